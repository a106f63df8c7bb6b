"""Gates on a toy model under any schedule: chunks, batches, pauses and preemptions change no decision, and what is
reported is what acted."""

# long because: one toy model and one oracle stand behind every schedule
from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime import schedules as sch
from tests.runtime import toy, toy_program
from tests.runtime.schedules import Ask, holds
from tests.runtime.test_cuda import CHUNK, LIMITS, captured
from tests.saes import activations, reconstruction, save_sae
from vtaps.runtime import gates as worker_gates
from vtaps.runtime import ops
from vtaps.runtime.kernels import sentinel
from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.manifest import Manifest
from vtaps.runtime.memory import Limits
from vtaps.runtime.program import LockError
from vtaps.runtime.records import Record
from vtaps.runtime.session import Session
from vtaps.spec.rows import from_ranges

Array = np.ndarray[Any, Any]
SITES = ("r0", "r1", "r2", "final")
GATES: dict[str, dict[str, Any]] = {
    "near": {"site": "r0", "tokens": "all", "holds": "row"},
    "same": {"site": "r1", "tokens": "sampling", "holds": "row"},
    "most": {"site": "r0", "tokens": "prompt", "holds": "request", "reduce": "max"},
    "whole": {"site": "r1", "tokens": "prompt", "holds": "request", "reduce": "mean"},
    "end": {"site": "r0", "tokens": "ends", "holds": "request", "reduce": "last"},
    "none": {"site": "r0", "tokens": "even prompt", "holds": "request", "reduce": "max"},
}
SELECTORS = {name: said for name, (said, _) in sch.SELECTORS.items()} | {
    "even prompt": {"rows": "prompt", "ids": [0, 2, 4]}
}
VECTOR = {"near": "v", "same": "w", "most": "v", "whole": "w", "end": "v", "none": "w"}
EDITS: dict[str, dict[str, Any]] = {
    "push": {"verb": "add", "sites": ["r1", "final"], "tokens": "but", "when": "near"},
    "gain": {"verb": "scale", "sites": ["r1"], "tokens": "all", "when": "same"},
    "put": {"verb": "set", "sites": ["r2"], "tokens": "generated", "when": "most"},
    "odd": {"verb": "add", "sites": ["r2"], "tokens": "after", "when": "whole"},
    "lift": {"verb": "add", "sites": ["final"], "tokens": "generated", "when": "end"},
    "rest": {"verb": "add", "sites": ["r1"], "tokens": "generated", "when": "none"},
    "free": {"verb": "scale", "sites": ["final"], "tokens": "steps"},
    "bend": {"verb": "python", "sites": ["r1", "final"], "tokens": "but", "when": "near",
             "python": {"file": "bend.py", "function": "bend"}},
    "flip": {"verb": "python", "sites": ["r2"], "tokens": "generated", "when": "most",
             "python": {"file": "bend.py", "function": "flip"}},
    "mirror": {"verb": "reconstruct", "sites": ["r1", "r2"], "tokens": "all", "when": "same",
               "sae": {"dir": "sae", "does": "by"}},
}  # fmt: skip
PYTHON = ("bend", "flip", "mirror")
"""They are in locks of their own: a CUDA graph of the whole model has no breaks."""
BEND = """\
import torch

def bend(rows, at):
    assert len(rows) == len(at.positions) == len(at.requests) > 0
    return 0.5 * rows + torch.from_numpy(at.positions).to(rows)[:, None]

def flip(rows):
    return -rows
"""


def use(name: str, c: float, vector: str | None = None) -> dict[str, Any]:
    return {"edit": name, "sites": EDITS[name]["sites"], "coefficient": c, "vector": vector}


def by(gate: str, above: float | None = None, below: float | None = None) -> dict[str, Any]:
    return {"gate": gate, "vector": VECTOR[gate], "above": above, "below": below}


ARMS: dict[str, dict[str, Any]] = {
    "rows": {
        "reads": ["look"],
        "points": [
            {"edits": [use("push", 2.0, "v"), use("gain", 0.5)], "gates": [by("near", 3.0), by("same", below=-4.0)]},
            {"edits": [use("push", -1.0, "w"), use("free", 2.0)], "gates": [by("near", -20.0, 5.0)]},
        ],
    },
    "request": {
        "points": [
            {"edits": [use("put", 1.0, "v")], "gates": [by("most", 40.0)]},
            {
                "edits": [use("put", 1.0, "v"), use("odd", 1.0, "w"), use("rest", 1.0, "v")],
                "gates": [by("most", 20.0, 60.0), by("whole", -2.0), by("none", 0.0)],
                "overrides": toy_program.SAY,
            },
        ],
    },
    "all": {
        "reads": ["look"],
        "points": [
            {
                "edits": [use("push", 1.0, "w"), use("gain", -2.0), use("put", 0.5, "w"), use("lift", 1.0, "v")],
                "gates": [by("near", 0.0), by("same", 1.0), by("most", 30.0), by("end", below=6.0)],
            }
        ],
    },
    "look": {"reads": ["look"], "points": [{}]},
    "python": {
        "reads": ["look"],
        "points": [
            {
                "edits": [use("bend", 1.0), {**use("mirror", 0.0), "feature": 3}],
                "gates": [by("near", 3.0), by("same", below=4.0)],
            },
            {
                "edits": [use("flip", 1.0), {**use("mirror", 2.0), "feature": 5}, use("push", 2.0, "v")],
                "gates": [by("most", 30.0), by("same", -4.0, 9.0), by("near", 0.0)],
            },
        ],
    },
}


@pytest.fixture(autouse=True)
def nobody_is_served_after() -> Iterator[None]:
    yield
    ops.serve(None)


def lock_of(block: Path, mode: str, python: bool) -> dict[str, Any]:
    def spelled(table: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {name: {**entry, "tokens": SELECTORS[entry["tokens"]]} for name, entry in table.items()}

    return {
        "lock": 1,
        "engine": {"mode": mode},
        "block": {"digest": "sha256:" + hashlib.sha256(block.read_bytes()).hexdigest(), "structure": "s"},
        "sites": {name: {"width": toy.WIDTH, **toy.SITES[name]} for name in SITES},
        "gates": {name: {"score": "project", **entry} for name, entry in spelled(GATES).items()},
        "edits": spelled({name: entry for name, entry in EDITS.items() if python or name not in PYTHON}),
        "reads": {"look": {"kind": "rows", "sites": list(SITES), "tokens": SELECTORS["all"]}},
        "overrides": {"say": {"ids": list(sch.SAY)}},
        "vectors": {name: {"file": f"{name}.npy"} for name in ("v", "w")},
        "arms": {
            name: {**arm, "points": [{"edits": [], **p} for p in arm["points"]]}
            for name, arm in ARMS.items()
            if python or name != "python"
        },
    }


def write(folder: Path, mode: str, python: bool) -> Manifest:
    lines = [
        "from vtaps.runtime import block as vt",
        'BLOCK = vt.Block(spec="", tree="", structure="s", vllm="", architecture="")',
    ]
    for number, site in enumerate(SITES):
        where = {k: v for k, v in toy.SITES[site].items() if k in ("module", "output", "residual")}
        pair = ", residual" if "residual" in where else ""
        lines += [f"@BLOCK.location({site!r}, **{where!r})", f"def at_{number}(t, hidden{pair}):"]
        lines += [f'    vt.gate(t, "{name}", hidden{pair})' for name, gate in GATES.items() if gate["site"] == site]
        for name, entry in EDITS.items():
            if site in entry["sites"] and (python or name not in PYTHON):
                when = f", when={entry['when']!r}" if "when" in entry else ""
                call = "set_" if entry["verb"] == "set" else entry["verb"]
                lines.append(f'    vt.{call}(t, "{name}", hidden{pair}{when})')
        lines.append(f'    vt.keep(t, "look", hidden{pair})')
    block = folder / f"{mode}.block.py"
    block.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name in ("v", "w"):
        np.save(folder / f"{name}.npy", toy.VECTORS[name])
    save_sae(folder / "sae", toy_program.SAE, {"architecture": "jumprelu"})
    (folder / "bend.py").write_text(BEND, encoding="utf-8")
    (folder / f"{mode}.json").write_text(json.dumps(lock_of(block, mode, python)), encoding="utf-8")
    return Manifest(block, folder / f"{mode}.json", folder)


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    return {
        f"{mode}{' with Python' * python}": write(tmp_path_factory.mktemp(mode), mode, python)
        for mode in ("eager", "taps") for python in (False, True)
    }  # fmt: skip


def selected(tokens: str, ask: Ask, request: int, position: int) -> bool:
    if tokens == "even prompt":
        return holds("prompt", ask, request, position) and holds("even", ask, request, position)
    return holds(tokens, ask, request, position)


class Oracle:
    """What one request should show, row by row, in float64."""

    def __init__(self, ask: Ask, request: int) -> None:
        self.ask, self.request = ask, request
        point = {} if ask.arm == "plain" else ARMS[ask.arm]["points"][ask.point]
        self.uses = {u["edit"]: u for u in point.get("edits", [])}
        self.bounds = {
            g["gate"]: (-np.inf if g["above"] is None else g["above"], np.inf if g["below"] is None else g["below"])
            for g in point.get("gates", [])
        }
        self.decided: dict[str, bool] = {}

    def rows(self, position: int, time: int) -> tuple[dict[str, Array], dict[str, float]]:
        """Site → the row ``[width]`` after its edits, and the scores, where it is computed for the ``time``-th time."""
        x = toy.inputs(self.request, [position], [time])[0]
        out, scores = {}, {}

        def at(site: str, x: Array) -> Array:
            x = x.copy()
            for gate, bounds in self.bounds.items():
                entry = GATES[gate]
                if entry["site"] == site and selected(entry["tokens"], self.ask, self.request, position):
                    scores[gate] = float(x @ toy.VECTORS[VECTOR[gate]])
                    if entry["holds"] == "row":
                        passed[gate] = bounds[0] < scores[gate] < bounds[1]
            for edit, entry in EDITS.items():
                gate = entry.get("when", "")
                if edit not in self.uses or site not in entry["sites"]:
                    continue
                if not selected(entry["tokens"], self.ask, self.request, position) or not passed.get(gate, not gate):
                    continue
                if edit in PYTHON:
                    x = self.python(edit, x, position)
                    continue
                c, name = self.uses[edit]["coefficient"], self.uses[edit]["vector"]
                x = c * x if name is None else c * toy.VECTORS[name] + (x if entry["verb"] == "add" else 0.0)
            out[site] = x
            return x

        passed = dict(self.decided)
        for layer in range(toy.LAYERS):
            x = at(f"r{layer}", 0.5 * np.roll(x, 1, -1) + x)
        at("final", 2 * x)
        return out, scores

    def python(self, edit: str, x: Array, position: int) -> Array:
        """What an edit that Python does makes of a row."""
        if edit == "mirror":
            active = activations(toy_program.SAE, x[None])
            active[:, self.uses[edit]["feature"]] += self.uses[edit]["coefficient"]
            return reconstruction(toy_program.SAE, active)[0]
        return -x if edit == "flip" else 0.5 * x + position

    def decide(self, times: dict[int, int]) -> dict[str, float]:
        """The scores of the request's gates, by which it is then known what they decided."""
        values = {}
        for gate, entry in GATES.items():
            if gate not in self.bounds or entry["holds"] == "row":
                continue
            found = [
                self.rows(p, times[p])[1][gate]
                for p in range(self.ask.prompt)
                if selected(entry["tokens"], self.ask, self.request, p)
            ]
            if found:
                reduce = {"max": max, "mean": lambda all_: sum(all_) / len(all_), "last": lambda all_: all_[-1]}
                values[gate] = float(np.float32(reduce[entry["reduce"]](found)))  # type: ignore[operator]
            low, high = self.bounds[gate]
            self.decided[gate] = gate in values and low < values[gate] < high
        return values


def compare(record: Record, oracle: Oracle) -> None:
    ask, request = oracle.ask, oracle.request
    first = dict.fromkeys(range(ask.stop), 0)
    values = oracle.decide(first)
    rows = [oracle.rows(p, 0) for p in range(ask.stop)]
    assert set(record.gates) == {g for g in oracle.bounds if any(g in scores for _, scores in rows)}
    for gate, told in record.gates.items():
        at = [p for p in range(ask.stop) if gate in rows[p][1]]
        scores = [rows[p][1][gate] for p in at]
        assert told.positions.tolist() == at and told.scores.tolist() == scores, gate
        low, high = oracle.bounds[gate]
        if GATES[gate]["holds"] == "row":
            assert told.value is None and told.passed.tolist() == [low < s < high for s in scores]
        else:
            assert told.value == values[gate] and told.passed.tolist() == [oracle.decided[gate]] * len(at)
    for edit in oracle.uses:
        entry = EDITS[edit]
        meant = {p for p in range(ask.stop) if selected(entry["tokens"], ask, request, p)}
        gate = entry.get("when")
        if gate is not None:
            assert set(from_ranges(record.selected.get(edit, ())).tolist()) == meant, edit
            low, high = oracle.bounds[gate]
            if GATES[gate]["holds"] == "row":
                meant = {p for p in meant if gate in rows[p][1] and low < rows[p][1][gate] < high}
            elif not oracle.decided[gate]:
                meant = set()
        assert set(from_ranges(record.fired.get(edit, ())).tolist()) == meant, edit
    for (_, site), read in record.reads.items():
        assert read.positions.tolist() == list(range(ask.stop))
        np.testing.assert_array_equal(read.values["rows"], [out[site] for out, _ in rows])


class Drive:
    """A worker driven through a schedule; every row that it puts out, and every record, is held against the oracle."""

    def __init__(self, worker: toy.Worker, forward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.worker, self.session, self._forward = worker, worker.session, forward or worker.model
        self.oracles = [Oracle(ask, i) for i, ask in enumerate(worker.asks)]
        self.gone: set[int] = set()

    def run(self, event: sch.Event, *, late: bool = False, padding: int = 0) -> None:
        match event:
            case sch.Step(shares):
                self._step(shares, late, padding)
            case sch.Dummy():
                self.worker.dummy()
            case sch.Finish(i):
                self.session.table.finish(f"r{i}")
            case sch.Collect(i) if self.worker.asks[i].arm != "plain":
                [(_, found)] = self.session.collect([(f"k{i}", 0, self.worker.asks[i].generated)])
                self.gone.add(i)
                compare(found, Oracle(self.worker.asks[i], i))

    def _step(self, shares: Sequence[sch.Share], late: bool, padding: int) -> None:
        finals: list[Array] = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            out = self._forward(x)
            finals.append(out.cpu().numpy().copy())
            return out

        self.worker.step(shares, self.worker.rows(shares, padding), forward, late=late)
        row = 0
        for share in shares:
            oracle, times = self.oracles[share.request], self.worker.times[share.request]
            if share.start + share.count > oracle.ask.prompt:
                oracle.decide(dict.fromkeys(times, 0))
            for p in range(share.start, share.start + share.count):
                if share.request not in self.gone:
                    np.testing.assert_array_equal(finals[0][row], oracle.rows(p, times[p])[0]["final"])
                row += 1


@pytest.mark.parametrize("mode", ["eager with Python", "taps", "taps with Python"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    case=sch.schedules(
        {"plain": 1, "look": 1, "rows": 2, "request": 2, "all": 1, "python": 2}, budget=st.integers(1, 20)
    ),
    data=st.data(),
)
def test_every_row_is_edited_as_its_gates_decide(
    mode: str, manifests: dict[str, Manifest], case: sch.Schedule, data: st.DataObject
) -> None:
    asks, events = case
    if "Python" not in mode:
        asks = [replace(ask, arm="look", point=0) if ask.arm == "python" else ask for ask in asks]
    steps = [event.shares for event in events if isinstance(event, sch.Step)]
    rows = max(sum(share.count for share in shares) for shares in steps)
    session = Session(manifests[mode])
    inside = toy.compiled if "taps" in mode else None
    drive = Drive(toy.Worker(session, asks, Limits(rows + 2, max(map(len, steps)), rows), inside=inside))
    for event in events:
        late, padding = data.draw(st.booleans(), "late"), data.draw(st.integers(0, 2), "padding")
        drive.run(event, late=late, padding=padding)
    session.neutral()
    assert not any(axis.board.rows.any() for axis in session.boards.axes)
    session.close()


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
ASKS = [Ask("request", 1, 17, 12), Ask("all", 0, 5, 30), Ask("rows", 0, 9, 25), Ask("request", 0, 6, 20)]


def preempted() -> list[sch.Event]:
    """Prompts in chunks of at most CHUNK rows a step, long decoding; the first two are computed again on the way."""
    done, known = [0] * len(ASKS), [ask.prompt for ask in ASKS]
    events: list[sch.Event] = []
    gone: set[int] = set()
    for number in itertools.count():
        shares, left = list[sch.Share](), CHUNK
        for i in (i for i in range(len(ASKS)) if i not in gone):
            count = min(known[i] - done[i], left - (len(ASKS) - 1 - i))
            sampled = done[i] + count == known[i]
            shares.append(sch.Share(i, done[i], count, sampled))
            done[i], known[i], left = done[i] + count, known[i] + sampled, left - count
        if not shares:
            return events
        events.append(sch.Step(tuple(shares)))
        done = [0 if number == 9 + i and i < 2 else d for i, d in enumerate(done)]
        for i in [s.request for s in shares if known[s.request] > ASKS[s.request].prompt + ASKS[s.request].generated]:
            gone.add(i)
            events += [sch.Collect(i), sch.Finish(i)]
    return events


@pytest.mark.parametrize(
    ("device", "way"),
    [
        pytest.param("cpu", "operations", id="operations on the CPU"),
        *(pytest.param("cuda", way, marks=GPU, id=f"{way} on CUDA") for way in ("hooks", "operations", "graph")),
    ],
)
def test_a_request_that_is_computed_again_stays_decided(device: str, way: str, manifests: dict[str, Manifest]) -> None:
    mode = "eager" if way == "hooks" else "taps"
    session = Session(manifests[mode])
    worker = toy.Worker(session, ASKS, LIMITS, torch.float32, device, toy.compiled if mode == "taps" else None)
    drive = Drive(worker, captured(worker) if way == "graph" else None)
    for event in preempted():
        drive.run(event)
    assert drive.gone == set(range(len(ASKS)))
    assert max(times[0] for times in worker.times) == 1, "nothing was computed again"
    session.close()


def test_other_bounds_are_loaded_behind_the_same_tables(manifests: dict[str, Manifest], tmp_path: Path) -> None:
    """Bounds are data: the next lock goes on with the launches of the first."""
    session = Session(manifests["taps"])
    worker = toy.Worker(session, [Ask("rows", 0, 4, 1)], LIMITS, inside=toy.compiled)
    drive, step = Drive(worker), sch.Step((sch.Share(0, 0, 4, True),))
    drive.run(step)
    drive.run(sch.Collect(0))
    drive.run(sch.Finish(0))
    for name in ("v", "w"):
        (tmp_path / f"{name}.npy").write_bytes((manifests["taps"].folder / f"{name}.npy").read_bytes())
    lock = json.loads(manifests["taps"].lock.read_text())
    lock["arms"]["rows"]["points"][0]["gates"][0]["above"] = -1e6
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    session.load(Manifest(manifests["taps"].block, tmp_path / "lock.json", tmp_path))
    worker.runner.table = session.table
    worker.step(step.shares, worker.rows(step.shares))
    [(_, found)] = session.collect([("k0", 0, 1)])
    assert found.gates["near"].passed.all() and found.fired["push"] == found.selected["push"]
    session.close()


def test_more_requests_than_seats_keep_what_was_decided(
    manifests: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whose prompts were seen wait, as preempted ones do, while others are decided."""
    monkeypatch.setattr(worker_gates, "SEATS", 2)
    session = Session(manifests["taps"])
    asks = [Ask("request", i % 2, 2 + i % 3, 4) for i in range(9)]
    worker = toy.Worker(session, asks, Limits(12, 4, 12), inside=toy.compiled)
    for i, ask in enumerate(asks):
        share = [sch.Share(i, 0, ask.prompt, True)]
        worker.step(share, worker.rows(share))
    for step in range(3):
        for i, ask in enumerate(asks):
            share = [sch.Share(i, ask.prompt + step, 1, True)]
            worker.step(share, worker.rows(share))
    decided = set()
    for i, ask in enumerate(asks):
        [(_, found)] = session.collect([(f"k{i}", 0, 4)])
        compare(found, Oracle(ask, i))
        decided.add(found.gates["most"].passed.all())
    assert decided == {True, False}
    seats = session.boards.tokens.gates.tables["gates.most"].seats
    assert seats is not None and len(seats.memory) >= len(asks)
    session.close()


def test_proof_rows_gate_nothing(manifests: dict[str, Manifest]) -> None:
    session = Session(manifests["taps"])
    session.attach(model := toy.Model(), model.compute_logits, Limits(8, 4, 8), torch.float32, toy.compiled)
    with torch.inference_mode():
        session.boards.prove(3)
        out = model(torch.full((8, toy.WIDTH), torch.nan))
        assert session.boards.unproved(3) == []
    assert (out[:3] == sentinel(list(SITES).index("final"))).all() and out[3:].isnan().all()
    # A location with a gate and an edit that it gates is two launches.
    assert session.boards.seen.tolist() == session.counts.proved.tolist() == [1, 2, 1, 1]
    session.boards.clear()
    session.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gates": {"near": {"score": "angle"}}}, "gates.near: score 'angle' is not one of project, cosine"),
        ({"gates": {"near": {"reduce": "max"}}}, "gates.near: reduce 'max' is not one of None"),
        ({"gates": {"most": {"reduce": None}}}, "gates.most: reduce None is not one of max, mean, last"),
        ({"edits": {"push": {"when": "far"}}}, "edits.push: gates has no gates.far"),
        ({"arms": {"rows": {"points": [{"edits": [use("push", 1.0, "v")], "overrides": []}]}}}, "says nothing"),
    ],
)
def test_a_lock_that_cannot_be_served(change: dict[str, Any], message: str, manifests: dict[str, Manifest]) -> None:
    lock = json.loads(manifests["eager"].lock.read_text())
    for section, entries in change.items():
        for name, more in entries.items():
            lock[section][name] |= more
    with pytest.raises(LockError) as caught:
        parse_program(lock, Path())
    assert message in str(caught.value)

"""Session, hooks, boards and harvest on toy models: what is found, what is refused, what is a fault, and that every
request gets what its own forward says under any schedule."""

# long because: one toy model stands behind every regime of a session
from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.runtime import schedules as sch
from tests.runtime import toy, toy_program
from tests.saes import activations
from vtaps.runtime import harvest, memory, ops, spool
from vtaps.runtime.handshake import told
from vtaps.runtime.hooks import BlockFault, InstallError, parameter_names
from vtaps.runtime.live import Scheduled
from vtaps.runtime.manifest import Manifest
from vtaps.runtime.memory import Limits
from vtaps.runtime.program import LockError
from vtaps.runtime.records import Record
from vtaps.runtime.results.tensors import E4M3
from vtaps.runtime.session import Session
from vtaps.spec import slots

WIDTH = 4
LIMITS = Limits(rows=8, requests=2, step_rows=6)
Inside = Callable[[str], bool] | None
BOTH = [pytest.param(None, id="by Python"), pytest.param(lambda module: True, id="in the graph")]


@pytest.fixture(autouse=True)
def nobody_is_served_after() -> Iterator[None]:
    yield
    ops.serve(None)


class Op(nn.Module):
    """Dispatches as vLLM's custom ops do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return (x + 1, x) if residual is None else (x + residual, residual)


class Compiled(nn.Module):
    """Skips ``nn.Module.__call__``, as vLLM's compile decorator does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Twin(nn.Module):
    """At a model's first layer one tensor may be both halves of the pair."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, x


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.op, self.inner, self.idle, self.twin = Op(), Compiled(), nn.Identity(), Twin()
        self.twice = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.twin(x)
        hidden, residual = self.op(x, residual=None)
        if self.twice:
            self.op(x)
        out: torch.Tensor = self.inner(hidden + residual)
        return out


def session(tmp_path: Path, places: dict[str, dict[str, Any]], body: str = "", **more: Any) -> Session:
    """A block with one read (``rows``, everywhere) of ``places``; ``more`` are other entries of the lock."""
    lines = [
        "from vtaps.runtime import block as vt",
        'BLOCK = vt.Block(spec="", tree="", structure="s", vllm="", architecture="")',
    ]
    for number, (name, site) in enumerate(places.items()):
        where = {k: v for k, v in site.items() if k in ("module", "output", "input", "residual", "columns")}
        lines += [
            f"@BLOCK.location({name!r}, **{where!r})",
            f"def at_{number}(t, x, residual=None):",
            "    # toy.yaml:7 reads.look: everything",
            body or '    vt.keep(t, "look", x, residual)',
        ]
    block = tmp_path / "toy.block.py"
    block.write_text("\n".join(lines) + "\n")
    lock = {
        "lock": 1,
        "spec": {"file": "toy.yaml"},
        "block": {"digest": "sha256:" + hashlib.sha256(block.read_bytes()).hexdigest(), "structure": "s"},
        "sites": {name: {"width": WIDTH, "layer": None, **site} for name, site in places.items()},
        "reads": {"look": {"kind": "rows", "sites": list(places), "tokens": {"rows": "all"}}},
        "arms": {"a": {"reads": ["look"], "points": [{}]}},
        **more,
    }
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    return Session(Manifest(block, tmp_path / "lock.json", tmp_path))


X = torch.arange(12, dtype=torch.float32).reshape(3, WIDTH)


def attached(s: Session, inside: Inside = None, dtype: torch.dtype = torch.float32) -> Toy:
    """A toy with the session at work on it and one request of 3 prompt tokens admitted."""
    model = Toy()
    s.attach(model, lambda x: x, LIMITS, dtype, inside)
    s.table.admit("r", {"key": "k", "arm": "a", "point": 0}, 3)
    return model


def step(s: Session, model: nn.Module, x: torch.Tensor = X, start: int = 0) -> torch.Tensor:
    """The request's rows from ``start`` on; returns what the model puts out."""
    with torch.inference_mode():
        s.begin([Scheduled("r", start, np.arange(len(x)), 0)])
        out: torch.Tensor = model(x.clone())
        s.end()
    return out


def record(s: Session, generated: int = 1) -> Record:
    [(key, found)] = s.collect([("k", 0, generated)])
    assert key == ("k", 0)
    return found


def run(s: Session, inside: Inside = None) -> dict[str, Any]:
    step(s, attached(s, inside))
    return {site: read.values["rows"] for (_, site), read in record(s).reads.items()}


@pytest.mark.parametrize("inside", BOTH)
def test_where_values_are_found(inside: Inside, tmp_path: Path) -> None:
    x = X.numpy()
    got = run(session(tmp_path, {
        "by name": {"module": "op", "input": "x"},
        "no residual yet": {"module": "op", "input": "x", "residual": "residual"},
        "element": {"module": "op", "output": 1},
        "pair": {"module": "op", "output": 0, "residual": 1},
        "columns": {"module": "op", "output": 0, "columns": [1, 3], "width": 2},
        "past __call__": {"module": "inner"},
        "its input": {"module": "inner", "input": "x"},
        "bare as element 0": {"module": "inner", "output": 0},
        "whole model": {"module": ""},
        "both halves": {"module": "twin", "output": 0, "residual": 1},
        "whole model's input": {"module": "", "input": "x"},
    }), inside)  # fmt: skip
    expected = {
        "by name": x, "no residual yet": x, "element": x, "pair": 2 * x + 1, "columns": (x + 1)[:, 1:3],
        "past __call__": 2 * (2 * x + 1), "its input": 2 * x + 1, "bare as element 0": 2 * (2 * x + 1),
        "whole model": 2 * (2 * x + 1), "both halves": x, "whole model's input": x,
    }  # fmt: skip
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_custom_ops_have_the_names_of_forward_native() -> None:
    assert parameter_names(Op()) == ("x", "residual")


@pytest.mark.parametrize(
    ("site", "says"),
    [
        ({"module": "gone"}, "s: the model has no module gone"),
        ({"module": "op", "input": "y"}, "s: op has no input y; it has x, residual"),
        ({"module": "op", "input": "x", "residual": "z"}, "s: op has no input z"),
    ],
)
def test_what_is_not_there_is_refused_at_start(site: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=says):
        run(session(tmp_path, {"s": site}))


@pytest.mark.parametrize("inside", BOTH)
@pytest.mark.parametrize(
    ("site", "says"),
    [
        ({"module": "op", "output": 2}, "s: op put out 2 values; there is no element 2"),
        ({"module": "op"}, "s: op has tuple there, not a tensor"),
        ({"module": "op", "input": "residual"}, r"s \(residual\): op has NoneType there, not a tensor"),
        ({"module": "inner", "output": 1}, "s: inner put out Tensor, which has no element 1"),
        ({"module": "op", "input": "x", "width": 5}, r"s: op has shape \[3, 4\] there; \[3, 5\] was compiled"),
        (
            {"module": "op", "input": "x", "columns": [2, 5], "width": 3},
            r"s: op has shape \[3, 4\] there; \[3, 3\] was compiled",
        ),
        ({"module": "idle"}, "s: idle was not called in a step that needs it"),
    ],
)
def test_what_is_not_there_at_run_time_is_a_fault(
    site: dict[str, Any], says: str, inside: Inside, tmp_path: Path
) -> None:
    with pytest.raises(BlockFault, match=says):
        run(session(tmp_path, {"s": site}), inside)


@pytest.mark.parametrize("inside", BOTH)
@pytest.mark.parametrize(
    ("x", "says"),
    [
        (X[:2], r"s: op has shape \[2, 4\] there; \[3, 4\] was compiled"),
        (X[0], r"s: op has shape \[4\] there; \[3, 4\] was compiled"),
        (X.double(), r"s: op has torch\.float64 there; torch\.float32 was compiled"),
    ],
)
def test_another_tensor_than_was_planned_for_is_a_fault(
    x: torch.Tensor, says: str, inside: Inside, tmp_path: Path
) -> None:
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    model = attached(s, inside)
    s.begin([Scheduled("r", 0, np.arange(3), 0)])
    with pytest.raises(BlockFault, match=says), torch.inference_mode():
        model(x)


@pytest.mark.parametrize("inside", BOTH)
def test_a_module_called_twice_is_a_fault(inside: Inside, tmp_path: Path) -> None:
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    model = attached(s, inside)
    model.twice = True
    with pytest.raises(BlockFault, match="s: op was called twice in one step"):
        step(s, model)
    # Counting starts afresh.
    model.twice = False
    step(s, model, X[:1], 3)


LOOK = {"kind": "rows", "tokens": {"rows": "all"}}


@pytest.mark.parametrize(
    ("body", "more", "says"),
    [
        ("    pass", {}, r"^reads\.look: the block says nothing of it at s$"),
        ("", {"reads": {"look": {**LOOK, "sites": ["s", "t"]}}}, r"^reads\.look: the block has no location t$"),
        ("", {"sites": {"t": {"module": "op", "width": WIDTH}}}, r"^reads\.look: sites has no s$"),
        (
            "",
            {
                "sites": {"t": {"module": "op", "width": WIDTH}},
                "reads": {"look": {**LOOK, "sites": ["t"]}},
            },
            r"^sites\.s: the block has a location that the lock does not know$",
        ),
        ("", {"lens": {"norm": "gone"}}, "^lens: the model has no module gone$"),
    ],
)
def test_block_and_lock_that_do_not_fit_are_refused_at_start(
    body: str, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    sites = {"s": {"width": WIDTH, "module": "op", "input": "x"}}
    if "sites" not in more:
        more = {**more, "sites": {**sites, "t": {"width": WIDTH, "module": "op", "input": "x"}}}
    with pytest.raises(LockError, match=says):
        run(session(tmp_path, sites, body=body, **more))


@pytest.mark.parametrize("lines", [{}, {"6": 31}])
def test_an_exception_names_the_lines_of_block_and_spec(lines: dict[str, int], tmp_path: Path) -> None:
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}}, body="    x[99]")
    block = json.loads((tmp_path / "lock.json").read_text())
    block["block"]["lines"] = lines
    (tmp_path / "lock.json").write_text(json.dumps(block))
    s = Session(s.manifest)
    where = "toy.yaml:31" if lines else "toy.yaml:7"
    with pytest.raises(BlockFault, match=rf"^toy\.block\.py:6 \({where}\), at s: TypeError"):
        s.attach(Toy(), lambda x: x, LIMITS, torch.float32)


@pytest.mark.parametrize("inside", BOTH)
def test_outside_a_step_the_model_is_untouched(inside: Inside, tmp_path: Path) -> None:
    """Dummy and warm-up runs call the model with no step begun."""
    more = {
        "edits": {"none": {"verb": "zero", "sites": ["s"], "tokens": {"rows": "all"}}},
        "reads": {},
        "arms": {"a": {"points": [{"edits": [{"edit": "none", "sites": ["s"]}]}]}},
    }
    s = session(tmp_path, {"s": {"module": "inner"}}, body='    vt.zero(t, "none", x)', **more)
    model = attached(s, inside)
    untouched = 2 * (2 * X + 1)

    def dummy() -> None:
        s.neutral()
        s.passed()
        with torch.inference_mode():
            assert torch.equal(model(X.clone()), untouched)

    dummy()
    assert not step(s, model).any()
    dummy()
    s.table.admit("plain", None, 3)
    with torch.inference_mode():
        s.begin([Scheduled("plain", 0, np.arange(3), 0)])
        assert torch.equal(model(X.clone()), untouched)
        s.end()
    # A step of the request again: what a plan selects is only its own rows.
    assert torch.equal(step(s, model, X[:1], 3), torch.zeros(1, WIDTH))
    assert record(s, 2).fired == {"none": ((0, 4),)}


def test_a_changed_block_is_refused(tmp_path: Path) -> None:
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    with s.manifest.block.open("a") as file:
        file.write("# changed\n")
    with pytest.raises(LockError, match="not the block that was locked"):
        Session(s.manifest)


def long_mean(tmp_path: Path, computed: int) -> tuple[Session, np.ndarray[Any, Any]]:
    """A request of 3 prompt tokens whose rows 0 … computed−1 went into a mean, and those rows."""
    reads = {"look": {"kind": "mean", "sites": ["s"], "tokens": {"rows": "all"}}}
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}}, body='    vt.mean(t, "look", x)', reads=reads)
    model = attached(s)
    rows = np.random.default_rng(0).normal(size=(computed, WIDTH)).astype(np.float32)
    for start, stop in [(0, 2), (2, 3), *((i, i + 1) for i in range(3, computed))]:
        step(s, model, torch.from_numpy(rows[start:stop]), start)
    return s, rows


@pytest.mark.parametrize(("computed", "generated"), [(6, 4), (7, 3), (400, 398), (400, 390)])
def test_a_mean_leaves_out_rows_after_the_stop(computed: int, generated: int, tmp_path: Path) -> None:
    s, rows = long_mean(tmp_path, computed)
    read = record(s, generated).reads["look", "s"]
    count = 3 + generated - 1
    assert read.positions.tolist() == list(range(count)) and read.values["count"].tolist() == [count]
    np.testing.assert_allclose(read.values["mean"][0], rows[:count].astype(np.float64).mean(0), atol=1e-6)


def test_a_mean_that_cannot_leave_them_out_says_so(tmp_path: Path) -> None:
    s, _ = long_mean(tmp_path, 400)
    [(_, found)] = s.collect([("k", 0, 5)])
    assert found.fault is not None and "already part of the mean" in found.fault.message and not found.reads


def test_a_row_computed_again_is_taken_once_and_the_first_stands(tmp_path: Path) -> None:
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    model = attached(s)
    for start, stop, value in [(0, 3, 1.0), (3, 4, 2.0), (0, 2, 5.0), (2, 5, 6.0)]:
        step(s, model, torch.full((stop - start, WIDTH), value), start)
    read = record(s, 3).reads["look", "s"]
    assert read.positions.tolist() == [0, 1, 2, 3, 4]
    assert read.values["rows"][:, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 6.0]


def test_half_precision_travels_as_bits(tmp_path: Path) -> None:
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    x = torch.linspace(-2, 2, 12).reshape(3, WIDTH).to(torch.bfloat16)
    step(s, attached(s, dtype=torch.bfloat16), x)
    read = record(s).reads["look", "s"]
    assert read.dtype == "bfloat16" and read.values["rows"].dtype == np.uint16
    widened = (read.values["rows"].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(widened, x.float().numpy())


@pytest.mark.parametrize("inside", BOTH)
def test_rows_stored_in_float32_are_the_unrounded_stream(inside: Inside, tmp_path: Path) -> None:
    """Of a pair in bfloat16, whose sum has more digits than bfloat16."""
    look = {"kind": "rows", "sites": ["s"], "tokens": {"rows": "all"}, "store": {"dtype": "float32"}}
    s = session(tmp_path, {"s": {"module": "op", "output": 0, "residual": 1}}, reads={"look": look})
    step(s, attached(s, inside, torch.bfloat16), torch.full((3, WIDTH), 2.0**-9, dtype=torch.bfloat16))
    read = record(s).reads["look", "s"]
    # The op gives x + 1 and x; x + 1 rounds to 1 in bfloat16.
    assert read.dtype == "float32" and (read.values["rows"] == 1 + 2.0**-9).all()


@pytest.mark.parametrize("inside", BOTH)
def test_what_was_read_is_no_alias(inside: Inside, tmp_path: Path) -> None:
    """Neither of the model's tensors nor of slots that later steps write."""
    s = session(tmp_path, {"s": {"module": "inner"}})
    model = attached(s, inside)
    with torch.inference_mode():
        step(s, model).fill_(9.0)
    for n in range(20):
        step(s, model, X[:1] + n, 3 + n)
    read = record(s, 18).reads["look", "s"]
    expected = torch.cat([X, *(X[:1] + n for n in range(17))])
    np.testing.assert_array_equal(read.values["rows"], (4 * expected + 2).numpy())
    before = read.values["rows"].copy()
    s.table.admit("r2", {"key": "k2", "arm": "a", "point": 0}, 3)
    with torch.inference_mode():
        s.begin([Scheduled("r2", 0, np.arange(3), 0)])
        model(X + 50)
        s.end()
    np.testing.assert_array_equal(read.values["rows"], before)


@pytest.fixture
def two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots for two steps and no more."""
    monkeypatch.setattr(slots, "GATHERED_STEPS", 1)


def small_ring(tmp_path: Path, mode: str, **read: int) -> tuple[Session, Toy]:
    reads = {"look": {**LOOK, **read, "sites": ["s"]}}
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}}, reads=reads, engine={"mode": mode})
    s.attach(model := Toy(), lambda x: x, Limits(rows=20, requests=2, step_rows=20), torch.float32)
    s.table.admit("r", {"key": "k", "arm": "a", "point": 0}, 3)
    return s, model


@pytest.mark.usefixtures("two_steps")
def test_a_step_that_needs_more_slots_than_there_are_is_refused(tmp_path: Path) -> None:
    s, model = small_ring(tmp_path, "taps", step_rows=1, requests=1)
    assert told(s)["slots"] == {"look/tokens": 2}
    step(s, model, X[:2])
    step(s, model, X, 2)
    [(fault, since)] = s.failing().values()
    assert (fault.code, since) == ("VT621", 0)
    assert fault.message.startswith("read look: a step selects 3 rows and there are 2 slots")


@pytest.mark.usefixtures("two_steps")
def test_without_a_graph_a_ring_grows_to_what_a_step_needs(tmp_path: Path) -> None:
    s, model = small_ring(tmp_path, "eager", step_rows=3, requests=2)
    assert told(s)["slots"] == {"look/tokens": 12}
    step(s, model, X[:2])
    # Two rows wait in the ring while it becomes another.
    step(s, model, more := torch.arange(52.0).reshape(13, WIDTH), 2)
    assert told(s)["slots"] == {"look/tokens": 26}
    read = record(s, 13).reads["look", "s"]
    np.testing.assert_array_equal(read.values["rows"], torch.cat([X[:2], more]).numpy())


@pytest.mark.usefixtures("two_steps")
def test_a_ring_grows_after_another_lock_as_before(tmp_path: Path) -> None:
    s, model = small_ring(tmp_path, "eager", step_rows=3, requests=2)
    s.table.forget({"k"})
    s.table.finish("r")
    s.load(s.manifest)
    s.table.admit("r", {"key": "k", "arm": "a", "point": 0}, 3)
    step(s, model, X[:2])
    step(s, model, more := torch.arange(52.0).reshape(13, WIDTH), 2)
    read = record(s, 13).reads["look", "s"]
    np.testing.assert_array_equal(read.values["rows"], torch.cat([X[:2], more]).numpy())
    board = s.boards.tokens.board
    assert {t.data_ptr() for t in board.tensors.values()} == {int(board.descriptors[0, 0])}


def test_slots_beyond_what_is_allowed_are_refused(tmp_path: Path) -> None:
    # 2 · 6 rows of 4 float32.
    for allowed in (192, 191):
        engine = {"mode": "taps", "tap_memory": allowed}
        s = session(tmp_path, {"s": {"module": "op", "input": "x"}}, engine=engine)
        if allowed == 192:
            attached(s)
        else:
            with pytest.raises(LockError, match=r"^engine\.tap_memory: the slots of 1 reads take 192 bytes"):
                attached(s)


def test_an_engine_that_has_run_ahead_is_not_waited_for(tmp_path: Path) -> None:
    """What is collected leaves its ring; what later steps put there stays until it is its turn."""
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    s.attach(model := Toy(), lambda x: x, Limits(rows=100, requests=2, step_rows=100), torch.float32)
    for key in "abc":
        s.table.admit(key, {"key": key, "arm": "a", "point": 0}, 1)
    with torch.inference_mode():
        for n in range(6):
            s.begin([Scheduled(key, n, np.zeros(1, np.int64), i) for i, key in enumerate("abc")])
            model(torch.tensor([[n], [-n], [10 * n]], dtype=torch.float32).expand(3, WIDTH).clone())
            s.end()

    def first_column(key: str, generated: int) -> list[float]:
        [(_, found)] = s.collect([(key, 0, generated)])
        values: list[float] = found.reads["look", "s"].values["rows"][:, 0].tolist()
        return values

    def arrived(key: str) -> int:
        live = s.table.live[key]
        assert live is not None
        [kept] = live.kept.values()
        return int(kept.used)

    assert first_column("a", 4) == [0, 1, 2, 3]
    assert arrived("b") == 4
    assert first_column("c", 5) == [0, 10, 20, 30, 40]
    assert arrived("b") == 5
    assert first_column("b", 6) == [0, -1, -2, -3, -4, -5]


def test_the_unembedding_is_left_alone_after_sampling(tmp_path: Path) -> None:
    """Prompt logprobs go through it as well, and are nobody's rows."""
    session = Session(toy.write(tmp_path))
    worker = toy.Worker(session, [sch.Ask("some", 0, 3, 4)], Limits(rows=3, requests=1, step_rows=3))
    for share in (sch.Share(0, 0, 3, True), sch.Share(0, 3, 1, True), sch.Share(0, 4, 1, True)):
        worker.step([share], worker.rows([share]))
        rows = torch.arange(3.0 * toy.WIDTH).reshape(3, toy.WIDTH)
        with torch.inference_mode():
            assert torch.equal(worker.model.compute_logits(rows), rows @ worker.model.head.weight.T)


def test_the_proof_finds_every_tap_that_is_in_the_graph(tmp_path: Path) -> None:
    """Proof rows come out as each location's sentinel, from reads and edits, and only as many as were asked for."""
    s = Session(toy.write(tmp_path, "taps"))
    s.attach(model := toy.Model(), model.compute_logits, LIMITS, torch.float32, toy.compiled)
    in_graph = s.counts.in_graph.tolist()
    assert in_graph == [name not in toy_program.BEHIND for name in toy.SITES]
    with torch.inference_mode():
        for rows in (1, 3, 8):
            before = s.boards.seen.clone()
            s.boards.prove(rows)
            out = model(torch.ones(8, toy.WIDTH))
            assert s.boards.unproved(rows) == []
            assert (s.boards.seen - before).tolist() == [int(inside) for inside in in_graph]
            number = list(toy.SITES).index("final")
            assert (out[:rows] == number + 1).all() and not (out[rows:] == number + 1).all(1).any()
            s.boards.clear()
        s.boards.prove(2)
        # Without its tap.
        with patch.object(model.norm, "forward", lambda x: toy.Norm.forward(model.norm, x)):
            model(torch.ones(8, toy.WIDTH))
        assert set(s.boards.unproved(2)) == {"final"}


# Any schedule, with rings so small that they wrap, leave in pieces and grow all the time.


def close(got: Any, expected: Any, said: str, **more: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=said, **more)


def compare_read(
    name: str, got: Any, entry: dict[str, Any], rows: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], said: str
) -> None:
    """``rows``: what the read saw, ``[n, width]``, at ``positions``."""
    values = got.values
    match entry["kind"]:
        case "rows" if name == "tiny":
            stored = E4M3[values["rows"]].astype(np.float64) * values["scale"][:, None]
            assert (abs(stored - rows) <= abs(rows) / 16 + abs(rows).max(-1, keepdims=True) * 2.0**-17).all(), said
        case "rows" if name == "small":
            np.testing.assert_array_equal(values["rows"], rows.astype(np.float16), said)
        case "rows":
            close(values["rows"], rows, said)
        case "norm":
            close(values["norm"], np.linalg.norm(rows, axis=-1), said)
        case "project":
            close(values["project"], rows @ np.stack([toy.VECTORS[v] for v in entry["vectors"]]).T, said)
        case "python" if name == "count":
            assert values["python"].dtype == np.uint8 and values["python"].tolist() == (rows > 0).sum(-1).tolist(), said
        case "python":
            close(values["python"], np.stack([rows.sum(-1), positions], -1), said)
        case "mean":
            assert values["count"].tolist() == [len(rows)], said
            close(values["mean"], rows.mean(0)[None], said)
        case "probe":
            close(values["probe"], rows @ toy.VECTORS["weight"].T + toy.VECTORS["bias"], said)
        case "features":
            active, ids = activations(toy.SAE, rows), values["ids"]
            if "top" in entry:
                close(values["activations"], -np.sort(-active)[:, : entry["top"]], said)
                assert ((ids == -1) == (values["activations"] == 0)).all(), said
            else:
                assert (ids == entry["ids"]).all()
            picked = np.where(ids < 0, 0.0, np.take_along_axis(active, np.maximum(ids, 0), 1))
            close(values["activations"], picked, said)
        case "lens":
            compare_lens(got, entry, 2 * rows @ toy.UNEMBEDDING.T, said)


def compare_lens(got: Any, entry: dict[str, Any], logits: np.ndarray[Any, Any], said: str) -> None:
    values = got.values
    ids = values["ids"]
    if "top" in entry:
        assert all(len(set(row)) == entry["top"] for row in ids.tolist())
        close(values["logits"], -np.sort(-logits)[:, : entry["top"]], said)
    else:
        assert (ids == entry["ids"]).all()
    close(values["logits"], np.take_along_axis(logits, ids, 1), said)
    close(values["logsumexp"], np.log(np.exp(logits).sum(-1)), said)


def compare(got: Record, worker: toy.Worker, i: int) -> None:
    """A record with a forward of its request alone."""
    ask = worker.asks[i]
    arm = toy.ARMS[ask.arm]
    point = arm["points"][ask.point]
    positions = list(range(ask.stop))

    def selected(selector: str) -> list[int]:
        return [p for p in positions if sch.holds(selector, ask, i, p)]

    def ranges(found: list[int]) -> list[list[int]]:
        return [run.tolist() for run in np.split(np.array(found), np.flatnonzero(np.diff(found) != 1) + 1) if len(run)]

    fired = {}
    for use in point.get("edits", ()):
        found = selected(toy.EDITS[use["edit"]]["tokens"])
        if toy.EDITS[use["edit"]]["sites"] == ["logits"]:
            found = [p for p in found if p >= ask.prompt - 1]
        fired[use["edit"]] = tuple((run[0], run[-1] + 1) for run in ranges(found))
    assert {n: f for n, f in got.fired.items() if f} == {n: f for n, f in fired.items() if f}

    streams = toy.streams(ask, i, positions, [0] * len(positions))
    seen = set()
    for name in arm.get("reads", ()):
        entry = toy.READS[name]
        for site in entry["sites"]:
            wanted = [p for p in selected(entry["tokens"]) if site not in toy_program.BEHIND or p >= ask.prompt - 1]
            if not wanted:
                continue
            seen.add((name, site))
            read = got.reads[name, site]
            dtype = toy_program.DTYPES.get(name, "float32")
            assert read.positions.tolist() == wanted and read.dtype == dtype, (i, name, site)
            rows = streams[site][name not in toy_program.BEFORE][wanted]
            if site == "logits" and entry["kind"] == "lens":
                compare_lens(read, entry, rows, f"request {i}, {name} at {site}")
                continue
            compare_read(name, read, entry, rows, np.array(wanted), f"request {i}, {name} at {site}")
    assert got.reads.keys() == seen

    # Of a row that is sampled from twice, the token that stands is that of the last time.
    times = [worker.sampled[i].get(p, 0) for p in positions]
    logits = toy.streams(ask, i, positions, times)["logits"][1]
    total = np.log(np.exp(logits).sum(-1))
    for name in arm.get("metrics", ()):
        entry = toy.METRICS[name]
        wanted = [p for p in selected(entry["tokens"]) if p >= ask.prompt - 1]
        first = logits[wanted, entry["ids"][0]]
        values = {
            "logprob": first - total[wanted],
            "logit_diff": first - logits[wanted, entry["ids"][-1]],
            "rank": (logits[wanted] > first[:, None]).sum(-1),
        }[entry["kind"]]
        at, numbers = got.metrics.get(name, (np.empty(0), np.empty(0)))
        assert at.tolist() == wanted, (i, name)
        close(numbers, values, f"request {i}, {name}")

    said = [s for s in range(sch.SAY_AT, sch.SAY_AT + len(sch.SAY)) if s < ask.generated]
    assert got.overridden == (tuple(said) if point.get("overrides") else ())


def replaced(asks: list[sch.Ask], shares: tuple[sch.Share, ...], gone: set[int]) -> list[int]:
    """The tokens of a step: -1 but where an override speaks."""
    out = []
    for share in shares:
        ask = asks[share.request]
        step = share.start + share.count - ask.prompt - sch.SAY_AT
        speaks = "overrides" in toy.ARMS[ask.arm]["points"][ask.point] and share.request not in gone
        out.append(sch.SAY[step] if speaks and share.sampled and 0 <= step < len(sch.SAY) else -1)
    return out


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    return {mode: toy.write(tmp_path_factory.mktemp(mode), mode) for mode in ("eager", "taps")}


@pytest.mark.parametrize("mode", ["eager", "taps"])
@settings(max_examples=20, deadline=None)
@given(
    case=sch.schedules(
        {name: len(arm["points"]) for name, arm in toy.ARMS.items()}, budget=st.sampled_from([4, 6, 11, 40])
    ),
    data=st.data(),
)
def test_every_request_gets_what_its_own_forward_says(
    mode: str, manifests: dict[str, Manifest], case: sch.Schedule, data: st.DataObject
) -> None:
    asks, events = toy.served(case[0], mode), case[1]
    steps = [event.shares for event in events if isinstance(event, sch.Step)]
    rows = max(sum(share.count for share in shares) for shares in steps)
    limits = Limits(rows=rows + 2, requests=max(map(len, steps)), step_rows=rows)
    gone: set[int] = set()
    with (
        patch.object(harvest, "PIECE_BYTES", data.draw(st.sampled_from([1, 300, 32 << 20]), "piece")),
        patch.object(harvest, "GATHERED_METRICS", data.draw(st.sampled_from([1, 3, 256]), "metrics")),
        patch.object(slots, "GATHERED_STEPS", data.draw(st.sampled_from([1, 3, 64]), "gathered")),
        patch.object(memory, "EAGER_SLOTS", data.draw(st.sampled_from([1, 5, 1024]), "slots")),
        patch.object(spool, "SMALL", data.draw(st.sampled_from([1, 300]), "small")),
        patch.object(spool, "MESSAGE", data.draw(st.sampled_from([1, 100]), "message")),
    ):
        manifest = manifests[mode]
        shared = data.draw(st.sampled_from([None, manifest.folder / "shared"]), "shared")
        (manifest.folder / "shared").mkdir(exist_ok=True)
        allowed = data.draw(st.sampled_from([None, 0, 700]), "memory")
        session = Session(replace(manifest, spool=manifest.folder / "spool", memory=allowed, shared=shared))
        worker = toy.Worker(session, asks, limits, inside=toy.compiled if mode == "taps" else None)
        late = data.draw(st.booleans(), "logits after the step's end")
        for event in events:
            match event:
                case sch.Step(shares):
                    x = worker.rows(shares, data.draw(st.integers(0, 2), "padding"))
                    assert worker.step(shares, x, late=late).tolist() == replaced(asks, shares, gone)
                case sch.Dummy():
                    worker.dummy()
                case sch.Finish(i):
                    session.table.finish(f"r{i}")
                case sch.Collect(i) if asks[i].arm != "plain":
                    [(key, found)] = session.collect([(f"k{i}", 0, asks[i].generated)])
                    gone.add(i)
                    assert key == (f"k{i}", 0)
                    compare(found, worker, i)
    session.neutral()
    assert not any(axis.board.rows.any() for axis in session.boards.axes)
    session.close()
    del session, worker
    gc.collect()
    assert not [p for name in ("spool", "shared") for p in manifest.folder.glob(f"{name}/*")]

"""A fault of one request is that request's: it fails by name, its neighbours keep every bit, and the engine lives.

Faults are in functions of the user's, in the row table and on the way of rows; on both engines, and on one in a process
of its own.  The last test lets the device fail, which ends the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engine.case import LAYERS, arm, hugging_face, reference, request, tiny_llama, use, write_case  # noqa: E402
from vtaps.runtime.engine import Engine, EngineError, RequestError  # noqa: E402
from vtaps.runtime.harvest import Harvest  # noqa: E402
from vtaps.runtime.records import Finished, Request  # noqa: E402
from vtaps.runtime.rowtable import RowTable  # noqa: E402
from vtaps.spec.diagnostics import Diagnostic, Span  # noqa: E402
from vtaps.spec.reporters import render  # noqa: E402
from vtaps.spec.vectors import draw  # noqa: E402

pytestmark = pytest.mark.engine

MID, LAST = "resid_post[1]", f"resid_post[{LAYERS - 1}]"
BLOCK, LINE = 32, {"bend": 11, "felt": 12}
# On CUDA vLLM's attention multiplies float32 in TF32.
TOLERANCE = 4e-3 if torch.cuda.is_available() else 2e-5
SOURCE = """\
import torch


def check(at):
    for key, position in zip(at.requests, at.positions):
        if key.startswith("bad") and position >= 9:
            raise KeyError("nothing")
        if key == "dead" and position >= 9:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def bend(rows, at):
    rows.mul_(1.5)
    check(at)
    return rows


def felt(rows, at):
    check(at)
    return rows.sum(-1)
"""
CASES = Path(__file__).parents[1] / "golden" / "diagnostics"
PROMPT = [7, 9, 30, 200, 41, 8, 100]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}


def write(folder: Path, model: Path, mode: str) -> tuple[dict[str, Any], Path]:
    folder.mkdir(exist_ok=True)
    (folder / "edits.py").write_text(SOURCE, encoding="utf-8")

    def python(name: str) -> dict[str, Any]:
        said = {"file": "edits.py", "function": name, "digest": None}
        return {"sites": [MID], "tokens": {"rows": "all"}, "python": said, "line": LINE[name]}

    stream = {"kind": "rows", "sites": [MID, LAST], "tokens": {"rows": "all"}}
    return write_case(
        folder,
        model,
        edits={
            "push": {"verb": "add", "sites": [MID], "tokens": {"rows": "all"}},
            "bend": {"verb": "python", **python("bend")},
        },
        reads={
            "stream": stream,
            "out": {**stream, "sites": [LAST], "tokens": {"rows": "sampling"}},
            "felt": {"kind": "python", **python("felt")},
        },
        vectors={"r": {"random": {"seed": 1, "norm": 6.0}}},
        arms={
            "plain": arm(reads=["stream"]),
            "pushed": arm(use("push", MID, coefficient=1.5, vector="r"), reads=["stream"]),
            "bent": arm(use("bend", MID), reads=["stream"]),
            "felt": arm(reads=["stream", "felt"]),
            "shared": arm(use("push", MID, coefficient=1.5, vector="r"), reads=["out"]),
        },
        vllm={"max_num_batched_tokens": 64, "enable_prefix_caching": True, "block_size": BLOCK},
        mode=mode,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["eager", "taps", "apart"])
def engine(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp(f"living-{request.param}")
    apart = request.param == "apart"
    lock, block = write(folder, model, "eager" if apart else request.param)
    with Engine(lock, folder, block, folder / "manifest", in_process=not apart) as made:
        yield made


def serve(
    engine: Engine, requests: Sequence[Request], sampling: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[dict[str, Finished], dict[str, RequestError]]:
    """What was whole and what failed, by key."""
    failed: list[RequestError] = []
    own = sampling or {}
    found = list(engine.run(requests, lambda r: {**GREEDY, **own.get(r.key, {})}, failed=failed.append))
    assert len(found) + len(failed) == len(requests)
    return {f.request.key: f for f in found}, {error.key: error for error in failed}


def shown(error: EngineError, name: str, regen: bool) -> None:
    """The golden case of a code: what is printed."""
    span = Span("case.yaml", line := getattr(error, "line", None) or 1, 1, line, 1)
    text = re.sub(r"/\S*/", "…/", render([Diagnostic(error.code, error.message, span)], "text", {}))
    expected = CASES / name / "expected.txt"
    if regen:
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8"), "if this is right: pytest --regen"


def bits(finished: Finished) -> list[Any]:
    """Everything that a request gave."""
    out: list[Any] = []
    for c in finished.completions:
        reads = {
            where: (read.dtype, read.positions.tolist(), {n: v.tobytes() for n, v in read.values.items()})
            for where, read in c.record.reads.items()
        }
        out.append((c.token_ids, c.text, c.finish_reason, c.logprobs, c.record.fired, reads))
    return out


def test_a_function_that_raises_fails_its_request_and_no_bit_of_others(engine: Engine, regen: bool) -> None:
    def batch(last: str) -> list[Request]:
        arms = {"plain": "plain", "pushed": "pushed", "good": "bent", f"{last} bent": "bent", "felt": "felt",
                f"{last} felt": "felt"}  # fmt: skip
        return [request(key, name, [n, *PROMPT[1:]]) for n, (key, name) in enumerate(arms.items(), 20)]

    whole, failed = serve(engine, batch("bad"))
    assert set(whole) == {"plain", "pushed", "good", "felt"}
    for key, where in {"bad bent": "edits.bend", "bad felt": "reads.felt"}.items():
        error, name = failed[key], where.partition(".")[2]
        assert (error.code, error.definition, error.line) == ("VT620", where, LINE[name])
        place = f"edits.py:7, in edits.py:{name}: KeyError: 'nothing'"
        assert error.message == f"request {key}: arm {key.split()[1]}: {MID}: {where}: {place}"
    shown(failed["bad felt"], "VT620-raises", regen)
    # The row at position 9 is computed in the fourth step, and under async scheduling the fifth is on its way then.
    steps = 4 + int(engine.report["async_scheduling"])
    ended = {f"was {name}": {"max_tokens": steps} for name in ("bent", "felt")}
    beside, none = serve(engine, batch("was"), ended)
    assert not none
    for key, finished in whole.items():
        assert bits(finished) == bits(beside[key]), key


def test_a_child_that_fails_fails_its_request(engine: Engine) -> None:
    more = {"n": 2, "temperature": 1.0}
    whole, failed = serve(engine, [request("bad n", "bent", PROMPT), request("n", "bent", PROMPT)],
                          {"bad n": more, "n": more})  # fmt: skip
    assert [len(f.completions) for f in whole.values()] == [2] and set(whole) == {"n"}
    assert failed["bad n"].code == "VT620"


def test_what_cannot_be_validated_fails_alone(engine: Engine) -> None:
    def sampling(r: Request) -> Mapping[str, Any]:
        return {"odd": {**GREEDY, "top_p": 7}, "lost": {}}.get(r.key) or {"short": GREEDY}[r.key]

    failed: list[RequestError] = []
    asked = [request(key, "plain", PROMPT) for key in ("odd", "lost", "short")]
    asked.append(request("unknown", "nobody", PROMPT))
    found = list(engine.run(asked, sampling, failed=failed.append))
    assert [f.request.key for f in found] == ["short"]
    assert {e.key: e.code for e in failed} == dict.fromkeys(("odd", "lost", "unknown"), "VT603")
    assert "KeyError: 'lost'" in next(e.message for e in failed if e.key == "lost")


def in_process(engine: Engine) -> None:
    if not engine.report["in_process"]:
        pytest.skip("the fault is put into the worker, which is in this process")


def test_rows_that_could_not_be_planned_are_taken_by_nobody(
    engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch, regen: bool
) -> None:
    in_process(engine)
    prompt = np.random.default_rng(5).integers(4, 260, 107).tolist()
    rows = RowTable._rows

    def broken(self: RowTable, live: Any, picks: Any, last: int, *args: Any) -> Any:
        if live.key[0] == "bad" and last >= 64:
            raise IndexError("no such row")
        return rows(self, live, picks, last, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RowTable, "_rows", broken)
        # The second has its first 96 rows from the cache, those included that the same step computes for the first.
        asked = [request(key, "shared", prompt) for key in ("bad", "second")]
        whole, failed = serve(engine, [*asked, request("plain", "plain", prompt)])
    assert set(whole) == {"plain"}
    assert (failed["bad"].code, failed["second"].code) == ("VT621", "VT623")
    assert "IndexError: no such row" in failed["bad"].message and "no such row" in failed["second"].message
    shown(failed["bad"], "VT621-planned", regen)
    shown(failed["second"], "VT623-shared", regen)
    # What the request made is in nobody's cache, and the next one is what it should be.
    whole, _ = serve(engine, [request("again", "shared", prompt)])
    [completion] = whole["again"].completions
    assert completion.record.cached == ()
    r = torch.from_numpy(draw(1, 6.0, 1, 128))
    ids = [*prompt, *completion.token_ids][:-1]
    _, seen = reference(hugging_face(model), ids, {MID: lambda x: x + 1.5 * r})
    read = completion.record.reads["out", LAST]
    np.testing.assert_allclose(read.values["rows"], seen[LAST][106:], atol=TOLERANCE)


def test_rows_that_are_lost_on_their_way_are_their_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, regen: bool
) -> None:
    in_process(engine)
    reduced = Harvest._reduced

    def refuse(self: Harvest, ring: Any, sites: Any, rows: Any) -> Any:
        if ring.read == "felt":
            raise MemoryError("no memory")
        return reduced(self, ring, sites, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Harvest, "_reduced", refuse)
        whole, failed = serve(engine, [request("a", "felt", PROMPT), request("b", "pushed", PROMPT)])
    assert set(whole) == {"b"} and failed["a"].code == "VT622" and "MemoryError: no memory" in failed["a"].message
    shown(failed["a"], "VT622-lost", regen)
    assert set(serve(engine, [request("a", "felt", PROMPT)])[0]) == {"a"}


def test_a_device_that_fails_ends_the_engine(engine: Engine, regen: bool) -> None:
    """The last one: the engine is gone after it."""
    # The device fails in the row at position 9, when what is short has ended.
    asked = [request("short", "plain", PROMPT), request("long", "plain", PROMPT), request("dead", "bent", PROMPT)]
    sampling = {"short": {**GREEDY, "max_tokens": 2}}
    found: list[str] = []
    failed: list[RequestError] = []
    with pytest.raises(EngineError) as caught:
        for finished in engine.run(asked, lambda r: sampling.get(r.key, GREEDY), failed=failed.append):
            found.append(finished.request.key)
    assert caught.value.code == "VT624" and not isinstance(caught.value, RequestError)
    assert found == ["short"] and not failed
    shown(caught.value, "VT624-access", regen)
    with pytest.raises(EngineError, match=r"the engine has ended: .*illegal memory access"):
        list(engine.run(asked[:1], lambda r: GREEDY))

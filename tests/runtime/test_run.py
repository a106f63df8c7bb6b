"""How the driver steps vLLM: when requests are added and when what ended is collected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from vtaps.runtime.compat.frontend import Output
from vtaps.runtime.engine import Engine, EngineError, RequestError
from vtaps.runtime.merging import Merging
from vtaps.runtime.records import Record, Request


class Frontend:
    """Steps of which each takes up to two requests, all of which end ``after`` steps later; ``log`` says what was
    asked of it."""

    def __init__(self, fail_at: int = 99, after: int = 1) -> None:
        self.log: list[str] = []
        self.waiting: list[str] = []
        self.running: list[tuple[str, int]] = []
        self.steps, self.fail_at, self.after = 0, fail_at, after

    def add(self, key: str, ids: Sequence[int], sampling: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
        assert extra == {"key": key, "arm": "a", "point": 0}
        self.log.append(f"add {key}")
        self.waiting.append(key)
        return key

    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[tuple[str, tuple[Output, ...]]]:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the worker is gone")
        ended = [key for key, last in self.running if last == self.steps]
        self.running = [(key, last) for key, last in self.running if key not in ended]
        self.running += [(key, self.steps + self.after) for key in self.waiting[:2]]
        del self.waiting[:2]
        self.log.append("step" + "".join(f" -{key}" for key in ended))
        return [(key, (Output(0, (1,), "", "length", None),)) for key in ended]

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "vtaps_collect":
            self.log.append("collect " + " ".join(key for key, *_ in args[0]))
            return [[((key, child), Record()) for key, child, _ in args[0]]]
        self.log.append(method + "".join(f" {key}" for key in args[0]) if args else method)
        return []

    def abort(self, ids: Sequence[str]) -> None:
        self.log.append("abort " + " ".join(ids))


class Folders:
    held = 0

    def records(self, answer: Any) -> dict[Any, Record]:
        return dict(answer)


class Program:
    patterns: Mapping[str, Any] = {}
    sites: Mapping[str, Any] = {}

    def compile(self, *_: Any) -> None:
        return None


def engine(frontend: Frontend, **report: Any) -> Engine:
    made = object.__new__(Engine)
    made._frontend, made._folders, made.program = frontend, Folders(), Program()  # type: ignore[assignment]
    made._faults, made._attention, made._lines = lambda: [], {}, {}
    made._merging = Merging(made.program, [{}])
    made.report = {
        "max_num_seqs": 2, "max_num_batched_tokens": 6, "in_process": True, "async_scheduling": True,
        "prefix_caching": False, **report,
    }  # fmt: skip
    return made


def run(frontend: Frontend, count: int, **report: Any) -> Iterator[str]:
    requests = [Request(f"k{i}", "a", 0, "", "", (1, 2, 3)) for i in range(count)]
    for done in engine(frontend, **report).run(requests, lambda _: {}):
        frontend.log.append(f"take {done.request.key}")
        yield done.request.key


def test_the_device_is_at_work_while_the_host_is() -> None:
    frontend = Frontend()
    assert list(run(frontend, 8)) == [f"k{i}" for i in range(8)]
    assert frontend.log == [
        # As much as a step takes, then more beside it.
        "add k0", "add k1", "step",
        "add k2", "add k3", "step -k0 -k1",
        # What ended is taken once the next step is under way; until then it is alive.
        "add k4", "add k5", "step -k2 -k3", "collect k0 k1", "take k0", "take k1",
        "add k6", "add k7", "step -k4 -k5", "collect k2 k3", "take k2", "take k3",
        # Nothing is left to wait for.
        "step -k6 -k7", "collect k4 k5 k6 k7", "take k4", "take k5", "take k6", "take k7",
        "vtaps_verify",
    ]  # fmt: skip


@pytest.mark.parametrize("report", [{"in_process": False}, {"async_scheduling": False}])
def test_an_engine_that_waits_for_its_steps_gives_at_once(report: dict[str, Any]) -> None:
    frontend = Frontend()
    assert list(run(frontend, 4, **report)) == ["k0", "k1", "k2", "k3"]
    assert frontend.log == [
        "add k0", "add k1", "add k2", "add k3", "step",
        "step -k0 -k1", "collect k0 k1", "take k0", "take k1",
        "step -k2 -k3", "collect k2 k3", "take k2", "take k3",
        "vtaps_verify",
    ]  # fmt: skip


def test_what_ended_before_a_fault_is_given() -> None:
    frontend, taken = Frontend(fail_at=3), list[str]()
    made = engine(frontend)
    with pytest.raises(EngineError, match=r"^the worker is gone"):
        for done in made.run([Request(f"k{i}", "a", 0, "", "", (1, 2, 3)) for i in range(4)], lambda _: {}):
            frontend.log.append(f"take {done.request.key}")
            taken.append(done.request.key)
    assert taken == ["k0", "k1"]
    with pytest.raises(EngineError, match="the engine has ended: the worker is gone"):
        list(made.run([Request("k9", "a", 0, "", "", (1, 2, 3))], lambda _: {}))
    assert frontend.log[-5:] == ["collect k0 k1", "take k0", "take k1", "abort k2 k3", "vtaps_forget k2 k3"]


def test_whoever_stops_early_leaves_nothing_behind() -> None:
    frontend = Frontend()
    taking = run(frontend, 6)
    assert next(taking) == "k0"
    taking.close()
    assert frontend.log[-2:] == ["abort k1 k2 k3 k4 k5", "vtaps_forget k1 k2 k3 k4 k5"]


def test_what_ended_before_a_request_is_refused_is_given() -> None:
    frontend, taken = Frontend(), list[str]()
    requests = [Request(key, "a", 0, "", "", (1, 2, 3)) for key in ("k0", "k1", "k2", "k3", "k3")]
    with pytest.raises(RequestError, match="its key is alive already"):
        taken.extend(done.request.key for done in engine(frontend).run(requests, lambda _: {}))
    assert taken == ["k0", "k1"]
    assert frontend.log[-2:] == ["abort k2 k3", "vtaps_forget k2 k3"]


def test_what_ended_before_the_requests_fail_is_given() -> None:
    frontend, taken = Frontend(), list[str]()

    def requests() -> Iterator[Request]:
        for number in range(4):
            yield Request(f"k{number}", "a", 0, "", "", (1, 2, 3))
        raise OSError("no more prompts")

    with pytest.raises(OSError, match="no more prompts"):
        taken.extend(done.request.key for done in engine(frontend).run(requests(), lambda _: {}))
    assert taken == ["k0", "k1"]

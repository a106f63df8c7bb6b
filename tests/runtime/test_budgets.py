"""Runs that end early: which requests are started while others are on their way, and after an interrupt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from tests.results import make
from tests.results.test_folder import opened
from vtaps import schemas
from vtaps.runtime.budgets import Budgets
from vtaps.runtime.records import Finished, Request
from vtaps.runtime.results.folder import RunFolder
from vtaps.runtime.results.load import load
from vtaps.show import show

LENGTHS = (4, 3, 5, 2, 6, 3, 4, 5)


def lock(limit: int, tokens: str = "prompt", other: int | None = None) -> dict[str, Any]:
    """Arm ``a`` collects under a budget, ``b`` does not, ``c`` has a budget of its own beside it."""
    reads = {
        "acts": make.read("rows", {"rows": tokens}, budget=limit),
        "free": make.read("rows", {"rows": "prompt"}),
        "more": make.read("rows", {"rows": "prompt"}, **({"budget": other} if other else {})),
    }
    arms = {"a": make.arm(reads=["acts"]), "b": make.arm(reads=["free"]), "c": make.arm(reads=["acts", "more"])}
    return make.lock(reads=reads, arms=arms)


def requests(*arms: str) -> list[Request]:
    return [
        Request(f"{arm}/{i}", arm, 0, "facts", str(i), tuple(range(1, n + 1)))
        for i, n in enumerate(LENGTHS)
        for arm in arms
    ]


def serve(
    folder: RunFolder, locked: dict[str, Any], asked: list[Request], window: int, fail: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """As the engine does it: up to ``window`` alive, the first of them done next; what was started, in order."""
    budgets, failed, started = Budgets(locked, folder.kept), dict[str, str](), list[str]()

    def left() -> list[Request]:
        return [r for r in asked if r.key not in folder.done | failed.keys() and not budgets.covered(r)]

    while wanted := left():
        source: Iterator[Request] = budgets.start(wanted)
        alive: list[Request] = []
        while True:
            while len(alive) < window and (request := next(source, None)) is not None:
                alive.append(request)
                started.append(request.key)
            if not alive:
                break
            request = alive.pop(0)
            if request.key in fail:
                failed[request.key] = "it failed"
                budgets.failed(request.key)
                continue
            done: Finished = make.finish(request, locked)
            assert folder.add(done) == []
            budgets.done(request, folder.kept)
    return started, failed


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize(
    ("limit", "count"), [(1, 1), (4, 1), (5, 2), (7, 2), (8, 3), (12, 3), (13, 4), (32, 8), (99, 8)]
)
def test_no_more_is_started_than_the_budget_needs(limit: int, count: int, window: int, tmp_path: Path) -> None:
    locked, asked = lock(limit), requests("a")
    with opened(tmp_path / "run", locked, order=[r.key for r in asked]) as folder:
        started, _ = serve(folder, locked, asked, window)
        assert started == [f"a/{i}" for i in range(count)]
        rest = [r.key for r in asked[count:]]
        assert folder.finish({}, not_run=rest) == []
    run = load(tmp_path / "run")
    assert len(run["acts"]) == sum(LENGTHS[:count]) and run.info["not_run"] == rest and run.info["failed"] == []
    jsonschema.validate(dict(run.info), schemas.load("run-v1.schema.json"))
    console = Console(width=200, record=True)
    console.print(show(tmp_path / "run"))
    assert (f"{len(rest)} not run, as a budget was kept" in console.export_text()) is bool(rest)


def test_arms_without_the_read_go_on_and_an_arm_ends_with_any_of_its_budgets(tmp_path: Path) -> None:
    locked, asked = lock(12, other=4), requests("a", "b", "c")
    with opened(tmp_path / "run", locked, order=[r.key for r in asked]) as folder:
        started, _ = serve(folder, locked, asked, 3)
    # Both `a` and `c` fill the first budget: 4 + 4 + 3 + 5; `c` has its own after one request.
    assert started == ["a/0", "b/0", "c/0", "a/1", "b/1", "a/2", *(f"b/{i}" for i in range(2, 8))]


def test_generated_rows_count_when_they_are_there(tmp_path: Path) -> None:
    """They are not foreseen: those on their way bring them too."""
    locked, asked = lock(20, tokens="all"), requests("a")
    for window, count in ((1, 3), (4, 5)):
        with opened(tmp_path / str(window), locked, order=[r.key for r in asked]) as folder:
            started, _ = serve(folder, locked, asked, window)
            assert started == [f"a/{i}" for i in range(count)]
            # Four tokens each: three rows of generated ones.
            assert folder.kept["acts"] == sum(n + 3 for n in LENGTHS[:count]) >= 20


def test_what_a_failed_request_does_not_bring_another_one_does(tmp_path: Path) -> None:
    locked, asked = lock(8), requests("a")
    with opened(tmp_path / "run", locked, order=[r.key for r in asked]) as folder:
        started, failed = serve(folder, locked, asked, 8, fail=("a/1",))
        # Seven rows are on their way until the second one fails: then four, and the next one's five.
        assert started == ["a/0", "a/1", "a/2"]
        assert failed.keys() == {"a/1"} and folder.kept["acts"] == 9


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    locked, asked = lock(13), requests("a")
    order = [r.key for r in asked]
    with opened(tmp_path / "run", locked, order=order) as folder:
        for request in asked[1:3]:
            folder.add(make.finish(request, locked))
        assert folder.kept == {"acts": 8}
    with opened(tmp_path / "run", locked, order=order) as folder:
        assert folder.kept == {"acts": 8} and folder.done == {"a/1", "a/2"}
        started, _ = serve(folder, locked, asked, 8)
        assert started == ["a/0", "a/3"] and folder.kept == {"acts": 14}
        folder.finish({}, not_run=order[4:])
    with opened(tmp_path / "run", locked, order=order, overwrite=True) as folder:
        assert folder.kept == {}

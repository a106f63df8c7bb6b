"""The short form of `make fuzz`, the same specs every time, and what the fuzzer would notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spec import fuzz
from tests.spec.fuzz import Folder, Told, draw_all, mutate_all, put_through, ready
from vtaps.check import CheckResult, check_file
from vtaps.spec.diagnostics import Diagnostic, Span


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    with ready(tmp_path_factory.mktemp("fuzz")) as made:
        yield made


def test_drawn_specs_are_compiled_or_refused_at_a_place_in_the_file(folder: Folder) -> None:
    told = Told()
    draw_all(folder, 200, None, told)
    assert told.faults == {}
    # A grammar whose specs are all refused at once would prove little.
    assert told.specs == 200 and told.share >= 0.3 and len(told.refused) >= 15


def test_specs_of_the_checkout_with_slips_are_too(folder: Folder) -> None:
    told = Told()
    mutate_all(folder, 150, 0, told)
    assert told.faults == {}
    assert told.specs == 150 and len(told.refused) >= 25


GOOD = b"""vtaps: 1
model: {path: data/configs/llama, tokenizer: data/tokenizer}
edits: {half: {at: "resid_post[1]", tokens: all, scale: {by: 0.5}}}
prompts: {facts: [{id: a, text: The capital of France}]}
arms: {main: {edits: [half]}}
"""


def waiting(path: Path) -> CheckResult:
    while True:
        time.sleep(0.01)


def busy(path: Path) -> CheckResult:
    while True:
        pass


def raising(path: Path) -> CheckResult:
    raise KeyError(path)


def writing(path: Path) -> CheckResult:
    Path("stray").write_text("x")
    return check_file(path)


def running(path: Path) -> CheckResult:
    exec(compile((path.parent / "probes.py").read_text(), "probes.py", "exec"), {"__file__": "probes.py"})
    return check_file(path)


def beyond(path: Path) -> CheckResult:
    return CheckResult([Diagnostic("VT101", "x", Span(str(path), 99, 1, 99, 2))], {str(path): GOOD.decode()})


def silent(path: Path) -> CheckResult:
    return CheckResult([], {})


@pytest.mark.parametrize(
    ("check", "says"),
    [
        (waiting, "hang in waiting"),
        (busy, "hang in busy"),
        (raising, "KeyError in "),
        (writing, "opens 'stray' to write"),
        (running, "opens 'probes.py.ran' to write"),
        (beyond, "VT101 points outside the file"),
        (silent, "neither a plan nor an error"),
    ],
)
def test_what_must_not_happen_is_noticed(
    check: Callable[[Path], Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ready(tmp_path) as made:
        good = Told()
        put_through(GOOD, made.path, good)
        assert good.accepted == 1 and not good.faults
        monkeypatch.setattr(fuzz, "check_file", check)
        monkeypatch.setattr(fuzz, "LIMIT_S", 0.2)
        monkeypatch.setattr(fuzz, "WALL_S", 0.2 if check is waiting else 20)
        told = Told()
        put_through(GOOD, made.path, told)
        [fault] = told.faults
        assert fault.startswith(says) and told.faults[fault] == GOOD

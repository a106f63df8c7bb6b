"""A forward with taps is the same function: values, closures, defaults, lines, and every forward of vLLM."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.codegen.test_source_ops import forwards
from vtaps.codegen.instrument import TAP, Instrumented, InstrumentError, instrument, instrumented_source
from vtaps.codegen.source_ops import ops_of


def of(function: Any, *wanted: str) -> Instrumented:
    lines, line = inspect.getsourcelines(function)
    return instrument(function, "".join(lines), line, inspect.getfile(function), wanted or None)


def traced(function: Any, *wanted: str) -> tuple[FunctionType, list[tuple[str, Any]]]:
    seen: list[tuple[str, Any]] = []

    def tap(names: str, value: Any) -> Any:
        seen.append((names, value))
        return value

    return of(function, *wanted).bind(tap), seen


class Base:
    def forward(self, x: int) -> int:
        return x * 10


def factory(scale: int) -> type:
    class Child(Base):
        def forward(self, x: int, *, more: int = 3, many: tuple[int, ...] = (1, 2)) -> int:
            """What it does.
            no indent here
            """
            y = super().forward(x) + scale
            a, b = divmod(
                y,
                7,
            )
            a += more
            held = {"a": a}
            held["a"] -= 1
            z = [abs(v) for v in many]
            text = f"{abs(a)}"
            return a if b > len(text) else (c := a + b) + c - sum(z)

    return Child


def test_values_and_closures_stay() -> None:
    child = factory(5)
    plain = child.forward
    tapped, seen = traced(plain)
    for x in range(20):
        for more in (0, 4):
            assert tapped(child(), x, more=more) == plain(child(), x, more=more)
    assert tapped(child(), 3) == plain(child(), 3)
    assert inspect.signature(tapped) == inspect.signature(plain)
    assert tapped.__doc__ == plain.__doc__ and tapped.__qualname__ == plain.__qualname__
    seen.clear()
    tapped(child(), 3)
    assert seen[:3] == [("forward_0", 30), ("binop_add_0 y_0", 35), ("divmod_0 a_0 b_0", (5, 0))]


def test_a_tap_of_the_first_argument_is_no_cell() -> None:
    """For a compiler that keeps the cells of a function: they are those that it had."""
    child = factory(5)
    plain = child.forward
    made = of_own(plain)
    tapped, one, other = made.bind(), child(), child()
    seen: list[tuple[str, Any]] = []

    def tap(names: str, value: Any) -> Any:
        seen.append((names, value))
        return 100 if names == "forward_0" else value

    setattr(one, TAP, lambda _, value: value)
    setattr(other, TAP, tap)
    assert set(tapped.__code__.co_freevars) == set(plain.__code__.co_freevars)
    assert tapped(one, 3) == plain(one, 3) and seen == []
    assert tapped(other, 3) == plain(child(), 10)
    assert seen[:2] == [("forward_0", 30), ("binop_add_0 y_0", 105)]
    with pytest.raises(InstrumentError, match="takes no argument that could have the taps"):
        of_own(lone)


def lone() -> int:
    return abs(-1)


def of_own(function: Any) -> Instrumented:
    lines, line = inspect.getsourcelines(function)
    return instrument(function, "".join(lines), line, inspect.getfile(function), own=True)


def test_what_a_tap_returns_is_the_value() -> None:
    def forward(x: int) -> int:
        y = abs(x)
        return y + 1

    made = of(forward, "y_0")
    assert made.bind(lambda names, value: 100)(-3) == 101
    assert made.bind(lambda names, value: value)(-3) == 4


def test_only_what_is_asked_for_is_tapped() -> None:
    child = factory(5)
    tapped, seen = traced(child.forward, "b_0", "forward_0")
    tapped(child(), 3)
    assert seen == [("forward_0", 30), ("b_0", (5, 0))]


def test_an_augmented_assignment_is_tapped_behind_it() -> None:
    child = factory(5)
    tapped, seen = traced(child.forward, "a_1")
    assert tapped(child(), 3, more=4) == child().forward(3, more=4)
    assert seen == [("a_1", 9)]
    changed = of(child.forward, "a_1").bind(lambda names, value: 100)
    assert changed(child(), 3, more=4) == child().forward(3, more=95)


@pytest.mark.parametrize(
    ("name", "why"),
    [("abs_0", "in a comprehension"), ("abs_1", "in an f-string"), ("held_1", "part of a value")],
)
def test_where_nothing_can_be_put_around(name: str, why: str) -> None:
    with pytest.raises(InstrumentError, match=why):
        of(factory(1).forward, name)
    with pytest.raises(InstrumentError, match="no op nothing_0; there are forward_0"):
        of(factory(1).forward, "nothing_0")


def test_lines_are_those_of_the_file() -> None:
    def forward(x: int) -> float:
        y = abs(
            x,
        )
        return 1 / (y - 1)

    def line(function: Callable[[int], float]) -> int | None:
        try:
            function(1)
        except ZeroDivisionError as error:
            return traceback.extract_tb(error.__traceback__)[-1].lineno
        return None

    assert line(traced(forward)[0]) == line(forward) is not None


def test_a_function_at_the_start_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first.py").write_text(
        textwrap.dedent(
            """\
            def forward(x):
                return (
                    abs(x)
                    + 1
                )
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("first")
    tapped, seen = traced(module.forward)
    assert tapped(-4) == 5 and seen == [("abs_0", 4), ("binop_add_0", 5)]
    del sys.modules["first"]


def mark(function: Any) -> Any:
    @functools.wraps(function)
    def marked(x: int) -> Any:
        return "marked", function(x)

    return marked


@mark
def decorated(x: int) -> int:
    return abs(x)


def test_decorators_are_left_out_and_lines_stay() -> None:
    tapped, seen = traced(inspect.unwrap(decorated))
    assert tapped(-2) == 2 and seen == [("abs_0", 2)]
    assert tapped.__code__.co_firstlineno == inspect.unwrap(decorated).__code__.co_firstlineno + 1


def test_the_text_shows_where_the_taps_are() -> None:
    source = "    def forward(self, x):\n        q, k = self.qk(x)\n        return q + k\n"
    assert instrumented_source(source, ["q_0", "binop_add_0"]).splitlines() == [
        "def forward(self, x):",
        '    q, k = __vtaps_tap__("q_0", self.qk(x))',
        '    return __vtaps_tap__("binop_add_0", q + k)',
    ]


def test_every_forward_of_vllm_compiles_with_taps() -> None:
    """Every op that can have a tap has one; no line is moved; the ops (of every tenth) are the same ones."""
    pytest.importorskip("vllm")
    count = 0
    for where, source in forwards():
        text = instrumented_source(source)
        compile(text if not text[:1].isspace() else "class _:\n" + text, where, "exec", dont_inherit=True)
        assert text.count("\n") == source.count("\n"), where
        count += 1
        if count % 10:
            continue
        before = [op.name for op in ops_of(source) if op.kind == "call"]
        after = [op.name for op in ops_of(text) if op.kind == "call" and not op.name.startswith("__vtaps_tap__")]
        assert before == after, where
    assert count > 500


class Private:
    def forward(self, x: int) -> int:
        self.__seen = abs(x)
        return self.__seen


def test_a_private_name_is_not_made_another() -> None:
    with pytest.raises(InstrumentError, match="__seen would be other names"):
        of(Private.forward, "abs_0")

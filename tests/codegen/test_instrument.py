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
from vtaps.codegen.instrument import (
    TAP,
    Instrumented,
    InstrumentError,
    copy_name,
    instrument,
    instrumented_source,
)
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
    assert seen[:5] == [
        ("forward_0.input[0]", 3),
        ("forward_0", 30),
        ("binop_add_0.input[1]", 5),
        ("binop_add_0 y_0", 35),
        ("divmod_0.input[0]", 35),
    ]


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
    outputs = [pair for pair in seen if ".input" not in pair[0]]
    assert outputs[:2] == [("forward_0", 30), ("binop_add_0 y_0", 105)]
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
    assert tapped(-4) == 5 and seen == [("abs_0.input[0]", -4), ("abs_0", 4), ("binop_add_0", 5)]
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
    assert tapped(-2) == 2 and seen == [("abs_0.input[0]", -2), ("abs_0", 2)]
    assert tapped.__code__.co_firstlineno == inspect.unwrap(decorated).__code__.co_firstlineno + 1


def test_the_text_shows_where_the_taps_are() -> None:
    source = "    def forward(self, x):\n        q, k = self.qk(x)\n        return q + k\n"
    assert instrumented_source(source, ["q_0", "binop_add_0"]).splitlines() == [
        "def forward(self, x):",
        '    q, k = __vtaps_tap__("q_0", self.qk(x))',
        '    return __vtaps_tap__("binop_add_0", q + k)',
    ]


def test_arguments_are_evaluated_in_their_order() -> None:
    order: list[str] = []

    def note(text: str) -> str:
        order.append(text)
        return text

    def forward(x: str) -> list[str]:
        def join(*parts: str, **more: str) -> list[str]:
            return [*parts, *more.values()]

        return join(note("a") + x, *[note("b")], last=x, first=note("c") + x)

    def tap(names: str, value: Any) -> Any:
        order.append(names)
        return value

    wanted = ["join_0.input.last", "binop_add_1.input[1]", "join_0", "binop_add_0"]
    tapped = of(forward, *wanted).bind(tap)
    assert tapped("x") == ["ax", "b", "x", "cx"]
    assert order == ["a", "binop_add_0", "b", "join_0.input.last", "c", "binop_add_1.input[1]", "join_0"]


def test_what_a_tap_at_an_argument_returns_is_what_the_call_takes_in() -> None:
    def forward(x: int) -> tuple[int, int]:
        return abs(x), x

    assert of(forward, "abs_0.input[0]").bind(lambda names, value: 7)(-3) == (7, -3)


def test_a_subscripted_value_is_tapped_behind_the_subscript() -> None:
    def forward(x: int) -> int:
        y = divmod(x, 7)[1]
        return y + 1

    tapped, seen = traced(forward, "y_0", "divmod_0")
    assert tapped(10) == 4 and seen == [("divmod_0", (1, 3)), ("y_0", 3)]


class Twice:
    scale = 10

    def helper(self, x: int) -> int:
        return abs(x) * self.scale

    def forward(self, x: int) -> int:
        return self.helper(x) + self.helper(x=x)


def test_each_call_has_a_copy_of_its_own() -> None:
    lines, line = inspect.getsourcelines(Twice.forward)
    made = instrument(Twice.forward, "".join(lines), line, __file__, ["binop_add_0"], ["self_helper_1"])
    inner = of(Twice.helper, "abs_0")
    tapped = made.bind(lambda names, value: value, {"self_helper_1": inner.bind(lambda names, value: value + 1)})
    assert tapped(Twice(), -3) == 30 + 40
    assert Twice().forward(-3) == Twice().helper(-3) * 2 == 60
    text = instrumented_source("".join(lines), ["self_helper_1.input.x"], ["self_helper_1"])
    expected = 'self.helper(x) + __vtaps_self_helper_1__(self, x=__vtaps_tap__("self_helper_1.input.x", x))'
    assert text.splitlines()[-1].strip() == f"return {expected}"


def test_copies_too_are_attributes_of_the_first_argument() -> None:
    lines, line = inspect.getsourcelines(Twice.forward)
    made = instrument(Twice.forward, "".join(lines), line, __file__, ["binop_add_0"], ["self_helper_1"], own=True)
    one = Twice()
    setattr(one, TAP, lambda names, value: value)
    setattr(one, copy_name("self_helper_1"), of(Twice.helper, "abs_0").bind(lambda names, value: value + 1))
    assert made.bind()(one, -3) == 30 + 40
    assert made.bind().__code__.co_freevars == Twice.forward.__code__.co_freevars


@pytest.mark.parametrize(
    ("line", "op", "why"),
    [
        ("return [f(y) for y in x]", "f_0", "in a comprehension"),
        ("while x: f(x)", "f_0", "in a loop"),
        ("return x + 1", "binop_add_0", "no call"),
        ("return (f\n        .g)(x)", "f_g_0", "several lines"),
    ],
)
def test_what_cannot_call_a_copy_says_why(line: str, op: str, why: str) -> None:
    with pytest.raises(InstrumentError, match=why):
        instrumented_source(f"def forward(x):\n    {line}\n", (), [op])


def test_every_forward_of_vllm_compiles_with_taps() -> None:
    """Every op and argument that can have a tap has one, every call that can calls a copy; no line is moved; the ops of
    every tenth, which calls no copies, are the same ones."""
    pytest.importorskip("vllm")
    count = 0
    for where, source in forwards():
        ops = [op for op in ops_of(source) if op.kind == "call" and not op.fixed and not op.repeats]
        count += 1
        copied = [op.name for op in ops if op.text.removeprefix("self.").isidentifier()]
        text = instrumented_source(source, None, copied if count % 10 else ())
        compile(text if not text[:1].isspace() else "class _:\n" + text, where, "exec", dont_inherit=True)
        assert text.count("\n") == source.count("\n"), where
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

"""The vocabulary of a block: what its functions say of a location; what comes of it is test_kernels's."""

from __future__ import annotations

from typing import Any

import pytest

from vtaps.runtime import block as vt
from vtaps.runtime.program import KINDS, VERBS


def block() -> vt.Block:
    return vt.Block(spec="", tree="", structure="", vllm="", architecture="")


def said(function: Any, residual: int | None = None) -> tuple[vt.Note, ...]:
    b = block()
    b.location("site", module="m", output=0, residual=residual)(function)
    return b.locations["site"].notes()


@pytest.mark.parametrize(
    ("verb", "note"),
    [
        (vt.add, vt.Note("n", verb="add")),
        (vt.scale, vt.Note("n", verb="scale")),
        (vt.zero, vt.Note("n", verb="zero")),
        (vt.set_, vt.Note("n", verb="set")),
        (vt.keep, vt.Note("n", kind="rows")),
        (vt.mean, vt.Note("n", kind="mean")),
        (vt.norm, vt.Note("n", kind="norm")),
        (vt.project, vt.Note("n", kind="project")),
        (vt.lens, vt.Note("n", kind="lens")),
    ],
)
@pytest.mark.parametrize("pair", [False, True], ids=["tensor", "pair"])
def test_what_each_verb_says(verb: Any, note: vt.Note, pair: bool) -> None:
    if pair:
        assert said(lambda t, hidden, residual: verb(t, "n", hidden, residual), residual=1) == (note,)
    else:
        assert said(lambda t, x: verb(t, "n", x)) == (note,)


def test_there_is_a_verb_for_all_that_a_lock_can_ask() -> None:
    verbs = [getattr(vt, name) for name in vt.__all__ if not isinstance(getattr(vt, name), type)]

    def everything(t: vt.Tap, x: vt.Tensor) -> None:
        for verb in verbs:
            verb(t, "n", x)

    notes = said(everything)
    assert len(notes) == len(verbs)
    assert {n.verb for n in notes} - {None} == {*VERBS, "gate"}
    assert {n.kind for n in notes} - {None} == set(KINDS)
    assert all((n.verb is None) != (n.kind is None) for n in notes)


def test_notes_are_in_the_order_of_the_function_and_the_same_each_time() -> None:
    b = block()

    @b.location("site", module="m", output=0, residual=1)
    def site(t: vt.Tap, hidden: vt.Tensor, residual: vt.Tensor | None) -> None:
        vt.keep(t, "before", hidden, residual)
        vt.add(t, "push", hidden, residual, columns=((1, 3), (6, 8)))
        vt.add(t, "push", hidden, residual)
        vt.keep(t, "after", hidden, residual)

    expected = (
        vt.Note("before", kind="rows"),
        vt.Note("push", verb="add", columns=((1, 3), (6, 8))),
        vt.Note("push", verb="add"),
        vt.Note("after", kind="rows"),
    )
    assert b.locations["site"].notes() == expected
    assert b.locations["site"].notes() == expected


def test_a_function_that_looks_at_a_value_fails() -> None:
    """There is none when it is called: nothing in a block can depend on one."""

    def wrong(t: vt.Tap, x: Any) -> None:
        vt.add(t, "n", x)
        vt.scale(t, "m", x * 2)

    with pytest.raises(TypeError, match="NoneType"):
        said(wrong)


def test_a_function_without_the_pair_s_other_half_fails() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        said(lambda t, x: None, residual=1)


def test_locations_keep_their_order_and_where_they_act() -> None:
    b = block()
    function = b.location("z", module="m.1", output=0, residual=1, columns=(2, 6))(lambda t, hidden, residual: None)
    b.location("a", module="m.0", input="x", residual="residual")(lambda t, hidden, residual: None)
    b.location("whole", module="")(lambda t, x: None)
    assert list(b.locations) == ["z", "a", "whole"]
    assert b.locations["z"] == vt.Location("z", "m.1", function, 0, None, 1, (2, 6))
    assert (b.locations["a"].input, b.locations["a"].residual) == ("x", "residual")
    assert b.locations["whole"].output is None and b.locations["whole"].input is None
    assert b.locations["whole"].notes() == ()


def test_a_block_refuses_a_name_twice() -> None:
    b = block()
    b.location("x", module="m", output=0)(lambda t, x: None)
    with pytest.raises(ValueError, match="two functions for x"):
        b.location("x", module="n", output=0)
    assert b.locations["x"].module == "m"


def test_a_block_refuses_a_location_on_both_sides() -> None:
    b = block()
    with pytest.raises(ValueError, match="x: a location is an input or an output"):
        b.location("x", module="m", output=0, input="x")
    assert not b.locations

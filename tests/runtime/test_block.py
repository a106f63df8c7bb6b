"""The block's verbs against numpy in float64: what they do to selected rows, and that they do nothing to others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vtaps.runtime import block as vt

ROWS, WIDTH = 6, 8
SELECTIONS: dict[str, Any] = {"neighbours": slice(2, 5), "scattered": torch.tensor([0, 3, 5])}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def values(seed: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)).to(dtype)
    x[:, 0] = -0.0
    return x


def exact(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return x.to(torch.float64).numpy()


def rounded(x: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    return exact(torch.from_numpy(x.astype(np.float32)).to(dtype))


def chosen(rows: Any) -> np.ndarray[Any, Any]:
    return np.arange(ROWS)[rows] if isinstance(rows, slice) else rows.numpy()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype])))


def tap(step: vt.EditStep | None = None, vectors: torch.Tensor | None = None) -> vt.Tap:
    t = vt.Tap("site")
    if step is not None:
        t.edits["e"] = step
    if vectors is not None:
        t.vectors["e"] = vectors
    return t


def taken(step: vt.ReadStep) -> torch.Tensor:
    ((names, memory),) = step.groups.values()
    assert names == ["site"]
    return memory[:, 0]


def reading(rows: Any, segments: tuple[tuple[int, int], ...] = ()) -> tuple[vt.Tap, vt.ReadStep]:
    t, step = vt.Tap("site"), vt.ReadStep(rows, segments)
    t.reads["r"] = step
    return t, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("columns", [None, ((1, 3), (6, 8))], ids=["whole", "columns"])
@pytest.mark.parametrize("pair", [False, True], ids=["tensor", "pair"])
@pytest.mark.parametrize("verb", ["add", "scale", "zero", "set"])
def test_edits(verb: str, pair: bool, columns: Any, rows: Any, dtype: torch.dtype) -> None:
    hidden, residual = values(0, dtype), values(1, dtype) if pair else None
    before = (hidden.clone(), None if residual is None else residual.clone())
    vector = torch.from_numpy(np.random.default_rng(2).normal(size=WIDTH).astype(np.float32))
    # Row 1 of the vectors belongs to an arm that is not in this step.
    vectors = torch.stack([vector, torch.full((WIDTH,), float("nan"))])
    t = tap(vt.EditStep(rows, 2.5, 0), vectors)
    getattr(vt, "set_" if verb == "set" else verb)(t, "e", hidden, residual, columns=columns)

    picked = chosen(rows)
    cols = np.concatenate([np.arange(a, b) for a, b in columns or ((0, WIDTH),)])
    cell = np.ix_(picked, cols)
    stream = exact(before[0]) + (0 if before[1] is None else exact(before[1]))
    product = np.float64(2.5) * exact(vector)[cols]
    expected = {
        "add": exact(before[0])[cell] + product,
        "scale": 2.5 * stream[cell],
        "zero": np.zeros((len(picked), len(cols))),
        "set": np.broadcast_to(product, (len(picked), len(cols))),
    }[verb]
    got = exact(hidden)[cell]
    if dtype == torch.bfloat16:
        # float32 arithmetic and one rounding: float64's rounding, unless a value lies within 2⁻²³ of a tie.
        np.testing.assert_array_equal(got, rounded(expected, dtype))
    else:
        np.testing.assert_allclose(got, expected, rtol=2.0**-22, atol=1e-6)
    if residual is not None and before[1] is not None:
        wanted = exact(before[1])
        if verb != "add":
            wanted[cell] = 0.0
        np.testing.assert_array_equal(exact(residual), wanted)
    outside = np.ones((ROWS, WIDTH), bool)
    outside[cell] = False
    mask = torch.from_numpy(outside)
    assert same_bits(hidden[mask], before[0][mask])
    if residual is not None and before[1] is not None:
        assert same_bits(residual[mask], before[1][mask])
    assert t.edits["e"].fired == 1


def test_rows_of_one_step_may_differ_in_vector_and_coefficient() -> None:
    hidden = values(0, torch.float32)
    vectors = torch.from_numpy(np.random.default_rng(3).normal(size=(3, WIDTH)).astype(np.float32))
    coefficient = torch.tensor([[0.5], [-2.0], [4.0]])
    step = vt.EditStep(torch.tensor([0, 2, 5]), coefficient, torch.tensor([2, 0, 1]))
    before = exact(hidden)
    vt.add(tap(step, vectors), "e", hidden)
    before[[0, 2, 5]] += exact(coefficient) * exact(vectors)[[2, 0, 1]]
    np.testing.assert_allclose(exact(hidden), before, rtol=1e-6, atol=1e-7)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """One row alone (a scalar product) and in a mixed batch (products of rows) must agree to the bit."""
    vectors = torch.from_numpy(np.random.default_rng(4).normal(size=(2, WIDTH)).astype(np.float32))
    alone, mixed = values(0, torch.float32), values(0, torch.float32)
    vt.add(tap(vt.EditStep(slice(1, 2), 0.3, 0), vectors), "e", alone)
    step = vt.EditStep(slice(1, 3), torch.tensor([[0.3], [7.0]]), torch.tensor([0, 1]))
    vt.add(tap(step, vectors), "e", mixed)
    assert same_bits(alone[1], mixed[1])


def test_half_precision_is_rounded_once() -> None:
    """1 + 2⁻⁸ + 2⁻⁹ rounds to 1 + 2⁻⁷; a vector rounded to bfloat16 on its own, or a sum in two roundings, does not."""
    hidden = torch.ones(1, 2, dtype=torch.bfloat16)
    vectors = torch.tensor([[2.0**-8 + 2.0**-18, 2.0**-8]])
    vt.add(tap(vt.EditStep(slice(0, 1), 1.0, 0), vectors), "e", hidden)
    # Just above the tie goes up; the tie itself goes to even.
    assert hidden.tolist() == [[1 + 2.0**-7, 1.0]]


def test_an_empty_table_touches_nothing() -> None:
    hidden = values(0, torch.float32)
    before = hidden.clone()
    t = tap(vectors=torch.full((1, WIDTH), float("nan")))
    for verb in (vt.add, vt.scale, vt.zero, vt.set_):
        verb(t, "e", hidden, hidden)
    for read in (vt.keep, vt.norm, vt.mean, vt.project, vt.lens):
        read(t, "r", hidden, hidden)
    assert same_bits(hidden, before)


def test_at_the_first_layer_both_halves_are_one_tensor() -> None:
    hidden = values(0, torch.float32)
    before = exact(hidden)
    t, step = reading(slice(0, ROWS))
    vt.keep(t, "r", hidden, hidden)
    np.testing.assert_array_equal(exact(taken(step)), before)
    vt.set_(tap(vt.EditStep(slice(0, 2), 1.0, 0), torch.ones(1, WIDTH)), "e", hidden, hidden)
    np.testing.assert_array_equal(exact(hidden)[:2], np.ones((2, WIDTH)))
    vt.scale(tap(vt.EditStep(slice(2, 4), 3.0)), "e", hidden, hidden)
    np.testing.assert_allclose(exact(hidden)[2:4], 3 * before[2:4], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("pair", [False, True], ids=["tensor", "pair"])
def test_reads(pair: bool, rows: Any, dtype: torch.dtype) -> None:
    hidden, residual = values(0, dtype), values(1, dtype) if pair else None
    picked = chosen(rows)
    stream = (exact(hidden) + (0 if residual is None else exact(residual)))[picked]

    t, step = reading(rows)
    vt.keep(t, "r", hidden, residual)
    kept = taken(step)
    assert kept.dtype == dtype
    np.testing.assert_array_equal(exact(kept), rounded(stream, dtype))

    t, step = reading(rows)
    vt.norm(t, "r", hidden, residual)
    assert taken(step).dtype == torch.float32
    np.testing.assert_allclose(exact(taken(step)), np.linalg.norm(stream, axis=-1), rtol=1e-6)

    t, step = reading(rows)
    t.probes["r"] = torch.from_numpy(np.random.default_rng(5).normal(size=(2, WIDTH)).astype(np.float32))
    vt.project(t, "r", hidden, residual)
    np.testing.assert_allclose(exact(taken(step)), stream @ exact(t.probes["r"]).T, rtol=1e-5, atol=1e-6)

    t, step = reading(rows, ((0, 2), (2, 3)))
    vt.mean(t, "r", hidden, residual)
    expected = np.stack([stream[:2].sum(0), stream[2]])
    np.testing.assert_allclose(exact(taken(step)), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("verb", ["keep", "mean"])
def test_what_was_read_is_no_alias(verb: str, rows: Any) -> None:
    hidden = values(0, torch.float32)
    t, step = reading(rows, ((0, 1), (1, 2), (2, 3)))
    getattr(vt, verb)(t, "r", hidden)
    before = taken(step).clone()
    hidden.fill_(9.0)
    assert torch.equal(taken(step), before)


def test_a_block_refuses_a_name_twice() -> None:
    block = vt.Block(spec="", tree="", structure="", vllm="", architecture="")
    block.location("x", module="m", output=0)(lambda t, x: None)
    with pytest.raises(ValueError, match="two functions for x"):
        block.location("x", module="n", output=0)

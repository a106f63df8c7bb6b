"""Rows in fewer bytes, against numpy in float64 and the definition of each format."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from vtaps.runtime.narrow import narrowed
from vtaps.runtime.results.tensors import E4M3
from vtaps.spec.store import Store

TINY = float(np.finfo(np.float32).tiny)
FP8 = Store("float8_e4m3", scaled=True)
FP16 = Store("float16", scaled=True)


def rows(seed: int = 0) -> np.ndarray:
    """``[7, 3, 64]``: rows of every size, with outliers as the streams of language models have them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(7, 3, 64)) * 10.0 ** rng.integers(-3, 4, size=(7, 3, 1))
    x[:, 0, 5] *= 1000
    x[0, 1], x[1, 1], x[2, 1] = 0.0, -0.0, 1e38
    x[3, 1] = TINY * rng.normal(size=64)
    return x.astype(np.float32)


def test_the_table_of_float8_is_that_of_its_definition() -> None:
    want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    np.testing.assert_array_equal(E4M3, want.numpy())
    assert np.signbit(E4M3[128]) and np.nanmax(E4M3) == 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_with_a_scale_keeps_to_its_bound(dtype: torch.dtype) -> None:
    given = torch.from_numpy(rows()).to(dtype)
    fields, named = narrowed(given, FP8)
    assert named == "float8_e4m3" and fields["rows"].dtype == torch.uint8 and fields["scale"].shape == given.shape[:2]
    x = given.double().numpy()
    back = (E4M3[fields["rows"].numpy()] * fields["scale"].numpy()[..., None]).astype(np.float64)
    off, largest = abs(back - x), abs(x).max(-1, keepdims=True)
    # Half a step of three bits, where numbers are normal; half of the smallest step elsewhere.
    assert (off <= np.maximum(abs(x) / 16, largest * 2.0**-10 / 448) * (1 + 2.0**-20) + TINY * 2.0**-10).all()
    assert (off <= largest / 28 * (1 + 2.0**-20) + TINY / 16).all()
    assert (back[0, 1] == 0).all() and np.isfinite(back).all()


def test_the_bound_is_reached() -> None:
    """Between the two largest numbers of the format, 416 and 448, and between the two smallest ones."""
    x = torch.tensor([[[448.0, 432.0, 2.0**-10, 1.0]]])
    fields, _ = narrowed(x, FP8)
    back = E4M3[fields["rows"].numpy()] * fields["scale"].numpy()[..., None]
    off = [Fraction(float(b)) - Fraction(float(a)) for a, b in zip(x.flatten(), back.flatten(), strict=True)]
    assert abs(off[1]) == Fraction(448, 28) and abs(off[2]) == Fraction(1, 2**10) and off[0] == off[3] == 0


def test_float16_with_a_scale_holds_what_float16_does_not() -> None:
    x = rows()
    fields, named = narrowed(torch.from_numpy(x), FP16)
    back = fields["rows"].numpy().astype(np.float32) * fields["scale"].numpy()[..., None]
    largest = abs(x).max(-1, keepdims=True).astype(np.float64)
    assert named == "float16" and np.isfinite(back).all()
    assert (abs(back - x.astype(np.float64)) <= np.maximum(abs(x) * 2.0**-11, largest * 2.0**-40) * 1.001 + TINY).all()


@pytest.mark.parametrize("store", [FP8, FP16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_stays_so_and_leaves_the_others_alone(store: Store, bad: float) -> None:
    x = rows()
    x[4, 2, 7] = bad
    fields, _ = narrowed(torch.from_numpy(x), store)
    clean, _ = narrowed(torch.from_numpy(rows()), store)
    stored = fields["rows"].numpy()
    numbers = E4M3[stored] if stored.dtype == np.uint8 else stored.astype(np.float32)
    assert not np.isfinite(numbers[4, 2]).all() and not np.isfinite(fields["scale"].numpy()[4, 2])
    others = np.ones((7, 3), bool)
    others[4, 2] = False
    for name in ("rows", "scale"):
        np.testing.assert_array_equal(fields[name].numpy()[others], clean[name].numpy()[others])


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def float16_bits(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint16)


@pytest.mark.parametrize(("dtype", "bits_of"), [("float16", float16_bits), ("bfloat16", bfloat16_bits)])
def test_without_a_scale_each_number_is_rounded_once(dtype: str, bits_of: Callable[..., np.ndarray]) -> None:
    x = rows()
    fields, named = narrowed(torch.from_numpy(x), Store(dtype))
    bits = fields["rows"].view(torch.int16).numpy().view(np.uint16)
    want = bits_of(x)
    assert named == dtype and fields.keys() == {"rows"}
    np.testing.assert_array_equal(bits, want)


def test_nothing_is_copied_where_nothing_is_asked_for() -> None:
    x = torch.from_numpy(rows())
    assert narrowed(x, Store())[0]["rows"] is x

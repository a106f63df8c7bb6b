"""PUT, the row of a patch memory in place of a row: by torch and by the kernel against numpy, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.runtime.test_kernels import DTYPES, GPU, INTERPRETER, ODD, bits, from_bits, rounded  # noqa: E402
from vtaps.runtime import kernels as vt  # noqa: E402

ROWS, SLOTS, SITES, SPARE = 7, 5, 3, 2
STATES = np.array([1, 1, 0, 1, 2, 1, 1], np.int32)
POINTS = np.array([1, 2, 1, 0, 1, 3, 1], np.int32)
PUT_FROM = np.array([2, 5, 1, 4, 3, 1, 0], np.int32)
"""Row 3 has no point, row 6 no slot; point 3 does not act here, row 2 has no state and row 4 is a proof."""
INDEX = np.array([1 << 30, 0, 0, -1], np.int32)
ACTING = (0, 1)

RUNS = [pytest.param("reference", id="torch"), pytest.param("launch", marks=INTERPRETER.marks, id="interpreter"),
        pytest.param("cuda", marks=GPU.marks, id="cuda")]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [16, 2064])
def test_put_is_the_slot_of_the_memory(run: str, dtype: Any, pair: bool, masked: bool, width: int) -> None:
    rng = np.random.default_rng(width)
    first, site = 4, 1
    device = "cuda" if run == "cuda" else "cpu"

    def numbers(*shape: int) -> Any:
        found = rounded(rng.normal(size=shape).astype(np.float32) * 4, dtype)
        # A NaN with a payload and -0.0 are put like any other number.
        found[rng.random(shape) < 0.05] = ODD[dtype][0]
        found[rng.random(shape) < 0.05] = ODD[dtype][1]
        return found

    x, r = numbers(ROWS, first + width + SPARE), numbers(ROWS, first + width + SPARE)
    memory = numbers(SLOTS, SITES, width)
    mask = rng.integers(0, 2, width).astype(np.uint8)
    board = vt.Board.empty(ROWS, 2, 1, 1, device)
    board.rows[:] = torch.from_numpy(np.stack([STATES, POINTS, PUT_FROM], 1)).to(device)
    board.set_put(
        0,
        from_bits(memory, dtype).to(device),
        site,
        torch.from_numpy(INDEX.copy()).to(device),
        torch.from_numpy(mask).to(device) if masked else None,
    )
    program = vt.LocationProgram(0, first, width, (vt.Statement(vt.PUT, 1, 0, masked),))
    hidden, residual = from_bits(x, dtype).to(device), from_bits(r, dtype).to(device) if pair else None
    (vt.reference if run == "reference" else vt.launch)(board, program, hidden, residual)

    where = first + (np.flatnonzero(mask) if masked else np.arange(width))
    for row in ACTING:
        x[row, where] = memory[PUT_FROM[row] - 1, site][where - first]
        r[row, where] = 0
    inside = slice(first, first + width)
    x[4, inside] = rounded(np.ones(1, np.float32), dtype)
    r[4, inside] = 0
    np.testing.assert_array_equal(bits(hidden), x)
    if residual is not None:
        np.testing.assert_array_equal(bits(residual), r)
    assert board.seen.tolist() == [1]


def test_memory_of_another_dtype_is_refused() -> None:
    board = vt.Board.empty(1, 2, 1, 1)
    board.rows[:] = 1
    board.set_put(0, torch.zeros(2, 1, 4, dtype=torch.bfloat16), 0, torch.tensor([0, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match="bfloat16"):
        vt.run(board, vt.LocationProgram(0, 0, 4, (vt.Statement(vt.PUT, 1, 0),)), torch.zeros(1, 4))


@pytest.mark.parametrize("fault", ["site", "mask", "axes"])
def test_tables_that_a_launch_could_not_read_are_refused(fault: str) -> None:
    board, index = vt.Board.empty(1, 2, 1, 1), torch.zeros(2, dtype=torch.int32)
    memory = torch.zeros(2, 16) if fault == "axes" else torch.zeros(2, 1, 16)
    mask = torch.ones(32 if fault == "mask" else 16, dtype=torch.uint8)
    with pytest.raises((ValueError, IndexError)):
        board.set_put(0, memory, 1 if fault == "site" else 0, index, mask)

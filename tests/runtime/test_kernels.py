"""One location's launch: the torch reference against numpy, and the Triton kernel against the reference, to the bit.

The kernel runs on a GPU, and where triton is installed without one, in triton's interpreter.
"""

# long because: one oracle and its cases serve the reference, the interpreter and the device
from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from vtaps.runtime import kernels as vt  # noqa: E402

CUDA = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None
if TRITON and not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is imported

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")])
INTERPRETER = pytest.param("cpu", marks=pytest.mark.skipif(CUDA or not TRITON, reason="needs triton, and no GPU"))

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
SIGNED = {F32: torch.int32, BF16: torch.int16, F16: torch.int16}
UNSIGNED = {F32: np.uint32, BF16: np.uint16, F16: np.uint16}
POINTS, VECTORS, SLOTS, SITES = 3, 2, 9, 2
# Quiet NaNs with a payload that no arithmetic makes, and -0.0; a subnormal, and the largest number.
ODD = {F32: (0x7FC12345, 1 << 31), BF16: (0x7FD5, 1 << 15), F16: (0x7E35, 1 << 15)}
EXTREME = {F32: (5, 0x7F7FFFFF), BF16: (5, 0x7F7F), F16: (5, 0x7BFF)}

Array = np.ndarray[Any, Any]


def bits(x: Any) -> Array:
    return x.contiguous().cpu().view(SIGNED[x.dtype]).numpy().view(UNSIGNED[x.dtype])


def from_bits(a: Array, dtype: Any) -> Any:
    return torch.from_numpy(a.view(a.dtype.name[1:]).copy()).view(dtype)


def widened(a: Array, dtype: Any) -> Array:
    """Bits of ``dtype`` as float32."""
    if dtype == BF16:
        return (a.astype(np.uint32) << 16).view(np.float32)
    return a.view(np.float16).astype(np.float32) if dtype == F16 else a.view(np.float32)


def rounded(a: Array, dtype: Any) -> Array:
    """float32 as bits of ``dtype``, to nearest even."""
    if dtype == F16:
        return a.astype(np.float16).view(np.uint16)
    whole = a.astype(np.float32).view(np.uint32)
    if dtype == F32:
        return whole
    up = ((whole >> 16) & 1) + 0x7FFF
    return np.where(np.isnan(a), 0x7FC0, (whole + up) >> 16).astype(np.uint16)


@dataclass
class Case:
    """A location as plain data.  ``x`` and ``r`` are bits ``[rows, columns]``; ``drive`` is ``[statements, rows]``."""

    codes: tuple[Any, ...]
    masked: tuple[bool, ...]
    dtype: Any
    states: Array
    first: int
    width: int
    x: Array
    r: Array | None
    drive: Array
    coefficients: Array  # float32 [statements, POINTS + 1]
    index: Array  # int32 [statements, POINTS + 1]
    vectors: Array  # float32 [statements, VECTORS, width]
    masks: Array  # uint8 [statements, width]
    number: int = 5


def make(
    codes: tuple[Any, ...],
    dtype: Any,
    pair: bool,
    *,
    masked: tuple[bool, ...] | None = None,
    states: Any = (1, 0, 1, 2, 1, 0),
    first: int = 0,
    width: int = 16,
    spare: int = 0,
    seed: int = 0,
) -> Case:
    """A random case.  Rows without a state, columns that no edit selects, vectors that no row picks and entries 0 of
    tables hold what nobody may use."""
    rng = np.random.default_rng(seed)
    rows, n = len(states), len(codes)
    shape = (rows, first + width + spare)

    def numbers() -> Array:
        a = rounded(rng.normal(size=shape).astype(np.float32) * 4, dtype)
        for value in (ODD[dtype][1], *EXTREME[dtype]):
            a[rng.random(shape) < 0.07] = value
        a[np.asarray(states) == 0] = ODD[dtype][0]
        return a

    # A slot is written by one row.
    drive = np.where(
        np.asarray(codes)[:, None] >= vt.ADD,
        rng.integers(0, POINTS + 1, (n, rows)),
        np.stack([rng.permutation(SLOTS)[:rows] + 1 for _ in codes]) * (rng.random((n, rows)) < 0.7),
    )
    coefficients = rng.normal(size=(n, POINTS + 1)).astype(np.float32)
    coefficients[:, 0] = np.nan
    index = rng.integers(-1, VECTORS, (n, POINTS + 1))
    index[:, 0] = 1 << 30
    vectors = rng.normal(size=(n, VECTORS, width)).astype(np.float32)
    for i, code in enumerate(codes):
        used = {
            int(index[i, p]) for p, s in zip(drive[i], states, strict=True) if code >= vt.ADD and p and s == vt.LIVE
        }
        for v in set(range(VECTORS)) - used:
            vectors[i, v] = np.nan
    masks = rng.integers(0, 2, (n, width)).astype(np.uint8) * 3
    case = Case(
        codes=codes,
        masked=masked or (False,) * n,
        dtype=dtype,
        states=np.asarray(states, np.int32),
        first=first,
        width=width,
        x=numbers(),
        r=numbers() if pair else None,
        drive=drive.astype(np.int32),
        coefficients=coefficients,
        index=index.astype(np.int32),
        vectors=vectors,
        masks=masks,
    )
    if masked and all(masked):
        untouched = first + np.flatnonzero(~masks.any(0))
        for stream in (case.x,) if case.r is None else (case.x, case.r):
            stream[:, untouched] = ODD[dtype][0]
    return case


@dataclass
class Built:
    board: vt.Board
    program: vt.LocationProgram
    x: Any
    r: Any
    memories: list[Any]


def fresh(case: Case, code: Any, device: str = "cpu") -> Any:
    dtype = F32 if code == vt.KEEP32 else case.dtype
    return torch.full((SLOTS, SITES, case.width), -7.0, dtype=dtype, device=device)


def build(case: Case, device: str = "cpu") -> Built:
    n, rows = case.drive.shape
    board = vt.Board.empty(rows + 2, n + 1, n + 1, 8, device)
    board.rows[:, 0] = vt.LIVE  # what stands beyond the tensor's rows and in others' columns is not this location's
    board.rows[:, 1] = 1
    board.rows[:rows, 0] = torch.from_numpy(case.states).to(device)
    board.rows[:rows, 2:] = torch.from_numpy(case.drive.T.copy()).to(device)
    memories = []
    for i, code in enumerate(case.codes):
        if code >= vt.ADD:
            tables = [torch.from_numpy(a[i].copy()).to(device) for a in (case.coefficients, case.index, case.vectors)]
            mask = torch.from_numpy(case.masks[i].copy()).to(device) if case.masked[i] else None
            vectors = None if code in (vt.SCALE, vt.ZERO) else tables[2]
            board.set_edit(i + 1, tables[0], tables[1], vectors, mask)
        else:
            memories.append(fresh(case, code, device))
            board.set_read(i + 1, memories[-1], 1)
    statements = tuple(vt.Statement(c, i + 2, i + 1, case.masked[i]) for i, c in enumerate(case.codes))
    program = vt.LocationProgram(case.number, case.first, case.width, statements)
    x = from_bits(case.x, case.dtype).to(device)
    return Built(board, program, x, None if case.r is None else from_bits(case.r, case.dtype).to(device), memories)


@np.errstate(over="ignore")
def slow(case: Case) -> tuple[Array, Array | None, list[Array]]:
    """Row by row: the bits of x, of the residual and of each read's memory."""
    x, r = case.x.copy(), None if case.r is None else case.r.copy()
    memories = [bits(fresh(case, c)) for c in case.codes if c < vt.ADD]
    cut = slice(case.first, case.first + case.width)
    for row, state in enumerate(case.states):
        if state == 0:
            continue
        h, o = x[row, cut].copy(), None if r is None else r[row, cut].copy()
        if state == vt.PROOF:
            h[:] = rounded(np.full(case.width, case.number + 1, np.float32), case.dtype)
            if o is not None:
                o[:] = 0
        reads = iter(memories)
        for i, code in enumerate(case.codes):
            value = case.drive[i, row]
            total = widened(h, case.dtype) if o is None else widened(h, case.dtype) + widened(o, case.dtype)
            if code < vt.ADD:
                memory = next(reads)
                if value and code == vt.KEEP32:
                    memory[value - 1, 1] = total.view(np.uint32)
                elif value:
                    memory[value - 1, 1] = h if o is None else rounded(total, case.dtype)
            elif state == vt.LIVE and value and case.index[i, value] >= 0:
                c, v = case.coefficients[i, value], case.vectors[i, case.index[i, value]]
                new = {
                    vt.ADD: lambda h=h, c=c, v=v: widened(h, case.dtype) + c * v,
                    vt.SCALE: lambda total=total, c=c: total * c,
                    vt.ZERO: lambda v=v: np.zeros_like(v),
                    vt.SET: lambda c=c, v=v: c * v,
                }[code]()
                where = case.masks[i] != 0 if case.masked[i] else np.ones(case.width, bool)
                h[where] = rounded(new, case.dtype)[where]
                if o is not None and code > vt.ADD:
                    o[where] = 0
        if state == vt.LIVE or max(case.codes) >= vt.ADD:
            x[row, cut] = h
        if r is not None and o is not None and (state == vt.LIVE or max(case.codes) > vt.ADD):
            r[row, cut] = o
    return x, r, memories


def assert_bits(a: Array, b: Array, what: str) -> None:
    assert a.shape == b.shape, what
    bad = np.argwhere(a != b)
    assert not len(bad), (
        f"{what}: {len(bad)} of {a.size} differ, first at {bad[0]}: {a[tuple(bad[0])]:#x} {b[tuple(bad[0])]:#x}"
    )


def assert_same(a: Built, b: Built) -> None:
    assert_bits(bits(a.x), bits(b.x), "x")
    if a.r is not None:
        assert_bits(bits(a.r), bits(b.r), "residual")
    for i, (left, right) in enumerate(zip(a.memories, b.memories, strict=True)):
        assert_bits(bits(left), bits(right), f"read {i}")
    assert a.board.seen.tolist() == b.board.seen.tolist()


def referenced(case: Case) -> Built:
    built = build(case)
    vt.reference(built.board, built.program, built.x, built.r)
    return built


# By hand: one row is edited, by numbers that float32 holds exactly.


def eighths(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(-512, 512, shape) / 8


EXPECTED = {
    vt.ADD: lambda x, r, c, v: (x + c * v, r),
    vt.SCALE: lambda x, r, c, v: ((x + r) * c, 0 * r),
    vt.ZERO: lambda x, r, c, v: (0 * x, 0 * r),
    vt.SET: lambda x, r, c, v: (c * v, 0 * r),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("code", EXPECTED)
def test_an_edit_is_the_float64_formula_rounded_once(code: Any, masked: bool, pair: bool, dtype: Any) -> None:
    exact = [np.asarray(torch.from_numpy(eighths(s, 3, 8)).to(dtype).double()) for s in (1, 2)]
    x, r = (torch.from_numpy(a).to(dtype) for a in exact)
    vectors, c = eighths(3, 2, 8), 0.375
    mask = np.array([1, 0, 0, 1, 1, 0, 1, 255], np.uint8)
    board = vt.Board.empty(4, 1, 1, 1)
    board.rows[:, 0], board.rows[1, 1] = vt.LIVE, 2
    board.set_edit(
        0,
        torch.tensor([9, 9, c]),
        torch.tensor([9, 9, 1], dtype=torch.int32),
        torch.from_numpy(vectors).float(),
        torch.from_numpy(mask) if masked else None,
    )
    program = vt.LocationProgram(0, 0, 8, (vt.Statement(code, 1, 0, masked),))
    vt.run(board, program, x, r if pair else None)

    h, o = exact[0].copy(), exact[1].copy()
    new, rest = EXPECTED[code](h[1], o[1] if pair else np.zeros(8), c, vectors[1])
    where = mask != 0 if masked else np.ones(8, bool)
    h[1, where] = np.asarray(torch.from_numpy(new).to(dtype).double())[where]
    if pair:
        o[1, where] = rest[where]
    np.testing.assert_array_equal(x.double().numpy(), h)
    np.testing.assert_array_equal(r.double().numpy(), o)
    assert board.seen.tolist() == [1]


def one_row(code: Any, x: Any, c: float, v: Any, r: Any = None, **more: Any) -> vt.Board:
    """Run one edit on the only row, ``[1, width]``."""
    board = vt.Board.empty(1, 1, 1, 1)
    board.rows[:] = 1
    board.set_edit(0, torch.tensor([0, c]), torch.tensor([0, 0], dtype=torch.int32), v[None], **more)
    vt.run(board, vt.LocationProgram(0, 0, x.shape[1], (vt.Statement(code, 1, 0, "mask" in more),)), x, r)
    return board


def test_the_product_is_rounded_before_the_sum() -> None:
    # (1 + 2⁻¹²)² = 1 + 2⁻¹¹ + 2⁻²⁴, a tie that float32 rounds to 1 + 2⁻¹¹; a fused sum would leave 2⁻²⁴.
    near = 1 + 2.0**-12
    x = torch.tensor([[-(1 + 2.0**-11)] * 4])
    one_row(vt.ADD, x, near, torch.full((4,), near))
    assert x.tolist() == [[0.0] * 4]


def test_a_sum_is_not_rounded_before_it_is_scaled() -> None:
    x, r = torch.tensor([[256.0]], dtype=BF16), torch.tensor([[1.0]], dtype=BF16)
    one_row(vt.SCALE, x, 3.0, torch.zeros(1), r)
    assert (x.item(), r.item()) == (772.0, 0.0)  # 771 rounded; in bfloat16 257 is 256, and 3 times that 768


def test_a_statement_sees_what_the_one_before_stored() -> None:
    board = vt.Board.empty(1, 3, 3, 1)
    board.rows[:] = 1
    index = torch.tensor([0, 0], dtype=torch.int32)
    memory = torch.zeros(1, 1, 1)
    board.set_edit(0, torch.tensor([0, 1.0]), index, torch.tensor([[1.0]]))
    board.set_edit(1, torch.tensor([0, 3.0]), index)
    board.set_read(2, memory, 0)
    statements = (vt.Statement(vt.ADD, 1, 0), vt.Statement(vt.SCALE, 2, 1), vt.Statement(vt.KEEP32, 3, 2))
    x = torch.tensor([[256.0]], dtype=BF16)
    vt.run(board, vt.LocationProgram(0, 0, 1, statements), x)
    assert x.item() == memory.item() == 768.0  # not 772: 257 was stored as 256


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_selected_keeps_its_bits(dtype: Any) -> None:
    nan, minus = ODD[dtype]
    raw = np.array([[nan, minus, nan, minus]] * 3, UNSIGNED[dtype])
    for code in EXPECTED:
        x, r = from_bits(raw, dtype), from_bits(raw, dtype)
        board = vt.Board.empty(3, 1, 1, 1)
        board.rows[1], board.rows[2, 1] = torch.tensor([1, 1]), 1  # row 0 idles, row 2 has no state
        mask = torch.tensor([0, 0, 1, 1], dtype=torch.uint8)
        board.set_edit(
            0, torch.tensor([torch.nan, 1.0]), torch.tensor([0, 1], dtype=torch.int32), torch.ones(2, 4), mask
        )
        vt.run(board, vt.LocationProgram(0, 0, 4, (vt.Statement(code, 1, 0, True),)), x, r)
        for a in (bits(x), bits(r)):
            assert_bits(a[[0, 2]], raw[[0, 2]], "other rows")
            assert_bits(a[1, :2], raw[1, :2], "other columns")
        assert x[1, 3].item() == {vt.ADD: 1.0, vt.SET: 1.0}.get(code, 0.0)


def test_idle_vectors_may_be_nan_and_minus_one_is_off() -> None:
    board = vt.Board.empty(3, 1, 1, 1)
    board.rows[:, 0] = vt.LIVE
    board.rows[:, 1] = torch.tensor([0, 1, 2])
    vectors = torch.tensor([[torch.nan] * 4, [1.0] * 4])
    board.set_edit(0, torch.tensor([torch.nan, torch.nan, 2.0]), torch.tensor([0, -1, 1], dtype=torch.int32), vectors)
    for code, kept, new in ((vt.ADD, -0.0, 2.0), (vt.SET, -0.0, 2.0), (vt.SCALE, -0.0, -0.0), (vt.ZERO, -0.0, 0.0)):
        x = torch.full((3, 4), -0.0)
        vt.run(board, vt.LocationProgram(0, 0, 4, (vt.Statement(code, 1, 0),)), x)
        assert_bits(bits(x), bits(torch.tensor([[kept] * 4, [kept] * 4, [new] * 4])), str(code))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_an_edit_that_is_off_everywhere_needs_no_vectors(device: str) -> None:
    for code in EXPECTED:
        board = vt.Board.empty(1, 1, 1, 1, device)
        board.rows[:] = 1
        off = torch.full((2,), -1, dtype=torch.int32, device=device)
        board.set_edit(0, torch.ones(2, device=device), off)
        x = torch.full((1, 4), -0.0, device=device)
        vt.run(board, vt.LocationProgram(0, 0, 4, (vt.Statement(code, 1, 0),)), x)
        assert_bits(bits(x), bits(torch.full((1, 4), -0.0)), str(code))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_reads_take_their_own_rows_to_their_own_slots(dtype: Any) -> None:
    x = torch.tensor([[256.0, 1], [3, 4], [5, 6]], dtype=dtype)
    r = torch.tensor([[1.0, 1], [1, 1], [1, 1]], dtype=dtype)
    board = vt.Board.empty(8, 2, 2, 1)
    board.rows[:3] = torch.tensor([[1, 4, 1], [1, 0, 0], [1, 1, 3]])
    kept, exact = torch.zeros(4, 2, 2, dtype=dtype), torch.zeros(3, 3, 2)
    board.set_read(0, kept, 1)
    board.set_read(1, exact, 2)
    vt.run(board, vt.LocationProgram(0, 0, 2, (vt.Statement(vt.KEEP, 1, 0), vt.Statement(vt.KEEP32, 2, 1))), x, r)
    assert kept[:, 1].tolist() == [[6, 7], [0, 0], [0, 0], [256 if dtype == BF16 else 257, 2]]
    assert exact[:, 2].tolist() == [[257, 2], [0, 0], [6, 7]]
    assert not kept[:, 0].any() and not exact[:, :2].any()


@pytest.mark.parametrize(
    ("codes", "x_stored", "r_stored"),
    [((vt.KEEP,), False, False), ((vt.KEEP, vt.ADD), True, False), ((vt.ZERO, vt.KEEP), True, True)],
)
def test_a_proof_row_holds_the_sentinel(codes: tuple[Any, ...], x_stored: bool, r_stored: bool) -> None:
    case = make(codes, BF16, True, states=(2, 2, 0))
    case.drive[:] = 1
    case.drive[codes.index(vt.KEEP)] = [3, 0, 1]
    case.number = 7
    built = referenced(case)
    before = build(case)
    for now, then, stored, value in ((built.x, before.x, x_stored, 8.0), (built.r, before.r, r_stored, 0.0)):
        assert_bits(bits(now[2:]), bits(then[2:]), "idle row")
        if stored:
            assert (now[:2] == value).all()
        else:
            assert_bits(bits(now), bits(then), "not stored")
    (memory,) = built.memories
    assert (memory[2, 1] == 8.0).all() and (memory[[0, 1, 3], 1] == -7.0).all() and (memory[:, 0] == -7.0).all()
    assert vt.sentinel(7) == 8.0 and vt.sentinel(127) == 128.0 and vt.sentinel(128) == 1.0


def test_a_location_may_be_some_columns_of_a_wider_tensor() -> None:
    wide = torch.arange(48.0).reshape(2, 24)
    x = wide[:, :20]  # row stride 24
    board = vt.Board.empty(2, 1, 1, 1)
    board.rows[1] = 1
    board.set_edit(0, torch.ones(2), torch.zeros(2, dtype=torch.int32))
    vt.run(board, vt.LocationProgram(0, 4, 12, (vt.Statement(vt.ZERO, 1, 0),)), x)
    expected = np.arange(48.0).reshape(2, 24)
    expected[1, 4:16] = 0
    np.testing.assert_array_equal(wide.numpy(), expected)


def test_a_residual_that_is_the_hidden_state_counts_as_none() -> None:
    x = torch.full((1, 4), 3.0)
    one_row(vt.SCALE, x, 2.0, torch.zeros(4), x)
    assert x.tolist() == [[6.0] * 4]


def test_every_launch_is_counted_and_none_without_rows() -> None:
    board = vt.Board.empty(2, 1, 1, 3)
    program = vt.LocationProgram(1, 0, 4, (vt.Statement(vt.KEEP, 1, 0),))
    for rows in (2, 1, 0):
        vt.run(board, program, torch.zeros(rows, 4))
    assert board.seen.tolist() == [0, 2, 0]


def test_a_board_keeps_what_its_descriptors_name() -> None:
    board = vt.Board.empty(1, 1, 2, 1)
    index = torch.zeros(2, dtype=torch.int32)
    first, second, vectors = torch.ones(2), torch.ones(2), torch.ones(1, 4)
    board.set_edit(0, first, index, vectors)
    board.set_edit(1, first, index)
    assert board.descriptors[0].tolist() == [t.data_ptr() for t in (first, index, vectors)] + [0] * 5
    board.set_edit(0, second, index)
    assert set(board.tensors) == {t.data_ptr() for t in (first, second, index)}
    memory = torch.zeros(3, 5, 8)
    board.set_read(1, memory, 2)
    assert board.descriptors[1].tolist() == [memory.data_ptr(), 40, 16] + [0] * 5
    assert set(board.tensors) == {t.data_ptr() for t in (second, index, memory)}


def test_tables_that_the_kernel_could_not_read_are_refused() -> None:
    board = vt.Board.empty(1, 1, 1, 1)
    c, index = torch.ones(2), torch.zeros(2, dtype=torch.int32)
    for message, arguments in {
        "coefficients is torch.float64": (c.double(), index),
        "vector_index is torch.int64": (c, index.long()),
        "2 coefficients and 3": (c, torch.zeros(3, dtype=torch.int32)),
        "vectors has shape": (c, index, torch.ones(4)),
        "not contiguous": (c, index, torch.ones(4, 2).T),
        "multiple of 16 bytes": (c, index, torch.ones(2, 1)[1:]),
        "the mask is 3 wide": (c, index, torch.ones(1, 4), torch.ones(3, dtype=torch.uint8)),
    }.items():
        with pytest.raises(ValueError, match=message):
            board.set_edit(0, *arguments)
    with pytest.raises(IndexError, match="site 2"):
        board.set_read(0, torch.zeros(1, 2, 4), 2)
    with pytest.raises(ValueError, match="column 0"):
        vt.Statement(vt.KEEP, 0, 0)
    assert not board.tensors and not board.descriptors.any()


def test_tensors_of_another_form_are_refused_before_anything_is_written() -> None:
    board = vt.Board.empty(2, 1, 1, 1)
    board.rows[:] = 1
    board.set_edit(0, torch.ones(2), torch.zeros(2, dtype=torch.int32))
    program = vt.LocationProgram(0, 2, 4, (vt.Statement(vt.ZERO, 1, 0),))
    x = torch.ones(2, 6)
    forms = (
        torch.ones(3, 6),
        torch.ones(2, 5),
        torch.ones(6, 2).T,
        torch.ones(1, 6).expand(2, 6),
        x.double(),
        torch.ones(6),
    )
    for other in forms:
        with pytest.raises(ValueError, match=r"shape|hidden state"):
            vt.run(board, program, other)
    with pytest.raises(ValueError, match="residual"):
        vt.run(board, program, x, torch.ones(2, 6, dtype=BF16))
    assert x.all() and board.seen.tolist() == [0]


# At random: the reference against rows one by one, the kernel against the reference.

CODES = st.sampled_from([vt.KEEP, vt.KEEP32, vt.ADD, vt.SCALE, vt.ZERO, vt.SET])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_reference_is_its_rows_one_by_one(data: st.DataObject) -> None:
    codes = tuple(data.draw(st.lists(CODES, min_size=1, max_size=5), "codes"))
    case = make(
        codes,
        data.draw(st.sampled_from(DTYPES), "dtype"),
        data.draw(st.booleans(), "pair"),
        masked=tuple(c >= vt.ADD and data.draw(st.booleans(), "masked") for c in codes),
        states=data.draw(st.lists(st.sampled_from([0, 1, 1, 2]), min_size=1, max_size=7), "states"),
        first=data.draw(st.integers(0, 3), "first"),
        width=data.draw(st.integers(1, 9), "width"),
        spare=data.draw(st.integers(0, 3), "spare"),
        seed=data.draw(st.integers(0, 1 << 16), "seed"),
    )
    x, r, memories = slow(case)
    built = referenced(case)
    assert_bits(bits(built.x), x, "x")
    if r is not None:
        assert_bits(bits(built.r), r, "residual")
    for i, (got, expected) in enumerate(zip(built.memories, memories, strict=True)):
        assert_bits(bits(got), expected, f"read {i}")


PROGRAMS = {
    "add": (vt.ADD,),
    "scale": (vt.SCALE,),
    "zero": (vt.ZERO,),
    "set": (vt.SET,),
    "keep": (vt.KEEP,),
    "keep32": (vt.KEEP32,),
    "add, keep": (vt.ADD, vt.KEEP),
    "four": (vt.KEEP, vt.SCALE, vt.ADD, vt.KEEP32),
    "all": (vt.ADD, vt.KEEP, vt.SET, vt.ADD, vt.SCALE, vt.KEEP32, vt.ZERO, vt.KEEP),
}
SHAPES = {
    "one block": {"width": 64},
    "two blocks": {"width": 1032, "first": 8, "spare": 16},
    "odd": {"width": 37, "first": 3},
}


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton 3.6's interpreter truncates to bfloat16, where its compiler rounds to nearest even."""
    if CUDA or not TRITON:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    tl: Any = importlib.import_module("triton.language")
    convert = interpreter._convert_float

    def converted(data: Array, source: Any, target: Any, mode: Any) -> Array:
        if (source, target) == (tl.float32, tl.bfloat16):
            return rounded(data, BF16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return widened(data, BF16)
        return convert(data, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("device", [GPU, INTERPRETER])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_kernel_is_the_reference_to_the_bit(name: str, shape: str, pair: bool, dtype: Any, device: str) -> None:
    codes = PROGRAMS[name]
    for seed, masks in enumerate((False, True)):
        masked = tuple(masks and c >= vt.ADD for c in codes)
        case = make(codes, dtype, pair, masked=masked, states=(1, 1, 0, 1, 2, 1, 1), seed=seed, **SHAPES[shape])
        built = build(case, device)
        vt.launch(built.board, built.program, built.x, built.r)
        assert_same(built, referenced(case))


@pytest.mark.parametrize("device", [GPU, INTERPRETER])
def test_the_kernel_rounds_the_product_before_the_sum(device: str) -> None:
    case = make((vt.ADD,), F32, False, states=(1,), width=64)
    near = np.float32(1 + 2.0**-12)
    case.x[:] = np.float32(-(1 + 2.0**-11)).view(np.uint32)
    case.drive[:], case.coefficients[:], case.index[:], case.vectors[:] = 1, near, 0, near
    built = build(case, device)
    vt.launch(built.board, built.program, built.x, built.r)
    assert not built.x.any()


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("device", ["cpu", GPU, INTERPRETER])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_ban_is_minus_infinity_in_its_columns_alone(dtype: Any, device: str) -> None:
    """A vocabulary of 1030; what is banned stays so when it is raised and scaled by more than 0."""
    width, banned = 1030, [0, 7, 1029]
    logits = torch.linspace(-8, 8, width).to(dtype).repeat(3, 1)
    logits[2] = torch.nan
    board = vt.Board.empty(3, 3, 3, 1, device)
    board.rows[:, 0] = vt.LIVE
    board.rows[0, 1:] = 1
    board.rows[1, 3] = 1
    index, ones = torch.zeros(2, dtype=torch.int32, device=device), torch.ones(1, width, device=device)
    mask = torch.zeros(width, dtype=torch.uint8, device=device)
    mask[banned] = 1
    for row, c in enumerate((-torch.inf, 5.0, 0.5)):
        vectors, columns = (None if row == 2 else ones), (mask if row == 0 else None)
        board.set_edit(row, torch.tensor([torch.nan, c], device=device), index, vectors, columns)
    statements = (vt.Statement(vt.SET, 1, 0, True), vt.Statement(vt.ADD, 2, 1), vt.Statement(vt.SCALE, 3, 2))
    x = logits.clone().to(device)
    (vt.reference if device == "cpu" else vt.launch)(board, vt.LocationProgram(0, 0, width, statements), x)
    wanted = logits.clone()
    wanted[0] = ((wanted[0].float() + 5.0).to(dtype).float() * 0.5).to(dtype)
    wanted[0, banned] = -torch.inf
    wanted[1] = (wanted[1].float() * 0.5).to(dtype)
    assert_bits(bits(x), bits(wanted), "logits")


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_follows_tables_that_move(dtype: Any) -> None:
    cases = [make(PROGRAMS["all"], dtype, True, states=(1, 0, 2, 1, 1, 1), width=576, seed=s) for s in range(3)]
    fixed = build(cases[0], "cuda")
    vt.run(fixed.board, fixed.program, fixed.x, fixed.r)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vt.run(fixed.board, fixed.program, fixed.x, fixed.r)
    for case in cases:
        other = build(case, "cuda")
        for name in ("rows", "descriptors", "seen"):
            getattr(fixed.board, name).copy_(getattr(other.board, name))
        fixed.x.copy_(other.x)
        fixed.r.copy_(other.r)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(Built(fixed.board, fixed.program, fixed.x, fixed.r, other.memories), referenced(case))

"""A gate's launch and the two of request gates, by torch and by the kernels, against numpy in float64."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vtaps.runtime import gates  # noqa: E402
from vtaps.runtime import kernels as vt  # noqa: E402

CUDA = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None
if TRITON and not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is imported
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")])
INTERPRETER = pytest.param(
    "interpreter", marks=pytest.mark.skipif(CUDA or not TRITON, reason="needs triton, and no GPU")
)
DEVICES = ["cpu", GPU, INTERPRETER]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Array = np.ndarray[Any, Any]

LIVE, PROOF = vt.LIVE, vt.PROOF
STATES = [LIVE, 0, LIVE, PROOF, LIVE, LIVE, LIVE, LIVE]
POINTS = [1, 1, 2, 1, 0, 1, 2, 1]  # row 4 has no score
SLOTS = [3, 2, 1, 5, 0, 0, 7, 4]  # row 5 is scored again, after a preemption, and not kept
# Columns of the row table: the gate's point and slot, and the host's and the statement's of two edits.
POINT, SLOT, SOURCES, EFFECTIVE = 1, 2, (3, 5), (4, 6)
SOURCE = [[1, 1, 2, 1, 3, 3, 0, 2], [0, 0, 5, 5, 5, 5, 5, 5]]
STALE = 9


@dataclass
class Case:
    board: Any
    program: Any
    x: Any
    r: Any
    memory: Any
    vectors: Array
    bounds: Array
    cosine: bool


def make(dtype: Any, *, width: int, pair: bool, cosine: bool, size: float = 4.0, device: str = "cpu") -> Case:
    rng = np.random.default_rng(width + pair)
    rows, where = len(STATES), "cuda" if device == "cuda" else "cpu"
    vectors = rng.normal(size=(3, width)).astype(np.float32)
    if cosine:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[2] = np.nan  # of a use that no row has
    spread = 1.0 / np.sqrt(width) if cosine else size * np.sqrt(width)
    bounds = np.array([[np.nan, -0.3, -np.inf, 0], [np.nan, np.inf, 0.4, 0]], np.float32) * np.float32(spread)
    x = torch.from_numpy(rng.normal(size=(rows, width + 3)) * size).to(dtype)
    r = torch.from_numpy(rng.normal(size=(rows, width + 3)) * size).to(dtype) if pair else None
    for t in (x,) if r is None else (x, r):
        t[1] = t[3] = t[4] = float("nan")  # nobody's rows, and those of the proof
        t[7] = -0.0
    board = vt.Board.empty(rows + 2, 6, 1, 4, where)
    table = np.zeros((rows + 2, 7), np.int32)
    table[:rows, 0], table[:rows, POINT], table[:rows, SLOT] = STATES, POINTS, SLOTS
    for source, effective, said in zip(SOURCES, EFFECTIVE, SOURCE, strict=True):
        table[:rows, source], table[:, effective] = said, STALE
    board.rows.copy_(torch.from_numpy(table))
    wiring = torch.tensor([SLOT, int(cosine), 2, *(c for p in zip(SOURCES, EFFECTIVE, strict=True) for c in p)])
    memory = torch.full((8, 1, 3), -7.0, device=where)
    index = torch.tensor([1 << 30, 1, 0, 2], dtype=torch.int32)
    tables = [torch.from_numpy(bounds), index, torch.from_numpy(vectors), wiring.int()]
    board.set_gate(0, *(t.to(where) for t in tables), memory)
    program = vt.LocationProgram(3, 2, width, (vt.Statement(vt.GATE, POINT, 0),))
    return Case(board, program, x.to(where), None if r is None else r.to(where), memory, vectors, bounds, cosine)


def launch(case: Case, device: str) -> None:
    (vt.launch if device == "interpreter" else vt.run)(case.board, case.program, case.x, case.r)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(("width", "size"), [(16, 4.0), (576, 4.0), (4096, 1e4)])
def test_a_row_passes_by_its_score(width: int, size: float, pair: bool, cosine: bool, dtype: Any, device: str) -> None:
    case = make(dtype, width=width, pair=pair, cosine=cosine, size=size, device=device)
    kept = [None if t is None else t.clone() for t in (case.x, case.r)]
    launch(case, device)
    for after, before in zip((case.x, case.r), kept, strict=True):
        if after is not None:
            raw = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(after.view(raw), before.view(raw)), "a gate changes nothing"
    table, memory = case.board.rows.cpu().numpy(), case.memory.cpu().numpy()
    s = case.x[:, 2 : 2 + width].double().cpu().numpy()
    s = s if case.r is None else s + case.r[:, 2 : 2 + width].double().cpu().numpy()
    used = set()
    decided = []
    for row, (state, point, slot) in enumerate(zip(STATES, POINTS, SLOTS, strict=True)):
        passed = False
        if state == LIVE and point:
            v = case.vectors[[0, 1, 0][point]].astype(np.float64)
            length = np.linalg.norm(s[row])
            want = s[row] @ v / (length or 1.0) if cosine else s[row] @ v
            low, high = case.bounds[:, point]
            passed = bool(low < want < high)
            # float32 products and their sum over the width.
            bound = 2.0**-22 * np.sqrt(width) * (1.0 if cosine else length)
            assert min(abs(want - low), abs(want - high)) > 4 * bound, "too near to say"
            decided.append(passed)
        if slot and state:
            used.add(slot)
            if state == PROOF:
                assert (memory[slot - 1] == vt.sentinel(3)).all()
            else:
                assert abs(memory[slot - 1, 0, 0] - want) <= bound
                assert memory[slot - 1, 0, 1:].tolist() == [passed, memory[slot - 1, 0, 0]]
        for source, effective in zip(SOURCES, EFFECTIVE, strict=True):
            # Where a row is nobody's, nothing looks at what stands there.
            assert table[row, effective] == (STALE if not state else table[row, source] * passed), row
    assert (memory[[i for i in range(8) if i + 1 not in used]] == -7).all()
    assert set(decided) == {True, False}
    assert case.board.seen.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_a_number_passes_nothing(device: str) -> None:
    for cosine in (False, True):
        case = make(torch.float32, width=16, pair=False, cosine=cosine, device=device)
        case.x[0] = float("nan")
        case.bounds[:] = [[-np.inf], [np.inf]]
        next(t for t in case.board.tensors.values() if t.shape == (2, 4)).copy_(torch.from_numpy(case.bounds))
        launch(case, device)
        assert case.board.rows[0, EFFECTIVE[0]] == 0 and case.board.rows[2, EFFECTIVE[0]] == SOURCE[0][2]
        assert case.memory[2, 0, 0].isnan() and case.memory[2, 0, 1] == 0


FOLD, SEAT, ACTS = 1, 2, 7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduce", ["max", "mean", "last"])
@pytest.mark.parametrize("pieces", [(1,), (700,), (3, 1, 300), (256, 256)])
def test_scores_of_a_request_come_to_one(
    reduce: Any, pieces: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever pieces they come, beside other requests; what the seat held before is forgotten."""
    where = "cuda" if device == "cuda" else "cpu"
    rng = np.random.default_rng(len(pieces))
    scores = (rng.normal(size=sum(pieces)) * 1e4).astype(np.float32)
    want = {"max": scores.max(), "mean": np.float32(scores.astype(np.float64).mean()), "last": scores[-1]}[reduce]
    near = abs(want) * 2.0**-20 if reduce == "mean" else 0.0
    for below in (False, True):
        bounds = np.array([[0, want - 1], [0, np.inf]] if not below else [[0, -np.inf], [0, want - 1]], np.float32)
        seats = gates.Seats(torch.full((3, 3), float("nan"), dtype=torch.float64, device=where), reduce)
        start = 0
        for number, count in enumerate(pieces):
            memory = torch.full((count + 9, 1, 3), float("nan"), device=where)
            memory[5 : 5 + count, 0, 0] = torch.from_numpy(scores[start : start + count]).to(where)
            table = np.zeros((4, 8), np.int32)
            # Row 2 is the request's last one; the others have nothing to close.
            table[:, 0] = LIVE
            table[2, [FOLD, SEAT, 3, 4]] = 2 * count + (number == 0), 2, 1, 5 + count
            rows = torch.from_numpy(table).to(where)
            tensors = rows, seats, memory, torch.from_numpy(bounds).to(where), (FOLD, SEAT, 3, 4)
            if device == "interpreter":
                from vtaps.runtime.gates_triton import fold

                fold(rows, seats.memory, memory, tensors[3], tensors[4], gates.REDUCE[reduce])
            else:
                gates._fold(*tensors)
            start += count
        kept = memory[5 + count - 1, 0].cpu().numpy()
        assert kept[0] == scores[-1] and kept[1] == (not below) and abs(kept[2] - want) <= near
        assert seats.memory[1, 1:].tolist() == [len(scores), float(not below)]
        assert seats.memory[[0, 2]].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_one_score_that_is_not_a_number_decides_against(reduce: Any, device: str) -> None:
    where = "cuda" if device == "cuda" else "cpu"
    memory = torch.tensor([1.0, float("nan"), 2.0], device=where)[:, None, None].repeat(1, 1, 3)
    seats = gates.Seats(torch.zeros((1, 3), dtype=torch.float64, device=where), reduce)
    rows = torch.tensor([[LIVE, 2 * 3 + 1, 1, 1, 3]], dtype=torch.int32, device=where)
    bounds = torch.tensor([[0.0, -np.inf], [0.0, np.inf]], device=where)
    for fresh in (1, 0):
        rows[0, FOLD] = 2 * 3 + fresh
        if device == "interpreter":
            from vtaps.runtime.gates_triton import fold

            fold(rows, seats.memory, memory, bounds, (FOLD, SEAT, 3, 4), gates.REDUCE[reduce])
        else:
            gates._fold(rows, seats, memory, bounds, (FOLD, SEAT, 3, 4))
        assert memory[2, 0, 1] == 0 and memory[2, 0, 2].isnan() and seats.memory[0, 2] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_told_what_their_requests_decided(device: str) -> None:
    where = "cuda" if device == "cuda" else "cpu"
    seats = torch.tensor([[0, 1, 0], [0, 1, 1.0]], dtype=torch.float64, device=where)
    #        state, seat, source, effective
    table = [[LIVE, 1, 4, 9], [LIVE, 2, 4, 9], [LIVE, 0, 4, 9], [0, 2, 4, 9], [PROOF, 2, 4, 9], [LIVE, 2, 0, 9]]
    for _ in range(2):  # the second launch goes another way
        rows = torch.tensor(table, dtype=torch.int32, device=where)
        if device == "interpreter":
            from vtaps.runtime.gates_triton import tell_rows

            tell_rows[(6,)](rows, seats, rows.stride(0), 2, 3, 1)
        else:
            gates._tell(rows, seats, (2, 3, 1))
        assert rows[:, 3].tolist() == [0, 4, 0, 0, 0, 0]

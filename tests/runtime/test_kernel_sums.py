"""Edits that sum over a row (lengths, projections), by torch and by the kernel, against the formula in float64."""

from __future__ import annotations

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
from vtaps.spec.vectors import directions  # noqa: E402

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
)
TRITON = importlib.util.find_spec("triton") is not None
if TRITON and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is imported
INTERPRETER = pytest.param(
    "interpreter",
    marks=pytest.mark.skipif(torch.cuda.is_available() or not TRITON, reason="needs triton, and no GPU"),
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROWS, POINTS, VECTORS = 6, 3, 2
SUMS = {"keep": vt.ADD_KEEP, "out": vt.PROJECT_OUT, "clamp": vt.CLAMP, "affine": vt.AFFINE, "feature": vt.FEATURE}


@dataclass
class Case:
    """One statement on ``x`` ``[ROWS, width]``: all as torch tensors on one device."""

    code: Any
    rank: int
    x: Any
    r: Any
    points: Any  # int32 [ROWS], 0: off
    index: Any  # int32 [POINTS + 1], -1: not here
    coefficients: Any
    vectors: Any  # float32 [VECTORS · rank, width]
    mask: Any
    bounds: Any
    up: Any = None
    bias: Any = None


def make(
    name: str,
    dtype: Any,
    *,
    width: int,
    pair: bool,
    masked: bool,
    size: float = 4.0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    rng = np.random.default_rng(seed)
    code = SUMS[name]
    rank = {"out": 3, "affine": 5}.get(name, 1)
    mask = np.ones(width, np.uint8)
    columns = None
    if masked:
        mask[width // 2 :] = 0
        columns = [(0, width // 2)]
    raw = rng.normal(size=(VECTORS * rank, width)).astype(np.float32)
    if name == "keep":
        vectors = raw
    elif name in ("affine", "feature"):
        vectors = (raw * mask / np.sqrt(width)).astype(np.float32)
    else:
        names = [str(i) for i in range(rank)]
        vectors = np.concatenate(
            [directions(list(raw[v * rank : (v + 1) * rank]), names, columns) for v in range(VECTORS)]
        )
    x = torch.from_numpy(rng.normal(size=(ROWS, width)) * size).to(dtype)
    r = torch.from_numpy(rng.normal(size=(ROWS, width)) * size).to(dtype) if pair else None
    p = np.sort(rng.normal(size=(2, POINTS + 1)) * size, axis=0).astype(np.float32)
    p[0, 1], p[1, 2] = -np.inf, np.inf
    case = Case(
        code, rank, x, r,
        points=torch.tensor([1, 0, 2, 3, 1, 2], dtype=torch.int32),
        index=torch.tensor([1 << 30, 0, 1, -1], dtype=torch.int32),
        coefficients=torch.tensor([np.nan, 1.5, -2.0, 1.0], dtype=torch.float32),
        vectors=torch.from_numpy(vectors), mask=torch.from_numpy(mask) if masked else None,
        bounds=torch.from_numpy(p) if name in ("clamp", "feature") else None,
    )  # fmt: skip
    if name == "feature":
        case.up = torch.from_numpy((rng.normal(size=(VECTORS, width)) / 4).astype(np.float32))
        # One point's feature is active in its rows, the other's is not.
        case.bounds = torch.tensor([[np.nan, size, -size, 1.0], [np.nan, -1e6, 1e6, 0.0]], dtype=torch.float32)
    if name == "affine":
        case.up = torch.from_numpy((rng.normal(size=(rank, width)) * mask / 40).astype(np.float32))
        case.bias = torch.from_numpy(rng.normal(size=rank).astype(np.float32))
        # Its points share one pair of matrices.
        case.index = torch.tensor([1 << 30, 0, 0, -1], dtype=torch.int32)
    for field in ("x", "r", "points", "index", "coefficients", "vectors", "mask", "bounds", "up", "bias"):
        if (value := getattr(case, field)) is not None:
            setattr(case, field, value.to("cuda" if device == "cuda" else "cpu"))
    return case


def run(case: Case, device: str = "cpu") -> tuple[Any, Any]:
    """What comes out: copies."""
    board = vt.Board.empty(ROWS, 1, 1, 1, case.x.device)
    board.rows[:, 0], board.rows[:, 1] = vt.LIVE, case.points
    board.set_edit(0, case.coefficients, case.index, case.vectors, case.mask, case.bounds, case.up, case.bias)
    statement = vt.Statement(case.code, 1, 0, case.mask is not None, case.rank)
    x, r = case.x.clone(), None if case.r is None else case.r.clone()
    (vt.launch if device == "interpreter" else vt.run)(board, vt.LocationProgram(0, 0, x.shape[1], (statement,)), x, r)
    return x, r


def wanted(case: Case) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(the stream in float64, which rows and columns it is for)"""
    x = case.x.double().cpu().numpy()
    s = x if case.r is None else x + case.r.double().cpu().numpy()
    here = np.zeros(s.shape, bool)
    out = s.copy()
    mask = np.ones(s.shape[1], bool) if case.mask is None else case.mask.cpu().numpy().astype(bool)
    for row, point in enumerate(case.points.tolist()):
        which = int(case.index[point]) if point else -1
        if which < 0:
            continue
        c = float(case.coefficients[point])
        v = case.vectors.double().cpu().numpy()[which * case.rank : (which + 1) * case.rank]
        own = np.where(mask, s[row], 0.0)
        if case.code == vt.ADD_KEEP:
            y = s[row] + c * v[0]
            out[row] = y * np.linalg.norm(own) / np.linalg.norm(np.where(mask, y, 0.0))
        elif case.code == vt.AFFINE:
            up, bias = case.up.double().cpu().numpy(), case.bias.double().cpu().numpy()
            out[row] = s[row] + c * (v @ own + bias) @ up
        elif case.code == vt.FEATURE:
            bias, threshold = case.bounds.double().cpu().numpy()[:, point]
            p = float(v[0] @ own) + bias
            out[row] = s[row] + (c - (p if p > threshold else 0.0)) * case.up.double().cpu().numpy()[which]
        elif case.code == vt.PROJECT_OUT:
            out[row] = s[row] - c * (v @ own) @ v
        else:
            low, high = case.bounds.double().cpu().numpy()[:, point]
            p = float(v[0] @ own)
            q = min(max(p, low), high)
            if abs(q - p) == 0:
                continue
            out[row] = s[row] + (q - p) * v[0]
        here[row] = mask
    return out, here


def hold(case: Case, device: str) -> None:
    if device == "interpreter" and case.x.dtype == torch.bfloat16:
        pytest.skip("triton's interpreter truncates to bfloat16")
    x, r = run(case, device)
    dtype = case.x.dtype
    want, here = wanted(case)
    got = x.double().cpu().numpy()
    scale = np.abs(want).max(axis=1, keepdims=True)
    # One rounding to the dtype, and float32 sums over the width.
    bound = np.abs(want) * EPS[dtype] + scale * 2.0**-22 * np.sqrt(case.x.shape[1])
    assert (np.abs(got - want) <= bound)[here].all()
    for after, before in ((x, case.x), (r, case.r)):
        if after is not None:
            same = after.cpu().view(torch.int16 if dtype != torch.float32 else torch.int32) == before.cpu().view(
                torch.int16 if dtype != torch.float32 else torch.int32
            )
            assert same[~torch.from_numpy(here)].all(), "what is not selected changed"
    if r is not None:
        assert not r.cpu()[torch.from_numpy(here)].any()


@pytest.mark.parametrize("device", ["cpu", GPU, INTERPRETER])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("width", [16, 576, 4096])
@pytest.mark.parametrize("name", SUMS)
def test_it_is_the_formula(name: str, width: int, pair: bool, masked: bool, dtype: Any, device: str) -> None:
    hold(make(name, dtype, width=width, pair=pair, masked=masked, device=device), device)


@pytest.mark.parametrize("device", ["cpu", GPU, INTERPRETER])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SUMS)
def test_streams_of_ten_thousand_do_not_overflow(name: str, dtype: Any, device: str) -> None:
    case = make(name, dtype, width=4096, pair=True, masked=False, size=8000.0, device=device)
    hold(case, device)
    assert torch.isfinite(run(case, device)[0]).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_do_not_depend_on_each_other(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(SUMS)))
    dtype = data.draw(st.sampled_from(DTYPES))
    case = make(
        name, dtype, width=data.draw(st.integers(8, 40)), pair=data.draw(st.booleans()),
        masked=data.draw(st.booleans()), size=data.draw(st.sampled_from([1e-3, 1.0, 1e3])),
        seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    before = run(case)[0]
    row = data.draw(st.integers(0, ROWS - 1))
    case.x[[i for i in range(ROWS) if i != row]] = float("nan")
    assert torch.equal(run(case)[0][row], before[row])


def test_a_row_within_the_bounds_keeps_its_bits() -> None:
    case = make("clamp", torch.bfloat16, width=16, pair=True, masked=False)
    case.bounds[0], case.bounds[1] = -1e9, 1e9
    x, r = run(case)
    assert torch.equal(x, case.x) and torch.equal(r, case.r)


@pytest.mark.parametrize("device", ["cpu", GPU, INTERPRETER])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_feature_that_has_its_value_already_keeps_the_row_s_bits(dtype: Any, device: str) -> None:
    case = make("feature", dtype, width=576, pair=True, masked=False, device=device)
    # Set to 0, of rows in which it is not active.
    case.coefficients[1:], case.bounds[1] = 0.0, 1e6
    x, r = run(case, device)
    assert torch.equal(x, case.x) and torch.equal(r, case.r)
    case.bounds[1] = -1e6
    assert not torch.equal(run(case, device)[0], case.x)


def test_a_row_of_zeros_keeps_its_length() -> None:
    case = make("keep", torch.float32, width=16, pair=False, masked=False)
    case.x.zero_()
    assert not run(case)[0].any()


def test_what_is_left_has_no_part_along_any_of_the_vectors() -> None:
    case = make("out", torch.float32, width=576, pair=True, masked=False)
    case.coefficients[1:] = 1.0
    x, _ = run(case)
    for row, point in enumerate(case.points.tolist()):
        which = int(case.index[point]) if point else -1
        if which >= 0:
            left = case.vectors[which * 3 : which * 3 + 3].double() @ x[row].double()
            assert left.abs().max() < 1e-5 * x[row].double().norm()

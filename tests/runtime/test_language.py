"""Every verb of the language on boards as an engine makes them, against the formulas of ``vtaps verify`` in float64.

A drawn location (one tensor, a pair, columns of a wider tensor) has up to three edits with several points each; rows
take points of their own.  The bounds: each statement rounds once to the model's dtype and sums a row in float32.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from vtaps.runtime import block as vt  # noqa: E402
from vtaps.runtime import kernels  # noqa: E402
from vtaps.runtime.boards import Boards  # noqa: E402
from vtaps.runtime.fills import Fill  # noqa: E402
from vtaps.runtime.memory import Limits  # noqa: E402
from vtaps.runtime.program import ArmEntry, EditEntry, Point, PointEdit, Program, SiteEntry  # noqa: E402
from vtaps.runtime.reference.verbs import VERBS, Use, change  # noqa: E402
from vtaps.spec.rows import Rows  # noqa: E402

CUDA = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None
if TRITON and not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is imported
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")])
INTERPRETER = pytest.param(
    "interpreter", marks=pytest.mark.skipif(CUDA or not TRITON, reason="needs triton, and no GPU")
)

FORMULAS = sorted(
    verb for verb, formula in VERBS.items() if callable(formula) and verb not in ("feature", "reconstruct")
)
"""What an SAE does comes out of files: ``tests/runtime/test_sae.py``."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EPS = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Half a unit in the last place, as a share of the value."""
ROWS, USES, RANK = 7, 3, 3
CALLS: dict[str, Callable[..., None]] = {"set": vt.set_}
Columns = tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class Drawn:
    """A location ``[first, first + width)`` of a tensor ``total`` wide, its edits with their columns, and its rows:
    ``points[e, row]`` is the use of edit e at the row, counted from 1, 0 for none."""

    width: int
    first: int
    total: int
    pair: bool
    dtype: str
    size: float
    edits: tuple[EditEntry, ...]
    columns: tuple[Columns, ...]
    uses: tuple[tuple[PointEdit, ...], ...]
    points: Any
    seed: int


class Given(Program):
    """A program whose vectors are drawn by their names."""

    def load_vector(self, name: str, site: SiteEntry) -> Any:
        return _numbers(name, site.width)

    def load_affine(self, names: Any, site: SiteEntry) -> Any:
        down, up = (
            np.stack([_numbers(f"{name}{k}", site.width) for k in range(RANK)]) / np.float32(2 * site.width**0.5)
            for name in names[:2]
        )
        return down, up, (_numbers(names[2], RANK) if len(names) > 2 else np.zeros(RANK, np.float32))


def _numbers(name: str, count: int) -> Any:
    return np.random.default_rng(list(name.encode())).standard_normal(count).astype(np.float32)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    width = draw(st.sampled_from([16, 40, 576]))
    pair = draw(st.booleans())
    first = 0 if pair else draw(st.sampled_from([0, 8]))
    verbs = draw(st.lists(st.sampled_from(FORMULAS), min_size=1, max_size=3))
    edits, columns, uses = [], [], []
    for number, verb in enumerate(verbs):
        name = f"e{number}"
        edits.append(
            EditEntry(
                verb, ("here",), Rows(),
                vectors=tuple("xyz"[: draw(st.integers(1, 3))]) if verb == "project_out" else (),
                keep_norm=verb == "add" and draw(st.booleans()),
                matrices=(("a", "b", "c")[: draw(st.sampled_from([2, 3]))] if verb == "affine" else ()),
            )
        )  # fmt: skip
        start = draw(st.integers(0, width // 2))
        columns.append(draw(st.sampled_from([None, ((start, start + width // 4),), ((0, 3), (width - 5, width))])))
        uses.append(tuple(_use(draw, name, verb) for _ in range(USES)))
    points = draw(st.lists(st.lists(st.integers(0, USES), min_size=ROWS, max_size=ROWS), min_size=len(verbs),
                           max_size=len(verbs)))  # fmt: skip
    return Drawn(
        width, first, first + width + (0 if pair else draw(st.sampled_from([0, 5]))), pair,
        draw(st.sampled_from(list(DTYPES))), draw(st.sampled_from([1e-2, 1.0, 1e4])),
        tuple(edits), tuple(columns), tuple(uses), np.array(points, np.int32), draw(st.integers(0, 2**16)),
    )  # fmt: skip


def _use(draw: st.DrawFn, name: str, verb: str) -> PointEdit:
    """A point of an edit; one in four is at another location."""
    here = ("here",) if draw(st.integers(0, 3)) else ("elsewhere",)
    coefficient = None if verb in ("zero", "clamp") else draw(st.sampled_from([-1.25, 0.1, 0.5, 1.0, 1.5]))
    vector = draw(st.sampled_from("xyz")) if verb in ("add", "set", "clamp") else None
    low, high = draw(st.sampled_from([(None, None), (-0.5, 0.25), (None, 0.0), (2.0, None)]))
    bounds = (low, high) if verb == "clamp" else (None, None)
    return PointEdit(name, here, coefficient, vector, *bounds)


def program_of(case: Drawn) -> Program:
    """Equal uses are one to a program, so each is an arm of its own with the edits that have one."""
    where = {"here": SiteEntry("here", "m", 0, None, None, (case.first, case.first + case.width), 2, case.width)}
    where["elsewhere"] = SiteEntry("elsewhere", "m", 1, None, None, None, 3, case.width)
    edits = {
        f"e{n}": EditEntry(e.verb, ("here", "elsewhere"), e.tokens, e.vectors, e.keep_norm, e.matrices)
        for n, e in enumerate(case.edits)
    }
    arms = {f"arm{i}": ArmEntry((), (), (Point(tuple(uses[i] for uses in case.uses), {}),), {}) for i in range(USES)}
    return Given(Path(), "s", "", {}, "", where, edits, {}, {}, {}, {}, arms, None)


def block_of(case: Drawn) -> vt.Block:
    block = vt.Block("", "", "s", "", "")

    def statements(t: vt.Tap, *values: Any) -> None:
        for number, edit in enumerate(case.edits):
            more = {"keep_norm": True} if edit.keep_norm else {}
            call = CALLS.get(edit.verb) or getattr(vt, edit.verb)
            call(t, f"e{number}", *values, columns=case.columns[number], **more)

    residual = 1 if case.pair else None
    block.location("here", module="m", output=0, residual=residual)(statements)
    block.location("elsewhere", module="m", output=1)(statements)
    return block


def run(case: Drawn, device: str) -> tuple[Any, Any, Any, Any, Program]:
    """The tensor and the residual before and after; rows without a point hold NaN."""
    on = torch.device("cuda" if device == "cuda" else "cpu")
    program = program_of(case)
    boards = Boards(
        block_of(case), program, Limits(ROWS, ROWS, ROWS), DTYPES[case.dtype], on, lambda place: place.notes()
    )
    rng = np.random.default_rng(case.seed)

    def numbers() -> Any:
        rows = rng.standard_normal((ROWS, case.total))
        rows *= case.size / np.abs(rows).max(1, keepdims=True)
        rows[(case.points == 0).all(0)] = np.nan
        return torch.from_numpy(rows).to(DTYPES[case.dtype]).to(on)

    x, r = numbers(), numbers() if case.pair else None
    before, rest = x.clone(), None if r is None else r.clone()
    fills = []
    for number, chosen in enumerate(case.points):
        numbered = program.uses_of[f"e{number}"]
        rows = np.flatnonzero(chosen)
        if len(rows):
            points = np.array([numbered[case.uses[number][p - 1]] for p in chosen[rows]], np.int32)
            fills.append(Fill(f"e{number}", ("here",), False, rows, rows, (), rows, rows, points))
    boards.tokens.write(fills, ())
    board, location, _ = boards.find("here")
    (kernels.launch if device == "interpreter" else kernels.run)(board, location, x, r)
    return before, rest, x, r, program


def hold(case: Drawn, device: str) -> None:
    x0, r0, x1, r1, program = run(case, device)
    dtype, here = DTYPES[case.dtype], slice(case.first, case.first + case.width)
    touched = np.zeros((ROWS, case.total), bool)
    hidden = x0.double().cpu().numpy()[:, here]
    rest = None if r0 is None else r0.double().cpu().numpy()
    bound = np.zeros((ROWS, 1))
    for number, edit in enumerate(case.edits):
        for row, point in enumerate(case.points[number]):
            use = case.uses[number][point - 1] if point else None
            if use is None or "here" not in use.sites:
                continue
            asked = Use(program, edit, use, program.sites["here"], case.columns[number])
            mask = asked.here
            total = hidden[row] + (0.0 if rest is None else rest[row])
            size = max(np.abs(v).max() for v in (total, hidden[row], 0.0 if rest is None else rest[row]))
            with np.errstate(invalid="ignore"):
                want = change(asked)(total[None])[0]
            if edit.verb == "clamp" and np.array_equal(want[mask], total[mask]):
                continue  # within the bounds: left alone, both halves
            keeps_pair = edit.verb == "add" and not edit.keep_norm and rest is not None
            value = want - rest[row] if keeps_pair and rest is not None else want
            rounded = torch.from_numpy(value).to(dtype).double().numpy()
            hidden[row] = np.where(mask, rounded, hidden[row])
            if rest is not None and not keeps_pair:
                rest[row] = np.where(mask, 0.0, rest[row])
            size = max(size, float(np.abs(want).max()), float(np.abs(value).max()))
            # What was off before may grow by what the verb does to a difference (a reflection: 1 + 1.5 · 2).
            bound[row] = 4 * bound[row] + size * (EPS[case.dtype] + 2.0**-22 * case.width**0.5)
            touched[row, here] |= mask
    got = x1.double().cpu().numpy()[:, here]
    cells = touched[:, here]
    off = np.divide(np.abs(got - hidden), bound, out=np.zeros(got.shape), where=cells)
    assert (off <= 1)[cells].all(), f"{off.max():.2f} times the bound"
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for after, before in ((x1, x0), (r1, r0)):
        if after is not None:
            same = (after.view(bits) == before.view(bits)).cpu().numpy()
            assert same[~touched].all(), "what is not selected changed"
    if r1 is not None:
        assert np.abs(r1.double().cpu().numpy() - rest)[touched].max(initial=0.0) == 0.0


@pytest.mark.parametrize("device", ["cpu", GPU])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=drawn())
def test_every_verb_is_its_formula(device: str, case: Drawn) -> None:
    hold(case, device)


@pytest.mark.parametrize("device", [INTERPRETER])
@settings(max_examples=25, deadline=None)
@given(case=drawn().filter(lambda case: case.dtype != "bfloat16"))  # triton's interpreter truncates to it
def test_every_verb_is_its_formula_by_the_kernel(device: str, case: Drawn) -> None:
    hold(case, device)

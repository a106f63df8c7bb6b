"""Rows that edits set, in the worker: their memory, and where the row table says each comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import save  # noqa: E402

from vtaps.runtime.block import Note  # noqa: E402
from vtaps.runtime.faults import Fault  # noqa: E402
from vtaps.runtime.live import Batch, Scheduled  # noqa: E402
from vtaps.runtime.lockfile import parse_program  # noqa: E402
from vtaps.runtime.memory import Limits, TapMemoryError, patch_bytes, predicted, slots  # noqa: E402
from vtaps.runtime.patches import PatchMemory, memories  # noqa: E402
from vtaps.runtime.program import LockError, Program  # noqa: E402
from vtaps.runtime.rowtable import RowTable  # noqa: E402
from vtaps.runtime.vector_tables import vectors_at  # noqa: E402

CPU = torch.device("cpu")
WIDTHS = {"a": 16, "b": 16, "c": 32}


def program(tokens: dict[str, Any] | None = None, mode: str = "taps", **engine: Any) -> Program:
    point = {"edits": [{"edit": "patch", "sites": list(WIDTHS)}]}
    alone = {"edits": [{"edit": "patch", "sites": ["b"], "position": 2}]}
    return parse_program(
        {
            "lock": 1,
            "engine": {"mode": mode, **engine},
            "block": {"digest": "", "structure": ""},
            "sites": {name: {"module": name, "output": 0, "width": width} for name, width in WIDTHS.items()},
            "edits": {
                "patch": {
                    "verb": "put",
                    "sites": list(WIDTHS),
                    "tokens": tokens or {"rows": "prompt"},
                    "rows": {"arm": "x", "read": "y", "slots": 6},
                }
            },
            "arms": {"p": {"points": [point, alone]}, "idle": {"points": [{}]}},
        },
        Path("."),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_lie_in_their_slots_to_the_bit(dtype: Any) -> None:
    memory = memories(program(), dtype, CPU)["patch"]
    rng = np.random.default_rng(1)
    rows = {name: torch.from_numpy(rng.normal(size=(2, width))).to(dtype) for name, width in WIDTHS.items()}
    rows["a"][0, 0] = float("nan")
    stored = {n: (r.view(torch.uint16) if dtype == torch.bfloat16 else r).numpy() for n, r in rows.items()}
    memory.write("patch", 3, save(stored))
    for name, wanted in rows.items():
        table, part = memory.place(name)
        torch.testing.assert_close(table[3:5, part], wanted, rtol=0, atol=0, equal_nan=True)
        assert not table[:3, part].any() and not table[5:, part].any()


@pytest.mark.parametrize("fault", ["width", "dtype", "slots", "site"])
def test_rows_that_do_not_fit_are_refused(fault: str) -> None:
    memory: PatchMemory = memories(program(), torch.float32, CPU)["patch"]
    rows = {name: np.ones((2, width), np.float32) for name, width in WIDTHS.items()}
    if fault == "width":
        rows["b"] = rows["c"]
    elif fault == "dtype":
        rows["b"] = rows["b"].astype(np.float16)
    elif fault == "site":
        del rows["c"]
    with pytest.raises(LockError, match=r"edits\.patch"):
        memory.write("patch", 5 if fault == "slots" else 0, save(rows))


def asked(point: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "key": "k",
        "arm": "p",
        "point": point,
        "patches": {"patch": {"first": 2, "positions": [[0, 2], [3, 5]]}},
        **more,
    }


def share(start: int, count: int) -> Scheduled:
    return Scheduled("r", start, np.zeros(count, np.int64), 0)


@pytest.mark.parametrize("chunks", [(5,), (2, 3), (1, 1, 1, 1, 1), (4, 1)])
def test_each_row_of_a_chunk_has_its_own_slot(chunks: tuple[int, ...]) -> None:
    """Positions 0, 1, 3, 4 are in the slots 2 … 5; single rows one after the other are no steady decoding."""
    table = RowTable(program({"rows": "prompt", "except": {"rows": "all", "positions": [[2, 2]]}}))
    table.admit("r", asked(), 5)
    found: dict[int, int] = {}
    start = 0
    for count in chunks:
        plan, shift = table.step(_batch(share(start, count)))
        assert shift == 0
        for fill in plan.edits if plan is not None else ():
            assert fill.slots is not None
            found.update(zip(fill.positions.tolist(), fill.slots.tolist(), strict=True))
        start += count
    assert found == {0: 3, 1: 4, 3: 5, 4: 6}
    plan, _ = table.step(_batch(share(5, 1)))
    assert plan is None, "generated rows are not set"
    assert table.collect(("k", 0)).ranges_fired(9) == {"patch": ((0, 2), (3, 5))}


def _batch(one: Scheduled) -> Batch:
    return Batch.of([one])


def test_a_row_without_a_source_is_refused_before_it_is_scheduled() -> None:
    made = program()
    for wrong in (asked(), asked(patches={}), asked(1)):
        with pytest.raises(LockError, match=r"edits\.patch: it sets rows, and this request has no source"):
            made.compile("p", wrong["point"], 5, wrong)
        with pytest.raises(LockError):
            RowTable(made).admit("r", wrong, 5)
    made.compile("p", 0, 2, asked())
    made.compile("idle", 0, 5, {})


def test_a_row_of_an_id_without_a_source_fails_its_request() -> None:
    table = RowTable(program({"rows": "all", "ids": [0]}))
    table.admit("r", asked(), 5)
    assert table.step(_batch(share(0, 5))) == (None, 0)
    [(fault, since)] = table.failing.values()
    assert fault == Fault("VT621", "patch: request 'k' has no source for its rows") and since == 0


def test_the_memory_counts_against_tap_memory() -> None:
    # 6 slots of 16 + 16 + 32 numbers.
    assert patch_bytes(program(), "float32") == 6 * 64 * 4 and patch_bytes(program(), "bfloat16") == 6 * 64 * 2
    limits = Limits(8, 2, 8)
    assert predicted(program(tap_memory=6 * 64 * 4), limits, "float32") >= 6 * 64 * 4
    with pytest.raises(TapMemoryError, match="the rows that edits set take 1536 bytes"):
        slots(program(tap_memory=6 * 64 * 4 - 1), limits, "float32")


def test_a_vector_that_the_run_has_not_made_is_no_number_and_asked_for_by_nobody() -> None:
    made = parse_program(
        {
            "lock": 1,
            "block": {"digest": "", "structure": ""},
            "sites": {"a": {"module": "a", "output": 0, "width": 4}},
            "vectors": {"mu": {"read": {"arm": "x", "read": "y", "sites": {"a": "a"}}}},
            "edits": {
                "push": {"verb": "add", "sites": ["a"], "tokens": {"rows": "all"}},
                "out": {"verb": "project_out", "sites": ["a"], "tokens": {"rows": "all"}, "vectors": ["mu"]},
            },
            "reads": {"dots": {"kind": "project", "sites": ["a"], "tokens": {"rows": "all"}, "vectors": ["mu"]}},
            "arms": {
                "add": {"points": [{"edits": [{"edit": "push", "sites": ["a"], "coefficient": 1, "vector": "mu"}]}]},
                "out": {"points": [{"edits": [{"edit": "out", "sites": ["a"], "coefficient": 1}]}]},
                "dots": {"reads": ["dots"], "points": [{}]},
                "idle": {"points": [{}]},
            },
        },
        Path("."),
    )
    site, note = made.sites["a"], Note("out", verb="project_out")
    assert np.isnan(made.load_vector("mu", site)).all() and np.isnan(vectors_at(made, note, site, ())).all()
    made.compile("idle", 0, 3, {})
    for arm in ("add", "out", "dots"):
        with pytest.raises(LockError, match=r"vectors\.mu: it is the mean of a read"):
            made.compile(arm, 0, 3, {})
    made.known["mu", "a"] = np.array([0, 3, 4, 0], np.float32)
    for arm in ("add", "out", "dots"):
        made.compile(arm, 0, 3, {})
    np.testing.assert_allclose(vectors_at(made, note, site, ()), [[0, 0.6, 0.8, 0]])

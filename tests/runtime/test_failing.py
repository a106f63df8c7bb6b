"""Which requests a fault in a step concerns, and that nothing of the others changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.runtime import schedules as sch  # noqa: E402
from tests.runtime import toy  # noqa: E402
from vtaps.runtime import failing, ops  # noqa: E402
from vtaps.runtime.faults import Fault, of_device  # noqa: E402
from vtaps.runtime.harvest import Harvest  # noqa: E402
from vtaps.runtime.hooks import BlockFault  # noqa: E402
from vtaps.runtime.memory import Limits  # noqa: E402
from vtaps.runtime.session import Session  # noqa: E402

COUNT = 3
SEEN = "seen = []\n\ndef bend(rows, at):\n    seen.append((at.location, at.requests))\n    "


def serve(folder: Path, body: str, point: int = 1) -> tuple[list[Any], dict[str, Fault], list[Any], Session]:
    """Three requests through a prompt and steps of decoding, with an edit in Python at ``final``: what the model puts
    out in each step, what failed, what the function was given, the session."""
    folder.mkdir(exist_ok=True)
    manifest = toy.write(folder)
    (folder / "bend.py").write_text(SEEN + body, encoding="utf-8")
    limits = Limits(rows=3 * COUNT, requests=COUNT, step_rows=3 * COUNT)
    made = toy.Worker(Session(manifest), [sch.Ask("bent", point, 3, 4)] * COUNT, limits)
    out: list[Any] = []
    found: dict[str, Fault] = {}

    def forward(x: Any) -> Any:
        out.append(made.model(x))
        return out[-1]

    try:
        for shares in (
            [sch.Share(n, 0, 3, True) for n in range(COUNT)],
            *([sch.Share(n, at, 1, True) for n in range(COUNT)] for at in (3, 4, 5)),
        ):
            made.step(shares, made.rows(shares), forward)
            found |= {name: fault for name, (fault, _) in made.session.failing().items()}
    finally:
        made.session.close()
        ops.serve(None)
    seen = made.session.functions._of["edits", "bend"].call.__globals__["seen"]
    return out, found, [requests for location, requests in seen if location == "final"], made.session


def test_a_function_fails_for_the_requests_that_it_fails_for(tmp_path: Path) -> None:
    raises = "if 'k1' in at.requests:\n        raise KeyError('k1')\n    return rows * (1 + len(rows))"
    out, found, seen, session = serve(tmp_path / "a", raises)
    assert found.keys() == {"r1"} and found["r1"].code == "VT620" and found["r1"].definition == "edits.bend"
    assert found["r1"].message.endswith("final: edits.bend: bend.py:6, in bend.py:bend: KeyError: 'k1'")
    # Together, each alone, the others together; in later steps the others.
    assert seen[:5] == [("k0", "k1", "k2"), ("k0",), ("k1",), ("k2",), ("k0", "k2")]
    assert len(seen) > 5 and set(seen[5:]) == {("k0", "k2")}
    spared = "import torch\n    keys = zip(rows, at.requests)\n    "
    spared += "return torch.stack([row if key == 'k1' else 3 * row for row, key in keys])"
    beside, none, _, _ = serve(tmp_path / "b", spared)
    assert not none
    # In the step that fails its row is left as it is; in later ones nothing acts on it.
    assert torch.equal(out[0], beside[0])
    for mine, its in zip(out[1:], beside[1:], strict=True):
        assert torch.equal(mine[::2], its[::2])
    records = dict(session.collect([(f"k{n}", 0, 1) for n in range(COUNT)]))
    assert [records[f"k{n}", 0].fault for n in range(COUNT)] == [None, found["r1"], None]
    assert not records["k1", 0].reads and records["k0", 0].reads


def test_a_request_that_failed_is_not_given_at_later_locations_of_the_step(tmp_path: Path) -> None:
    raises = "if 'k1' in at.requests:\n        raise KeyError('k1')\n    return rows"
    _, found, seen, _ = serve(tmp_path, raises, point=0)
    assert found.keys() == {"r1"} and found["r1"].message.startswith("r1: edits.bend: ")
    assert set(seen) == {("k0", "k2")}


@pytest.mark.parametrize(
    ("body", "who", "says"),
    [
        ("return rows[:1]", {"r0", "r1", "r2"}, r"gave back \[1, 8\]"),
        ("raise ValueError(at.requests[0])", {"r0", "r1", "r2"}, "ValueError: k"),
        ("if 'k1' in at.requests or len(rows) == 2:\n        raise ValueError('two')", {"r0", "r1", "r2"}, "two"),
    ],
)
def test_what_fails_for_none_alone_fails_for_all(body: str, who: set[str], says: str, tmp_path: Path) -> None:
    import re

    out, found, _, _ = serve(tmp_path / "a", body)
    assert found.keys() == who and all(re.search(says, fault.message) for fault in found.values())
    if "at.requests[0]" in body:
        assert [found[f"r{n}"].message[-2:] for n in range(COUNT)] == ["k0", "k1", "k2"]
    untouched, _, _, _ = serve(tmp_path / "b", "return None")
    assert torch.equal(out[0], untouched[0])


def test_the_device_s_fault_is_nobody_s(tmp_path: Path) -> None:
    told = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(BlockFault, match=f"final: edits.bend: .*AcceleratorError: {told}"):
        serve(tmp_path, f"import torch\n    if at.location == 'final':\n        raise torch.AcceleratorError({told!r})")


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (ValueError("CUDA error: said a function"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_what_is_the_device_s(error: Exception, is_so: bool) -> None:
    assert of_device(error) is is_so
    try:
        raise BlockFault("further up") from error
    except BlockFault as wrapped:
        assert of_device(wrapped) is is_so


def test_a_device_that_fails_on_the_way_ends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Any, *a: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    *_, session = serve(tmp_path, "return rows")
    with monkeypatch.context() as patch:
        patch.setattr(Harvest, "_reduced", lost)
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            session.collect([("k0", 0, 1)])
    # Nobody gets what the device gave later.
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        session.collect([("k1", 0, 1)])
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        session.harvest.settle()


def test_a_request_that_cannot_be_taken_in_is_a_plain_one_until_it_ends(tmp_path: Path) -> None:
    *_, session = serve(tmp_path, "return rows")
    table = session.table
    failing.admit(table, "again", {"key": "k0", "arm": "bent", "point": 1}, 3)
    failing.admit(table, "other", {"key": "x", "arm": "nobody", "point": 0}, 3)
    assert {name: fault.code for name, (fault, _) in table.failing.items()} == {"again": "VT621", "other": "VT621"}
    assert "alive twice" in table.failing["again"][0].message and table.live["again"] is table.live["other"] is None
    table.finish("again")
    assert table.failing.keys() == {"other"} and ("k0", 0) in table.alive

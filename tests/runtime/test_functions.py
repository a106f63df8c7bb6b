"""Edits in Python: what a function is given and may give back.  Which rows, in which batches, among which statements:
``test_session.py``, whose toy has such an edit."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.runtime import schedules as sch  # noqa: E402
from tests.runtime import toy  # noqa: E402
from vtaps.runtime import ops  # noqa: E402
from vtaps.runtime.hooks import BlockFault  # noqa: E402
from vtaps.runtime.memory import Limits  # noqa: E402
from vtaps.runtime.program import LockError  # noqa: E402
from vtaps.runtime.session import Session  # noqa: E402

PROMPT = (sch.Share(0, 0, 3, True),)


def worker(folder: Path, source: str) -> toy.Worker:
    folder.mkdir(exist_ok=True)
    manifest = toy.write(folder)
    (folder / "bend.py").write_text(source, encoding="utf-8")
    return toy.Worker(Session(manifest), [sch.Ask("bent", 1, 3, 4)], Limits(rows=3, requests=1, step_rows=3))


def final(made: toy.Worker) -> torch.Tensor:
    """What the model puts out in a prompt's step: the last edited location."""
    rows: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows.append(made.model(x))
        return rows[0]

    try:
        made.step(PROMPT, made.rows(PROMPT), forward)
        return rows[0]
    finally:
        made.session.close()
        ops.serve(None)


def test_in_place_is_as_good_as_given_back(tmp_path: Path) -> None:
    given = final(worker(tmp_path / "a", "def bend(rows, at):\n    return 3 * rows\n"))
    in_place = final(worker(tmp_path / "b", "def bend(rows):\n    rows.mul_(3)\n"))
    untouched = final(worker(tmp_path / "c", "def bend(rows):\n    return None\n"))
    assert torch.equal(given, in_place) and not torch.equal(given, untouched)


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    given = final(worker(tmp_path / "a", "def bend(rows):\n    return (2 * rows).double()\n"))
    assert given.dtype == torch.float32
    assert torch.equal(given, final(worker(tmp_path / "b", "def bend(rows):\n    return 2 * rows\n")))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return rows[:0]", r"bend.py:bend gave back \[0, 8\] on cpu, where \[1, 8\] on cpu was due"),
        ("return 3", "bend.py:bend gave back int, not a tensor"),
        ("return rows @ rows", "bend.py:2, in bend.py:bend: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("raise ValueError('no such\\nrow')", "bend.py:2, in bend.py:bend: ValueError: no such$"),
    ],
)
def test_what_a_function_may_not_do_names_it(body: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BlockFault, match="^final: edits.bend: .*" + says):
        final(worker(tmp_path, f"def bend(rows):\n    {body}\n"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def other(rows):\n    return rows\n", "edits.bend: bend.py has no function bend"),
        ("bend = 3\n", "edits.bend: bend.py has no function bend"),
        ("import nothing_of_the_kind\n", "edits.bend: bend.py cannot be imported: ModuleNotFoundError"),
        ("def bend(rows:\n", "edits.bend: bend.py cannot be imported: SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_start(source: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(LockError, match=says):
        worker(tmp_path, source)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    import json

    manifest = toy.write(tmp_path)
    lock = json.loads(manifest.lock.read_text())
    lock["edits"]["bend"]["python"]["digest"] = "sha256:" + "0" * 64
    manifest.lock.write_text(json.dumps(lock))
    with pytest.raises(LockError, match=r"edits.bend: bend.py changed since compile: its digest is sha256:"):
        Session(manifest)

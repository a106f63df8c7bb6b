"""Edits and reads in Python: what a function is given and may give back.  Which rows, in which batches, among which
statements: ``test_session.py``, whose toy has such edits and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.runtime import schedules as sch  # noqa: E402
from tests.runtime import toy  # noqa: E402
from vtaps.runtime import ops  # noqa: E402
from vtaps.runtime.memory import Limits  # noqa: E402
from vtaps.runtime.program import LockError  # noqa: E402
from vtaps.runtime.session import Session  # noqa: E402

PROMPT = (sch.Share(0, 0, 3, True),)


def worker(folder: Path, source: str) -> toy.Worker:
    folder.mkdir(exist_ok=True)
    manifest = toy.write(folder)
    (folder / "bend.py").write_text(source, encoding="utf-8")
    return toy.Worker(Session(manifest), [sch.Ask("bent", 1, 3, 4)], Limits(rows=3, requests=1, step_rows=3))


class Failed(Exception):
    """What a request's fault says."""


def failed(made: toy.Worker) -> None:
    """Raises what failed in the worker's last step."""
    for fault, _ in made.session.failing().values():
        assert fault.code == "VT620" and f": {fault.definition}: " in fault.message
        raise Failed(fault.message)


def final(made: toy.Worker) -> torch.Tensor:
    """What the model puts out in a prompt's step: the last edited location."""
    rows: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows.append(made.model(x))
        return rows[0]

    try:
        made.step(PROMPT, made.rows(PROMPT), forward)
        failed(made)
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
    with pytest.raises(Failed, match="^final: edits.bend: .*" + says):
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


# Reads


def felt(folder: Path, body: str, steps: int = 1) -> dict[str, Any]:
    """Of a request of three prompt rows and more steps after it: site → what the read ``feel`` kept."""
    folder.mkdir(exist_ok=True)
    manifest = toy.write(folder)
    source = f"import torch\n\ndef feel(rows, at):\n    {body}\n\ndef count(rows):\n    return rows[:, 0]\n"
    (folder / "feel.py").write_text(source, encoding="utf-8")
    asks = [sch.Ask("bent", 1, 3, 1 + steps)]
    made = toy.Worker(Session(manifest), asks, Limits(rows=3, requests=1, step_rows=3))
    try:
        made.step(PROMPT, made.rows(PROMPT))
        failed(made)
        for number in range(steps):
            share = (sch.Share(0, 3 + number, 1, True),)
            made.step(share, made.rows(share))
            failed(made)
        [(_, found)] = made.session.collect([("k0", 0, 1 + steps)])
        return {site: rows for (read, site), rows in found.reads.items() if read == "feel"}
    finally:
        made.session.close()
        ops.serve(None)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        ("float64", "float64"),
        ("float16", "float16"),
        ("bfloat16", "uint16"),
        ("int64", "int64"),
        ("int8", "int8"),
        ("bool", "bool"),
    ],
)
def test_a_read_keeps_the_shape_and_dtype_that_its_function_gave(dtype: str, kept: str, tmp_path: Path) -> None:
    found = felt(tmp_path, f"return rows[:, :2].to(torch.{dtype})[:, None].expand(-1, 3, 2)")
    for rows in (found["in"], found["cut"]):
        assert rows.dtype == dtype and rows.values["python"].dtype == kept
        assert rows.values["python"].shape == (len(rows.positions), 3, 2)
    whole = felt(tmp_path / "whole", "return rows")
    first = whole["in"].values["python"][:, :2]
    wanted = torch.from_numpy(first).to(getattr(torch, dtype))
    bits = wanted.view(torch.uint16) if dtype == "bfloat16" else wanted
    np.testing.assert_array_equal(found["in"].values["python"], np.repeat(bits.numpy()[:, None], 3, 1))


def test_sites_of_a_read_may_have_rows_of_their_own_shape(tmp_path: Path) -> None:
    found = felt(tmp_path, "return rows[:, ::2] if at.location != 'in' else rows.sum(-1)", 8)
    assert {site: rows.values["python"].shape for site, rows in found.items()} == {
        "in": (4,), "r1": (4, 4), "cut": (4, 2), "final": (4, 4), "logits": (4, 6)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return None", "gave back nothing: what a read's function gives back is what is kept"),
        ("rows.mul_(2)", "gave back nothing"),
        ("return 3.0", "gave back float, not a tensor"),
        ("return rows.numpy()", "gave back ndarray, not a tensor"),
        ("return rows.sum()", r"gave back \[\] for 1 row: one was due"),
        ("return rows.repeat(2, 1)", r"gave back \[2, 8\] for 1 row: one was due"),
        ("return rows[:, :0]", r"gave back \[1, 0\]: there is nothing to keep"),
        ("return rows.to(torch.complex64)", "gave back complex64; a read keeps float64, float32"),
        ("return rows[:, : len(at.positions) + (at.positions[0] > 4)]",
         r"gave back float32 \[2\] a row, after float32 \[1\] in its first call"),
        ("return rows.double() if at.positions[0] > 4 else rows",
         r"gave back float64 \[8\] a row, after float32 \[8\] in its first call"),
    ],
)  # fmt: skip
def test_what_a_read_may_not_do_names_it(body: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(Failed, match="^in: reads.feel: feel.py:feel " + says):
        felt(tmp_path, body, 8)


def test_what_a_read_raises_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"^in: reads.feel: feel.py:4, in feel.py:feel: IndexError: "):
        felt(tmp_path, "return rows[:, 99]")


def test_a_file_of_a_read_is_imported_once_and_held_to_its_digest(tmp_path: Path) -> None:
    import json

    manifest = toy.write(tmp_path)
    (tmp_path / "feel.py").write_text(toy.FEEL + "\nnumber = [0]\nnumber[0] += 1\nassert number == [1]\n")
    session = Session(manifest)
    functions = session.functions._of
    assert functions["reads", "feel"].call.__globals__ is functions["reads", "count"].call.__globals__
    lock = json.loads(manifest.lock.read_text())
    lock["reads"]["feel"]["python"]["digest"] = "sha256:" + "0" * 64
    manifest.lock.write_text(json.dumps(lock))
    with pytest.raises(LockError, match=r"reads.feel: feel.py changed since compile: its digest is sha256:"):
        Session(manifest)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("resid_post[1]: reads.probe: probes.py:3, in probes.py:f: KeyError: 'x'", 3),
        ("embed: edits.flip: edits.py:f gave back int, not a tensor", 5),
        ("the worker died", 1),
        ("x: reads.other: f gave back int", 1),
    ],
)
def test_a_fault_at_work_points_at_the_definition(message: str, line: int) -> None:
    from vtaps.running import _definition
    from vtaps.spec.yaml import loads

    doc, _ = loads("vtaps: 1\nreads:\n  probe: {at: embed}\nedits:\n  flip: {at: embed}\n", "spec.yaml", Path())
    assert doc is not None
    assert _definition(message, doc).line == line

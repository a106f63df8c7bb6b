"""A folder that holds something else."""

from pathlib import Path

from tests.golden.cases import Found
from tests.results.make import LOCK
from vtaps.runtime.results.folder import RunFolder


def findings(folder: Path) -> Found:
    (folder / "photos").mkdir()
    (folder / "photos" / "cat.jpg").write_bytes(b"cat")
    return RunFolder.open("photos", LOCK, order=["a"])[1], {}

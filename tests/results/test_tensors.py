"""safetensors files written from arrays as they lie, against the library's own bytes."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from tests.results import make
from vtaps.runtime.records import Finished, ReadRows
from vtaps.runtime.results import findings, tensors
from vtaps.runtime.results.folder import RunFolder
from vtaps.runtime.results.tensors import write_tensors

TYPES = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")


def written(path: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> bytes:
    with path.open("wb") as f:
        write_tensors(f.fileno(), arrays, metadata)
    return path.read_bytes()


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 4), min_size=1, max_size=3)), max_size=14),
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_the_bytes_are_those_of_the_library(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[Any], text: str, piece: int, random: Any
) -> None:
    arrays = {}
    for number, (dtype, shape) in enumerate(wanted):
        values = np.frombuffer(random.randbytes(8 * 64), "u1")[: int(np.prod(shape, dtype=int))] % 2
        arrays[str(number)] = values.astype(dtype).reshape(shape)
    metadata = {"vtaps": json.dumps({"text": text})}
    old, tensors.PIECE = tensors.PIECE, piece
    try:
        got = written(tmp_path_factory.getbasetemp() / "tensors", arrays, metadata)
    finally:
        tensors.PIECE = old
    assert got == save(arrays, metadata)


@pytest.mark.parametrize("piece", [1, 1000, 32 << 20])
def test_parts_of_one_memory(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "PIECE", piece)
    rows = np.random.default_rng(0).normal(size=(17, 5, 6)).astype("f4")
    parts = {str(i): rows[:15, i] for i in range(5)} | {"x": rows[::3], "y": rows[0, 0]}
    expected = save({name: np.ascontiguousarray(a) for name, a in parts.items()}, {})
    # The library leaves an empty note out.
    assert written(tmp_path / "t", parts, {})[-200:] == expected[-200:]
    with (tmp_path / "t").open("rb") as f:
        assert os.fstat(f.fileno()).st_size >= len(expected)


ROWS, WIDTH = 3000, 512


@pytest.fixture
def large() -> Iterator[tuple[dict[str, Any], Finished, Any]]:
    """A request with 3,000 rows of two sites, side by side in one memory: 12 MB."""
    locked = make.lock(reads={"stream": make.read("rows", {"rows": "prompt"})}, metrics={}, overrides={}, edits={})
    locked["arms"] = {"base": make.arm(reads=["stream"])}
    request = replace(make.requests(make.LOCK)[0], arm="base", prompt_token_ids=tuple(range(ROWS)))
    rows = np.random.default_rng(1).normal(size=(ROWS, 2, WIDTH)).astype("f4")
    completion = make.complete(request, (5,), locked)
    reads = {
        ("stream", site): ReadRows(np.arange(ROWS), {"rows": rows[:, i]}, "float32")
        for i, site in enumerate(make.SITES)
    }
    completion = replace(completion, record=replace(completion.record, reads=reads))
    yield locked, Finished(request, (completion,)), rows


def test_a_large_record_is_written_without_a_copy_of_it(
    large: tuple[dict[str, Any], Finished, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "PIECE", 1 << 18)
    monkeypatch.setattr(findings, "PIECE", 1 << 18)
    locked, finished, rows = large
    folder, found = RunFolder.open(tmp_path / "run", locked, order=[finished.request.key])
    assert folder is not None and not found
    tracemalloc.start()
    try:
        assert not folder.add(finished)
        folder.finish({})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < rows.nbytes / 4, "numpy tells tracemalloc of its memory"
    for i, file in enumerate(sorted((tmp_path / "run/reads/stream").glob("*.safetensors"))):
        assert file.read_bytes()[-rows[:, i].nbytes :] == rows[:, i].tobytes()


def test_the_spool_goes_with_the_run(large: tuple[dict[str, Any], Finished, Any], tmp_path: Path) -> None:
    locked, finished, _ = large
    path, key = tmp_path / "run", finished.request.key

    def start(overwrite: bool = False) -> RunFolder:
        folder, found = RunFolder.open(path, locked, order=[key], overwrite=overwrite)
        assert folder is not None, found
        return folder

    def fill(folder: RunFolder) -> Path:
        folder.spool.mkdir(parents=True)
        (folder.spool / "1-ab").write_bytes(b"rows")
        return folder.spool

    # Nothing done: nothing is left.
    folder = start()
    fill(folder)
    folder.close()
    assert not path.exists()
    # Killed: the next run of the folder clears it.
    folder = start()
    spool = fill(folder)
    folder._held.release()
    folder = start()
    assert not spool.exists()
    fill(folder)
    assert not folder.add(finished) and spool.exists()
    folder.finish({})
    assert not (path / "partial").exists()
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    # A finished run that is to be replaced stays until the first request of the new one is done.
    folder = start(overwrite=True)
    fill(folder)
    folder.close()
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before and not (path / "partial").exists()
    folder = start(overwrite=True)
    fill(folder)
    folder._held.release()
    folder = start(overwrite=True)
    assert not spool.exists()
    fill(folder)
    assert not folder.add(finished) and spool.exists(), "the rows of the others are still there"
    folder.finish({})
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before

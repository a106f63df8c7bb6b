"""Rows of a finished run, for the edits of another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vtaps.runtime.results.array import ReadArray
from vtaps.runtime.results.load import RunError, RunResult, load
from vtaps.spec.diagnostics import nearest
from vtaps.spec.files import open_regular
from vtaps.spec.plan import PromptKey
from vtaps.spec.sources import KeptRows, SourceFault

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def kept_rows(path: Path, arm: str, read: str) -> KeptRows:
    """What the run in ``path`` keeps of a read in an arm.  Raises SourceFault."""
    try:
        return _kept(path, arm, read)
    except _NOT_WHOLE as error:
        told = f"{type(error).__name__}: {error}"
        raise SourceFault("VT327", f"the run {path} is not what vtaps wrote: {told}", None) from error


_NOT_WHOLE = (KeyError, TypeError, AttributeError, IndexError, ValueError, OSError, pa.ArrowException)


def _kept(path: Path, arm: str, read: str) -> KeptRows:
    try:
        run = load(path)
        array = _of_arm(run, arm, read)
        requests = [r for r in run.requests.select(_NAMED).to_pylist() if r["arm"] == arm]
    except RunError as error:
        raise SourceFault("VT327", str(error), None) from error
    lengths: dict[str, dict[str, int]] = {}
    for row in requests:
        groups = lengths.setdefault(row["prompt"], {})
        if row["group"] in groups:
            named = f"{row['group']}/{row['prompt']}"
            raise SourceFault("VT328", f"the arm {arm!r} of {path} has several completions of {named}", None)
        groups[row["group"]] = len(row["prompt_token_ids"])
    positions: dict[PromptKey, list[int]] = {}
    for group, prompt, position in _coordinates(array):
        positions.setdefault((group, prompt), []).append(position)
    fields = run.info["reads"][read]["fields"]
    dtype, shape = (fields["rows"]["dtype"], fields["rows"]["shape"]) if "rows" in fields else ("", [])
    sites = run.lock["sites"]
    return KeptRows(
        run.info["reads"][read]["kind"],
        {site: int(sites[site]["width"]) for site in array.sites},
        lengths,
        lambda key: positions.get(key, ()),
        DTYPES.get(dtype, dtype) if shape else None,
        _digest(run, read),
        "scale" in fields,
    )


_NAMED = ["arm", "group", "prompt", "prompt_token_ids"]


class EarlierRun:
    """The rows of one read in one arm of a finished run.  Raises RunError."""

    def __init__(self, path: Path, arm: str, read: str) -> None:
        self._array = load(path)[read].sel(arm=arm)
        self._index: dict[PromptKey, list[int]] = {}
        for number, (group, prompt, _) in enumerate(_coordinates(self._array)):
            self._index.setdefault((group, prompt), []).append(number)

    def rows(self, key: PromptKey, sites: Iterable[str]) -> tuple[list[int], Mapping[str, npt.NDArray[Any]]] | None:
        """Positions and rows (site → ``[rows, width]``, bfloat16 as its bits) of a prompt; None if there are none."""
        numbers = self._index.get(key)
        if numbers is None:
            return None
        mine = self._array.at(np.array(numbers, np.int64))
        return mine.rows["position"].to_pylist(), {site: mine.stored(site) for site in sites}


def _of_arm(run: RunResult, arm: str, read: str) -> ReadArray:
    for what, name, known in (("arm", arm, tuple(run.lock["arms"])), ("read", read, run.reads)):
        if name not in known:
            near = nearest(name, known)
            there = f"; nearest is {near!r}" if near else ""
            raise SourceFault("VT327", f"the run {run.path} has no {what} {name!r}{there}", None)
    if read not in run.lock["arms"][arm]["reads"]:
        raise SourceFault("VT327", f"the arm {arm!r} of {run.path} does not list the read {read!r}", None)
    array = run[read]
    return array.sel(arm=arm) if arm in array.rows["arm"].to_pylist() else array.at(np.empty(0, np.int64))


def _coordinates(array: ReadArray) -> Iterable[tuple[str, str, int]]:
    columns = (array.rows[name].to_pylist() for name in ("group", "prompt", "position"))
    return zip(*columns, strict=True)


def _digest(run: RunResult, read: str) -> str:
    """Of everything that rows of a read come from."""
    hashed = hashlib.sha256()
    names = ["requests.parquet", f"reads/{read}/rows.parquet", *run.info["reads"][read]["sites"].values()]
    for name in names:
        with open_regular(run.path / name) as file:
            hashed.update(hashlib.file_digest(file, "sha256").digest())
    return "sha256:" + hashed.hexdigest()

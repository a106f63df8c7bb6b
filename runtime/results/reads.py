"""reads/NAME/: one rows.parquet and one safetensors file a site, streamed out of the journal request by request."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from safetensors.numpy import save_file

from vtaps.runtime.results.expected import Lock
from vtaps.runtime.results.journal import Entry, mean_of, sync_folder
from vtaps.runtime.results.means import RunMean
from vtaps.runtime.results.tables import GROUPS, KEY, Layout, Table, utf8
from vtaps.runtime.results.tensors import RowWriter, read_header, view

OPEN_FILES = 128
"""Site files that are open at once: a read of every module must not run into the limit of descriptors."""

ROWS = (*KEY, *GROUPS, ("position", pa.int64()), ("step", pa.int64()))


def site_files(sites: Iterable[str]) -> dict[str, str]:
    """A file name for each site: ``resid_post[10]`` → ``resid_post.10.safetensors``.  Names that become one, also
    where upper and lower case are one, are told apart by a number."""
    out: dict[str, str] = {}
    taken: set[str] = set()
    for site in sites:
        stem = base = re.sub(r"[^A-Za-z0-9_.-]+", ".", site).strip(".")[:200] or "site"
        number = 2
        while stem.lower() in taken:
            stem, number = f"{base}-{number}", number + 1
        taken.add(stem.lower())
        out[site] = f"{stem}.safetensors"
    return out


def write_reads(folder: Path, lock: Lock, entries: Mapping[Path, Entry]) -> dict[str, Any]:
    """Write every read of the run and return its description for run.json."""
    used = dict.fromkeys(r for e in entries.values() for c in e["completions"] for r in c["reads"])
    names = [n for n in lock["reads"] if n in used or any(n in a["reads"] for a in lock["arms"].values())]
    if not names:
        return {}
    (folder / "reads").mkdir(exist_ok=True)
    out = {
        name: _write_run_mean(folder, name, lock, entries)
        if lock["reads"][name].get("mean_over") == "run"
        else _write_read(folder, name, lock["reads"][name], entries)
        for name in names
    }
    sync_folder(folder / "reads")
    return out


def _write_read(folder: Path, name: str, read: Mapping[str, Any], entries: Mapping[Path, Entry]) -> dict[str, Any]:
    home = folder / "reads" / name
    home.mkdir(exist_ok=True)
    total = 0
    with Table(home / "rows.parquet", ROWS) as table:
        for entry in entries.values():
            for completion in entry["completions"]:
                if name in completion["reads"]:
                    total += completion["reads"][name]["rows"]
                    for row in _coordinates(entry["request"], completion, name):
                        table.add(row)
    files = site_files(read["sites"])
    layouts = _layouts(name, entries)
    sites = list(read["sites"])
    for start in range(0, len(sites), OPEN_FILES):
        _write_sites(home, name, sites[start : start + OPEN_FILES], files, layouts, total, entries)
    sync_folder(home)
    return _described(read, name, files, total, layouts.get(sites[0], {}) if sites else {})


def _described(
    read: Mapping[str, Any], name: str, files: Mapping[str, str], total: int, fields: _Fields
) -> dict[str, Any]:
    return {
        "kind": read["kind"],
        "rows": total,
        "fields": {f: {"dtype": dtype, "shape": list(shape)} for f, (dtype, shape) in fields.items()},
        "sites": {site: os.path.join("reads", name, files[site]) for site in read["sites"]},
    }


def _write_run_mean(folder: Path, name: str, lock: Lock, entries: Mapping[Path, Entry]) -> dict[str, Any]:
    """One mean an arm and sweep point, over all rows of its requests; its coordinates are those of no request."""
    home, read = folder / "reads" / name, lock["reads"][name]
    home.mkdir(exist_ok=True)
    found: dict[tuple[str, int], RunMean] = {}
    for path, entry in entries.items():
        where = entry["request"]["arm"], entry["request"]["point"]
        for count, means in mean_of(path, name):
            found.setdefault(where, RunMean()).add(count, means)
    sweep = Layout(lock, ())
    with Table(home / "rows.parquet", [*ROWS, *sweep.sweep_fields()]) as table:
        for arm, point in found:
            nobody = dict.fromkeys(column for column, _ in ROWS)
            table.add({**nobody, "arm": arm, **sweep.sweep_values(arm, point)})
    files = site_files(read["sites"])
    fields: _Fields = {}
    for site in read["sites"]:
        width = next((len(mean.sums[site]) for mean in found.values()), 0)
        fields = {"mean": ("F32", (width,)), "count": ("I64", ())}
        writer = RowWriter(home / files[site], fields if found else {}, len(found))
        for row, mean in enumerate(found.values()):
            writer.write("mean", row, mean.mean(site).astype(np.float32))
            writer.write("count", row, np.array([mean.count], np.int64))
        writer.close()
    sync_folder(home)
    return _described(read, name, files, len(found), fields if found else {})


def write_vectors(folder: Path, vectors: Mapping[str, Mapping[str, npt.NDArray[np.float32]]]) -> None:
    """vectors/NAME.safetensors: what the run made of its reads, float32 ``[width]`` a location of use."""
    shutil.rmtree(folder / "vectors", ignore_errors=True)
    for name, sites in vectors.items():
        (folder / "vectors").mkdir(exist_ok=True)
        save_file(dict(sites), folder / "vectors" / f"{name}.safetensors")
    if vectors:
        sync_folder(folder / "vectors")


def _coordinates(request: Entry, completion: Entry, name: str) -> Iterable[dict[str, Any]]:
    read = completion["reads"][name]
    last = len(request["prompt_token_ids"]) - 1
    for position in read["positions"] if read["positions"] is not None else [None] * read["rows"]:
        yield {
            "request": utf8(request["key"]),
            "completion": completion["index"],
            "prompt": utf8(request["prompt"]),
            "group": request["group"],
            "arm": request["arm"],
            "position": position,
            "step": None if position is None or position < last else position - last,
        }


class ShapeError(ValueError):
    """Requests of one ``read`` hold rows of different shapes: a function of the user's gave others in an earlier start
    of the run."""

    def __init__(self, read: str, message: str) -> None:
        super().__init__(message)
        self.read = read


_Fields = dict[str, tuple[str, tuple[int, ...]]]


def _layouts(name: str, entries: Mapping[Path, Entry]) -> dict[str, _Fields]:
    """Site → field → (dtype, shape of a row).  Raises ShapeError where two requests disagree."""
    out: dict[str, _Fields] = {}
    for path, entry in entries.items():
        tensors = None
        for completion in entry["completions"]:
            if name not in completion["reads"]:
                continue
            if tensors is None:
                _, tensors = read_header(path)
            for site, fields in completion["reads"][name]["sites"].items():
                layout = {f: (dtype, tensors[t].shape[1:]) for f, (t, dtype) in fields.items()}
                if out.setdefault(site, layout) != layout:
                    key = entry["request"]["key"]
                    held = f"request {key!r} holds {_told(layout)} a row, others {_told(out[site])}"
                    raise ShapeError(name, f"read {name} at {site}: {held}")
    return out


def _told(layout: _Fields) -> str:
    return ", ".join(f"{field} {dtype} {list(shape)}" for field, (dtype, shape) in layout.items())


def _write_sites(
    home: Path,
    name: str,
    sites: list[str],
    files: Mapping[str, str],
    layouts: Mapping[str, _Fields],
    total: int,
    entries: Mapping[Path, Entry],
) -> None:
    writers: dict[str, RowWriter] = {}
    try:
        for site in sites:
            writers[site] = RowWriter(home / files[site], layouts.get(site, {}), total)
        row = 0
        for path, entry in entries.items():
            reads = [c["reads"][name] for c in entry["completions"] if name in c["reads"]]
            if not reads:
                continue
            _, tensors = read_header(path)
            # Straight from one file into the other: a request's rows of one site may be many.
            whole = np.asarray(np.memmap(path, np.uint8, "r"))
            for read in reads:
                for site in sites:
                    for field, (tensor, _) in read["sites"][site].items():
                        writers[site].write(field, row, view(whole, tensors[tensor]))
                row += read["rows"]
    finally:
        for writer in writers.values():
            writer.close()

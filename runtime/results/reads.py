"""reads/NAME/: one rows.parquet and one safetensors file a site, or several where the read is to be stored in shards,
streamed out of the journal request by request."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vtaps.runtime.results.expected import Lock
from vtaps.runtime.results.journal import Entry, mean_of, sync_folder, write_atomically
from vtaps.runtime.results.means import RunMean
from vtaps.runtime.results.tables import GROUPS, KEY, Layout, Table, utf8
from vtaps.runtime.results.tensors import RowWriter, Tensor, read_header, view, write_tensors
from vtaps.spec.store import Store

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


def shard_files(file: str, count: int) -> list[str]:
    """``x.safetensors`` → ``x-00001-of-00003.safetensors``, …"""
    stem = file.removesuffix(".safetensors")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


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
    layouts = _layouts(name, entries, read["kind"] == "pattern")
    sites = list(read["sites"])
    store = Store.from_json(read.get("store") or {})
    sharded = store.shard_bytes is not None or store.shard_rows is not None
    files: dict[str, list[str]] = {}
    for site, file in site_files(sites).items():
        count = -(-total // _shard_rows(store, layouts.get(site, {}), total)) or 1
        files[site] = shard_files(file, count) if sharded else [file]
    for start in range(0, len(sites), OPEN_FILES):
        some = {
            site: _Shards([home / file for file in files[site]], fields, total, _shard_rows(store, fields, total))
            for site in sites[start : start + OPEN_FILES]
            for fields in (layouts.get(site, {}),)
        }
        _write_sites(name, some, entries)
    sync_folder(home)
    kept = files if sharded else {site: paths[0] for site, paths in files.items()}
    return _described(read, name, kept, total, layouts.get(sites[0], {}) if sites else {})


def _described(
    read: Mapping[str, Any], name: str, files: Mapping[str, str | list[str]], total: int, fields: _Fields
) -> dict[str, Any]:
    """``files``: site → the file of its rows, or its shards."""

    def within(file: str) -> str:
        return os.path.join("reads", name, file)

    return {
        "kind": read["kind"],
        "rows": total,
        "fields": {f: {"dtype": dtype, "shape": list(shape)} for f, (dtype, shape) in fields.items()},
        "sites": {s: within(of) if isinstance(of, str) else [within(f) for f in of] for s, of in files.items()},
    }


def _shard_rows(store: Store, fields: _Fields, total: int) -> int:
    """Rows of a file at most, at least one."""
    if store.shard_rows is not None:
        return store.shard_rows
    size = sum(Tensor(dtype, shape, 0).nbytes for dtype, shape in fields.values())
    return max(1, total if store.shard_bytes is None else store.shard_bytes // max(1, size))


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
    for name, sites in vectors.items():
        (folder / "vectors").mkdir(exist_ok=True)
        write_atomically(folder / "vectors" / f"{name}.safetensors", partial(write_tensors, arrays=sites, metadata={}))


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


def _widest(one: _Fields, other: _Fields) -> _Fields:
    """Each field as long in every axis as the longer of the two."""
    return {
        field: (dtype, tuple(max(pair) for pair in zip(shape, other[field][1], strict=True)))
        for field, (dtype, shape) in one.items()
    }


def _padded(rows: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """``rows`` ``[n, …]`` with NaN behind what they hold, up to the ``shape`` of a row."""
    if rows.shape[1:] == shape:
        return rows
    out = np.full((len(rows), *shape), np.nan, rows.dtype)
    out[tuple(slice(size) for size in rows.shape)] = rows
    return out


def _layouts(name: str, entries: Mapping[Path, Entry], padded: bool) -> dict[str, _Fields]:
    """Site → field → (dtype, shape of a row).  Raises ShapeError where two requests disagree, unless rows are
    ``padded`` to the longest."""
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
                if padded and site in out:
                    layout = _widest(layout, out[site])
                    out[site] = layout
                if out.setdefault(site, layout) != layout:
                    key = entry["request"]["key"]
                    held = f"request {key!r} holds {_told(layout)} a row, others {_told(out[site])}"
                    raise ShapeError(name, f"read {name} at {site}: {held}")
    return out


def _told(layout: _Fields) -> str:
    return ", ".join(f"{field} {dtype} {list(shape)}" for field, (dtype, shape) in layout.items())


class _Shards:
    """The files of one site: each holds ``most`` rows, the last of them what is left of ``total``; one is open at a
    time.  Rows come in their order."""

    def __init__(self, paths: list[Path], fields: _Fields, total: int, most: int) -> None:
        self._paths, self._fields, self._total, self._most = paths, fields, total, most
        self._number = 0
        self._writer = self._open()

    def _open(self) -> RowWriter:
        rows = min(self._most, self._total - self._number * self._most)
        return RowWriter(self._paths[self._number], self._fields, rows)

    def write(self, row: int, fields: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put the fields ``[k, …]`` of rows ``row … row+k−1``."""
        count, done = max(map(len, fields.values()), default=0), 0
        while done < count:
            number, at = divmod(row + done, self._most)
            if number != self._number:
                self._writer.close()
                self._number = number
                self._writer = self._open()
            stop = min(count, done + self._most - at)
            for field, array in fields.items():
                self._writer.write(field, at, _padded(array[done:stop], self._fields[field][1]))
            done = stop

    def close(self) -> None:
        self._writer.close()


def _write_sites(name: str, shards: Mapping[str, _Shards], entries: Mapping[Path, Entry]) -> None:
    try:
        row = 0
        for path, entry in entries.items():
            reads = [c["reads"][name] for c in entry["completions"] if name in c["reads"]]
            if not reads:
                continue
            _, tensors = read_header(path)
            # Straight from one file into the other: a request's rows of one site may be many.
            whole = np.asarray(np.memmap(path, np.uint8, "r"))
            for read in reads:
                for site, writer in shards.items():
                    held = read["sites"][site].items()
                    writer.write(row, {field: view(whole, tensors[tensor]) for field, (tensor, _) in held})
                row += read["rows"]
    finally:
        for writer in shards.values():
            writer.close()

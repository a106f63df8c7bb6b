"""The journal of a run: one file per finished request, so that an interrupt leaves only whole requests.

A file is safetensors: its metadata holds everything but the arrays as JSON (one :data:`Entry`), its tensors the read
rows and metric values.  What goes in is already clipped to the rows that count and compared with what was expected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.records import Completion, Finished, Record, Request, Scores
from vtaps.runtime.results.expected import Expected, Lock, caches, expect, fired_positions, point_of
from vtaps.runtime.results.findings import Finding, examine, sites_of
from vtaps.runtime.results.tensors import memory_map, read_header, tensor_dtype, write_tensors
from vtaps.spec.rows import to_ranges

Entry = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]


def file_name(index: int, key: str) -> str:
    """A key may hold any characters, so its file is named by its place in the plan and a digest."""
    return f"{index:07d}-{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}.safetensors"


def encode(lock: Lock, finished: Finished) -> tuple[Entry, Arrays, list[Finding]]:
    """What a journal file holds, its arrays still the record's own memory, and what is wrong with the request."""
    arrays: Arrays = {}
    findings: list[Finding] = []
    completions = []
    for completion in finished.completions:
        expected = expect(lock, finished.request, completion)
        findings += examine(lock, finished.request, completion, expected)
        completions.append(_completion(lock, finished.request, completion, expected, arrays))
    entry: Entry = {
        "request": _request(finished.request),
        "completions": completions,
        "findings": [f.to_json() for f in findings],
    }
    return entry, arrays, findings


def _request(request: Request) -> dict[str, Any]:
    return {
        "key": request.key,
        "arm": request.arm,
        "point": int(request.point),
        "group": request.group,
        "prompt": request.prompt_id,
        "prompt_token_ids": [int(t) for t in request.prompt_token_ids],
        "turns": [[role, int(a), int(b)] for role, a, b in request.turns],
        "columns": dict(request.columns),
        "prompt_text": request.prompt_text,
    }


def _completion(
    lock: Lock, request: Request, completion: Completion, expected: Expected, arrays: Arrays
) -> dict[str, Any]:
    record = completion.record
    # In the order in which the edits apply, which is the arm's.
    names = dict.fromkeys(e["edit"] for e in point_of(lock, request.arm, request.point)["edits"])
    fired = {n: fired_positions(record.fired[n], expected.rows) for n in {**names, **record.fired} if n in record.fired}
    metrics: dict[str, Any] = {}
    for name, (positions, values) in record.metrics.items():
        kept = positions < expected.rows
        metrics[name] = {
            "positions": positions[kept].tolist(),
            "values": _keep(arrays, values[kept].astype(np.float32)),
        }
    return {
        "index": int(completion.index),
        "token_ids": [int(t) for t in completion.token_ids],
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "logprobs": None if completion.logprobs is None else [float(v) for v in completion.logprobs],
        "overridden": sorted(int(s) for s in set(record.overridden) if s < len(completion.token_ids)),
        "fired": {n: to_ranges(p) for n, p in fired.items()},
        "edits": {
            n: [len(fired.get(n, ())), len(expected.edits.get(n, ()))]
            for n in [*expected.edits, *(n for n in fired if n not in expected.edits)]
        },
        **({"cached": {"rows": _held(record, expected.rows), "edits": dict(expected.cached)}} if caches(lock) else {}),
        "overrides": {
            n: [sum(completion.token_ids[s] == t for s, t in tokens), len(tokens)]
            for n, tokens in expected.overrides.items()
        },
        "metrics": metrics,
        "gates": {
            name: _scores(record.gates[name], expected.rows, arrays) for name in expected.gates if name in record.gates
        },
        "reads": _reads(lock, completion, expected, arrays),
    }


def _held(record: Record, count: int) -> int:
    """How many of the rows came from the prefix cache."""
    return sum(max(0, min(b, count) - a) for a, b in record.cached)


def _scores(scores: Scores, count: int, arrays: Arrays) -> dict[str, Any]:
    kept = scores.positions < count
    return {
        "positions": scores.positions[kept].tolist(),
        "scores": _keep(arrays, _chosen(np.ascontiguousarray(scores.scores), kept)),
        "passed": to_ranges(scores.positions[kept & scores.passed]),
        # JSON has no NaN, and a score may be none.
        "value": None if scores.value is None else repr(scores.value),
    }


def _reads(lock: Lock, completion: Completion, expected: Expected, arrays: Arrays) -> dict[str, Any]:
    """Reads whose sites all hold the same rows; :func:`examine` has reported the others."""
    out: dict[str, Any] = {}
    for name in expected.reads:
        sites = sites_of(lock, completion, name)
        if sites is None or len(sites) != len(lock["reads"][name]["sites"]):
            continue
        first = next(iter(sites.values())).positions
        mean = lock["reads"][name]["kind"] == "mean"
        kept = np.ones(1, np.bool_) if mean else first < expected.rows
        if any(not np.array_equal(r.positions, first) for r in sites.values()) or not len(first):
            continue
        out[name] = {
            "rows": int(kept.sum()),
            "positions": None if mean else first[kept].tolist(),
            "sites": {
                site: {
                    field: [_keep(arrays, _chosen(a, kept)), tensor_dtype(a, rows.dtype)]
                    for field, a in rows.values.items()
                }
                for site, rows in sites.items()
            },
        }
    return out


def _keep(arrays: Arrays, array: npt.NDArray[Any]) -> str:
    name = str(len(arrays))
    arrays[name] = array
    return name


def _chosen(array: npt.NDArray[Any], kept: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """The rows that are kept, without a copy where they are the first ones: positions are sorted."""
    count = int(kept.sum())
    return array[:count] if kept[:count].all() else array[kept]


def write_entry(path: Path, entry: Entry, arrays: Arrays) -> None:
    """Whole or not at all; nothing is held beside the arrays.  Raises OSError."""
    write_atomically(path, lambda fd: write_tensors(fd, arrays, {"vtaps": json.dumps(entry)}))


def read_entry(path: Path) -> Entry:
    """Everything but the arrays.  Raises ValueError where the file is not whole."""
    metadata, _ = read_header(path)
    try:
        entry: Entry = json.loads(metadata["vtaps"])
    except KeyError as e:
        raise ValueError(f"{path} is not a journal file") from e
    return entry


class Entries(Mapping[Path, Entry]):
    """The journal in the order of the plan; each entry is read when it is asked for and not kept."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __getitem__(self, path: Path) -> Entry:
        return read_entry(path)

    def __iter__(self) -> Iterator[Path]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def rows_of(path: Path, read: str) -> tuple[list[int], Arrays] | None:
    """Positions of a read's rows in a journal file and the rows, site → ``[rows, width]``, of the first completion;
    None where it kept none."""
    found = read_entry(path)["completions"][0]["reads"].get(read)
    if found is None or found["positions"] is None:
        return None
    _, tensors = read_header(path)
    sites = {site: memory_map(path, tensors[fields["rows"][0]]) for site, fields in found["sites"].items()}
    return found["positions"], sites


def mean_of(path: Path, read: str) -> Iterator[tuple[int, Mapping[str, npt.NDArray[np.float32]]]]:
    """Of each completion in a journal file that kept a mean: how many rows it is of, and site → ``[width]``."""
    _, tensors = read_header(path)
    for completion in read_entry(path)["completions"]:
        if read in completion["reads"]:
            fields = completion["reads"][read]["sites"]
            first = next(iter(fields.values()))
            count = int(memory_map(path, tensors[first["count"][0]])[0])
            yield count, {site: memory_map(path, tensors[f["mean"][0]])[0] for site, f in fields.items()}


def write_atomically(path: Path, data: bytes | Callable[[int], None]) -> None:
    """``path`` holds either what it held before or all of ``data``, or what that writes to a descriptor, also after a
    power cut."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as f:
        if isinstance(data, bytes):
            f.write(data)
            f.flush()
        else:
            data(f.fileno())
        os.fsync(f.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def to_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=True) + "\n").encode()

"""Records on the wire between a worker and the driver: one safetensors buffer, an index in its metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from vtaps.runtime.records import ReadRows, Record
from vtaps.runtime.rowtable import RequestKey


def pack(records: Iterable[tuple[RequestKey, Record]]) -> bytes:
    """Arrays keep their dtype; names are numbers and the index says what each is."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    index: list[dict[str, Any]] = []

    def put(array: npt.NDArray[Any]) -> str:
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(array)
        return name

    for (key, child), record in records:
        index.append(
            {
                "key": key,
                "child": child,
                "fired": {name: list(ranges) for name, ranges in record.fired.items()},
                "overridden": list(record.overridden),
                "metrics": {name: [put(p), put(v)] for name, (p, v) in record.metrics.items()},
                "reads": [
                    [read, site, put(r.positions), r.dtype, {f: put(a) for f, a in r.values.items()}]
                    for (read, site), r in record.reads.items()
                ],
            }
        )
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    return save(arrays)


def unpack(payload: bytes) -> dict[RequestKey, Record]:
    arrays: Mapping[str, npt.NDArray[Any]] = load(payload)
    out: dict[RequestKey, Record] = {}
    for item in json.loads(arrays["index"].tobytes()):
        out[item["key"], item["child"]] = Record(
            fired={name: tuple((a, b) for a, b in ranges) for name, ranges in item["fired"].items()},
            reads={
                (read, site): ReadRows(arrays[positions], {f: arrays[n] for f, n in values.items()}, dtype)
                for read, site, positions, dtype, values in item["reads"]
            },
            metrics={name: (arrays[p], arrays[v]) for name, (p, v) in item["metrics"].items()},
            overridden=tuple(item["overridden"]),
        )
    return out

"""What a step's reads and metrics put out: grouped, shipped to the host, split by request."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vtaps.runtime.block import ReadStep
from vtaps.runtime.lens import Lens
from vtaps.runtime.program import Program, ReadEntry
from vtaps.runtime.records import ReadRows, Record
from vtaps.runtime.rowtable import Chunk, Fill, Ints, Live, MetricFill, TableError

Array = npt.NDArray[Any]

PENDING_ROWS = 64
"""Generated rows that a mean keeps apart before they are summed: vLLM may compute that many past a stop at most."""

FIELD_OF = {"rows": "rows", "norm": "norm", "project": "project", "mean": "sum"}


@dataclass
class _Shipment:
    """Host tensors that are complete once ``event`` (None: at once) has passed."""

    fill: Fill | None
    sites: tuple[str, ...]
    fields: dict[str, Tensor]
    event: Any
    metrics: Sequence[tuple[MetricFill, Tensor]] = ()


class Harvest:
    """Collects the steps of one worker; nothing it keeps aliases a tensor of the model."""

    def __init__(self, program: Program, device: torch.device, lens: Lens | None) -> None:
        self.program = program
        self.lens = lens
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: deque[_Shipment] = deque()
        self.dtypes: dict[tuple[str, str], str] = {}

    def take(self, fills: Sequence[tuple[Fill, ReadStep]]) -> None:
        """Group what the taps put out by shape, project the lenses, start the way to the host."""
        for fill, step in fills:
            entry = self.program.reads[fill.name]
            for names, memory in step.groups.values():
                stacked = memory[:, : len(names)]
                dtype = str(stacked.dtype).removeprefix("torch.")
                self.dtypes.update(((fill.name, site), dtype) for site in names)
                self._ship(_Shipment(fill, tuple(names), self._fields(entry, stacked), None))
            if entry.kind == "mean":
                for part in fill.parts:
                    part.live.counted[fill.name] = int(part.positions[-1]) + 1

    def measure(self, fills: Sequence[MetricFill], logits: Tensor) -> None:
        """Metrics of the sampled rows from the model's logits ``[requests, vocab]``, float32 and untouched."""
        if not fills:
            return
        rows = np.unique(np.concatenate([f.rows for f in fills]))
        picked = logits.index_select(0, torch.from_numpy(rows).to(logits.device)).float()
        total: Tensor | None = None
        values: list[tuple[MetricFill, Tensor]] = []
        for fill in fills:
            entry = self.program.metrics[fill.name]
            mine = torch.from_numpy(np.searchsorted(rows, fill.rows)).to(logits.device)
            chosen = picked[mine][:, list(entry.ids)]
            if entry.kind == "logprob":
                if total is None:
                    total = torch.logsumexp(picked, dim=-1)
                value = chosen[:, 0] - total[mine]
            elif entry.kind == "logit_diff":
                value = chosen[:, 0] - chosen[:, 1]
            else:
                value = (picked[mine] > chosen).sum(-1).float()
            values.append((fill, value))
        self._ship(_Shipment(None, (), {}, None, values))

    def _fields(self, entry: ReadEntry, stacked: Tensor) -> dict[str, Tensor]:
        """``stacked`` ``[n, sites, …]`` → field → ``[n, sites, …]``."""
        if entry.kind != "lens":
            return {FIELD_OF[entry.kind]: stacked}
        assert self.lens is not None, "a program with a lens has its norm"
        n, sites = stacked.shape[:2]
        found = self.lens.read(stacked.flatten(0, 1), top=entry.top, ids=entry.ids)
        return {name: value.unflatten(0, (n, sites)) for name, value in found.items()}

    def _ship(self, shipment: _Shipment) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                shipment.fields = {name: _to_host(t, self._stream) for name, t in shipment.fields.items()}
                shipment.metrics = [(f, _to_host(t, self._stream)) for f, t in shipment.metrics]
                shipment.event = self._stream.record_event()
        self._pending.append(shipment)
        self.settle(wait=False)

    def settle(self, *, wait: bool) -> None:
        """Split what has arrived by request; with ``wait``, everything."""
        while self._pending:
            first = self._pending[0]
            if first.event is not None:
                if not wait and not first.event.query():
                    return
                first.event.synchronize()
            self._split(self._pending.popleft())

    def _split(self, shipment: _Shipment) -> None:
        for measured, value in shipment.metrics:
            for live, position, number in zip(measured.lives, measured.positions, value.tolist(), strict=True):
                live.metrics.setdefault(measured.name, []).append((position, number))
        if shipment.fill is None:
            return
        fill = shipment.fill
        arrays = {name: _numpy(t) for name, t in shipment.fields.items()}
        key = (fill.name, shipment.sites)
        if self.program.reads[fill.name].kind == "mean":
            _split_sums(fill, key, arrays["sum"])
            return
        for part in fill.parts:
            # A slice would keep the whole batch alive for as long as its longest request.
            own = {name: a if len(fill.parts) == 1 else a[part.start : part.stop].copy() for name, a in arrays.items()}
            part.live.chunks.setdefault(key, []).append((part.positions, own))


def _split_sums(fill: Fill, key: tuple[str, tuple[str, ...]], sums: Array) -> None:
    for part in fill.parts:
        mine: list[Chunk] = part.live.chunks.setdefault(key, [])
        for number, (start, stop) in enumerate(fill.segments):
            if part.start <= start < part.stop:
                positions = part.positions[start - part.start : stop - part.start]
                mine.append((positions, {"sum": sums[number].copy()}))
        if len(mine) > 2 * PENDING_ROWS:
            old = mine[: len(mine) - PENDING_ROWS]
            mine[: len(old)] = [_fold(old)]


def _fold(chunks: Sequence[Chunk]) -> Chunk:
    total: Array = np.stack([c[1]["sum"] for c in chunks]).sum(0, dtype=np.float32)
    return np.concatenate([c[0] for c in chunks]), {"sum": total}


def _to_host(t: Tensor, stream: Any) -> Tensor:
    host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
    host.copy_(t, non_blocking=True)
    t.record_stream(stream)
    return host


def _numpy(t: Tensor) -> Array:
    """numpy has no bfloat16: its bits travel as uint16."""
    array: Array = t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()
    return array


def record_of(live: Live, generated: int, dtypes: Mapping[tuple[str, str], str], program: Program) -> Record:
    """What a request of ``generated`` tokens put out: rows past P + n − 2 were computed after its stop and do not
    count.  ``dtypes``: (read, site) → dtype of its rows.

    Raises TableError where a mean has already summed such rows.
    """
    stop = live.prompt + max(generated, 1) - 1
    reads: dict[tuple[str, str], ReadRows] = {}
    for (read, sites), chunks in live.chunks.items():
        if program.reads[read].kind == "mean":
            reads.update(_means(read, sites, chunks, stop))
            continue
        positions = np.concatenate([c[0] for c in chunks])
        chosen = _latest(positions, stop)
        if not len(chosen):
            continue
        fields = {name: np.concatenate([c[1][name] for c in chunks])[chosen] for name in chunks[0][1]}
        for number, site in enumerate(sites):
            values = {name: a[:, number] for name, a in fields.items()}
            dtype = dtypes[read, site] if "rows" in values else "float32"
            reads[read, site] = ReadRows(positions[chosen], values, dtype)
    metrics = {}
    for name, pairs in live.metrics.items():
        kept = dict(sorted((p, v) for p, v in dict(pairs).items() if p < stop))
        metrics[name] = (np.array(list(kept), np.int64), np.array(list(kept.values()), np.float32))
    return Record(
        fired=live.ranges_fired(stop),
        reads=reads,
        metrics=metrics,
        overridden=tuple(sorted(s for s in live.overridden if s < generated)),
    )


def _latest(positions: Ints, stop: int) -> Ints:
    """Indices that sort ``positions`` below ``stop``; of a repeated one (after preemption) the later counts."""
    unique, last = np.unique(positions[::-1], return_index=True)
    return (len(positions) - 1 - last)[unique < stop]


def _means(read: str, sites: tuple[str, ...], chunks: Sequence[Chunk], stop: int) -> dict[tuple[str, str], ReadRows]:
    kept = [c for c in chunks if c[0][0] < stop]
    if not kept:
        return {}
    positions, fields = _fold(kept)
    if positions.max() >= stop:
        raise TableError(f"read {read}: rows computed after a stop are already part of the mean")
    count = np.array([len(positions)], np.int64)
    values = fields["sum"] / np.float32(len(positions))
    return {
        (read, site): ReadRows(np.sort(positions), {"mean": values[n : n + 1], "count": count}, "float32")
        for n, site in enumerate(sites)
    }

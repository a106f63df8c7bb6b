"""What a step's reads and metrics put out, on its way to the requests: slots, host memory, records.

Rows stay in the slots of their ring until enough have gathered or somebody asks: then they leave in one piece, on a
stream of their own, and a thread sorts them by request.  A slot is written again only after it has left.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vtaps.runtime.faults import of_device, said
from vtaps.runtime.fills import Fill, MetricFill, lives_of
from vtaps.runtime.lens import Lens
from vtaps.runtime.live import Live, TableError
from vtaps.runtime.marks import Marks
from vtaps.runtime.metrics import Metrics, deliverer
from vtaps.runtime.narrow import as_numpy, narrowed
from vtaps.runtime.probes import Probe, applied
from vtaps.runtime.program import Program
from vtaps.runtime.rings import Ring, Taken, neighbours, sorter
from vtaps.runtime.sae import Encoder, encoded
from vtaps.runtime.spool import Spool
from vtaps.runtime.store import sums_of

Array = npt.NDArray[Any]

GATHERED_BYTES = 4 << 20
"""A ring is emptied once this much has gathered, or half of its slots are taken: what is still there when the last
request ends is waited for."""
LENS_ROWS = 32
"""Rows of the stream that go through the unembedding, or an SAE's encoder, together, where there are as many."""
PIECE_BYTES = 32 << 20
"""What leaves in one copy at most."""
ON_WAY_BYTES = 1 << 30
"""What has left the device and is not sorted yet, at most: where the rows go to a disk that is slower, steps wait."""
GATHERED_METRICS = 256
FIELD_OF = {"norm": "norm", "project": "project", "probe": "probe", "python": "python", "gate": "gate"}


@dataclass
class _Load:
    """Host memory that is complete once ``event`` (None: at once) has passed, what is done with it then, and whose it
    is."""

    event: Any
    bytes: int
    tensors: Sequence[Tensor]
    deliver: Callable[[Sequence[Array]], None]
    lives: Sequence[Live]


class Harvest:
    """Collects the steps of one worker; nothing it keeps aliases a tensor of the model."""

    def __init__(
        self,
        program: Program,
        device: torch.device,
        lens: Lens | None,
        probes: dict[str, dict[str, Probe]],
        grow: Callable[[Ring, int], None],
        spool: Spool,
        saes: Mapping[str, Mapping[str, Encoder]],
    ) -> None:
        """``probes`` and ``saes``: by read and site; ``grow``: :meth:`Boards.grow`; ``spool``: where the rows wait to
        be collected."""
        self.program, self.spool = program, spool
        self._grow = grow
        self.lens = lens
        self._probes, self._saes = probes, saes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._open: list[Taken] = []
        self._waiting: dict[str, list[Taken]] = {}
        self._events, self._measured = Marks(), Marks()
        self._computed = 0
        self._leaving: deque[tuple[Ring, int, int, Any]] = deque()
        self._metrics = Metrics(program, device)
        self._loads: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._sent = self._sorted = self._on_way = 0
        self._first: deque[tuple[int, int]] = deque()
        """Number of a load that may not be sorted yet, and the first step that it is of."""
        self._arrived = threading.Condition()
        self._failed: BaseException | None = None
        self.lost: deque[tuple[Sequence[Live], Exception]] = deque()
        """What could not be brought to its requests; see :func:`~vtaps.runtime.failing.delivered`."""
        self._thread: threading.Thread | None = None

    def probe(self, read: str, probes: Mapping[str, Probe]) -> None:
        """Other vectors for a read, by site."""
        self._probes[read] = dict(probes)

    # -- before a step

    def open(self, fills: Sequence[tuple[Fill, Ring]], step: int) -> list[tuple[Fill, int]]:
        """Slots for the rows of a new plan's reads: the fills with the first slot of each.  Raises TableError with the
        requests of a fill that gets none; then no fill has any."""
        self._shut()
        for fill, ring in fills:
            try:
                start = self._take(ring, len(fill.rows))
            except Exception as error:
                self._open = []
                raise TableError(str(error) if isinstance(error, TableError) else said(error), fill.lives) from error
            self._open.append(Taken(fill, ring, start, 0, step))
        return [(t.fill, t.start) for t in self._open]

    def move(self, shift: int, step: int) -> list[tuple[Fill, int]]:
        """Slots for the same rows one step later."""
        out = []
        for number in range(len(self._open)):
            ring, count = self._open[number].ring, self._open[number].count
            start = self._take(ring, count)
            taken = self._open[number]
            if start == taken.stop:
                taken.repeats += 1
            else:
                self._waiting.setdefault(ring.key, []).append(taken)
                self._open[number] = Taken(taken.fill, ring, start, shift, step)
            out.append((taken.fill, start))
        return out

    def _shut(self) -> None:
        for taken in self._open:
            self._waiting.setdefault(taken.ring.key, []).append(taken)
        self._open = []

    def _take(self, ring: Ring, count: int) -> int:
        if count > ring.slots:
            # What its slots hold leaves before they are other memory.
            self._flush(ring)
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
            self._grow(ring, count)
        start = ring.take(count)
        stop = start + count
        held = [*self._waiting.get(ring.key, ()), *(t for t in self._open if t.ring is ring)]
        if any(t.start < stop and start < t.stop for t in held):
            self._flush(ring)
        if self._leaving:
            kept: deque[tuple[Ring, int, int, Any]] = deque()
            for other, a, b, event in self._leaving:
                if other is ring and a < stop and start < b:
                    torch.cuda.current_stream().wait_event(event)
                elif not event.query():
                    kept.append((other, a, b, event))
            self._leaving = kept
        return start

    # -- after a step

    def computed(self, step: int) -> None:
        """The forward of ``step`` is on its way.  Send what has gathered, where it is enough: what is enough depends
        on the plans alone, so that all ranks send, and run the lens, in the same step."""
        self._computed = step
        if self._stream is not None and self._open:
            self._events.put(step)
        for taken in list(self._open):
            ring = taken.ring
            rows = taken.repeats * taken.count
            rows += sum(t.repeats * t.count for t in self._waiting.get(ring.key, ()))
            if ring.kind in ("lens", "features"):
                # The locations of a lens share one matrix; each may have an SAE of its own.
                enough = rows * (ring.sites if ring.kind == "lens" else 1) >= LENS_ROWS
            else:
                enough = rows * ring.row_bytes >= GATHERED_BYTES
            if enough or 2 * rows >= ring.slots:
                self._flush(ring)

    def measure(self, fills: Sequence[MetricFill], shift: int, logits: Tensor, step: int) -> None:
        """Metrics of the sampled rows from the model's logits ``[requests, vocab]`` of ``step``, float32 and
        untouched."""
        if not fills:
            return
        self._metrics.measure(fills, shift, logits, step)
        if self._stream is not None:
            self._measured.put(step)
        if len(self._metrics) >= GATHERED_METRICS:
            self._flush_metrics()

    @torch.inference_mode()  # vLLM runs its models so, and the lens calls one
    def settle(self, step: int | None = None, seen: int = 0) -> None:
        """Send everything of the steps up to ``step`` (None: all), and wait until it is with its requests, as is what
        has been sent of the steps up to ``seen``; or in :attr:`lost`.  Raises what the device did wrong."""
        # A step that is still being computed has not written all of its slots.
        until = self._computed if step is None else min(step, self._computed)
        held = [*self._open, *(t for waiting in self._waiting.values() for t in waiting)]
        for ring in {t.ring.key: t.ring for t in held}.values():
            self._flush(ring, until)
        self._flush_metrics(step)
        with self._arrived:
            # What later steps sent may still be computed.
            needed = max((n for n, first in self._first if step is None or first <= max(step, seen)), default=0)
            while self._sorted < needed and self._failed is None:
                self._arrived.wait()
            if self._failed is not None:
                raise self._failed

    def close(self) -> None:
        if self._thread is not None:
            self._loads.put(None)
            self._thread.join()
            self._thread = None

    # -- on the way

    def _flush(self, ring: Ring, step: int | None = None) -> None:
        """Send the rows of a ring up to ``step``; what the open plan adds is another piece."""
        pieces = []
        later = []
        for taken in self._waiting.pop(ring.key, []):
            now, rest = (taken, None) if step is None else taken.split(step)
            pieces.append(now)
            if rest is not None and rest.repeats:
                later.append(rest)
        if later:
            self._waiting[ring.key] = later
        for number, taken in enumerate(self._open):
            if taken.ring is ring:
                now, self._open[number] = taken.split(taken.step + taken.repeats if step is None else step)
                pieces.append(now)
        after = self._events.after(step)
        for run in neighbours([p for p in pieces if p.repeats]):
            with self._or_lost(lives_of([taken.fill for taken in run])):
                self._send_run(ring, run, after)

    @contextmanager
    def _or_lost(self, lives: Sequence[Live]) -> Iterator[None]:
        """What is being sent of ``lives`` is in no ring any more: where that fails, they have failed.  Of a device that
        failed, and where the user interrupts, nothing collected later would be whole."""
        try:
            yield
        except Exception as error:
            if self._failed is not None or of_device(error):
                self._failed = self._failed or error
                raise
            self.lost.append((lives, error))
        except BaseException:
            self._failed = self._failed or RuntimeError("rows were lost: interrupted on their way")
            raise

    def _send_run(self, ring: Ring, run: Sequence[Taken], after: Any) -> None:
        lives = lives_of([taken.fill for taken in run])
        for sites, memory in ring.groups:
            if ring.kind == "mean":
                self._send_sums(sites, memory, run, after)
                continue
            start, stop = run[0].start, run[-1].stop
            if ring.kind in ("lens", "features"):
                with self._aside(after):
                    fields = self._looked(ring, sites, memory[start:stop])
                deliver = sorter(ring, sites, list(fields), run, start, "float32", self.spool, self.lost)
                self._send(list(fields.values()), deliver, after, run[0].step, lives)
                continue
            row = memory[0].numel() * memory.element_size()
            step = max(1, PIECE_BYTES // row)
            for first in range(start, stop, step):
                last = min(stop, first + step)
                with self._aside(after):
                    values, dtype = self._reduced(ring, sites, memory[first:last])
                deliver = sorter(ring, sites, list(values), run, first, dtype, self.spool, self.lost)
                self._send(list(values.values()), deliver, after, run[0].step, lives)
        if self._stream is not None:
            event = self._stream.record_event()
            self._leaving.append((ring, run[0].start, run[-1].stop, event))

    def _looked(self, ring: Ring, sites: Sequence[str], rows: Tensor) -> dict[str, Tensor]:
        """``rows`` ``[n, sites, width]`` → what a lens or an SAE makes of them, each field ``[n, sites, …]``."""
        entry = self.program.reads[ring.read]
        if ring.kind == "features":
            return encoded(rows, [self._saes[ring.read][site] for site in sites], entry.top)
        assert self.lens is not None, "a program with a lens has its norm"
        found = self.lens.read(rows.flatten(0, 1), top=entry.top, ids=entry.ids, unembedded=ring.sampled)
        return {n: v.unflatten(0, rows.shape[:2]) for n, v in found.items()}

    def _reduced(self, ring: Ring, sites: Sequence[str], rows: Tensor) -> tuple[dict[str, Tensor], str]:
        """``rows`` ``[n, sites, width]`` → fields of what the read keeps of each, ``[n, sites, …]``, and the dtype of
        the first of them."""
        if ring.kind == "rows":
            return narrowed(rows, self.program.reads[ring.read].store)
        value = rows
        if ring.kind == "norm":
            value = torch.linalg.vector_norm(rows, dim=-1)
        elif ring.kind in ("project", "probe"):
            value = applied(rows, [self._probes[ring.read][s] for s in sites])
        return {FIELD_OF[ring.kind]: value}, str(value.dtype).removeprefix("torch.")

    def _send_sums(self, sites: tuple[str, ...], memory: Tensor, run: Sequence[Taken], after: Any) -> None:
        """A request's prompt rows are summed at once; each generated row stays alone until it is known to count."""
        for taken in run:
            read = taken.fill.name
            for repeat in range(taken.repeats):
                base = taken.start + repeat * taken.count
                for part in taken.fill.parts:
                    positions = part.positions + taken.shift + repeat
                    split = int(np.count_nonzero(positions < part.live.prompt))
                    bounds = [(0, split)] if split else []
                    bounds += [(i, i + 1) for i in range(split, len(positions))]
                    first = base + part.start
                    with self._aside(after):
                        totals = torch.stack([memory[first + a : first + b].sum(0) for a, b in bounds])
                    kept = sums_of(part.live, read, sites)

                    def deliver(
                        arrays: Sequence[Array], kept: Any = kept, positions: Any = positions, bounds: Any = bounds
                    ) -> None:
                        for number, (a, b) in enumerate(bounds):
                            kept.add(positions[a:b], arrays[0][number].copy())

                    self._send([totals], deliver, after, taken.step + repeat, [part.live])

    def _flush_metrics(self, step: int | None = None) -> None:
        """Send the metrics of the steps up to ``step``."""
        metrics = self._metrics.take(step)
        if not metrics:
            return
        after = self._measured.after(step)

        with self._or_lost(lives_of([m.fill for m in metrics])):
            with self._aside(after):
                values = torch.cat([m.value for m in metrics])
                for m in metrics:
                    if self._stream is not None:
                        m.value.record_stream(self._stream)
            self._send([values], deliverer(metrics), after, metrics[0].step, lives_of([m.fill for m in metrics]))

    def _aside(self, after: Any) -> Any:
        """Work off the model's stream, once ``after`` has passed."""
        if self._stream is None:
            return nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def _send(
        self,
        tensors: Sequence[Tensor],
        deliver: Callable[[Sequence[Array]], None],
        after: Any,
        first: int,
        lives: Sequence[Live],
    ) -> None:
        """Bring ``tensors``, of ``first`` and later steps, to the host, where ``deliver`` takes them to ``lives``."""
        if self._stream is None:
            if self._failed is not None:
                raise self._failed
            deliver([as_numpy(t) for t in tensors])
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._sort, name="vtaps-harvest", daemon=True)
            self._thread.start()
        size = sum(t.numel() * t.element_size() for t in tensors)
        with self._arrived:
            while self._on_way and self._on_way + size > ON_WAY_BYTES and self._failed is None:
                self._arrived.wait()
            if self._failed is not None:
                raise self._failed
            self._on_way += size
        with self._aside(after):
            host = [_to_host(t, self._stream) for t in tensors]
            event = self._stream.record_event()
        self._sent += 1
        while self._first and self._first[0][0] <= self._sorted:
            self._first.popleft()
        self._first.append((self._sent, first))
        self._loads.put(_Load(event, size, host, deliver, lives))

    def _sort(self) -> None:
        while (load := self._loads.get()) is not None:
            try:
                load.event.synchronize()
                load.deliver([as_numpy(t) for t in load.tensors])
            except BaseException as error:
                if isinstance(error, Exception) and not of_device(error):
                    self.lost.append((load.lives, error))
                else:
                    self._failed = self._failed or error
            with self._arrived:
                self._sorted += 1
                self._on_way -= load.bytes
                self._arrived.notify_all()
            del load  # it holds requests, and the next one may be long in coming


def _to_host(t: Tensor, stream: Any) -> Tensor:
    host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
    host.copy_(t, non_blocking=True)
    t.record_stream(stream)
    return host

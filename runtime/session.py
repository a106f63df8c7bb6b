"""One worker's block at work, from the model's load to the last record; it knows torch but not vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vtaps.runtime.block import Block, EditStep, ReadStep, Tap
from vtaps.runtime.harvest import Harvest, record_of
from vtaps.runtime.hooks import BlockFault, StepSize, install
from vtaps.runtime.lens import Lens
from vtaps.runtime.program import USES_VECTOR, LockError, Program, load_program
from vtaps.runtime.rowtable import Fill, RequestKey, RowTable, Scheduled, StepPlan
from vtaps.runtime.transport import pack
from vtaps.spec import digests

MANIFEST = "VTAPS_MANIFEST"
"""Environment variable that holds the path of the manifest, in every process of the engine."""


@dataclass(frozen=True)
class Manifest:
    """Where an engine's workers find their block and lock; ``folder`` is what the lock's file names start from."""

    block: Path
    lock: Path
    folder: Path

    def write(self, path: Path) -> None:
        data = {"block": str(self.block), "lock": str(self.lock), "folder": str(self.folder)}
        path.write_text(json.dumps(data), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Manifest:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(Path(data["block"]), Path(data["lock"]), Path(data["folder"]))


def import_block(path: Path, digest: str) -> Block:
    """Import a block file as a module named by its digest.

    A real file in ``sys.modules``: tracebacks show its lines. Raises LockError where the file is not the one that
    was locked, or holds no block.
    """
    content = path.read_bytes()
    if digests.of_bytes(content) != digest:
        raise LockError("block.digest", f"{path.name} is not the block that was locked; compile again")
    name = f"vtaps_block_{digest.removeprefix('sha256:')[:16]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    block = getattr(sys.modules[name], "BLOCK", None)
    if not isinstance(block, Block):
        raise LockError("block", f"{path.name} defines no BLOCK")
    return block


class Session:
    """What one worker holds: program, block, taps, row table, harvest.

    Made in two steps: the block is imported before the model loads, and attached to it afterwards.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.program: Program = load_program(manifest.lock, manifest.folder)
        self.block = import_block(manifest.block, self.program.block_digest)
        if self.block.structure != self.program.structure:
            raise LockError("block.structure", "the block and the lock are of two compilations; compile again")
        self.table = RowTable(self.program)
        self.taps = {name: Tap(name) for name in self.block.locations}
        self.size = StepSize()
        self.installed: tuple[str, ...] = ()
        self._plan: StepPlan | None = None
        self._edits: list[tuple[Fill, EditStep]] = []
        self._reads: list[tuple[Fill, ReadStep]] = []

    def attach(self, model: nn.Module, compute_logits: Callable[[Tensor], Tensor | None]) -> None:
        """Put vectors on the model's device and hooks on its modules.  Raises LockError, InstallError."""
        self.device = next(model.parameters()).device
        self._load_vectors()
        lens = None
        if self.program.lens_norm is not None:
            found = dict(model.named_modules()).get(self.program.lens_norm)
            if found is None:
                raise LockError("lens", f"the model has no module {self.program.lens_norm}")
            lens = Lens(found, compute_logits)
        self.harvest = Harvest(self.program, self.device, lens)
        self.installed = install(self.block, self.program, model, self.taps, self.size)

    def _load_vectors(self) -> None:
        for name, edit in self.program.edits.items():
            if edit.verb not in USES_VECTOR:
                continue
            order = self.program.vectors_of[name]
            for site, used in self.program.used_at.get(name, {}).items():
                width = self.program.sites[site].width
                matrix = np.zeros((len(order), width), np.float32)
                for row, vector in enumerate(order):
                    if vector in used:
                        matrix[row] = self.program.load_vector(vector, self.program.sites[site])
                self._tap(site, f"edits.{name}").vectors[name] = torch.from_numpy(matrix).to(self.device)
        for name, read in self.program.reads.items():
            for site in read.sites if read.kind == "project" else ():
                rows = [self.program.load_vector(v, self.program.sites[site]) for v in read.vectors]
                self._tap(site, f"reads.{name}").probes[name] = torch.from_numpy(np.stack(rows)).to(self.device)

    def _tap(self, site: str, entry: str) -> Tap:
        if site not in self.taps:
            raise LockError(entry, f"the block has no location {site}")
        return self.taps[site]

    def begin(self, batch: Sequence[Scheduled]) -> None:
        """Fill the taps for a step, before its forward.  Raises TableError."""
        self.clear()
        plan = self.table.plan(batch)
        if plan is None:
            return
        self._plan = plan
        self.size.rows, self.size.requests = plan.total, len(batch)
        for fill in plan.edits:
            step = EditStep(self._rows(fill), self._column(fill.coefficient), self._index(fill.vector))
            self._edits.append((fill, step))
            for site in fill.sites:
                tap = self._tap(site, f"edits.{fill.name}")
                tap.edits[fill.name] = step
                tap.live = True
        for fill in plan.reads:
            read = ReadStep(self._rows(fill), fill.segments, len(fill.sites))
            self._reads.append((fill, read))
            for site in fill.sites:
                tap = self._tap(site, f"reads.{fill.name}")
                tap.reads[fill.name] = read
                tap.live = True

    def end(self, logits: Tensor | None) -> None:
        """Take what the step put out; ``logits`` ``[requests, vocab]`` as the model gave them, None on a worker
        without them.  Raises BlockFault where something planned did not happen."""
        plan, edits, reads = self._plan, self._edits, self._reads
        # Neutral first: the lens calls the unembedding, which may be a location too.
        self.clear(keep_replacements=True)
        if plan is None:
            return
        for fill, step in edits:
            if step.fired != len(fill.sites):
                raise BlockFault(f"edit {fill.name} acted at {step.fired} of {len(fill.sites)} locations")
            for part in fill.parts:
                part.live.fired.setdefault(fill.name, []).append(part.positions)
        for fill, read in reads:
            if len(read.seen) != len(fill.sites):
                missing = [site for site in fill.sites if site not in read.seen]
                raise BlockFault(f"read {fill.name} saw nothing at {', '.join(missing)}")
        self.harvest.take(reads)
        if logits is not None:
            self.harvest.measure(plan.metrics, logits)

    def replace(self, sampled: Tensor) -> None:
        """Write the overrides of the step into ``sampled`` ``[requests]``, in place."""
        plan, self._plan = self._plan, None
        if plan is None or not plan.replacements:
            return
        rows = torch.tensor([r.row for r in plan.replacements], device=sampled.device)
        tokens = torch.tensor([r.token for r in plan.replacements], device=sampled.device, dtype=sampled.dtype)
        sampled.index_copy_(0, rows, tokens)
        for replacement in plan.replacements:
            replacement.live.overridden.add(replacement.step)

    def clear(self, *, keep_replacements: bool = False) -> None:
        """Make every tap neutral: dummy runs and the lens see a model without a block."""
        for steps in (self._edits, self._reads):
            for fill, _ in steps:
                for site in fill.sites:
                    self.taps[site].clear()
        self._edits, self._reads = [], []
        if not keep_replacements:
            self._plan = None

    def collect(self, wanted: Iterable[tuple[str, int, int]]) -> bytes:
        """Records of ``(key, child, generated tokens)``, packed; they are forgotten here.  Raises TableError."""
        self.harvest.settle(wait=True)
        records: list[tuple[RequestKey, Any]] = []
        for key, child, generated in wanted:
            live = self.table.collect((key, child))
            records.append((live.key, record_of(live, generated, self.harvest.dtypes, self.program)))
        return pack(records)

    def handshake(self) -> dict[str, Any]:
        return {
            "block": self.program.block_digest,
            "structure": self.program.structure,
            "locations": list(self.installed),
            "pid": os.getpid(),
        }

    def _rows(self, fill: Fill) -> slice | Tensor:
        span = fill.span
        return torch.from_numpy(fill.rows).to(self.device, non_blocking=True) if span is None else span

    def _column(self, value: Any) -> float | Tensor:
        if isinstance(value, float):
            return value
        return torch.from_numpy(value).unsqueeze(-1).to(self.device, non_blocking=True)

    def _index(self, value: Any) -> int | Tensor:
        return value if isinstance(value, int) else torch.from_numpy(value).to(self.device, non_blocking=True)

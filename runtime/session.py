"""One worker's block at work, from the model's load to the last record; it knows torch but not vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load
from torch import Tensor, nn

from vtaps.runtime import failing, kernels, ops
from vtaps.runtime.axis import Axis
from vtaps.runtime.block import Location, Note
from vtaps.runtime.boards import Boards
from vtaps.runtime.faults import Fault
from vtaps.runtime.fills import NOTHING, Fill, StepPlan, lives_of
from vtaps.runtime.functions import FunctionFault, Functions
from vtaps.runtime.harvest import Harvest
from vtaps.runtime.hooks import Act, BlockFault, describe, install
from vtaps.runtime.launches import At, Launches
from vtaps.runtime.lens import Lens
from vtaps.runtime.live import Batch, RequestKey, Scheduled
from vtaps.runtime.lockfile import load_program
from vtaps.runtime.manifest import Manifest, import_block
from vtaps.runtime.memory import Limits
from vtaps.runtime.parts import Ranks, localized
from vtaps.runtime.probes import probes
from vtaps.runtime.program import LockError, Program
from vtaps.runtime.records import Collected, Record
from vtaps.runtime.rowtable import RowTable
from vtaps.runtime.sae import load_saes
from vtaps.runtime.samples import Samples, override
from vtaps.runtime.spool import Spool
from vtaps.runtime.transport import record_of
from vtaps.spec.behind import SAMPLES


class Session:
    """What one worker holds: program, block, tables, requests, harvest.

    Made in two steps: the block is imported before the model loads, and attached to it afterwards.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.program: Program = load_program(manifest.lock, manifest.folder)
        self.block = import_block(manifest.block, self.program.block_digest)
        if self.block.structure != self.program.structure:
            raise LockError("block.structure", "the block and the lock are of two compilations; compile again")
        self.functions = Functions(self.program)
        self.table = RowTable(self.program)
        self.spool = Spool(manifest.spool, manifest.memory, manifest.shared)
        self.installed: tuple[str, ...] = ()
        self._plan: StepPlan | None = None
        self._shift = 0
        self._slots: dict[tuple[str, bool], int] = {}
        self._samples = Samples()
        self._active: tuple[StepPlan | None, frozenset[int]] = (None, frozenset())
        self._muted = self._sampling = self.proving = False

    def attach(
        self,
        model: nn.Module,
        compute_logits: Callable[[Tensor], Tensor | None],
        limits: Limits,
        dtype: torch.dtype,
        inside: Callable[[str], bool] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Make the tables on the model's device and put the block into its modules.

        ``inside`` says which modules a compiler will trace: there the block becomes operations in the graph, elsewhere
        (and without it, everywhere) Python calls them.  ``ranks``: the group that this worker is one of.  Raises
        LockError, InstallError, BlockFault.
        """
        self.ranks = ranks
        if ranks is not None:
            self._localize(ranks)
        self.device = next(model.parameters()).device
        self.modules, self._compute_logits, self._limits = dict(model.named_modules()), compute_logits, limits
        self.boards = Boards(self.block, self.program, limits, dtype, self.device, self._notes)
        self.harvest = self._harvest(self.program, self.functions)
        self.at = [At(name, *self.boards.find(name), self.program.sites[name].sampled) for name in self.block.locations]
        self._dtype = dtype
        traced = [at.name for at in self.at if inside is not None and inside(self.block.locations[at.name].module)]
        self.breaks = frozenset(at.name for at in self.at if at.name in traced and at.python)
        self.recorded = frozenset(traced) - self.breaks
        self.counts = Launches(self.at, traced, self.recorded, self.boards.seen)
        self.installed = install(self.block, self.program, model, self._act_of)
        self.serve()

    def _localize(self, ranks: Ranks) -> None:
        self.program = localized(self.program, ranks)
        self.block = self.block.only(self.program.sites)
        self.functions, self.table = Functions(self.program), RowTable(self.program)

    def load(self, manifest: Manifest) -> None:
        """Go on with another lock and block of the same structure: other numbers, vectors, rows, arms.

        Nothing is compiled or captured.  Raises LockError for another structure, or while requests are alive.
        """
        if self.table.alive or self.table.done:
            raise LockError("lock", "requests of the one before are still alive")
        new = Session(manifest)
        if (new.program.structure, new.program.mode) != (self.program.structure, self.program.mode):
            raise LockError("block.structure", "it is of another structure; start another engine")
        # Whatever may be refused comes before anything is changed.
        if self.ranks is not None:
            new._localize(self.ranks)
        boards = Boards(new.block, new.program, self._limits, self._dtype, self.device, new._notes)
        harvest = self._harvest(new.program, new.functions)
        self.boards.adopt(boards)
        self.neutral()
        self.harvest.close()
        self.manifest, self.program, self.block, self.table = manifest, new.program, new.block, new.table
        self.functions = new.functions
        self.harvest = harvest

    def _harvest(self, program: Program, functions: Functions) -> Harvest:
        unembed, first = self._compute_logits, (lambda: 0)
        if self.ranks is not None:
            unembed, first = self.ranks.unembed, self.ranks.vocabulary
        lens = Lens.of(program, self.modules, self._quietly(unembed), first)
        saes, functions.autoencoders, self._sae_bytes = load_saes(program, self.device)
        return Harvest(program, self.device, lens, probes(program, self.device), self.boards.grow, self.spool, saes)

    @property
    def device_bytes(self) -> int:
        """Device memory of all tables, vectors, slots and SAEs."""
        return self.boards.bytes + self._sae_bytes

    def serve(self) -> None:
        """Make this the session that the operations of this process look at."""
        ops.serve(self._run, self._act_at)

    def close(self) -> None:
        """Stop the thread of the harvest and leave the operations of this process alone."""
        self.harvest.close()
        ops.leave(self._run)

    def _act_of(self, place: Location) -> Act:
        if place.name not in self.recorded and place.name not in self.breaks:
            return self._act
        # Where an alias is nothing else of the table shares its memory; a tap in a forward has a copy already.
        own = place.residual is not None or place.op is not None or "." not in place.name
        if place.name in self.breaks:
            broken: Act = ops.tap_break if own else ops.break_apart
            return broken
        program = self.at[self.boards.order[place.name]].program
        op: Act = ops.tap_pair if place.residual is not None and program.replaces else ops.tap
        return op if own else ops.apart

    def _act_at(self, number: int, x: Tensor, residual: Tensor | None) -> None:
        self._act(x, residual, number)

    def _act(self, x: Tensor, residual: Tensor | None, number: int) -> None:
        """At a location that Python reaches: nothing where the step has nothing to do there."""
        if self._muted or (number not in self._active[1] and not self.proving):
            return
        # Prompt logprobs use the unembedding too, after the sampled rows have gone through it.
        if self._sampling or not self.at[number].sampled:
            self._run(number, x, residual)

    def _run(self, number: int, x: Tensor, residual: Tensor | None) -> None:
        at = self.at[number]
        site = self.program.sites[at.name]
        rows, width = x.shape[0] if x.dim() else 0, x.shape[-1] if x.dim() else 0
        wide = width == site.width if site.columns is None else width >= site.columns[1]
        needed = self._needed(at)
        if x.dim() != 2 or not wide or rows < needed:
            raise BlockFault(
                f"{at.name}: {site.module} has shape {list(x.shape)} there; [{needed}, {site.width}] was compiled"
            )
        if x.dtype != self._dtype:
            raise BlockFault(f"{at.name}: {site.module} has {x.dtype} there; {self._dtype} was compiled")
        for part in at.parts:
            if isinstance(part, Note):
                self._call(part, at, x, residual)
            else:
                kernels.run(at.board, part, x, residual)

    def _call(self, note: Note, at: At, x: Tensor, residual: Tensor | None) -> None:
        """What Python makes of the step's rows."""
        self.counts.called[at.program.number] += 1
        plan, sampled, site = self._plan or NOTHING, at.sampled, self.program.sites[at.name]
        where = self._shift, x, residual, site, at.program
        name, edits = f"{'edits' if note.verb else 'reads'}.{note.name}", plan.sampled_edits if sampled else plan.edits
        reads, kept = plan.sampled_reads if sampled else plan.reads, None
        try:
            if note.verb:
                let = None if note.when is None else self.boards.let(note.name, sampled)
                failed = self.functions.run(note.name, edits, *where, let)
            else:
                kept, failed = self.functions.read(note.name, reads, *where)
        except FunctionFault as error:
            raise BlockFault(f"{at.name}: {name}: {error}") from error
        if failed:
            failing.functions(self.table, name, at.name, failed, edits, self._shift)
        if kept is not None:
            ring = self.boards.axes[at.sampled].rings[note.name]
            try:
                self.boards.keep(ring, at.name, self._slots[note.name, at.sampled], kept)
            except Exception as error:
                failing.concerned(self.table, lives_of(f for f in reads if f.name == note.name), error)

    def _needed(self, at: At) -> int:
        axis = self.boards.requests if at.sampled else self.boards.tokens
        return axis.dirty

    def _notes(self, place: Location) -> tuple[Note, ...]:
        try:
            return place.notes()
        except Exception as error:
            raise BlockFault(describe(error, place, self.program)) from error

    def _quietly(self, compute_logits: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
        """The unembedding may be a location too, and the lens is not to see it."""

        def quiet(rows: Tensor) -> Tensor | None:
            self._muted = True
            try:
                return compute_logits(rows)
            finally:
                self._muted = False

        return quiet

    # -- a step

    def begin(self, batch: Sequence[Scheduled]) -> None:
        """Fill the tables for a step, before its forward.  A request that it cannot be filled for fails alone."""
        self.step(Batch.of(batch))

    def step(self, batch: Batch) -> None:
        """:meth:`begin` for the batch of a runner."""
        failing.delivered(self.table, self.harvest.lost)
        plan, shift = self.table.step(batch)
        while True:
            try:
                self._prepare(plan, shift)
                return
            except Exception as error:
                plan, shift = failing.unprepared(self.table, plan, shift, error), 0

    def _prepare(self, plan: StepPlan | None, shift: int) -> None:
        self._plan, self._shift, self._sampling = plan, shift, True
        if plan is None:
            self.harvest.open([], self.table.number)
            self.boards.clear()
            self._active = (None, frozenset())
            return
        tokens, requests = self.boards.axes
        if shift:
            first = self.harvest.move(shift, self.table.number)
        else:
            pairs = [(f, tokens.rings[f.name]) for f in plan.reads]
            pairs += [(f, requests.rings[f.name]) for f in plan.sampled_reads]
            first = self.harvest.open(pairs, self.table.number)
        self._slots = {(fill.name, fill.sampled): start for fill, start in first}
        many = len(plan.reads)
        for axis, edits, reads in (
            (tokens, plan.edits, first[:many]), (requests, plan.sampled_edits, first[many:]),
        ):  # fmt: skip
            self._fill(axis, edits, reads, shift)
        if self._active[0] is not plan:
            self._active = (plan, frozenset(self.boards.order[n] for n in self.boards.active(plan)))

    def _fill(self, axis: Axis, edits: Sequence[Fill], reads: Sequence[tuple[Fill, int]], shift: int) -> None:
        if shift:
            axis.move(reads)
        elif edits or reads:
            axis.write(edits, reads)
        else:
            axis.clear()
        if reads or not shift:
            # What was uploaded says of no request gate what it decided.
            axis.gates.tell(axis.board, axis.dirty, edits)

    def passed(self) -> None:
        """A forward has been started, with the tables as they are."""
        self.counts.passed()

    def end(self) -> None:
        """Take what the step's forward puts out.  Raises BlockFault where something planned did not happen."""
        self.passed()
        for number in self._active[1]:
            if not self.counts.in_graph[number] and not self.at[number].sampled:
                self.counts.need(number)
        if self.device.type == "cpu":
            self._compare(self.boards.seen.numpy(), sampled=False)
        if self._plan is not None:
            if not self._shift:
                tokens = self.boards.tokens
                tokens.gates.fold(tokens.board, tokens.dirty, self._plan.reads, tokens.rings)
            if not self._plan.sampled_reads:
                self.harvest.computed(self.table.number)

    def measure(self, logits: Tensor) -> None:
        """Metrics of the step from its logits ``[requests, vocab]``, as the model gave them."""
        for number in self._active[1]:
            if self.at[number].sampled and self.at[number].name != SAMPLES:
                self.counts.need(number)
        if self.device.type == "cpu":
            self._compare(self.boards.seen.numpy(), sampled=True)
        self._sampling = False
        if self._plan is None:
            return
        if self._plan.sampled_reads and not self._plan.samples:
            # What they read was written by the unembedding, after the forward.
            self.harvest.computed(self.table.number)
        try:
            self.harvest.measure(self._plan.metrics, self._shift, logits, self.table.number)
        except Exception as error:
            failing.concerned(self.table, lives_of(self._plan.metrics), error)

    def replace(self, sampled: Tensor) -> None:
        """Write the overrides of the step into ``sampled`` ``[requests]``, in place, and take the reads of it."""
        plan = self._plan
        if plan is None:
            return
        try:
            override(plan.replacements(self._shift), sampled)
            for fill in plan.samples:
                memory = self.boards.requests.rings[fill.name].groups[0][1]
                self._samples.keep(fill, memory, self._slots[fill.name, True], sampled)
            if plan.samples:
                self.harvest.computed(self.table.number)
        except Exception as error:
            failing.concerned(self.table, (*(s[1] for s in plan.speakers), *lives_of(plan.samples)), error)

    def neutral(self) -> None:
        """Select nothing: dummy runs see a model without a block."""
        self.table.close()
        self.harvest.open([], self.table.number)
        self._plan, self._active = None, (None, frozenset())
        self.boards.clear()

    def verify(self) -> None:
        """Every location has been launched as often as steps needed it; waits for the device.  Raises BlockFault."""
        seen = self.boards.seen.cpu().numpy()
        for sampled in (False, True):
            self._compare(seen, sampled=sampled)

    def _compare(self, seen: Any, *, sampled: bool) -> None:
        off = self.counts.off(seen, sampled=sampled)
        if off is None:
            return
        at, more = off
        module = self.program.sites[at.name].module
        raise BlockFault(
            f"{at.name}: {module} was called twice in one step"
            if more
            else f"{at.name}: {module} was not called in a step that needs it"
        )

    # -- results

    def patch(self, name: str, first: int, payload: bytes) -> None:
        """Fill slots of the memory of an edit that sets rows; see :meth:`PatchMemory.write`.  Raises LockError."""
        if name in self.program.edits:  # else it is another stage's
            self.boards.patches[name].write(name, first, payload)

    def define(self, name: str, payload: bytes) -> None:
        """Give a vector its numbers; ``payload``: safetensors, site → float32 ``[width]``.  Raises LockError."""
        for site, numbers in load(payload).items():
            if (here := self.program.sites.get(site)) is not None and numbers.shape != (here.whole,):
                raise LockError(f"vectors.{name}", f"{list(numbers.shape)} came for {site}")
            self.program.known[name, site] = numbers.astype(np.float32)
        self.boards.renew(name)
        for read, sites in probes(self.program, self.device).items():
            if name in self.program.reads[read].vectors:
                self.harvest.probe(read, sites)

    def collect(self, wanted: Iterable[tuple[str, int, int]]) -> list[tuple[RequestKey, Record]]:
        """Records of ``(key, child, generated tokens)``; they are forgotten here.  Raises TableError for a request that
        is not here."""
        return [(key, record_of(found)) for key, found in self.hand_over(wanted)]

    def hand_over(self, wanted: Iterable[tuple[str, int, int]]) -> list[tuple[RequestKey, Collected]]:
        """:meth:`collect` for another process: what lies in files stays there."""
        lives = [(self.table.collect((key, child)), generated) for key, child, generated in wanted]
        # Steps that the engine has run ahead are not waited for.
        acting = [(live, n) for live, n in lives if not live.compiled.idle and live.fault is None]
        needed = max((live.step_of(live.prompt + max(n, 1) - 2) for live, n in acting), default=0)
        # Nor may a thread still have rows of theirs, as those that were computed past a stop.
        self.harvest.settle(needed, max((live.span.last for live, _ in acting), default=0))
        failing.delivered(self.table, self.harvest.lost)
        return [(live.key, failing.handed_over(live, generated)) for live, generated in lives]

    def failing(self) -> dict[str, tuple[Fault, int | None]]:
        """What has failed since this was asked last; see :attr:`RowTable.failing`."""
        failing.delivered(self.table, self.harvest.lost)
        found, self.table.failing = self.table.failing, {}
        return found

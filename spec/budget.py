"""What reads can select at most: by one request in one step, by the run, and what that takes on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vtaps.spec.arms import points_of
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.plan import ArmPlan, EditPlan, EngineMode, GatePlan, OverridePlan, ReadPlan
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.rows import Interval, Rows, compile_rows
from vtaps.spec.selectors import facts_of
from vtaps.spec.sizes import human
from vtaps.spec.slots import GATE_BYTES, HELD_STEPS, allotted, row_bytes, slot_rows
from vtaps.spec.spec import Spec

LARGEST_SEQS = 1024
LARGEST_TOKENS = 16384
"""vLLM 0.32's defaults of ``max_num_seqs`` and ``max_num_batched_tokens`` for offline use of one GPU with 70 GB or
more (``EngineArgs.get_batch_defaults``); those of smaller GPUs and of the CPU are smaller."""


@dataclass(frozen=True)
class Reading:
    """One prompt under a read: ``placed`` are the overrides of the sweep point, (first step, tokens) by name; the
    prompt is completed ``n`` times by at most ``max_tokens`` tokens."""

    prompt: ReadyPrompt
    placed: Mapping[str, Interval]
    max_tokens: int
    n: int


def readings(
    name: str, arms: Mapping[str, ArmPlan], edits: Mapping[str, EditPlan],
    prompts: Mapping[str, tuple[ReadyPrompt, ...]], overrides: Mapping[str, OverridePlan],
) -> Iterator[Reading]:  # fmt: skip
    """Every request of the run whose arm lists the read."""
    for arm in arms.values():
        if name in arm.arm.reads:
            yield from readings_of(arm, edits, prompts, overrides)


def readings_of(
    arm: ArmPlan,
    edits: Mapping[str, EditPlan],
    prompts: Mapping[str, tuple[ReadyPrompt, ...]],
    overrides: Mapping[str, OverridePlan],
) -> Iterator[Reading]:
    """Every request of an arm."""
    for prompt in (p for group in arm.prompts for p in prompts.get(group, ())):
        for _, point in points_of(arm, edits, prompt):
            placed = {n: (start, len(overrides[n].ids)) for n, start in point.overrides}
            yield Reading(prompt, placed, arm.sampling["max_tokens"], arm.sampling.get("n", 1))


def without_ids(rows: Rows) -> Rows:
    """The selector without its filters on token ids: what it can select at most."""
    kept = rows.exclude if rows.exclude is not None and all(p.ids is None for p in rows.exclude.parts()) else None
    return replace(rows, ids=None, exclude=kept)


def step_rows(rows: Rows, requests: Iterator[Reading]) -> int:
    """The most rows that one request can select in one step: a whole prompt can come in one step, of the rows after
    it only one.  (Rows that are computed again after a preemption were taken already, and need no slot.)"""
    most = 0
    seen: set[tuple[Any, ...]] = set()
    after = any(part.after is not None for part in rows.parts())
    for request in requests:
        prompt = request.prompt
        placed = tuple(sorted(request.placed.items())) if after else ()
        key = (prompt.group, prompt.id, request.max_tokens, placed)
        if key in seen:
            continue
        seen.add(key)
        facts = facts_of(prompt, [rows], request.placed)
        own = compile_rows(rows, facts).select(0, np.array(prompt.ids, np.int64))
        size, end = len(prompt.ids), len(prompt.ids) + request.max_tokens - 1
        later = any(max(a, size) < min(b, end) for a, b in compile_rows(without_ids(rows), facts).intervals)
        most = max(most, len(own), int(later))
    return most


@dataclass(frozen=True)
class Load:
    """What one read asks of a step: ``requests`` in the run, ``step_rows`` of one of them, and the bytes of ``each``
    row for as many steps as slots must be there."""

    requests: int
    step_rows: int
    each: int

    def rows(self, seqs: int, tokens: int | None) -> int:
        return slot_rows(self.step_rows, min(seqs, self.requests), tokens)

    def bytes(self, seqs: int, tokens: int | None) -> int:
        return self.each * self.rows(seqs, tokens)


@dataclass(frozen=True)
class Slots:
    """The slots of all reads for at most ``seqs`` requests alive and ``tokens`` a step (None: not known).  ``chunked``:
    vLLM may cut a prompt, so that it takes fewer tokens a step than a prompt has."""

    loads: Mapping[str, Load]
    seqs: int
    tokens: int | None
    chunked: bool = True

    @property
    def rows(self) -> int:
        """Over all reads, of one step."""
        return sum(load.rows(self.seqs, self.tokens) for load in self.loads.values())

    @property
    def bytes(self) -> int:
        return self.total(self.seqs, self.tokens)

    @property
    def alive(self) -> int:
        """Requests with a read that can be alive at once."""
        return min(self.seqs, max((load.requests for load in self.loads.values()), default=0))

    def total(self, seqs: int, tokens: int | None) -> int:
        return sum(load.bytes(seqs, tokens) for load in self.loads.values())

    def taken(self, memory: int) -> int:
        """What is really allocated where ``memory`` is allowed: rows gather only where there is room for it."""
        needs = {
            name: (load.rows(self.seqs, self.tokens), load.each // HELD_STEPS) for name, load in self.loads.items()
        }
        return sum(count * needs[name][1] for name, count in allotted(needs, memory).items())

    def fitting(self, memory: int) -> str:
        """The argument of vLLM that binds, with the largest value at which all slots take at most ``memory`` bytes;
        empty where none is small enough."""
        largest = max(self.loads.values(), key=lambda load: load.bytes(self.seqs, self.tokens))
        alone = largest.rows(self.seqs, None)
        if self.tokens is None or alone <= self.tokens or not self.chunked:
            seqs = _largest(min(self.seqs, largest.requests), lambda n: self.total(n, self.tokens) <= memory)
            if seqs or not self.chunked:
                return f"max_num_seqs: {seqs}" if seqs else ""
        tokens = _largest(alone, lambda n: self.total(self.seqs, n) <= memory)
        return f"max_num_batched_tokens: {tokens}" if tokens else ""


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits, 0 where none does; what fits, fits with less."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def limits(vllm: Mapping[str, Any]) -> tuple[int, int | None]:
    """(requests alive, tokens a step) at most: what the spec gives vLLM, else vLLM's largest defaults.  Without chunked
    prefill the default of the second follows the model's length: None."""
    twice = 2 if vllm.get("performance_mode") == "throughput" else 1
    seqs = _count(vllm, "max_num_seqs") or LARGEST_SEQS * twice
    tokens = _count(vllm, "max_num_batched_tokens")
    if tokens is None and vllm.get("enable_chunked_prefill") is not False:
        tokens = LARGEST_TOKENS * twice
    return seqs, tokens


def _count(vllm: Mapping[str, Any], name: str) -> int | None:
    """A positive whole number; anything else is refused where the arguments are held against vLLM's."""
    value = vllm.get(name)
    return value if type(value) is int and value > 0 else None


def slots_of(
    vllm: Mapping[str, Any], reads: Mapping[str, ReadPlan], dtype: str, gates: Mapping[str, GatePlan]
) -> Slots:
    """The slots of the reads that some arm lists, and of the scores of gates, under :func:`of_gate`; what a function
    gives is known when it has given it."""
    loads = {
        name: Load(p.requests, p.step_rows, HELD_STEPS * _row_bytes(p, dtype))
        for name, p in reads.items()
        if p.requests and p.read.kind not in ("python", "pattern")
    }
    loads |= {
        of_gate(n): Load(p.requests, p.step_rows, HELD_STEPS * GATE_BYTES) for n, p in gates.items() if p.requests
    }
    return Slots(loads, *limits(vllm), chunked=vllm.get("enable_chunked_prefill") is not False)


def of_gate(name: str) -> str:
    """A gate among reads: no name of theirs has a dot."""
    return f"gates.{name}"


def _row_bytes(plan: ReadPlan, dtype: str) -> int:
    stored = None if plan.read.store is None else plan.read.store.dtype
    return row_bytes(plan.read.kind, (s.width or 0 for s in plan.sites), dtype, stored)


def check_memory(
    spec: Spec, slots: Slots, doc: Document, found: list[Diagnostic], mode: EngineMode = "taps", patched: int = 0
) -> None:
    """VT321 at the read that takes most, where all of them take more than ``engine.tap_memory`` leaves beside the
    ``patched`` bytes of rows that edits set."""
    memory = max(0, spec.engine.tap_memory - patched)
    if slots.bytes <= memory or patched > spec.engine.tap_memory:  # of those there is a finding already
        return
    by_name = {name: load.bytes(slots.seqs, slots.tokens) for name, load in slots.loads.items()}
    largest = max(by_name, key=lambda name: by_name[name])
    load = slots.loads[largest]
    rows = load.rows(slots.seqs, slots.tokens)
    share = "" if len(by_name) == 1 else f" of the {human(slots.bytes)} that all reads take"
    section, _, gate = largest.rpartition(".")
    who, where = (f"gate {gate!r}", ("gates", gate)) if section else (f"read {largest!r}", spec.reads[largest].where)
    message = (
        f"{who} can take {rows} rows a step, {human(by_name[largest])}{share}; "
        f"engine.tap_memory is {human(spec.engine.tap_memory)}"
        + (f", and rows that edits set take {human(patched)} of it" if patched else "")
    )
    fit = slots.fitting(memory)
    name, _, value = fit.partition(": ")
    given = _count(spec.engine.vllm, "max_num_seqs") or 0
    # vLLM refuses fewer tokens a step than requests.
    beside = f" with `max_num_seqs: {value}`" if name == "max_num_batched_tokens" and given > int(value) else ""
    lower = f"`engine.vllm.{fit}`{beside} fits; so does" if fit else "it takes"
    note = f"{lower} `tap_memory: {enough(slots.bytes + patched)}`; fewer rows or locations take less"
    if mode == "taps":
        note += ", `mode: eager` takes none"
    found.append(Diagnostic("VT321", message, doc.key(*where), note=note))


def enough(size: int) -> str:
    """The next whole MiB or GiB."""
    unit, bytes_ = ("GiB", 2**30) if size > 8 * 2**30 else ("MiB", 2**20)
    return f"{-(-size // bytes_)} {unit}"

"""How much memory of the device a block takes: worked out before there is an engine, and what its worker allocates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vtaps.runtime.program import USES_VECTOR, Program
from vtaps.spec.slots import HELD_STEPS, slot_count, slot_rows

EAGER_SLOTS = 1024


class TapMemoryError(Exception):
    """The slots take more than ``engine.tap_memory``."""


@dataclass(frozen=True)
class Limits:
    """What a step can hold at most: rows (tokens, padding included) and requests; ``step_rows`` is what vLLM
    schedules without padding."""

    rows: int
    requests: int
    step_rows: int


@dataclass(frozen=True)
class _Need:
    """Slots of one ring: ``gathered`` where there is room for rows of many steps, ``held`` where there is not."""

    row_bytes: int
    gathered: int
    held: int


def ring_key(read: str, sampled: bool) -> str:
    return f"{read}/{'requests' if sampled else 'tokens'}"


def slots(program: Program, limits: Limits, item: int) -> dict[str, int]:
    """The slots of each ring, by :func:`ring_key`; ``item``: bytes of a number in the model's dtype.

    Raises TapMemoryError where they cannot be fewer and are too many.
    """
    needs = _needs(program, limits, item)
    gathered = sum(n.gathered * n.row_bytes for n in needs.values())
    held = sum(n.held * n.row_bytes for n in needs.values())
    allowed = program.tap_memory
    if program.mode == "eager":
        # No graph holds these: they grow to what a step needs.
        return {key: min(n.gathered, EAGER_SLOTS) for key, n in needs.items()}
    if allowed is not None and held > allowed:
        raise TapMemoryError(
            f"the slots of {len(needs)} reads take {held} bytes for {limits.requests} requests and "
            f"{limits.step_rows} tokens a step, and {allowed} are allowed; lower max_num_seqs or max_num_batched_tokens"
        )
    roomy = allowed is None or gathered <= allowed
    return {key: n.gathered if roomy else n.held for key, n in needs.items()}


def _needs(program: Program, limits: Limits, item: int) -> Mapping[str, _Need]:
    out = {}
    for name, read in program.reads.items():
        for sampled in (False, True):
            sites = [s for s in read.sites if program.sites[s].sampled == sampled]
            if not sites:
                continue
            most = limits.requests if sampled else limits.step_rows
            alive = limits.requests if read.requests is None else min(limits.requests, read.requests)
            rows = max(1, most if read.step_rows is None else slot_rows(read.step_rows, alive, most))
            row_bytes = _row_bytes(program, name, sites, item)
            out[ring_key(name, sampled)] = _Need(row_bytes, slot_count(rows, row_bytes), HELD_STEPS * rows)
    return out


def _row_bytes(program: Program, read: str, sites: list[str], item: int) -> int:
    each = item if program.reads[read].kind in ("rows", "lens") else 4
    return each * sum(program.sites[s].width for s in sites)


def predicted(program: Program, limits: Limits, item: int) -> int:
    """Bytes of slots, row tables and vectors; ``item``: bytes of a number in the model's dtype.

    Raises TapMemoryError.
    """
    count = slots(program, limits, item)
    total = 0
    for name, read in program.reads.items():
        for sampled in (False, True):
            sites = [s for s in read.sites if program.sites[s].sampled == sampled]
            if sites:
                total += count[ring_key(name, sampled)] * _row_bytes(program, name, sites, item)
    for sampled, rows in ((False, limits.rows), (True, limits.requests)):
        places = [e.sites for e in program.edits.values()] + [r.sites for r in program.reads.values()]
        uses = sum(any(program.sites[s].sampled == sampled for s in sites) for sites in places)
        total += 4 * rows * (1 + uses) if uses else 0
    for name, edit in program.edits.items():
        if edit.verb in USES_VECTOR:
            used = program.used_at.get(name, {})
            total += sum(4 * len(vectors) * program.sites[site].width for site, vectors in used.items())
    return total

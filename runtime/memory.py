"""How much memory of the device a block takes: worked out before there is an engine, and what its worker allocates."""

from __future__ import annotations

from dataclasses import dataclass

from vtaps.runtime import sae
from vtaps.runtime.program import USES_VECTOR, Program
from vtaps.spec.slots import HELD_STEPS, ITEM_BYTES, allotted, row_bytes, slot_rows

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


def ring_key(read: str, sampled: bool) -> str:
    return f"{read}/{'requests' if sampled else 'tokens'}"


def slots(program: Program, limits: Limits, dtype: str) -> dict[str, int]:
    """The slots of each ring, by :func:`ring_key`; ``dtype``: the model's.

    Raises TapMemoryError where they cannot be fewer and are too many.
    """
    needs = _needs(program, limits, dtype)
    if program.mode == "eager":
        # No graph holds these: they grow to what a step needs.
        return {key: min(count, EAGER_SLOTS) for key, count in allotted(needs, None).items()}
    # What a function gives is as large as its first call says: those slots are made then.
    later = {key: HELD_STEPS * rows for key, (rows, _) in needs.items() if _later(program, key)}
    needs = {key: need for key, need in needs.items() if key not in later}
    held = sum(HELD_STEPS * rows * size for rows, size in needs.values())
    patched = patch_bytes(program, dtype)
    allowed = None if program.tap_memory is None else program.tap_memory - patched
    if allowed is not None and held > allowed:
        if patched:
            raise TapMemoryError(
                f"the rows that edits set take {patched} bytes and the slots of {len(needs)} reads {held}, and "
                f"{program.tap_memory} are allowed"
            )
        raise TapMemoryError(
            f"the slots of {len(needs)} reads take {held} bytes for {limits.requests} requests and "
            f"{limits.step_rows} tokens a step, and {allowed} are allowed; lower max_num_seqs or max_num_batched_tokens"
        )
    return allotted(needs, allowed) | later


def patch_bytes(program: Program, dtype: str) -> int:
    """What `put` takes rows from."""
    rows = ((e.slots, sum(program.sites[s].width for s in e.sites)) for e in program.edits.values() if e.verb == "put")
    return sum(slots * width * ITEM_BYTES[dtype] for slots, width in rows)


def _later(program: Program, key: str) -> bool:
    return program.reads[key.rpartition("/")[0]].kind == "python"


def _needs(program: Program, limits: Limits, dtype: str) -> dict[str, tuple[int, int]]:
    """Of each ring, the rows that one step selects at most and the bytes of a row."""
    out = {}
    for name, read in program.reads.items():
        for sampled in (False, True):
            sites = [s for s in read.sites if program.sites[s].sampled == sampled]
            if not sites:
                continue
            most = limits.requests if sampled else limits.step_rows
            alive = limits.requests if read.requests is None else min(limits.requests, read.requests)
            rows = max(1, most if read.step_rows is None else slot_rows(read.step_rows, alive, most))
            size = row_bytes(read.kind, (program.sites[s].width for s in sites), dtype, read.store.dtype)
            out[ring_key(name, sampled)] = (rows, size)
    return out


def predicted(program: Program, limits: Limits, dtype: str) -> int:
    """Bytes of slots, row tables, vectors and SAEs; ``dtype``: the model's.  Raises TapMemoryError, LockError."""
    needs = _needs(program, limits, dtype)
    total = sum(n * needs[key][1] for key, n in slots(program, limits, dtype).items() if not _later(program, key))
    for sampled, rows in ((False, limits.rows), (True, limits.requests)):
        places = [e.sites for e in program.edits.values()] + [r.sites for r in program.reads.values()]
        places += [e.sites for e in program.edits.values() if e.verb == "put"]
        uses = sum(any(program.sites[s].sampled == sampled for s in sites) for sites in places)
        if not sampled:
            # What gates need beside the columns of their points and slots.
            uses += sum(edit.when is not None for edit in program.edits.values())
            uses += 2 * sum(gate.reduce is not None for gate in program.gates.values())
        total += 4 * rows * (1 + uses) if uses else 0
    total += patch_bytes(program, dtype)
    for name, edit in program.edits.items():
        if edit.verb in USES_VECTOR or edit.vectors or edit.verb == "feature":
            used = program.used_at.get(name, {})
            # Of a feature that is set to a value, what encodes it and what decodes it.
            each = 2 if edit.sae is not None and edit.sae[1] == "to" else 1
            count = {s: 1 if edit.value else each * len(edit.vectors or vectors) for s, vectors in used.items()}
            total += sum(4 * n * program.sites[site].width for site, n in count.items())
        for site in program.used_at.get(name, {}) if edit.matrices else ():
            total += sum(table.nbytes for table in program.load_affine(edit.matrices, program.sites[site]))
    return total + sae.predicted(program)

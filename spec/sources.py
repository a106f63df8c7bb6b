"""Edits that set the rows of a read: which prompt is paired with which, and what its rows take on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from vtaps.spec.budget import enough, without_ids
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.expand import written
from vtaps.spec.plan import ArmPlan, EditPlan, PromptKey, ReadPlan, RowsSource
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.rows import Rows, compile_rows, to_ranges
from vtaps.spec.selectors import facts_of
from vtaps.spec.sizes import human
from vtaps.spec.slots import ITEM_BYTES
from vtaps.spec.spec import RowsOf, Spec

Prompts = Mapping[str, tuple[ReadyPrompt, ...]]


class _Fault(Exception):
    """What is wrong with an edit's source; ``args``: code, message, note."""


def plan_sources(
    spec: Spec, edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan], arms: Mapping[str, ArmPlan],
    prompts: Prompts, doc: Document, found: list[Diagnostic],
) -> dict[str, EditPlan]:  # fmt: skip
    """The edits with where their rows come from; one finding an edit (VT218, VT325 … VT328)."""
    out = dict(edits)
    for name, plan in edits.items():
        rows = plan.edit.rows
        if rows is None or rows.run is not None or rows.arm not in arms or rows.read not in reads:
            continue
        try:
            out[name] = replace(plan, source=_source(plan, rows, reads[rows.read], arms, prompts))
        except _Fault as fault:
            code, message, note = fault.args
            where = doc.at(*plan.edit.where, plan.edit.verb, "rows")
            found.append(Diagnostic(code, f"edit {name!r}: {message}", where, note=note))
    return out


def _source(plan: EditPlan, rows: RowsOf, read: ReadPlan, arms: Mapping[str, ArmPlan], prompts: Prompts) -> RowsSource:
    source = arms[rows.arm]
    if rows.read not in source.arm.reads:
        raise _Fault("VT218", f"the arm {rows.arm!r} does not list the read {rows.read!r}", None)
    single(source)
    if read.read.kind != "rows":
        raise _Fault("VT327", f"{rows.read!r} keeps a {read.read.kind}, not rows", "name a read without a reduction")
    kept = {site.name for site in read.sites}
    missing = [site.name for site in plan.sites if site.name not in kept]
    if missing:
        raise _Fault("VT327", f"{rows.read!r} does not read {', '.join(missing)}", "give both the same `at`")
    if unknown := [site.name for site in plan.sites if site.width is None]:
        raise _Fault("VT327", f"the width of {unknown[0]} is not known before the run", None)
    pairs: dict[PromptKey, PromptKey] = {}
    wanted: dict[PromptKey, set[int]] = {}
    for arm in arms.values():
        if plan.edit.name not in arm.arm.edits:
            continue
        for prompt in served(arm, prompts):
            partner = partner_of(prompt, source, prompts)
            key = (partner.group, partner.id)
            pairs[prompt.group, prompt.id] = key
            wanted.setdefault(key, set()).update(_rows(plan, rows, read, prompt, partner, arm))
    blocks: dict[PromptKey, tuple[int, tuple[int, ...]]] = {}
    first = 0
    for key, positions in wanted.items():
        blocks[key] = (first, tuple(sorted(positions)))
        first += len(positions)
    return RowsSource(pairs, blocks)


def single(source: ArmPlan) -> None:
    """Raises a fault (VT328) where an arm has several requests a prompt."""
    name, n = source.arm.name, source.sampling.get("n", 1)
    if len(source.points) != 1:
        raise _Fault("VT328", f"the arm {name!r} has {len(source.points)} sweep points, and its rows are one set", None)
    if n != 1:
        raise _Fault("VT328", f"the arm {name!r} completes a prompt {n} times, and its rows are one set", None)


def served(arm: ArmPlan, prompts: Prompts) -> Iterator[ReadyPrompt]:
    for group in arm.prompts:
        yield from prompts.get(group, ())


def partner_of(prompt: ReadyPrompt, source: ArmPlan, prompts: Prompts) -> ReadyPrompt:
    """The prompt of the same id that the source arm serves: of the same group, else of the only one that has it."""
    there = {p.group: p for p in served(source, prompts) if p.id == prompt.id}
    if prompt.group in there:
        return there[prompt.group]
    if len(there) == 1:
        return next(iter(there.values()))
    told = f"the arm {source.arm.name!r} serves {'no' if not there else 'more than one'} prompt {prompt.id!r}"
    in_groups = f", in {' and '.join(there)}" if there else ""
    note = f"a pair has one id; its groups are {', '.join(source.prompts)}"
    raise _Fault("VT326", f"{told}{in_groups}, to pair with that of {prompt.group!r}", note)


def _rows(
    plan: EditPlan, rows: RowsOf, read: ReadPlan, prompt: ReadyPrompt, partner: ReadyPrompt, arm: ArmPlan
) -> list[int]:
    """The positions that the edit selects of a prompt, all of them in the source's read."""
    named = f"prompt {prompt.group}/{prompt.id}"
    if len(prompt.ids) != len(partner.ids):
        raise _Fault(
            "VT325",
            f"{named} has {len(prompt.ids)} tokens and its pair {partner.group}/{partner.id} in the arm {rows.arm!r} "
            f"{len(partner.ids)}",
            "rows are paired by position: only prompts of one length can be",
        )
    last = len(prompt.ids) + arm.sampling["max_tokens"] - 1
    if later := [p for p in _selected(without_ids(plan.edit.tokens), prompt, last) if p >= len(prompt.ids)]:
        raise _Fault(
            "VT327", f"its rows go on after the prompt ({named}, position {later[0]}), where there is none to pair",
            "`tokens: prompt` ends with the prompt",
        )  # fmt: skip
    wanted = _selected(plan.edit.tokens, prompt, len(prompt.ids))
    lacking = sorted(set(wanted) - set(_selected(read.read.tokens, partner, len(partner.ids))))
    if lacking:
        ranges = ", ".join(str(r) for r in written(tuple((a, b - 1) for a, b in to_ranges(np.array(lacking)))))
        text = f"{rows.read!r} does not keep position {ranges} of {partner.group}/{partner.id}"
        raise _Fault("VT327", text, "let the read select at least the edit's rows")
    return wanted


def _selected(rows: Rows, prompt: ReadyPrompt, stop: int) -> list[int]:
    """Positions below ``stop``; rows after an override are not the prompt's."""
    tokens = np.full(stop, -1, np.int64)
    tokens[: len(prompt.ids)] = prompt.ids
    placed = {part.after: (0, 0) for part in rows.parts() if part.after is not None}
    found: list[int] = compile_rows(rows, facts_of(prompt, [rows], placed)).select(0, tokens).tolist()
    return found


def patch_bytes(plan: EditPlan, dtype: str) -> int:
    """What the rows take on the device that an edit sets."""
    width = sum(site.width or 0 for site in plan.sites)
    return 0 if plan.source is None else plan.source.slots * width * ITEM_BYTES[dtype]


def check_patches(spec: Spec, edits: Mapping[str, EditPlan], dtype: str, doc: Document, found: list[Diagnostic]) -> int:
    """The bytes of all of them; VT321 at the largest where that is more than ``engine.tap_memory``."""
    sizes = {name: patch_bytes(plan, dtype) for name, plan in edits.items() if plan.source is not None}
    total, allowed = sum(sizes.values()), spec.engine.tap_memory
    if total > allowed:
        largest = max(sizes, key=lambda name: sizes[name])
        source = edits[largest].source
        assert source is not None
        message = (
            f"edit {largest!r} sets {source.slots} rows of {len(source.blocks)} prompts at {len(edits[largest].sites)} "
            f"locations, {human(sizes[largest])}; engine.tap_memory is {human(allowed)}"
        )
        note = f"it takes `tap_memory: {enough(total)}`; fewer rows, locations or prompts take less"
        found.append(Diagnostic("VT321", message, doc.key(*edits[largest].edit.where), note=note))
    return total

"""Edits that set the rows of a read: which prompt is paired with which, and what its rows take on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vtaps.spec.budget import enough, without_ids
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.expand import written
from vtaps.spec.files import path_in
from vtaps.spec.plan import ArmPlan, EditPlan, PromptKey, ReadPlan, RowsSource
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.rows import Rows, compile_rows, to_ranges
from vtaps.spec.selectors import facts_of
from vtaps.spec.sizes import human
from vtaps.spec.slots import ITEM_BYTES
from vtaps.spec.spec import RowsOf, Spec

Prompts = Mapping[str, tuple[ReadyPrompt, ...]]


@dataclass(frozen=True)
class KeptRows:
    """What an arm, of this run or of a finished one, keeps of a read.

    ``widths``: location → width, None where that is not known; ``lengths``: prompt id → group → prompt tokens;
    ``positions``: which rows of a prompt are kept.  ``dtype`` and ``digest`` are those of a finished run; ``narrowed``:
    they are not stored as the model has them.
    """

    kind: str
    widths: Mapping[str, int | None]
    lengths: Mapping[str, Mapping[str, int]]
    positions: Callable[[PromptKey], Collection[int]]
    dtype: str | None = None
    digest: str | None = None
    narrowed: bool = False


Runs = Callable[[Path, str, str], KeptRows]
"""The folder of a finished run, an arm and a read → what it keeps.  Raises SourceFault."""


class SourceFault(Exception):
    """What is wrong with where something is taken from; ``args``: code, message, note."""


def no_runs(path: Path, arm: str, read: str) -> KeptRows:
    """Where nobody can look into a run."""
    raise SourceFault("VT327", f"the run {path} cannot be looked into here", None)


def plan_sources(
    spec: Spec, edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan], arms: Mapping[str, ArmPlan],
    prompts: Prompts, runs: Runs, dtype: str, doc: Document, found: list[Diagnostic], outside: dict[str, str],
) -> dict[str, EditPlan]:  # fmt: skip
    """The edits with where their rows come from; one finding an edit (VT218, VT325 … VT328).  ``outside`` gets the
    digest of what is taken from other runs."""
    out = dict(edits)
    for name, plan in edits.items():
        rows = plan.edit.rows
        if rows is None or (rows.run is None and (rows.arm not in arms or rows.read not in reads)):
            continue
        try:
            if rows.run is None:
                kept = _own(arms[rows.arm], reads[rows.read], prompts)
            else:
                kept = runs(_run(doc, rows.run), rows.arm, rows.read)
                outside[outside_name(rows)] = str(kept.digest)
            if kept.dtype not in (None, dtype):
                text = f"{rows.read!r} of {rows.run} is in {kept.dtype}, and this model in {dtype}"
                raise SourceFault("VT327", text, None)
            out[name] = replace(plan, source=_source(plan, rows, kept, arms, prompts))
        except SourceFault as fault:
            code, message, note = fault.args
            where = doc.at(*plan.edit.where, plan.edit.verb, "rows")
            found.append(Diagnostic(code, f"edit {name!r}: {message}", where, note=note))
    return out


def _run(doc: Document, name: str) -> Path:
    try:
        return path_in(doc.folder, name)
    except OSError as error:
        raise SourceFault("VT327", f"{name!r}: {error.strerror}", None) from None


def outside_name(rows: RowsOf) -> str:
    """What the lock calls a read of another run."""
    return f"{rows.run}:{rows.read}"


def _own(source: ArmPlan, read: ReadPlan, prompts: Prompts) -> KeptRows:
    if read.read.name not in source.arm.reads:
        raise SourceFault("VT218", f"the arm {source.arm.name!r} does not list the read {read.read.name!r}", None)
    single(source)
    there = {(p.group, p.id): p for p in served(source, prompts)}
    return KeptRows(
        read.read.kind,
        {site.name: site.width for site in read.sites},
        lengths_of(source, prompts),
        lambda key: _selected(read.read.tokens, there[key], len(there[key].ids)),
        narrowed=read.read.store is not None and (read.read.store.dtype is not None or read.read.store.scaled),
    )


def lengths_of(arm: ArmPlan, prompts: Prompts) -> dict[str, dict[str, int]]:
    """Prompt id → group → tokens, of the prompts that an arm serves."""
    out: dict[str, dict[str, int]] = {}
    for prompt in served(arm, prompts):
        out.setdefault(prompt.id, {})[prompt.group] = len(prompt.ids)
    return out


def _source(plan: EditPlan, rows: RowsOf, kept: KeptRows, arms: Mapping[str, ArmPlan], prompts: Prompts) -> RowsSource:
    if kept.narrowed:
        raise SourceFault("VT327", f"{rows.read!r} stores its rows in another form", "give the read no `store`")
    if kept.kind != "rows":
        text = f"{rows.read!r} keeps a {kept.kind}, not rows"
        raise SourceFault("VT327", text, "name a read without a reduction")
    missing = [site.name for site in plan.sites if site.name not in kept.widths]
    if missing:
        raise SourceFault("VT327", f"{rows.read!r} does not read {', '.join(missing)}", "give both the same `at`")
    for site in plan.sites:
        if site.width is None:
            raise SourceFault("VT327", f"the width of {site.name} is not known before the run", None)
        if kept.widths[site.name] != site.width:
            text = f"{rows.read!r} is {kept.widths[site.name]} wide at {site.name}, and {site.width} is needed"
            raise SourceFault("VT327", text, None)
    pairs: dict[PromptKey, PromptKey] = {}
    wanted: dict[PromptKey, set[int]] = {}
    for arm in arms.values():
        for prompt in served(arm, prompts) if plan.edit.name in arm.arm.edits else ():
            key = partner_of(prompt, kept.lengths, rows.arm)
            pairs[prompt.group, prompt.id] = key
            wanted.setdefault(key, set()).update(_rows(plan, rows, kept, prompt, key, arm))
    blocks: dict[PromptKey, tuple[int, tuple[int, ...]]] = {}
    first = 0
    for key, positions in wanted.items():
        blocks[key] = (first, tuple(sorted(positions)))
        first += len(positions)
    return RowsSource(pairs, blocks)


def single(source: ArmPlan) -> None:
    """Raises SourceFault (VT328) where an arm has several requests a prompt."""
    name, n = source.arm.name, source.sampling.get("n", 1)
    if len(source.points) != 1:
        raise SourceFault("VT328", f"the arm {name!r} has {len(source.points)} sweep points; one is needed", None)
    if n != 1:
        raise SourceFault("VT328", f"the arm {name!r} completes a prompt {n} times; once is needed", None)


def served(arm: ArmPlan, prompts: Prompts) -> Iterator[ReadyPrompt]:
    for group in arm.prompts:
        yield from prompts.get(group, ())


def partner_of(prompt: ReadyPrompt, lengths: Mapping[str, Mapping[str, int]], arm: str) -> PromptKey:
    """The prompt of the same id that ``arm`` serves: of the same group, else of the only one that has it."""
    there = lengths.get(prompt.id, {})
    if prompt.group in there:
        return prompt.group, prompt.id
    if len(there) == 1:
        return next(iter(there)), prompt.id
    told = f"the arm {arm!r} serves {'no' if not there else 'more than one'} prompt {prompt.id!r}"
    in_groups = f", in {' and '.join(there)}" if there else ""
    groups = dict.fromkeys(group for found in lengths.values() for group in found)
    note = f"a pair has one id; its groups are {', '.join(groups)}"
    raise SourceFault("VT326", f"{told}{in_groups}, to pair with that of {prompt.group!r}", note)


def _rows(plan: EditPlan, rows: RowsOf, kept: KeptRows, prompt: ReadyPrompt, key: PromptKey, arm: ArmPlan) -> list[int]:
    """The positions that the edit selects of a prompt, all of them kept of its pair ``key``."""
    named, length = f"prompt {prompt.group}/{prompt.id}", kept.lengths[key[1]][key[0]]
    if len(prompt.ids) != length:
        raise SourceFault(
            "VT325",
            f"{named} has {len(prompt.ids)} tokens and its pair {'/'.join(key)} in the arm {rows.arm!r} {length}",
            "rows are paired by position: only prompts of one length can be",
        )
    last = len(prompt.ids) + arm.sampling["max_tokens"] - 1
    if later := [p for p in _selected(without_ids(plan.edit.tokens), prompt, last) if p >= len(prompt.ids)]:
        raise SourceFault(
            "VT327", f"its rows go on after the prompt ({named}, position {later[0]}), where there is none to pair",
            "`tokens: prompt` ends with the prompt",
        )  # fmt: skip
    wanted = _selected(plan.edit.tokens, prompt, len(prompt.ids))
    lacking = sorted(set(wanted) - set(kept.positions(key)))
    if lacking:
        ranges = ", ".join(str(r) for r in written(tuple((a, b - 1) for a, b in to_ranges(np.array(lacking)))))
        text = f"{rows.read!r} does not keep position {ranges} of {'/'.join(key)}"
        raise SourceFault("VT327", text, "let the read select at least the edit's rows")
    return wanted


def _selected(rows: Rows, prompt: ReadyPrompt, stop: int) -> list[int]:
    """Positions below ``stop``; rows after an override are not the prompt's."""
    tokens = np.full(stop, -1, np.int64)
    tokens[: len(prompt.ids)] = prompt.ids
    placed = {part.after: (0, 0) for part in rows.parts() if part.after is not None}
    found: list[int] = compile_rows(rows, facts_of(prompt, [rows], placed)).select(0, tokens).tolist()
    return found


def check_normalized(
    spec: Spec, arms: Mapping[str, ArmPlan], prompts: Prompts, doc: Document, found: list[Diagnostic]
) -> None:
    """The arms that a metric is normalized by measure it, once a prompt, for every prompt (VT218, VT326, VT328)."""
    for metric in spec.metrics.values():
        for key, name in zip(("one", "zero"), metric.normalize or (), strict=False):
            if name not in arms:
                continue
            try:
                _check_anchor(metric.name, arms[name], arms, prompts)
            except SourceFault as fault:
                code, message, note = fault.args
                where = doc.at(*metric.where, "normalize", key)
                found.append(Diagnostic(code, f"metric {metric.name!r}: {message}", where, note=note))


def _check_anchor(metric: str, anchor: ArmPlan, arms: Mapping[str, ArmPlan], prompts: Prompts) -> None:
    if metric not in anchor.arm.metrics:
        raise SourceFault("VT218", f"the arm {anchor.arm.name!r} does not list it", None)
    single(anchor)
    lengths = lengths_of(anchor, prompts)
    for arm in arms.values():
        for prompt in served(arm, prompts) if metric in arm.arm.metrics else ():
            partner_of(prompt, lengths, anchor.arm.name)


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

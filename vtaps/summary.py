"""A plan in words: what ``vtaps check`` prints when nothing is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator

from vtaps.spec.arms import points_of
from vtaps.spec.budget import readings, slots_of, without_ids
from vtaps.spec.expand import written
from vtaps.spec.layers import collapsed
from vtaps.spec.pattern import part_of
from vtaps.spec.plan import Plan, Point, ReadPlan
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.rows import compile_rows
from vtaps.spec.selectors import facts_of
from vtaps.spec.serving import between_all_reduce_and_norm
from vtaps.spec.sizes import human
from vtaps.spec.sources import patch_bytes
from vtaps.spec.spec import BOUNDS, Edit, Gate, Read
from vtaps.spec.store import Store
from vtaps.spec.tree import Site

EAGER_PRICE = (
    "            costs compile and CUDA graphs: an 8B model on an H200 decodes one request at 67.5 tokens a second, "
    "about a third of plain vLLM's 191 to 196"
)
"""Measured with plain vLLM: `enforce_eager` against its defaults."""

BREAK_PRICE = "10 µs"
"""Measured with `benchmarks.break_forms`: 32 breaks at 8B shapes took 332 µs of a step."""


def describe(plan: Plan) -> str:
    """Requests, locations, the engine and why, and how many bytes each read will take at most."""
    requests = sum(_requests(plan, name) for name in plan.arms)
    lines = [
        f"{plan.spec.file}: ok",
        f"  model     {plan.spec.model.path} ({plan.tree.architecture}, {plan.tree.dtype}, vLLM {plan.tree.vllm})",
        f"  engine    {plan.mode} ({plan.reason})",
        *(_taps(plan) if plan.mode == "taps" else [EAGER_PRICE]),
        *_everywhere(plan),
        f"  requests  {requests} ({', '.join(f'{n}: {_arm(plan, n)}' for n in plan.arms)})",
    ]
    for sae in plan.saes:
        taken = f", {human(sae.bytes)} of the device" if sae.bytes else ""
        lines.append(f"  sae       {sae.name}: {sae.architecture} in {sae.folder}, {sae.d_in} × {sae.d_sae}{taken}")
    for name, gate in plan.gates.items():
        lines.append(f"  gate      {name}: {_decides(gate.gate)} at {gate.site.name}{_scores(plan, name)}")
    for name, edit in plan.edits.items():
        when = "" if edit.edit.when is None else f" when {edit.edit.when}"
        lines.append(f"  edit      {name}: {edit.edit.verb}{_narrowed(edit.edit)} at {_places(plan, edit.sites)}{when}")
        lines += _set_from(plan, name)
        lines += _fusion(plan, name) if plan.mode == "taps" else []
    for name, read in plan.reads.items():
        if part_of(name) != name:
            continue
        rows, size = read_size(plan, name, read)
        kept = _count(rows, "mean" if read.read.kind == "mean" else "row")
        bytes_ = "as wide as its function makes them" if size is None else human(size)
        what = read.read.kind + _stored(read.read)
        if read.read.budget is not None:
            bytes_ += f"; its arms end at {_count(read.read.budget, 'row')} of each location"
        lines.append(f"  read      {name}: {what} at {_places(plan, read.sites)}, up to {kept}, {bytes_}")
    for name, override in plan.overrides.items():
        lines.append(f"  override  {name}: {_count(len(override.ids), 'token')} from step {override.override.start}")
        lines += _prefill_hint(plan, name)
    for name, metric in plan.metrics.items():
        of = " − ".join(f"{t!r} ({i})" for t, i in zip(metric.texts, metric.ids, strict=True))
        lines.append(f"  metric    {name}: {metric.metric.kind} of {of}")
    return "\n".join(lines)


def _taps(plan: Plan) -> list[str]:
    """What the taps cost: a launch each, and the slots of the reads with what their number assumes."""
    count = len(plan.locations)
    if not count:
        return []
    line = f"  taps      {_count(count, 'location')}, one launch each; "
    slots = slots_of(plan.spec.engine.vllm, plan.reads, plan.tree.dtype, plan.gates)
    if not slots.loads:
        return [line + "no reads, so no slots", *_breaks(plan)]
    assumed = f"{_count(slots.alive, 'request')} at once"
    if slots.tokens is not None:
        assumed += f" and {slots.tokens} tokens a step"
    allowed = plan.spec.engine.tap_memory
    return [
        f"{line}slots for up to {_count(slots.rows, 'row')} a step, {human(slots.taken(allowed))} of "
        f"{human(allowed)} allowed",
        f"            (for at most {assumed})",
        *_breaks(plan),
    ]


def _scores(plan: Plan, gate: str) -> str:
    """What the scores of a gate take: of one step on the device, and of the run."""
    slots = slots_of(plan.spec.engine.vllm, {}, plan.tree.dtype, {gate: plan.gates[gate]})
    if not slots.loads:
        return ""
    rows = slots.rows
    return f", up to {_count(rows, 'score')} a step, {human(slots.bytes)} of the device"


def _breaks(plan: Plan) -> list[str]:
    """What Python inside the model costs."""
    broken = [p for p in plan.locations if p.mode == "break"]
    if not broken:
        return []
    acting = [s for p in broken for s in p.statements]
    edits = [s.name for s in acting if s.kind == "edit" and plan.edits[s.name].edit.breaks]
    reads = [s.name for s in acting if s.kind == "read" and plan.reads[s.name].read.python is not None]
    named = ", ".join(dict.fromkeys([*(f"edits.{n}" for n in edits), *(f"reads.{n}" for n in reads)]))
    return [
        f"  breaks    {_count(len(broken), 'location')} of them for Python ({named}): CUDA graphs are cut there, about "
        f"{BREAK_PRICE} of a decode step each on an H200,",
        "            beside the functions' own time; vLLM's compile stays as configured",
    ]


def _everywhere(plan: Plan) -> list[str]:
    """What ``**`` became, what it leaves out, and what its rows take of the device on the eager engine."""
    every = plan.everywhere
    if every is None:
        return []
    lines = [f"  **        {_count(len(every.sites), 'module output')}, each a call of Python in every step"]
    slots = slots_of(plan.spec.engine.vllm, plan.reads, plan.tree.dtype, plan.gates)
    if slots.loads:
        lines[0] += f"; reads take up to {human(slots.bytes)} of the device"
    lines += [f"            without {text}" for text in every.left_out]
    return lines


def _places(plan: Plan, sites: tuple[Site, ...]) -> str:
    """:func:`listed`, where ``**`` stands for what it became."""
    every = () if plan.everywhere is None else plan.everywhere.sites
    if not every or not set(every) <= set(sites):
        return listed(sites)
    more = listed(tuple(s for s in sites if s not in set(every)))
    return f"** ({_count(len(every), 'module output')})" + (f", {more}" if more else "")


def _fusion(plan: Plan, name: str) -> list[str]:
    """Which of vLLM's fusions an edit prevents."""
    parted = [s for s in plan.edits[name].sites if between_all_reduce_and_norm(plan.tree.architecture, s)]
    if not parted:
        return []
    return [
        f"            between all-reduce and RMSNorm at {listed(tuple(parted))}: one GPU loses no fusion, "
        "tensor parallel that of the two"
    ]


def _decides(gate: Gate) -> str:
    """``cosine with paris above 0.2, max over the request``."""
    bounds = [f"{key} {bound:g}" for key in BOUNDS if (bound := getattr(gate, key)) is not None]
    of = "each row for itself" if gate.reduce is None else f"{gate.reduce} over the request"
    return f"{gate.kind} with {gate.vector} {' and '.join(bounds)}, {of}"


def _set_from(plan: Plan, name: str) -> list[str]:
    """Whose rows an edit sets, and what they take."""
    edit = plan.edits[name]
    rows, source = edit.edit.rows, edit.source
    if rows is None or source is None:
        return []
    size, run = human(patch_bytes(edit, plan.tree.dtype)), f" of {rows.run}" if rows.run is not None else ""
    told = f"{_count(source.slots, 'row')} of {_count(len(source.blocks), 'prompt')}, {size} of the device"
    return [f"            to rows of {rows.arm}.{rows.read}{run}: {told}"]


def _narrowed(edit: Edit) -> str:
    """`` heads 0, 3..5 dims 0..7``, `` ids " Paris", 12``: what narrows an edit."""
    ids = "" if edit.ids is None else " ids " + ", ".join(json.dumps(i, ensure_ascii=False) for i in edit.ids)
    return ids + "".join(
        f" {what} " + ", ".join(map(str, written(ranges)))
        for what, ranges in (("heads", edit.heads), ("dims", edit.dims))
        if ranges is not None
    )


def _stored(read: Read) -> str:
    """`` as float16``: what rows are narrowed to."""
    if read.store is None or read.store.dtype is None:
        return ""
    return f" as {read.store.dtype}" + (" with a scale a row" if read.store.scaled else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _arm(plan: Plan, name: str) -> str:
    arm = plan.arms[name]
    prompts, served = sum(len(plan.prompts[g]) for g in arm.prompts), _requests(plan, name)
    if served != prompts * len(arm.points):  # not every prompt has every row
        return f"{served} of {prompts} × {len(arm.points)}"
    return f"{prompts} × {len(arm.points)}" if len(arm.points) > 1 else str(prompts)


def _requests(plan: Plan, name: str) -> int:
    return sum(1 for _ in served(plan, name))


def served(plan: Plan, name: str) -> Iterator[tuple[ReadyPrompt, Point]]:
    """Each request of an arm, by prompt."""
    arm = plan.arms[name]
    for group in arm.prompts:
        for prompt in plan.prompts[group]:
            for _, point in points_of(arm, plan.edits, prompt):
                yield prompt, point


def _prefill_hint(plan: Plan, name: str) -> list[str]:
    """An override from step 0 gives what the same text at the end of the prompt gives, for a prefill instead of a
    decode step a token."""
    starts = {start for a in plan.arms.values() for p in a.points for n, start in p.overrides if n == name}
    if starts == {0}:
        return [f"            the same text as the end of the prompt costs less than {name} from step 0"]
    return []


def listed(sites: tuple[Site, ...]) -> str:
    """Sites with the layers of one alias collapsed, raw places last."""
    return collapsed(s.name for s in sorted(sites, key=lambda s: s.alias is None or s.layer is None))


def read_size(plan: Plan, name: str, read: ReadPlan) -> tuple[int, int | None]:
    """(rows, bytes) that a read keeps at most over the whole run, all its sites together; a mean keeps one a
    request.  None where the bytes are known only when its function has been called."""
    rows = requests = longest = 0
    for one in readings(name, plan.arms, plan.edits, plan.prompts, plan.overrides):
        own = compile_rows(without_ids(read.read.tokens), facts_of(one.prompt, [read.read.tokens], one.placed))
        last = len(one.prompt.ids) + one.max_tokens - 1
        rows += sum(max(0, min(b, last) - a) for a, b in own.intervals) * one.n
        requests += one.n
        longest = max([longest, *(min(b, last) for a, b in own.intervals if a < last)])
    if read.read.over == "run":
        requests = sum(len(a.points) for a in plan.arms.values() if name in a.arm.reads)
    width, count = sum((s.width or 0) for s in read.sites), len(read.sites)
    if read.read.kind == "mean":
        return requests * count, requests * width * 4
    each = {
        "rows": sum((read.read.store or Store()).row_bytes(s.width or 0, plan.tree.dtype) for s in read.sites),
        "norm": 4 * count,
        "project": 4 * len(read.read.vectors) * count,
        "probe": 4 * read.classes * count,
        "features": 8 * (read.read.top or len(read.read.ids or ())) * count,
        "pattern": 4 * (len(read.heads) * longest + 1) * count,
        "lens": (8 * (read.read.top or len(read.ids or ())) + 4) * count,
    }.get(read.read.kind)
    return rows * count, None if each is None else rows * each

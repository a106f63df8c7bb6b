"""Which stage of a pipeline serves a location, and what would have to cross from one stage to another within a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.plan import EditPlan, GatePlan, ReadPlan
from vtaps.spec.tree import ModelTree, Site

FIRST, LAST = ("embed",), ("final_norm",)


def stages(vllm: Mapping[str, Any]) -> int:
    """Of the pipeline that ``engine.vllm`` asks for."""
    return int(vllm.get("pipeline_parallel_size") or 1)


def layers_of(count: int, stages: int) -> tuple[range, ...]:
    """The layers of each stage as vLLM divides them: what is left over goes to the stages before the last."""
    sizes = [count // stages] * stages
    for i in range(2, count % stages + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def stage_of(site: Site, tree: ModelTree, stages: int) -> int | None:
    """None where no one stage is known to have it."""
    if site.sampled or site.alias in LAST:
        return stages - 1
    if site.alias in FIRST or site.name == "resid_pre[0]":
        return 0
    if site.layer is None:
        return None
    return next((i for i, some in enumerate(layers_of(tree.dimensions.layers, stages)) if site.layer in some), None)


def check_stages(
    count: int,
    edits: Mapping[str, EditPlan],
    reads: Mapping[str, ReadPlan],
    gates: Mapping[str, GatePlan],
    tree: ModelTree,
    doc: Document,
    found: list[Diagnostic],
) -> None:
    """VT353 for a location that no one of ``count`` stages is known to serve, and for a gate or a lens that would need
    another stage's rows within a step."""
    if count == 1:
        return
    if count > tree.dimensions.layers:
        size = doc.at("engine", "vllm", "pipeline_parallel_size")
        found.append(Diagnostic("VT353", f"{count} stages are more than the {tree.dimensions.layers} layers", size))
        return
    uses = [(p.sites, p.edit.where) for p in edits.values()]
    uses += [(p.sites, p.read.where) for p in reads.values() if not p.attention]
    uses += [((p.site,), p.gate.where) for p in gates.values()]
    for sites, where in uses:
        lost = [s for s in sites if stage_of(s, tree, count) is None]
        if lost:
            message = f"which of {count} pipeline stages runs {lost[0].name} is not known"
            found.append(Diagnostic("VT353", message, doc.at(*where, "at"), note=NOTE))
    for plan in edits.values():
        gate = gates.get(plan.edit.when or "")
        if gate is None:
            continue
        decided = stage_of(gate.site, tree, count)
        apart = [s for s in plan.sites if stage_of(s, tree, count) != decided]
        if decided is not None and apart:
            message = f"the gate {gate.gate.name!r} decides on stage {decided}, and {apart[0].name} is on another"
            note = "a stage hands on hidden states alone; put the gate on a layer of the edit's stage"
            found.append(Diagnostic("VT353", message, doc.at(*plan.edit.where, "when"), note=note))
    for read in reads.values():
        if read.read.kind != "lens":
            continue
        early = [s for s in read.sites if stage_of(s, tree, count) not in (count - 1, None)]
        if early:
            message = f"a lens unembeds on the last of {count} stages, and {early[0].name} is on an earlier one"
            note = "keep the rows and unembed them afterwards, or serve the model with tensor_parallel_size instead"
            found.append(Diagnostic("VT353", message, doc.at(*read.read.where, "at"), note=note))


NOTE = "locations of a layer, `embed`, `final_norm` and `logits` are of one stage"

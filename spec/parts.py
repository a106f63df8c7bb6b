"""What ranks of a tensor-parallel group have of a location: the whole of it, or a part of its columns each.

:mod:`vtaps.spec.shards` finds what a rank has of each value of a tree; here it is decided what can be served of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document, NodePath
from vtaps.spec.plan import EditPlan, GatePlan, ReadPlan
from vtaps.spec.spec import Edit, Read
from vtaps.spec.tree import ModelTree, Module, Site, Value

Held = Literal["whole", "columns"]

SPLIT = ("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear")
"""Their outputs' columns are divided, of each fused part by itself."""
ACTIVATIONS = ("SiluAndMul", "GeluAndMul", "NewGELU", "FastGELU", "QuickGELU", "ReLUSquaredActivation", "GELU", "SiLU",
               "ReLU", "GELUActivation")  # fmt: skip
"""Column by column: a rank puts out the columns of what it takes in."""


class NotServed(Exception):
    """Why a location is not served on several ranks."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


def ranks(vllm: Mapping[str, Any]) -> int:
    """Of the tensor-parallel group that ``engine.vllm`` asks for."""
    return int(vllm.get("tensor_parallel_size") or 1)


def held(site: Site, tree: ModelTree) -> Held:
    """What each of several ranks has of a site.  Raises :class:`NotServed`."""
    if site.sampled:
        return "whole"  # vLLM gathers the logits to every rank, and each of them samples
    if tree.unsharded is not None:
        raise NotServed("VT350", f"what a rank has of it is not known: {tree.unsharded}")
    module = tree.modules[site.module]
    values = [_value(module, site, site.element)]
    if site.residual is not None:
        values.append(_value(module, site, site.residual))
    return max((_held(value, module, site) for value in values), key=lambda h: h == "columns")


def _value(module: Module, site: Site, element: int | str | None) -> Value | None:
    value: Value | None
    if site.op is not None and site.side == "output" and site.inside is None:
        value = dict(module.ops).get(site.op)
        return _element(value, element)
    if site.op is not None:
        return None
    if site.side == "input" or isinstance(element, str):
        return dict(module.inputs).get(str(element))
    return _element(module.output, element)


def _element(value: Value | None, element: int | str | None) -> Value | None:
    if value is not None and value.kind == "tuple":
        index = element if isinstance(element, int) else 0
        return value.items[index] if index < len(value.items) else None
    return value


def _held(value: Value | None, module: Module, site: Site) -> Held:
    if value is None:
        if site.alias == "router_logits":
            return "whole"  # its gate is a linear layer that every rank has the whole of
        raise NotServed("VT351", "what a rank has of it is not known")
    if value.kind != "tensor":
        return "whole"  # a residual that is none yet
    if value.mark == "partial":
        raise NotServed("VT350", "each rank has a term of a sum there, which vLLM adds up later")
    if value.mark == "alone":
        raise NotServed("VT350", "a model on several ranks does not compute it")
    if not value.shards:
        return "whole"
    [(axis, _), *more] = value.shards
    if more or axis == 0:
        raise NotServed("VT350", "each rank has other rows there")
    if not _in_order(module, site, value, axis):
        raise NotServed("VT351", "each rank has some of its columns, and which they are is not known")
    return "columns"


def _in_order(module: Module, site: Site, value: Value, axis: int) -> bool:
    """Whether it is known which columns each rank has."""
    if site.op is not None:
        return False
    if len(value.shape) == 3:
        return axis == 1 and site.heads is not None
    if site.side == "output":
        return module.cls in (*SPLIT, *ACTIVATIONS, "Attention")
    return module.cls in (*ACTIVATIONS, "Attention", "RowParallelLinear")


READS = ("rows", "mean", "norm", "project", "probe")
"""What is made of the parts of a row is put together after they have come."""
EDITS = ("add", "scale", "zero", "set")
"""What they do to a column depends on nothing in the others."""


def check_parts(
    count: int,
    edits: Mapping[str, EditPlan],
    reads: Mapping[str, ReadPlan],
    gates: Mapping[str, GatePlan],
    tree: ModelTree,
    doc: Document,
    found: list[Diagnostic],
) -> frozenset[str]:
    """The names of the sites of which each of ``count`` ranks has some columns; VT350 to VT352 for what several ranks
    do not serve."""
    parted: set[str] = set()
    if count == 1:
        return frozenset()

    def at(sites: tuple[Site, ...], where: NodePath, needs: str | None) -> None:
        span = doc.at(*where, "at")
        for site in sites:
            try:
                if held(site, tree) == "whole":
                    continue
            except NotServed as no:
                message = f"{site.name} is not served at tensor_parallel_size {count}: {no.why}"
                found.append(Diagnostic(no.code, message, span, note=NOTES[no.code]))
                return
            parted.add(site.name)
            if needs is not None:
                message = f"{needs} needs whole rows, and of {site.name} each of {count} ranks has some columns"
                found.append(Diagnostic("VT352", message, span, note=NOTES["VT352"]))
                return

    for edit in edits.values():
        at(edit.sites, edit.edit.where, _whole_edit(edit.edit))
    for read in reads.values():
        if not read.attention:  # a pattern's queries and keys are reads of their own
            at(read.sites, read.read.where, _whole_read(read.read))
    for gate in gates.values():
        at((gate.site,), gate.gate.where, "a gate")
    return frozenset(parted)


NOTES = {
    "VT350": "`vtaps tree MODEL --at PATH` says what a rank has of each; every one has the whole residual stream",
    "VT351": "q, k, v, rot_q, rot_k, z, mlp_post, and what linear layers and attention take and give, are known",
    "VT352": "the residual stream, attn_out and mlp_out are whole on every rank; "
    "`add`, `scale`, `zero` and `set` go column by column",
}


def _whole_edit(edit: Edit) -> str | None:
    if edit.verb in EDITS and not edit.keep_norm:
        return None
    return "`keep_norm`" if edit.keep_norm else f"`{edit.verb}`"


def _whole_read(read: Read) -> str | None:
    if read.kind == "rows" and read.store is not None and read.store.scaled:
        return "a scale per row"
    return None if read.kind in READS else f"`{read.kind}`"

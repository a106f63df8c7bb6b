"""Vectors held against the places that use them: files, tensors, widths, finite values, digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vtaps.spec.diagnostics import Diagnostic, nearest
from vtaps.spec.document import Document, NodePath
from vtaps.spec.files import nearest_file
from vtaps.spec.plan import EditPlan, GatePlan, ReadPlan
from vtaps.spec.spec import MATRICES, PROBE, Edit, Gate, Read, Sae, Spec, Vector
from vtaps.spec.tree import Site
from vtaps.spec.vectors import (
    Floats,
    VectorError,
    directions,
    file_digest,
    read_affine,
    read_probe,
    read_vector,
    tensors_in,
)

CODES = {
    "missing": "VT306",
    "unreadable": "VT306",
    "ambiguous": "VT307",
    "tensor": "VT307",
    "width": "VT301",
    "nonfinite": "VT308",
    "direction": "VT323",
    "sae": "VT335",
    "feature": "VT336",
}


def definition(vector: Vector, saes: Mapping[str, Sae]) -> dict[str, Any]:
    """The vector as the lock writes it and ``read_vector`` takes it."""
    if vector.means:
        scaled = {} if vector.norm is None else {"norm": vector.norm}
        return {**{key: {"arm": of.arm, "read": of.read} for key, of in vector.means}, **scaled}
    if vector.random:
        return {"random": {"seed": vector.seed, "norm": vector.norm}}
    scaled = {} if vector.norm is None else {"norm": vector.norm}
    if vector.sae is not None:
        return {"sae": saes[vector.sae].path, "feature": vector.feature, **scaled}
    return {"file": vector.file, "tensor": vector.tensor, "row": vector.row, **scaled}


def swept_vectors(spec: Spec) -> dict[str, list[tuple[str, NodePath]]]:
    """Edit → the vectors that sweeps give it, and where."""
    swept: dict[str, list[tuple[str, NodePath]]] = {}
    for arm in spec.arms.values():
        for factor in arm.sweep:
            for axis in factor:
                target, _, field = axis.path.partition(".")
                if field.endswith(".vector") and axis.values is not None:
                    swept.setdefault(target, []).extend((str(v), (*axis.where, i)) for i, v in enumerate(axis.values))
    return swept


def uses_of_vectors(
    spec: Spec, edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan], gates: Mapping[str, GatePlan],
    swept: Mapping[str, list[tuple[str, NodePath]]],
) -> Iterator[tuple[str, Site, NodePath]]:  # fmt: skip
    """(vector, site, where the use stands); sweeps over vectors count as uses at every site of the edit."""
    for name, plan in edits.items():
        own = [(plan.edit.vector, (*plan.edit.where, plan.edit.verb, "vector"))] if plan.edit.vector else []
        own += [(v, (*plan.edit.where, plan.edit.verb, "vectors", i)) for i, v in enumerate(plan.edit.vectors)]
        for vector, where in own + swept.get(name, []):
            for site in plan.sites:
                yield vector, site, where
    for gate in gates.values():
        yield gate.gate.vector, gate.site, (*gate.gate.where, gate.gate.kind)
    for read in reads.values():
        if read.read.kind == "probe":
            continue
        for i, vector in enumerate(read.read.vectors):
            for site in read.sites:
                yield vector, site, (*read.read.where, "project", "vectors", i)


def check_vectors(
    spec: Spec, edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan], gates: Mapping[str, GatePlan],
    doc: Document, found: list[Diagnostic],
) -> dict[str, str]:  # fmt: skip
    """Findings go to ``found``, one a vector and kind; returns file → digest."""
    digests: dict[str, str] = {}
    told: set[tuple[str, str]] = set()
    good: set[tuple[str, int | None, int]] = set()

    def tell(vector: Vector, kind: str, message: str, where: NodePath) -> None:
        # What is wrong with an SAE is said there: vtaps.spec.sae_use.
        if (vector.name, kind) in told or (vector.sae is not None and kind != "direction"):
            return
        told.add((vector.name, kind))
        at_use = kind in ("width", "direction") or vector.file is None
        span = doc.at(*where) if at_use else doc.at(*vector.where, "tensor" if kind == "tensor" else "file")
        valid, close = _there(vector, doc) if kind in ("tensor", "ambiguous") else ((), None)
        if kind == "missing" and vector.file is not None:
            close = nearest_file(doc.folder / vector.file)
        found.append(Diagnostic(CODES[kind], f"vector {vector.name!r}: {message}", span, valid, close))

    for vector in spec.vectors.values():
        if vector.file is not None:
            try:
                digests[vector.file] = file_digest(doc.folder / vector.file)
            except VectorError as error:
                tell(vector, error.kind, error.message, vector.where)
    swept = swept_vectors(spec)
    for name, site, where in uses_of_vectors(spec, edits, reads, gates, swept):
        if _unusable(name, spec):
            continue
        vector = spec.vectors[name]
        if vector.means:
            continue  # its numbers are known in the run
        if "{layer}" in (vector.tensor or "") and _through_resid_pre(spec, str(where[0]), str(where[1])):
            message = f"{{layer}} at resid_pre[i] could be i or i−1, since resid_pre[i] is {site.name}"
            tell(vector, "tensor", message + ": write resid_post", where)
            continue
        if site.width is None:
            tell(vector, "width", f"the width of {site.name} is not known before the run", where)
            continue
        key = (name, site.layer, site.width)
        if key in good:
            continue
        try:
            read_vector(definition(vector, spec.saes), doc.folder, site.layer, site.width)
            good.add(key)
        except VectorError as error:
            message = error.message + (f" ({site.name})" if error.kind in ("width", "tensor") else "")
            tell(vector, error.kind, message, where)
    for plan in edits.values():
        _check_directions(plan, swept.get(plan.edit.name, []), spec, doc, good, tell)
        _check_affine(plan, spec, doc, tell)
    for read in reads.values():
        _check_probe(read, spec, doc, tell)
    for gate in gates.values():
        name, site = gate.gate.vector, gate.site
        cosine = gate.gate.kind == "cosine" and (name, site.layer, site.width) in good
        if (
            cosine
            and not read_vector(
                definition(spec.vectors[name], spec.saes), doc.folder, site.layer, site.width or 0
            ).any()
        ):
            tell(spec.vectors[name], "direction", f"{name} is zero here ({site.name})", (*gate.gate.where, "cosine"))
    return digests


def _check_probe(plan: ReadPlan, spec: Spec, doc: Document, tell: Callable[..., None]) -> None:
    read, names = plan.read, plan.read.vectors
    if read.kind != "probe" or any(_unusable(name, spec) or spec.vectors[name].means for name in names):
        return
    for site in plan.sites:
        where = (*read.where, "probe", "weight")
        if site.width is None:
            tell(spec.vectors[names[0]], "width", f"the width of {site.name} is not known before the run", where)
            return
        try:
            read_probe(
                [definition(spec.vectors[n], spec.saes) for n in names], names, doc.folder, site.layer, site.width
            )
        except VectorError as error:
            named = next((n for n in names if error.message.startswith(f"{n} ")), names[0])
            where = (*read.where, "probe", PROBE[names.index(named)])
            tell(spec.vectors[named], error.kind, f"{error.message} ({site.name})", where)
            return


def _unusable(name: str, spec: Spec) -> bool:
    """Whether a vector, or its SAE, is not defined: that has a finding already."""
    return name not in spec.vectors or spec.vectors[name].sae not in (None, *spec.saes)


def classes_of(plan: ReadPlan, spec: Spec, doc: Document) -> int:
    """How many numbers a ``probe`` that was checked gives of a row; 1 for other reads."""
    read, site = plan.read, plan.sites[0]
    if read.kind != "probe":
        return 1
    defined = [definition(spec.vectors[n], spec.saes) for n in read.vectors]
    return len(read_probe(defined, read.vectors, doc.folder, site.layer, site.width or 0)[0])


def _check_affine(plan: EditPlan, spec: Spec, doc: Document, tell: Callable[..., None]) -> None:
    edit, names = plan.edit, plan.edit.matrices
    if not names or any(_unusable(name, spec) or spec.vectors[name].means for name in names):
        return
    for site in plan.sites:
        where = (*edit.where, edit.verb, "down")
        if site.width is None:
            tell(spec.vectors[names[0]], "width", f"the width of {site.name} is not known before the run", where)
            return
        try:
            read_affine(
                [definition(spec.vectors[n], spec.saes) for n in names], names, doc.folder, site.layer, site.width
            )
        except VectorError as error:
            named = next((n for n in names if error.message.startswith(n)), names[0])
            key = MATRICES[names.index(named)]
            tell(spec.vectors[named], error.kind, f"{error.message} ({site.name})", (*edit.where, edit.verb, key))
            return


def _check_directions(
    plan: EditPlan, swept: list[tuple[str, NodePath]], spec: Spec, doc: Document,
    good: set[tuple[str, int | None, int]], tell: Callable[..., None],
) -> None:  # fmt: skip
    """Vectors of which the direction alone counts have one, at every site where they could be read; ``swept``: those
    that sweeps put in place of the edit's own, and where."""
    edit = plan.edit
    at = (*edit.where, edit.verb)
    together: list[list[tuple[str, NodePath]]] = []
    if edit.verb == "clamp":
        together = [[(str(edit.vector), (*at, "vector"))], *([one] for one in swept)]
    elif edit.vectors:
        together = [[(name, (*at, "vectors", i)) for i, name in enumerate(edit.vectors)]]
    for named in together:
        names = [name for name, _ in named]
        for site in plan.sites:
            if site.width is None or any((name, site.layer, site.width) not in good for name in names):
                continue
            read = [
                read_vector(definition(spec.vectors[n], spec.saes), doc.folder, site.layer, site.width) for n in names
            ]
            fault = _without_direction(read, names, plan, site)
            if fault is not None:
                count, message = fault
                tell(spec.vectors[names[count]], "direction", message, named[count][1])
                break


def _without_direction(read: list[Floats], names: list[str], plan: EditPlan, site: Site) -> tuple[int, str] | None:
    """The first vector that is at fault, and why."""
    for count in range(1, len(names) + 1):
        try:
            directions(read[:count], names[:count], plan.columns)
        except VectorError as error:
            return count - 1, f"{error.message} ({site.name})"
    return None


def _through_resid_pre(spec: Spec, section: str, name: str) -> bool:
    """Whether an edit or read spells a location by the layer that follows it."""
    tables: dict[str, Mapping[str, Edit | Read | Gate]] = {
        "edits": spec.edits,
        "reads": spec.reads,
        "gates": spec.gates,
    }
    used = tables.get(section, {}).get(name)
    if section == "arms":  # a sweep over vectors: any edit of the spec that does
        return any(_through_resid_pre(spec, "edits", edit) for edit in spec.edits)
    spelled = () if used is None else spec.texts(used.at)
    return any(t.startswith("resid_pre") for t in spelled)


def _there(vector: Vector, doc: Document) -> tuple[tuple[str, ...], str | None]:
    try:
        names = tuple(n for n in tensors_in(doc.folder / (vector.file or "")) if n)
    except VectorError:
        return (), None
    return names, nearest(vector.tensor or "", names)

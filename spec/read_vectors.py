"""Vectors made of what reads keep: which mean of which location each place of use gets."""

from __future__ import annotations

from collections.abc import Mapping

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.plan import ArmPlan, EditPlan, GatePlan, MeanSource, ReadPlan
from vtaps.spec.sources import Prompts, SourceFault, served
from vtaps.spec.spec import RowsOf, Spec, Vector
from vtaps.spec.tree import Site
from vtaps.spec.vector_use import swept_vectors, uses_of_vectors


def plan_means(
    spec: Spec, edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan], gates: Mapping[str, GatePlan],
    arms: Mapping[str, ArmPlan], prompts: Prompts, doc: Document, found: list[Diagnostic],
) -> dict[str, dict[str, MeanSource]]:  # fmt: skip
    """Vector → ``read`` and ``minus`` → its source; one finding a key (VT218, VT301, VT328, VT329)."""
    used: dict[str, dict[str, Site]] = {}
    for name, site, _ in uses_of_vectors(spec, edits, reads, gates, swept_vectors(spec)):
        used.setdefault(name, {})[site.name] = site
    whole = {name: f"edit {p.edit.name!r} takes its matrices" for p in edits.values() for name in p.edit.matrices}
    for read in (p.read for p in reads.values() if p.read.kind == "probe"):
        whole.update((name, f"read {read.name!r} takes its weights") for name in read.vectors)
    out: dict[str, dict[str, MeanSource]] = {}
    for vector in spec.vectors.values():
        for key, of in vector.means:
            if of.arm not in arms or of.read not in reads:
                continue
            try:
                if vector.name in whole:
                    raise SourceFault("VT329", f"{whole[vector.name]} from files alone", None)
                sites = used.get(vector.name, {})
                source = _source(vector, of, reads[of.read], arms[of.arm], prompts, sites)
                out.setdefault(vector.name, {})[key] = source
            except SourceFault as fault:
                code, message, note = fault.args
                where = doc.at(*vector.where, key)
                found.append(Diagnostic(code, f"vector {vector.name!r}: {message}", where, note=note))
    return out


def _source(
    vector: Vector, of: RowsOf, read: ReadPlan, arm: ArmPlan, prompts: Prompts, used: Mapping[str, Site]
) -> MeanSource:
    if of.read not in arm.arm.reads:
        raise SourceFault("VT218", f"the arm {of.arm!r} does not list the read {of.read!r}", None)
    if read.read.kind != "mean":
        note = "`mean_over: run` keeps one mean of all requests of the arm"
        raise SourceFault("VT329", f"{of.read!r} keeps {read.read.kind}, not a mean", note)
    if len(arm.points) != 1:
        raise SourceFault("VT328", f"the arm {of.arm!r} has {len(arm.points)} sweep points, so several means", None)
    count = sum(1 for _ in served(arm, prompts)) * arm.sampling.get("n", 1)
    if read.read.over == "request" and count != 1:
        text = f"{of.read!r} keeps a mean of each request, and the arm {of.arm!r} has {count}"
        raise SourceFault("VT329", text, "`mean_over: run` keeps one mean of all of them")
    return MeanSource(of.arm, of.read, {name: _at(site, of, read).name for name, site in used.items()})


def _at(site: Site, of: RowsOf, read: ReadPlan) -> Site:
    """The location of a read that stands for ``site``: itself, else the only one of its layer."""
    alike = [s for s in read.sites if s.name == site.name] or [s for s in read.sites if s.layer == site.layer]
    if len(alike) != 1:
        where = "outside the layers" if site.layer is None else f"of layer {site.layer}"
        many = "no location" if not alike else f"{len(alike)} locations"
        note = "a vector is taken from the location itself, else from the only one of its layer"
        raise SourceFault("VT329", f"it is used at {site.name}, and {of.read!r} reads {many} {where}", note)
    if alike[0].width != site.width:
        text = f"{of.read!r} is {alike[0].width} wide at {alike[0].name}; {site.width} is needed at {site.name}"
        raise SourceFault("VT301", text, None)
    return alike[0]

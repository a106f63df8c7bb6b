"""The order of what happens at one location: the arms' lists, merged, with reads before and after."""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Mapping

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.plan import ArmPlan, EditPlan, GatePlan, LocationPlan, ReadPlan, Statement
from vtaps.spec.spec import Spec
from vtaps.spec.tree import Site


def plan_locations(
    spec: Spec, edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan], arms: Mapping[str, ArmPlan],
    gates: Mapping[str, GatePlan], doc: Document, found: list[Diagnostic],
) -> tuple[LocationPlan, ...]:  # fmt: skip
    """One entry a site, in execution order.  At a site: reads that see the state before edits, gates, edits in the
    arms' order, the other reads; what no arm lists stays out.  Ties fall by name, so key order means nothing."""
    listed_edits = {n for a in arms.values() for n in a.arm.edits if n in edits}
    listed_reads = {n for a in arms.values() for n in a.arm.reads if n in reads}
    sites: dict[str, Site] = {}
    at: dict[str, tuple[list[str], list[str]]] = {}
    for name in sorted(listed_edits):
        for site in edits[name].sites:
            sites[site.name] = site
            at.setdefault(site.name, ([], []))[0].append(name)
    for name in sorted(listed_reads):
        for site in reads[name].sites if not reads[name].attention else ():
            sites[site.name] = site
            at.setdefault(site.name, ([], []))[1].append(name)
    looking: dict[str, list[str]] = {}
    for name in sorted({g for n in listed_edits if (g := edits[n].edit.when) in gates and g is not None}):
        site = gates[name].site
        sites[site.name] = site
        at.setdefault(site.name, ([], []))
        looking.setdefault(site.name, []).append(name)
    _check_sees(edits, reads, arms, doc, found)
    out = []
    disagreed: set[frozenset[str]] = set()
    for site in sorted(sites.values(), key=lambda s: (s.order, s.name)):
        here, read_here = at[site.name]
        ordered = _merged(site, here, spec, arms, doc, found, disagreed)
        before = [r for r in read_here if reads[r].read.sees == "before_edits"]
        after = [r for r in read_here if r not in before]
        statements = [Statement("read", r) for r in before]
        statements += [Statement("gate", g) for g in looking.get(site.name, ())]
        statements += [Statement("edit", e) for e in ordered]
        statements += [Statement("read", r) for r in after]
        out.append(LocationPlan(site, tuple(statements)))
    return tuple(out)


def _merged(
    site: Site, names: list[str], spec: Spec, arms: Mapping[str, ArmPlan], doc: Document, found: list[Diagnostic],
    disagreed: set[frozenset[str]],
) -> list[str]:  # fmt: skip
    graph: dict[str, set[str]] = {name: set() for name in names}
    asked: dict[tuple[str, str], str] = {}
    for arm in arms.values():
        own = [n for n in arm.arm.edits if n in graph]
        for first, then in itertools.pairwise(own):
            if first == then:
                continue
            graph[then].add(first)
            asked.setdefault((first, then), arm.arm.name)
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
        key = frozenset(cycle)
        if key not in disagreed:
            disagreed.add(key)
            pairs = [(a, b, asked[(a, b)]) for a, b in itertools.pairwise(cycle) if (a, b) in asked]
            wants = "; ".join(f"{arm!r} has {a!r} before {b!r}" for a, b, arm in pairs)
            last = max((spec.arms[arm] for _, _, arm in pairs), key=lambda arm: doc.line(*arm.where))
            found.append(
                Diagnostic(
                    "VT305", f"arms disagree about the order at {site.name}: {wants}", doc.at(*last.where, "edits")
                )
            )
        return names
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return order


def _check_sees(
    edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan], arms: Mapping[str, ArmPlan], doc: Document,
    found: list[Diagnostic],
) -> None:  # fmt: skip
    told: set[str] = set()
    for arm in arms.values():
        edited = {s.name: n for n in arm.arm.edits if n in edits for s in edits[n].sites}
        for name in arm.arm.reads:
            if name not in reads or reads[name].read.sees is not None or name in told:
                continue
            hit = next((s.name for s in reads[name].sites if s.name in edited), None)
            if hit is not None:
                told.add(name)
                found.append(
                    Diagnostic(
                        "VT304",
                        f"arm {arm.arm.name!r} edits {hit} ({edited[hit]!r}) where {name!r} reads it",
                        doc.key(*reads[name].read.where),
                        ("sees: before_edits", "sees: after_edits"),
                    )
                )

"""Arms that need what other arms keep: who needs whom, and in which order they can be served."""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Iterator

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document, NodePath
from vtaps.spec.spec import Arm, Spec


def needs(spec: Spec) -> Iterator[tuple[str, str, NodePath]]:
    """(arm, the arm whose reads it needs, where that is said), for arms that are defined."""
    for arm in spec.arms.values():
        for name in arm.edits:
            edit = spec.edits.get(name)
            if edit is not None and edit.rows is not None and edit.rows.run is None and edit.rows.arm in spec.arms:
                yield arm.name, edit.rows.arm, (*edit.where, edit.verb, "rows")
        for name in vectors_of(spec, arm):
            for key, of in spec.vectors[name].means:
                if of.arm in spec.arms:
                    yield arm.name, of.arm, (*spec.vectors[name].where, key)


def vectors_of(spec: Spec, arm: Arm) -> tuple[str, ...]:
    """The vectors, among those that are defined, that an arm's edits, their gates, its sweep and its reads use."""
    names: dict[str, None] = {}
    for edit in (spec.edits[n] for n in arm.edits if n in spec.edits):
        names.update(dict.fromkeys((*([edit.vector] if edit.vector else []), *edit.vectors, *edit.matrices)))
        if edit.when is not None and edit.when in spec.gates:
            names[spec.gates[edit.when].vector] = None
    for axis in (axis for factor in arm.sweep for axis in factor):
        if axis.path.endswith(".vector"):
            names.update((str(value), None) for value in axis.values or ())
    for read in (spec.reads[n] for n in arm.reads if n in spec.reads):
        names.update(dict.fromkeys(read.vectors))
    return tuple(name for name in names if name in spec.vectors)


def plan_stages(spec: Spec, doc: Document, found: list[Diagnostic]) -> tuple[tuple[str, ...], ...]:
    """The arms in the order in which they can be served, those of a stage in the order of the spec; VT219 where there
    is none."""
    graph: dict[str, set[str]] = {name: set() for name in spec.arms}
    said: dict[tuple[str, str], NodePath] = {}
    for arm, source, where in needs(spec):
        graph[arm].add(source)
        said.setdefault((arm, source), where)
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        # graphlib lists a source before what needs it.
        circle: list[str] = error.args[1]
        pairs = [(needing, source) for source, needing in itertools.pairwise(circle)]
        told = "; ".join(f"{needing!r} needs {source!r}" for needing, source in pairs)
        last = max((said[pair] for pair in pairs), key=lambda where: doc.line(*where))
        found.append(Diagnostic("VT219", f"no arm of these can be served first: {told}", doc.at(*last)))
        return ()
    order = list(spec.arms)
    stages = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=order.index)
        stages.append(tuple(ready))
        sorter.done(*ready)
    return tuple(stages)

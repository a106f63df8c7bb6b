"""Names: every one that is used is defined, every one that is defined is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vtaps.spec.aliases import ALIASES
from vtaps.spec.behind import BEHIND
from vtaps.spec.diagnostics import Diagnostic, nearest
from vtaps.spec.document import Document, NodePath
from vtaps.spec.spec import MATRICES, PROBE, Spec

KINDS = {
    "saes": "SAE",
    "vectors": "vector",
    "taps": "tap",
    "reads": "read",
    "gates": "gate",
    "edits": "edit",
    "overrides": "override",
    "metrics": "metric",
    "prompts": "prompt group",
    "arms": "arm",
}


MANY = 20
"""Past so many names that are not defined, the nearest one helps nobody and costs the most."""


def defined(spec: Spec, section: str) -> set[str]:
    """Names of a section, those of definitions that failed the schema too."""
    return set(getattr(spec, section)) | {str(path[1]) for path in spec.broken if len(path) == 2 and path[0] == section}


def uses(spec: Spec) -> Iterator[tuple[str, str, NodePath]]:
    """(section, name, where it is used), in no particular order."""
    for arm in spec.arms.values():
        for section in ("prompts", "reads", "edits", "overrides", "metrics"):
            for i, name in enumerate(getattr(arm, section) or ()):
                yield section, name, (*arm.where, section, i)
        for factor in arm.sweep:
            for axis in factor:
                if axis.values is not None and axis.path.endswith(".vector"):
                    for i, name in enumerate(axis.values):
                        yield "vectors", str(name), (*axis.where, i)
    for gate in spec.gates.values():
        yield "vectors", gate.vector, (*gate.where, gate.kind)
    for vector_def in spec.vectors.values():
        for key, of in vector_def.means:
            yield "arms", of.arm, (*vector_def.where, key)
            yield "reads", of.read, (*vector_def.where, key)
    for metric in spec.metrics.values():
        for key, arm_name in zip(("one", "zero"), metric.normalize or (), strict=False):
            yield "arms", arm_name, (*metric.where, "normalize", key)
    for edit in spec.edits.values():
        if edit.when is not None:
            yield "gates", edit.when, (*edit.where, "when")
        if edit.vector is not None:
            yield "vectors", edit.vector, (*edit.where, edit.verb, "vector")
        for key, vector in zip(MATRICES, edit.matrices, strict=False):
            yield "vectors", vector, (*edit.where, edit.verb, key)
        if edit.feature is not None:
            yield "saes", edit.feature.sae, (*edit.where, edit.verb, "sae")
        if edit.rows is not None and edit.rows.run is None:
            at = (*edit.where, edit.verb, "rows")
            yield "arms", edit.rows.arm, at
            yield "reads", edit.rows.read, at
        for i, vector in enumerate(edit.vectors):
            yield "vectors", vector, (*edit.where, edit.verb, "vectors", i)
    for read in spec.reads.values():
        for i, name in enumerate(read.vectors):
            said = ("probe", PROBE[i]) if read.kind == "probe" else ("project", "vectors", i)
            yield "vectors", name, (*read.where, *said)
        if read.sae is not None:
            yield "saes", read.sae, (*read.where, "features", "sae")
    for defined_by in spec.vectors.values():
        if defined_by.sae is not None:
            yield "saes", defined_by.sae, (*defined_by.where, "sae")
    for item in spec.selecting():
        for rows in item.tokens.parts():
            if rows.after is not None:
                yield "overrides", rows.after, (*item.where, "tokens", "after")


def check_names(spec: Spec, doc: Document) -> Iterable[Diagnostic]:
    used: dict[str, set[str]] = {section: set() for section in KINDS}
    meant: set[tuple[str, str | None]] = set()
    unknown = 0
    known = {section: dict.fromkeys(sorted(defined(spec, section))) for section in KINDS}
    for section, name, where in uses(spec):
        names = known[section]
        if name in used[section] and name in names:
            continue
        used[section].add(name)
        if name not in names:
            unknown += 1
            close = nearest(name, names) if unknown <= MANY else None
            meant.add((section, close))
            yield Diagnostic(
                "VT210",
                f"no {KINDS[section]} is named {name!r}",
                doc.at(*where),
                tuple(names),
                close,
                None if names else f"the spec has no `{section}:`",
            )
    for name, tap in spec.taps.items():
        if name in (*ALIASES, *BEHIND):
            yield Diagnostic(
                "VT211", f"the tap {name!r} has the name of an alias", doc.key("taps", name), note="choose another name"
            )
        for where, text in zip(tap.wheres, tap.texts, strict=True):
            if text in spec.taps:
                yield Diagnostic("VT201", f"a tap cannot be made of the tap {text!r}", doc.at(*where))
    used["taps"] = {t for at in spec.ats() for t in at.texts}
    if any(arm.prompts is None for arm in spec.arms.values()):
        used["prompts"] = set(spec.prompts)
    complete = not any(path[0] in ("arms", "edits", "reads", "gates") for path in spec.broken if path)
    for section in ("vectors", "taps", "reads", "gates", "edits", "overrides", "metrics", "prompts"):
        for name in getattr(spec, section):
            if complete and name not in used[section] and (section, name) not in meant:
                yield Diagnostic("VT212", f"the {KINDS[section]} {name!r} is never used", doc.key(section, name))

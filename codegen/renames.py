"""Names that another lock has for the same definitions, and a lock with its names replaced."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from vtaps.spec.pattern import part_of

Lock = Mapping[str, Any]
Names = dict[str, dict[str, str]]
"""Section → old name → new name."""

SECTIONS = ("vectors", "overrides", "gates", "reads", "edits", "prompts", "arms", "metrics")
UNKNOWN = "?"


def renames(old: Lock, new: Lock) -> Names:
    """The names of ``old`` that ``new`` does not have, each with the name that has the same definition there.

    A definition is what the lock holds of it, names in it followed; first with its numbers (scales, vectors, bounds),
    then without.  Substituting the result never makes two programs equal that are not.
    """
    found: Names = {s: {} for s in SECTIONS}
    changed = True
    while changed:
        changed = False
        for numbers in (True, False):
            for section in SECTIONS:
                changed |= _match(section, old, new, found, numbers)
            if changed:
                break
    return {s: names for s, names in found.items() if names}


def _match(section: str, old: Lock, new: Lock, found: Names, numbers: bool) -> bool:
    mine, theirs = _own(old, section), _own(new, section)
    taken = set(found[section].values())
    gone = [n for n in mine if n not in theirs and n not in found[section]]
    come = [n for n in theirs if n not in mine and n not in taken]
    if not gone or not come or (section == "arms" and not numbers):
        return False

    def before(of: str, name: str) -> str:
        return found[of].get(name, name if name in new.get(of, {}) else UNKNOWN)

    def after(of: str, name: str) -> str:
        return name if name in old.get(of, {}) or name in found[of].values() else UNKNOWN

    old_by = _by_definition(section, gone, old, before, numbers)
    new_by = _by_definition(section, come, new, after, numbers)
    pairs = [pair for key in old_by if key in new_by for pair in zip(old_by[key], new_by[key], strict=False)]
    found[section].update(pairs)
    return bool(pairs)


def _own(lock: Lock, section: str) -> list[str]:
    return [n for n in lock.get(section, {}) if section != "reads" or part_of(n) == n]


def _by_definition(
    section: str, names: list[str], lock: Lock, name: Callable[[str, str], str], numbers: bool
) -> dict[str, list[str]]:
    """Definition → its names, those that arms use alike in the order of their use."""
    out: dict[str, list[tuple[Any, str]]] = {}
    for n in names:
        body = _body(section, substituted(section, lock[section][n], name))
        own = numbers_of(lock, section, n) if numbers else []
        own = [{**e, "vector": e.get("vector") and name("vectors", e["vector"])} for e in own]
        uses = [
            (name("arms", arm), a[section].index(n))
            for arm, a in lock["arms"].items()
            if section in ("edits", "reads", "metrics", "prompts") and n in a[section]
        ]
        key = json.dumps([body, own], sort_keys=True)
        out.setdefault(key, []).append((sorted(uses), n))
    return {key: [n for _, n in sorted(found)] for key, found in out.items()}


def _body(section: str, body: dict[str, Any]) -> Any:
    """What a definition is, without what follows from its use."""
    if section == "prompts":
        return [body["count"], body["digest"]]
    if section == "vectors" and body.get("digest"):
        body.pop("file", None)
    if section == "edits" and "rows" in body:
        body["rows"].pop("slots", None)
    if section == "arms":
        for key in ("prompts", "reads", "metrics"):
            body[key] = sorted(body[key])
    return {k: v for k, v in body.items() if k not in ("step_rows", "requests", "attention")}


def numbers_of(lock: Lock, section: str, name: str) -> list[dict[str, Any]]:
    """What the points of the arms hold of an edit or a gate, each once."""
    key = {"edits": "edit", "gates": "gate"}.get(section)
    if key is None:
        return []
    entries = [
        {k: v for k, v in e.items() if k != key}
        for arm in lock["arms"].values()
        for point in arm["points"]
        for e in point.get(section, ())
        if e[key] == name
    ]
    unique = {json.dumps(e, sort_keys=True): e for e in entries}
    return [unique[k] for k in sorted(unique)]


def renamed(lock: Lock, names: Names) -> dict[str, Any]:
    """The lock with other names for its definitions, in every place that refers to them."""

    def name(section: str, old: str) -> str:
        known = names.get(section, {})
        if section == "reads" and part_of(old) != old:
            own = part_of(old)
            return known.get(own, own) + old.removeprefix(own)
        return known.get(old, old)

    out = dict(lock)
    for section in SECTIONS:
        if section in lock:
            out[section] = {name(section, n): substituted(section, b, name) for n, b in lock[section].items()}
    return out


def substituted(section: str, body: Mapping[str, Any], name: Callable[[str, str], str]) -> dict[str, Any]:
    """A definition of a lock with every reference in it replaced: ``name(section, name)``."""
    out: dict[str, Any] = json.loads(json.dumps(body))
    if "tokens" in out:
        part = out["tokens"]
        while part:
            if "after" in part:
                part["after"] = name("overrides", part["after"])
            part = part.get("except")
    match section:
        case "edits":
            if "when" in out:
                out["when"] = name("gates", out["when"])
            for key in ("vectors", "matrices"):
                if key in out:
                    out[key] = [name("vectors", v) for v in out[key]]
            if "rows" in out and "run" not in out["rows"]:
                _mean(out["rows"], name)
        case "reads":
            out["vectors"] = [name("vectors", v) for v in out["vectors"]]
        case "vectors":
            for key in ("read", "minus"):
                if isinstance(out.get(key), dict) and "run" not in out[key]:
                    _mean(out[key], name)
        case "metrics":
            if "normalize" in out:
                out["normalize"] = {k: name("arms", v) for k, v in out["normalize"].items()}
        case "arms":
            for key in ("prompts", "reads", "edits", "metrics"):
                out[key] = [name(key, v) for v in out[key]]
            for point in out["points"]:
                _point(point, name)
    return out


def _mean(of: dict[str, Any], name: Callable[[str, str], str]) -> None:
    of["arm"], of["read"] = name("arms", of["arm"]), name("reads", of["read"])


def section_of(path: str) -> str:
    """Of a sweep path, the section that its first name is of."""
    field = path.rpartition(".")[2]
    return {"start": "overrides", "above": "gates", "below": "gates"}.get(field, "edits")


def _point(point: dict[str, Any], name: Callable[[str, str], str]) -> None:
    values = {}
    for path, value in point["values"].items():
        target, _, field = path.partition(".")
        swept = name("vectors", value) if field.endswith(".vector") and isinstance(value, str) else value
        values[f"{name(section_of(path), target)}.{field}"] = swept
    point["values"] = values
    for entry in point["edits"]:
        entry["edit"] = name("edits", entry["edit"])
        entry["vector"] = entry["vector"] and name("vectors", entry["vector"])
    for entry in point["overrides"]:
        entry["override"] = name("overrides", entry["override"])
    for entry in point.get("gates", ()):
        entry["gate"], entry["vector"] = name("gates", entry["gate"]), name("vectors", entry["vector"])

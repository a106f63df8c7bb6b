"""What changes between two locks, in words: the pure half of ``vtaps diff``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from vtaps.codegen.facts import Fact, Facts, count, facts
from vtaps.codegen.renames import Lock, Names, renamed, renames
from vtaps.spec.layers import collapsed
from vtaps.spec.pattern import part_of

Kind = Literal["added", "removed", "changed"]

GROUPS = (
    "model", "engine", "locations", "edits", "vectors", "gates", "reads", "rows", "overrides", "metrics",
    "arms and sweeps", "prompts", "sampling", "files", "other",
)  # fmt: skip
_GROUP_OF = {"forwards": "locations", "arms": "arms and sweeps"}
SELECTING = ("edits", "reads", "gates", "metrics")
SHOWN_PROMPTS = 8
"""Prompts that a change of a group lists."""

PromptTexts = Mapping[str, Mapping[str, tuple[str, str]]]
"""Group → id → (a digest, the text) of each prompt, in order."""


@dataclass(frozen=True)
class Change:
    """One thing that differs.  ``section`` and ``name`` say of what, ``field`` what of it (empty where all of it was
    added or removed); ``old`` and ``new`` are in words, None where there is none.  ``detail``: lines below it."""

    kind: Kind
    group: str
    section: str
    name: str
    field: str
    old: str | None
    new: str | None
    detail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rename:
    section: str
    old: str
    new: str


@dataclass(frozen=True)
class Comparison:
    """``changes`` by group, in the order of :data:`GROUPS`; no change: the two mean the same.  ``names`` leads from the
    old lock's names to the new one's; ``untouched``: the arms, by their new names, that no change reaches."""

    changes: tuple[Change, ...]
    renames: tuple[Rename, ...]
    untouched: tuple[str, ...]
    names: Names

    @property
    def same(self) -> bool:
        return not self.changes


def compare(old: Lock, new: Lock, prompts: tuple[PromptTexts, PromptTexts] | None = None) -> Comparison:
    """Compare two locks of version 1.  ``prompts``: those of both, where they are known."""
    names = renames(old, new)
    found = tuple(Rename(s, a, b) for s, of in names.items() for a, b in of.items())
    moved = renamed(old, names)
    before, after = facts(moved), facts(new)
    changes = _merged(_changes(before, after, moved, new))
    if prompts is not None:
        texts = {names.get("prompts", {}).get(g, g): items for g, items in prompts[0].items()}
        changes = [_with_prompts(c, texts, prompts[1]) for c in changes]
    if not changes:
        changes = _rest(meaning(moved), meaning(new), ())
    changes.sort(key=lambda c: GROUPS.index(c.group))
    same = () if any(c.section == "files" for c in changes) else _untouched(moved, new)
    return Comparison(tuple(changes), found, same, names)


def _changes(before: Facts, after: Facts, old: Lock, new: Lock) -> list[Change]:
    out: list[Change] = []
    subjects = [*before, *(s for s in after if s not in before)]
    for subject in subjects:
        section, name = subject
        group = _GROUP_OF.get(section, section)
        mine, theirs = before.get(subject), after.get(subject)
        if mine is None or theirs is None:
            if section not in ("sampling", "files"):
                kind: Kind = "added" if mine is None else "removed"
                told = _summary(section, name, theirs or mine or {}, new if mine is None else old)
                out.append(Change(kind, group, section, name, "", *((None, told) if mine is None else (told, None))))
            continue
        fields = [f for f in [*mine, *(f for f in theirs if f not in mine)] if _key(mine, f) != _key(theirs, f)]
        swept = any(f.startswith("sweep ") for f in fields)
        for field in fields:
            a, b = _shown(mine.get(field)), _shown(theirs.get(field))
            if field == "points" and a == b and swept:
                continue
            if a == b:  # what is shown is less than what is compared
                b = f"{b}, not the same"
            field = "" if section == "prompts" else field
            where = "rows" if field == "tokens" and section in SELECTING else group
            out.append(Change(_kind(a, b, field), where, section, name, field, a, b))
    return out


def _kind(old: str | None, new: str | None, field: str) -> Kind:
    if field.startswith(("sweep ", "vllm.")) and (old is None or new is None):
        return "added" if old is None else "removed"
    return "changed"


def _key(of: Mapping[str, Fact], field: str) -> Any:
    return json.dumps(of[field].key, sort_keys=True) if field in of else None


def _shown(fact: Fact | None) -> str | None:
    return None if fact is None else fact.text


def _summary(section: str, name: str, of: Mapping[str, Fact], lock: Lock) -> str:
    """A whole definition in one line."""
    said = {k: v.text for k, v in of.items()}
    match section:
        case "locations":
            own = [(s, n, d) for s in ("edits", "reads") for n, d in lock[s].items() if part_of(n) == n]
            used = [f"{s}.{n}" for s, n, d in own if name in d["sites"]]
            used += [f"gates.{n}" for n, d in lock.get("gates", {}).items() if d["site"] == name]
            return f"{said['served']}, for {', '.join(used)}" if used else said["served"]
        case "edits" | "reads" | "gates":
            head = said.pop("verb", None) or said.pop("keeps", None) or said.pop("score")
            rest = [f"{k} {v}" for k, v in said.items() if k not in ("at", "tokens") and (k, v) != ("error", "keep")]
            return f"{head} at {said['at']}, tokens {said['tokens']}" + "".join(f", {r}" for r in rest)
        case "metrics":
            return f"{said['measures']}, tokens {said['tokens']}"
        case "prompts":
            return said["prompts"]
        case "arms":
            prompts = sum(lock["prompts"].get(g, {"count": 0})["count"] for g in lock["arms"][name]["prompts"])
            lists = [f"{k} {v}" for k, v in said.items() if k not in ("points",) and v != "none"]
            return f"{'; '.join(lists)} ({count(prompts, 'prompt')} × {count(int(said['points']), 'point')})"
    return ", ".join(f"{k} {v}" for k, v in said.items())


def _merged(changes: list[Change]) -> list[Change]:
    """What changes alike at several locations, or in several arms' sampling, once."""
    out: dict[Any, list[Change]] = {}
    for i, c in enumerate(changes):
        key = (c.section, c.field, c.kind, c.old, c.new) if c.section in ("locations", "sampling") else i
        out.setdefault(key, []).append(c)
    joined: list[Change] = []
    for same in out.values():
        names = [c.name for c in same]
        joined.append(replace(same[0], name=collapsed(names) if same[0].section == "locations" else ", ".join(names)))
    return joined


def _with_prompts(change: Change, old: PromptTexts, new: PromptTexts) -> Change:
    """A change of a group with the prompts that it is of."""
    if change.section != "prompts":
        return change
    mine, theirs = old.get(change.name, {}), new.get(change.name, {})
    lines = [f"- {i}: {text}" for i, (_, text) in mine.items() if i not in theirs]
    for i, (digest, text) in theirs.items():
        if i not in mine:
            lines.append(f"+ {i}: {text}")
        elif mine[i][0] != digest:
            same = " (its columns or tokens)" if mine[i][1] == text else f" → {text}"
            lines.append(f"~ {i}: {mine[i][1]}{same}")
    if not lines:
        lines = ["in another order"]
    if len(lines) > SHOWN_PROMPTS:
        lines = [*lines[:SHOWN_PROMPTS], f"… and {len(lines) - SHOWN_PROMPTS} more"]
    return replace(change, detail=tuple(lines))


def meaning(lock: Lock) -> dict[str, Any]:
    """A lock without what says nothing of the run: file names, digests of what vtaps writes, lines, reasons, and the
    order of lists that is none."""
    out: dict[str, Any] = json.loads(json.dumps(lock))
    for key in ("spec", "block"):
        out.pop(key, None)
    out["engine"].pop("reason", None)
    out["outside"] = {}
    for vector in out["vectors"].values():
        if vector.get("digest"):
            vector.pop("file", None)
    for group in out["prompts"].values():
        group.pop("file", None)
    for forward in out.get("forwards", {}).values():
        for key in ("line", "file"):
            forward.pop(key, None)
    out["reads"] = {n: r for n, r in out["reads"].items() if part_of(n) == n}
    for section in (*SELECTING, "overrides"):
        for definition in out.get(section, {}).values():
            for key in ("step_rows", "requests", "attention", "line"):
                definition.pop(key, None)
            if "python" in definition:
                definition["python"].pop("file", None)
            if "rows" in definition:
                definition["rows"].pop("slots", None)
    for arm in out["arms"].values():
        for key in ("prompts", "reads", "metrics"):
            arm[key].sort()
        arm["points"].sort(key=lambda p: json.dumps(p, sort_keys=True))
    return out


def _rest(old: Any, new: Any, path: tuple[str, ...]) -> list[Change]:
    """Whatever no fact tells: nothing that differs goes unsaid."""
    if old == new and json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [c for k in keys for c in _rest(old.get(k), new.get(k), (*path, k))]
    texts = ["none" if v is None else json.dumps(v, ensure_ascii=False, sort_keys=True) for v in (old, new)]
    before, after = (t if len(t) <= 200 else f"{t[:200]}…" for t in texts)
    return [Change("changed", "other", "lock", ".".join(path), "", before, after)]


def _untouched(old: Lock, new: Lock) -> tuple[str, ...]:
    """The arms whose requests are what they were, with all that they name; ``old`` by the new one's names."""
    before, after = meaning(old), meaning(new)
    if any(before[part] != after[part] for part in ("model", "engine", "tree")):
        return ()
    return tuple(a for a in new["arms"] if a in old["arms"] and _all_of(a, before) == _all_of(a, after))


def _all_of(arm: str, lock: Lock) -> dict[str, Any]:
    uses = {f"{s}.{n}": lock.get(s, {}).get(n) for s, n in sorted(_uses(arm, lock))}
    sites = {n for d in uses.values() if isinstance(d, dict) for n in (*d.get("sites", ()), d.get("site"))}
    where = {n: lock["sites"][n] for n in sites if n in lock["sites"]}
    return {
        **uses,
        "sites": where,
        "forwards": {s["forward"]: lock["forwards"].get(s["forward"]) for s in where.values() if "forward" in s},
    }


def _uses(arm: str, lock: Lock) -> set[tuple[str, str]]:
    """(section, name) of all that an arm names, and of what that names in turn: other arms whose rows it takes, too."""
    found: set[tuple[str, str]] = set()
    todo = [("arms", arm)]
    while todo:
        section, name = todo.pop()
        if (section, name) in found:
            continue
        found.add((section, name))
        of = lock.get(section, {}).get(name, {})
        if section == "arms" and of:
            todo += [(s, n) for s in ("prompts", "edits", "reads", "metrics") for n in of[s]]
            for p in of["points"]:
                todo += [("overrides", o["override"]) for o in p["overrides"]]
                todo += [("gates", g["gate"]) for g in p.get("gates", ())]
                todo += [("vectors", e["vector"]) for e in (*p["edits"], *p.get("gates", ())) if e["vector"]]
        else:
            todo += [("vectors", v) for v in (*of.get("vectors", ()), *of.get("matrices", ()))]
            todo += [("arms", a) for a in of.get("normalize", {}).values()]
            sources = [of.get(k) for k in ("rows", "read", "minus")]
            todo += [("arms", r["arm"]) for r in sources if isinstance(r, dict) and "run" not in r]
            todo += [("overrides", o) for o in _after(of.get("tokens", {}))]
    return found


def _after(tokens: Mapping[str, Any]) -> list[str]:
    own = [tokens["after"]] if "after" in tokens else []
    return own + (_after(tokens["except"]) if "except" in tokens else [])

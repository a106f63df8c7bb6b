"""Two sides → what changed and what that means for a run: the library's side of ``vtaps diff``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vtaps.codegen.changes import Comparison, PromptTexts, compare
from vtaps.codegen.lock import lock_digest
from vtaps.codegen.renames import Lock
from vtaps.sides import Side
from vtaps.spec import digests
from vtaps.spec.pattern import part_of
from vtaps.spec.plan import Plan
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.rows import compile_rows
from vtaps.spec.selectors import facts_of
from vtaps.spec.sizes import human
from vtaps.summary import read_size, served

ANOTHER = "vtaps run takes its folder for another program's"

TEXT = 60
"""Characters of a prompt that a change shows."""


@dataclass(frozen=True)
class Meaning:
    """One line of what a change means for a run; ``value`` is its short form for programs."""

    about: str
    text: str
    value: Any


@dataclass(frozen=True)
class Difference:
    """``block``: the unified diff of the blocks, empty where the two mean the same or a block is missing."""

    old: str
    new: str
    comparison: Comparison
    means: tuple[Meaning, ...]
    block: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        return self.comparison.same

    @property
    def headline(self) -> str:
        """``3 changes; the model is compiled and captured anew``"""
        renamed = f", {len(self.comparison.renames)} renamed" if self.comparison.renames else ""
        if self.same:
            return f"no change in meaning{renamed}"
        count = len(self.comparison.changes)
        told = next(m.text for m in self.means if m.about == "engine")
        return f"{count} change{'s' if count > 1 else ''}{renamed}; {told}"


def difference(old: Side, new: Side) -> Difference:
    """Compare two sides that have locks."""
    assert old.lock is not None and new.lock is not None
    prompts = (_texts(old.plan), _texts(new.plan)) if old.plan and new.plan else None
    found = compare(old.lock, new.lock, prompts)
    means = (
        *_engine(old.lock, new.lock, found),
        _requests(old, new),
        *_rows(old.plan, new.plan, found),
        _results(old, new, found),
    )
    notes, block = [*old.notes, *new.notes], []
    if not found.same and old.block is not None and new.block is not None:
        block = _block(old.label, old.block, new.label, new.block)
    return Difference(old.label, new.label, found, means, tuple(block), tuple(dict.fromkeys(notes)))


def _engine(old: Lock, new: Lock, found: Comparison) -> Iterator[Meaning]:
    """Whether vLLM must be started again, as ``Engine.load`` holds it, and whether anything is compiled then."""
    sections = {c.section for c in found.changes}
    mode = old["engine"]["mode"] != new["engine"]["mode"]
    structure = old["block"]["structure"] != new["block"]["structure"] or "forwards" in sections
    vllm = old["engine"]["vllm"] != new["engine"]["vllm"] or "model" in sections
    vllm |= any(c.section == "files" and c.name.startswith("model:") for c in found.changes)
    eager = new["engine"]["mode"] == "eager"
    anew = (structure or mode) and not eager
    if structure or mode or vllm:
        yield Meaning(
            "engine", "start another engine" + (", which compiles and captures anew" if anew else ""), "start"
        )
    else:
        yield Meaning("engine", ("only data changes: " if sections else "") + "a live engine can load it", "load")
    if eager:
        yield Meaning("compiled", "nothing: the eager engine compiles nothing", "nothing")
    elif mode:
        yield Meaning("compiled", "anew: the eager engine compiled nothing", "anew")
    elif structure:
        why = "the structure differs: locations, verbs, columns or kinds of reads"
        yield Meaning("compiled", f"anew: {why}", "anew")
    elif vllm:
        text = "the taps are the same; what else vLLM compiles follows its model and arguments"
        yield Meaning("compiled", text, "same")
    else:
        yield Meaning("compiled", "nothing anew: the structure is the same", "nothing")


def _requests(old: Side, new: Side) -> Meaning:
    """Of a lock as many as there can be, since a sweep over rows leaves prompts out: then of both sides."""
    if old.plan is not None and new.plan is not None:
        a, b = (sum(1 for name in plan.arms for _ in served(plan, name)) for plan in (old.plan, new.plan))
    else:
        a, b = (0 if s.lock is None else _most_requests(s.lock) for s in (old, new))
    return Meaning("requests", f"{a} → {b}" if a != b else f"{b}, as before", [a, b])


def _most_requests(lock: Lock) -> int:
    prompts = lock["prompts"]
    return sum(
        sum(prompts.get(g, {"count": 0})["count"] for g in arm["prompts"]) * len(arm["points"])
        for arm in lock["arms"].values()
    )


def _rows(old: Plan | None, new: Plan | None, found: Comparison) -> Iterator[Meaning]:
    """What reads keep and edits act on at most, where that changes; of a lock it is not known."""
    if old is None or new is None:
        yield Meaning("rows", "not known: a lock does not hold the prompts", None)
        return
    for section, of in (("reads", _read), ("edits", _edit)):
        before = {found.names.get(section, {}).get(n, n): of(old, n) for n in _listed(old, section)}
        after = {n: of(new, n) for n in _listed(new, section)}
        for name in [*before, *(n for n in after if n not in before)]:
            a, b = before.get(name, "none"), after.get(name, "none")
            if a != b:
                yield Meaning(f"{section}.{name}", f"{a} → {b}", [a, b])


def _listed(plan: Plan, section: str) -> list[str]:
    arms = [a.arm for a in plan.arms.values()]
    names = [n for a in arms for n in (a.reads if section == "reads" else a.edits)]
    return [n for n in dict.fromkeys(names) if part_of(n) == n]


def _read(plan: Plan, name: str) -> str:
    rows, size = read_size(plan, name, plan.reads[name])
    what = "mean" if plan.reads[name].read.kind == "mean" else "row"
    return f"up to {rows} {what}{'s' if rows != 1 else ''}" + ("" if size is None else f", {human(size)}")


def _edit(plan: Plan, name: str) -> str:
    """Rows × locations that an edit acts on at most, over the run."""
    total = 0
    rows = plan.edits[name].edit.tokens
    for arm in plan.arms.values():
        if name not in arm.arm.edits:
            continue
        for prompt, point in served(plan, arm.arm.name):
            acts = next((e for e in point.edits if e.edit == name), None)
            if acts is None:
                continue
            placed = {n: (start, len(plan.overrides[n].ids)) for n, start in point.overrides}
            last = len(prompt.ids) + arm.sampling["max_tokens"] - 1
            own = compile_rows(rows, facts_of(prompt, [rows], placed)).intervals
            each = 1 if acts.position is not None else sum(max(0, min(b, last) - a) for a, b in own)
            total += each * len(acts.sites) * arm.sampling.get("n", 1)
    return f"up to {total} row{'s' if total != 1 else ''}"


def _results(old: Side, new: Side, found: Comparison) -> Meaning:
    """Whether a finished run of the old side answers for the new one."""
    assert old.lock is not None and new.lock is not None
    if found.same:
        if found.renames:
            text = f"an earlier run's numbers stand, under its own names; {ANOTHER}"
            return Meaning("results", text, "renamed")
        order = old.plan is None or new.plan is None or _order(old.plan) == _order(new.plan)
        if lock_digest(old.lock) == lock_digest(new.lock) and order:
            return Meaning("results", "those of an earlier run are this one's", "same")
        text = f"an earlier run's numbers stand; {ANOTHER}"
        return Meaning("results", text, "stand")
    text = "an earlier run's are not this one's: run it into another folder"
    if found.untouched:
        arms = f"arm{'s' if len(found.untouched) > 1 else ''} {', '.join(found.untouched)}"
        text = f"an earlier run answers for the {arms} alone: run this one into another folder"
    return Meaning("results", text, "other")


def _order(plan: Plan) -> list[list[Any]]:
    return [[a, [[g, [p.id for p in plan.prompts[g]]] for g in arm.prompts]] for a, arm in plan.arms.items()]


def _texts(plan: Plan | None) -> PromptTexts:
    if plan is None:
        return {}
    return {
        group: {p.id: (digests.of_json([list(p.ids), repr(sorted(p.columns.items()))]), _shown(plan, p)) for p in items}
        for group, items in plan.prompts.items()
    }


def _shown(plan: Plan, prompt: ReadyPrompt) -> str:
    """The text, or the last message, and the number of tokens."""
    tokens = f"{len(prompt.ids)} token{'s' if len(prompt.ids) != 1 else ''}"
    written = next((i for i in plan.spec.prompts[prompt.group].items if i.id == prompt.id), None)
    text = prompt.text if written is None or written.kind != "chat" else str(written.content[-1].get("content", ""))
    if text is None:
        return tokens
    line = " ".join(text.split())
    return f'"{line[:TEXT]}{"…" if len(line) > TEXT else ""}" ({tokens})'


HEADER = "@BLOCK.location"


def _block(old: str, before: str, new: str, after: str) -> list[str]:
    """The unified diff of two blocks.  Their headers are left out: digests, which differ wherever anything does, and
    what is told in words."""
    a, b = before.splitlines(), after.splitlines()
    cut = [next((i for i, line in enumerate(t) if line.startswith(HEADER)), len(t)) for t in (a, b)]
    if cut[0] == cut[1]:
        a = [*b[: cut[1]], *a[cut[0] :]]
    return list(difflib.unified_diff(a, b, f"{old} (block)", f"{new} (block)", lineterm="", n=3))

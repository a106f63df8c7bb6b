"""Selectors held against the prompts: every one selects something, prompts fit, turns and matches exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document, NodePath
from vtaps.spec.plan import ArmPlan, OverridePlan
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.rows import Facts, Rows, compile_rows
from vtaps.spec.spec import Arm, Spec


def facts_of(prompt: ReadyPrompt, rows: list[Rows], overrides: Mapping[str, tuple[int, int]]) -> Facts:
    return Facts(len(prompt.ids), {t: prompt.matches(t) for t in match_texts(rows)}, prompt.turns, overrides)


def match_texts(rows: Iterable[Rows]) -> tuple[str, ...]:
    """The texts that selectors look for in a prompt."""
    return tuple(sorted({part.match for r in rows for part in r.parts() if part.match is not None}))


def check_ranges(spec: Spec, doc: Document, found: list[Diagnostic]) -> None:
    """Ranges that run backwards select nothing, whatever the prompt: a fault even where others select something."""
    for item in spec.selecting():
        where: NodePath = (*item.where, "tokens")
        for part in item.tokens.parts():
            for form in ("steps", "positions"):
                for i, (first, last) in enumerate(getattr(part, form) or ()):
                    if first > last and (first < 0) == (last < 0):
                        text = f"{first}..{last} runs backwards: it holds nothing"
                        found.append(Diagnostic("VT104", text, doc.at(*where, form, i), nearest=f"{last}..{first}"))
            where = (*where, "except")


def check_selectors(
    spec: Spec, arms: Mapping[str, ArmPlan], prompts: Mapping[str, tuple[ReadyPrompt, ...]],
    overrides: Mapping[str, OverridePlan], doc: Document, found: list[Diagnostic],
) -> None:  # fmt: skip
    limit = spec.engine.vllm.get("max_model_len")
    told: set[NodePath] = set()
    fits: set[tuple[str, str]] = set()
    for arm in arms.values():
        ready = [p for g in arm.prompts for p in prompts.get(g, ())]
        longest = arm.sampling["max_tokens"]
        if isinstance(limit, int):
            for prompt in ready:
                if len(prompt.ids) + longest > limit and (prompt.group, prompt.id) not in fits:
                    fits.add((prompt.group, prompt.id))
                    found.append(
                        Diagnostic(
                            "VT316",
                            f"prompt {prompt.id!r} has {len(prompt.ids)} tokens; with max_tokens {longest} that is "
                            f"more than max_model_len {limit}",
                            prompt.span,
                        )
                    )
        placed = {n: (s, len(overrides[n].ids)) for point in arm.points for n, s in point.overrides}
        for where, rows, what in _used(arm, spec):
            if where in told or not ready:
                continue
            problem = _problem(rows, ready, placed, longest)
            if problem is not None:
                told.add(where)
                code, text = problem
                found.append(Diagnostic(code, f"{what}: {text} (arm {arm.arm.name!r})", doc.at(*where, "tokens")))


def gates_of(arm: Arm, spec: Spec) -> tuple[str, ...]:
    """The gates by which the edits of an arm act, each once."""
    edits = (spec.edits[name] for name in arm.edits if name in spec.edits)
    return tuple(dict.fromkeys(e.when for e in edits if e.when in spec.gates and e.when is not None))


def _used(arm: ArmPlan, spec: Spec) -> Iterator[tuple[NodePath, Rows, str]]:
    gates = gates_of(arm.arm, spec)
    sections = {"gates": gates, "edits": arm.arm.edits, "reads": arm.arm.reads, "metrics": arm.arm.metrics}
    for section, names in sections.items():
        table = getattr(spec, section)
        for name in names:
            if name in table:
                yield table[name].where, table[name].tokens, f"{section[:-1]} {name!r}"


def _problem(
    rows: Rows, prompts: list[ReadyPrompt], placed: Mapping[str, tuple[int, int]], longest: int
) -> tuple[str, str] | None:
    for part in rows.parts():
        if part.after is not None and part.after not in placed:
            return "VT310", f"`after: {part.after}` needs that override in the arm"
        if part.turn is not None and not any(p.turns for p in prompts):
            return "VT317", "`turn` needs chat prompts whose template builds the text message by message"
        if part.match is not None and all(p.encoded is None for p in prompts):
            return "VT310", "`match` needs prompts given as text or chat, not as ids"
    for prompt in prompts:
        size = len(prompt.ids)
        tokens = np.full(size + longest - 1, -1, np.int64)
        tokens[:size] = prompt.ids
        if _any(rows, facts_of(prompt, [rows], placed), tokens, size):
            return None
    if rows.match is not None and not any(p.matches(rows.match) for p in prompts):
        return "VT311", f"{rows.match!r} stands in none of the prompts"
    if rows.turn is not None and not any(role == rows.turn for p in prompts for role, _, _ in p.turns):
        roles = sorted({role for p in prompts for role, _, _ in p.turns})
        return "VT311", f"no turn has the role {rows.turn!r}; there are {', '.join(roles)}"
    lengths = sorted({len(p.ids) for p in prompts})
    told = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} … {lengths[-1]}"
    return "VT311", f"it selects no row of any prompt; prompts have {told} tokens and max_tokens is {longest}"


def _any(rows: Rows, facts: Facts, tokens: np.ndarray[tuple[int], np.dtype[np.int64]], size: int) -> bool:
    """Whether any row can be selected; generated tokens are not known yet, so an ``ids`` form may hold there."""
    if rows.ids is not None:
        rest = replace(rows, ids=None)
        selected = compile_rows(rest, facts).select(0, tokens)
        return bool(len(selected)) and (
            bool((selected >= size).any()) or bool(np.isin(tokens[selected], list(rows.ids)).any())
        )
    return bool(len(compile_rows(rows, facts).select(0, tokens)))

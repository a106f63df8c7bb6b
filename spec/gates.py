"""Gates held against what they look at and what they decide on: earlier in the model, at rows that have a score."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from vtaps.spec.budget import readings_of, step_rows, without_ids
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.plan import ArmPlan, EditPlan, GatePlan, OverridePlan
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.rows import Interval, Rows, compile_rows
from vtaps.spec.selectors import facts_of
from vtaps.spec.spec import BOUNDS, Gate, Spec
from vtaps.spec.tree import Site

REDUCE = ("max", "mean", "last")
PER_REQUEST = ("logits", "samples")


def plan_gate(gate: Gate, sites: tuple[Site, ...], doc: Document, found: list[Diagnostic]) -> GatePlan | None:
    """VT330 for a gate that could not decide anything, VT331 for a place at which none can be."""
    before = len(found)
    at = doc.at(*gate.where, "at")
    if len(sites) > 1:
        listed = ", ".join(s.name for s in sites[:4]) + (", …" if len(sites) > 4 else "")
        found.append(Diagnostic("VT330", f"a gate looks at one location; here are {len(sites)}: {listed}", at))
    elif not sites[0].editable:
        found.append(Diagnostic("VT208", f"{sites[0].name} holds no floating-point rows: it has no score", at))
    elif sites[0].alias in PER_REQUEST:
        found.append(Diagnostic("VT331", f"{sites[0].name} comes after every location that could be edited", at))
    found += _bounds(gate, doc)
    if gate.holds == "request" and gate.reduce is None:
        message = "a gate that holds for a request says what the scores of its rows come to"
        found.append(Diagnostic("VT330", message, doc.at(*gate.where, "holds"), tuple(f"reduce: {r}" for r in REDUCE)))
    if gate.holds == "row" and gate.reduce is not None:
        message = "each row decides for itself, so there is nothing to reduce"
        found.append(Diagnostic("VT330", message, doc.at(*gate.where, "reduce"), ("holds: request",)))
    return GatePlan(gate, sites[0]) if len(found) == before else None


def _bounds(gate: Gate, doc: Document) -> Iterator[Diagnostic]:
    said = {key: bound for key in BOUNDS if (bound := getattr(gate, key)) is not None}
    wrong = [key for key, bound in said.items() if not math.isfinite(bound)]
    for key in wrong:
        yield Diagnostic("VT104", f"{key} must be a finite number", doc.at(*gate.where, key))
    if not said:
        yield Diagnostic("VT330", f"the gate {gate.name!r} has no bound", doc.key(*gate.where), BOUNDS)
    elif not wrong and crossed(gate.above, gate.below):
        message = f"no score is above {gate.above:g} and below {gate.below:g}"
        yield Diagnostic("VT330", message, doc.at(*gate.where, "above"))


def crossed(above: float | None, below: float | None) -> bool:
    return above is not None and below is not None and above >= below


def check_gated(
    spec: Spec, edits: Mapping[str, EditPlan], gates: Mapping[str, GatePlan], arms: Mapping[str, ArmPlan],
    prompts: Mapping[str, tuple[ReadyPrompt, ...]], overrides: Mapping[str, OverridePlan], doc: Document,
    found: list[Diagnostic],
) -> None:  # fmt: skip
    """VT331 where the gate of a row comes too late, VT332 where rows were computed before the decision, VT333 and
    VT334 where the edit selects rows without a score."""
    for name, plan in edits.items():
        when = plan.edit.when
        if when is None or when not in gates:
            continue
        gate, span = gates[when], doc.at(*plan.edit.where, "when")
        if (late := _late(gate, plan, spec.engine.mode)) is not None:
            message, note = late
            found.append(Diagnostic("VT331", message, span, note=note))
        elif gate.gate.holds == "request":
            found += _computed_before(gate, plan, doc)
        else:
            found += _unscored(name, gate, plan, arms, prompts, overrides, doc)


def loads(
    plan: GatePlan, arms: Mapping[str, ArmPlan], edits: Mapping[str, EditPlan],
    prompts: Mapping[str, tuple[ReadyPrompt, ...]], overrides: Mapping[str, OverridePlan],
) -> GatePlan:  # fmt: skip
    """The plan with how many rows of a step it scores."""
    name = plan.gate.name

    def using(arm: ArmPlan) -> ArmPlan:
        return replace(arm, points=tuple(p for p in arm.points if any(g.gate == name for g in p.gates)))

    asked = [r for arm in arms.values() for r in readings_of(using(arm), edits, prompts, overrides)]
    return replace(plan, step_rows=step_rows(plan.gate.tokens, iter(asked)), requests=sum(r.n for r in asked))


def _late(gate: GatePlan, plan: EditPlan, mode: str) -> tuple[str, str] | None:
    """Why the gate cannot decide where the edit acts, and what helps."""
    edit, name = plan.edit, gate.gate.name
    for site in plan.sites:
        if site.alias in PER_REQUEST:
            return (
                f"{site.name} has a row a request, and {name!r} decides for rows of tokens",
                "edit an earlier location",
            )
        same_forward = gate.gate.holds == "row"
        if same_forward and site.name != gate.site.name and site.order <= gate.site.order:
            return (
                f"{name!r} looks at {gate.site.name}, which does not come before {site.name}, where {edit.name!r} acts",
                "a gate of rows decides in the forward in which it looks: at an earlier location, or for a later edit",
            )
        if same_forward and mode != "eager" and not _leads_to(gate.site, site):
            return (
                f"{gate.site.name} and {site.name} may be branches of one layer, which a compiler runs in either order",
                "look at the stream (`resid_…`, `embed`) or in an earlier layer; `mode: eager` keeps the text's order",
            )
    return None


def _leads_to(gate: Site, site: Site) -> bool:
    """Whether what is computed at ``site`` depends on the value at ``gate``, which comes before it: a layer's branches
    do not on each other."""
    stream = (gate.alias or "").startswith(("resid_", "embed"))
    layers = gate.layer is not None and site.layer is not None and gate.layer < site.layer
    return gate.name == site.name or stream or layers


def in_prompt(rows: Rows) -> bool:
    """Whether every row that it can select holds a token of the prompt, whatever the prompt."""
    steps = rows.steps is not None and all(last <= 0 for _, last in rows.steps)
    return rows.word == "prompt" or rows.positions is not None or rows.match is not None or steps


def in_answer(rows: Rows) -> bool:
    """Whether every row that it can select holds a generated token."""
    steps = rows.steps is not None and all(first >= 1 for first, _ in rows.steps)
    return rows.word == "generated" or rows.after is not None or steps


def _computed_before(gate: GatePlan, plan: EditPlan, doc: Document) -> Iterator[Diagnostic]:
    name = gate.gate.name
    if not in_prompt(gate.gate.tokens):
        yield Diagnostic(
            "VT332", f"{name!r} decides for the request, and its rows may be generated ones, which come one by one",
            doc.at(*gate.gate.where, "tokens"), ("prompt", "{positions: […]}", "{match: …}", "{steps: [0]}"),
        )  # fmt: skip
    elif not in_answer(plan.edit.tokens):
        yield Diagnostic(
            "VT332",
            f"{plan.edit.name!r} would edit rows already computed: {name!r} decides once it has seen all of its "
            "rows of the prompt",
            doc.at(*plan.edit.where, "tokens"), ("generated", "{steps: [1..N]}", "{after: OVERRIDE}"),
            note="the prompt's last row, which samples the first token, is computed with the others",
        )  # fmt: skip


def _unscored(
    name: str, gate: GatePlan, plan: EditPlan, arms: Mapping[str, ArmPlan],
    prompts: Mapping[str, tuple[ReadyPrompt, ...]], overrides: Mapping[str, OverridePlan], doc: Document,
) -> Iterator[Diagnostic]:  # fmt: skip
    both = outside = 0
    mine, its = without_ids(plan.edit.tokens), without_ids(gate.gate.tokens)
    if mine == its:
        return
    for arm in arms.values():
        if name not in arm.arm.edits:
            continue
        for point in arm.points:
            placed: dict[str, Interval] = {n: (start, len(overrides[n].ids)) for n, start in point.overrides}
            for prompt in (p for group in arm.prompts for p in prompts.get(group, ())):
                tokens = np.full(len(prompt.ids) + arm.sampling["max_tokens"] - 1, -1, np.int64)
                facts = facts_of(prompt, [mine, its], placed)
                try:
                    edited, scored = (compile_rows(rows, facts).select(0, tokens) for rows in (mine, its))
                except KeyError:  # an override that the arm lacks, which VT310 says
                    return
                inside = int(np.isin(edited, scored).sum())
                both, outside = both + inside, outside + len(edited) - inside
    span = doc.at(*plan.edit.where, "tokens")
    if outside and not both:
        yield Diagnostic(
            "VT333", f"{name!r} never acts: none of its rows is one of those that {gate.gate.name!r} scores", span
        )
    elif outside:
        message = f"{name!r} selects rows that {gate.gate.name!r} does not score: it does not act there"
        yield Diagnostic("VT334", message, span)

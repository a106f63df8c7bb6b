"""Spec + ModelTree → Plan.

Everything that can be wrong is found in one pass: each stage adds its findings and leaves out what it could not
resolve, so that one fault is reported once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from vtaps.spec import digests, engine_args, logits, pipeline
from vtaps.spec.aliases import final_norm
from vtaps.spec.arms import plan_arms
from vtaps.spec.behind import LOGITS, SAMPLES
from vtaps.spec.budget import check_memory, readings, slots_of, step_rows
from vtaps.spec.columns import columns_of
from vtaps.spec.diagnostics import Diagnostic, Span, has_errors, nearest
from vtaps.spec.document import Document, NodePath
from vtaps.spec.everywhere import EVERYWHERE, Everywhere, everywhere
from vtaps.spec.files import path_in
from vtaps.spec.gates import check_gated, loads, plan_gate
from vtaps.spec.locations import locate
from vtaps.spec.names import check_names
from vtaps.spec.order import plan_locations
from vtaps.spec.parts import check_parts, ranks
from vtaps.spec.pattern import arms_with_parts, is_pattern, plan_pattern, with_parts
from vtaps.spec.plan import EditPlan, GatePlan, MetricPlan, OverridePlan, Plan, ReadPlan, TreeFacts
from vtaps.spec.prompts import Encoder, ReadyPrompt, load_group
from vtaps.spec.python_use import check_functions
from vtaps.spec.read_vectors import plan_means
from vtaps.spec.rows import Interval, merge
from vtaps.spec.sae_use import check_saes
from vtaps.spec.selectors import check_ranges, check_selectors
from vtaps.spec.serving import NOT_TAPS, Compiled, choose, compiled_part
from vtaps.spec.sources import Runs, check_normalized, check_patches, no_runs, plan_sources
from vtaps.spec.spec import At, Edit, Gate, Metric, Read, Spec
from vtaps.spec.stages import plan_stages
from vtaps.spec.store import check_budget, check_store
from vtaps.spec.token_ids import token_id
from vtaps.spec.tokens import Tokens
from vtaps.spec.tree import ModelTree, Site
from vtaps.spec.vector_use import check_vectors, classes_of

T = TypeVar("T")

EAGER_DOES = "`mode: eager` serves it; `mode: auto` takes eager by itself where it must"


@dataclass(frozen=True)
class Context:
    """What resolving leans on: the text, the tree, the tokenizer, and who looks into finished runs."""

    doc: Document
    tree: ModelTree
    tokens: Tokens
    runs: Runs = no_runs

    def token(self, token: int | str, where: NodePath, found: list[Diagnostic]) -> int:
        return token_id(token, self.tokens, self.tree.dimensions.vocab, self.doc.at(*where), found)

    @cached_property
    def compiled(self) -> Compiled:
        return compiled_part(self.tree)

    @cached_property
    def everywhere(self) -> Everywhere:
        return everywhere(self.tree)


def resolve(spec: Spec, context: Context) -> tuple[Plan | None, list[Diagnostic]]:
    """The plan, or None where a finding is an error.  Reads prompt and vector files; no torch, no vLLM."""
    doc, tree = context.doc, context.tree
    found = list(check_names(spec, doc))
    found += _against_taps(spec, doc)
    edits = _known({name: _edit(e, spec, context, found) for name, e in spec.edits.items()})
    reads = _known({name: _read(r, spec, context, found) for name, r in spec.reads.items()})
    overrides = _overrides(spec, context, found)
    metrics = _known({name: _metric(m, context, found) for name, m in spec.metrics.items()})
    prompts = _prompts(spec, context, found)
    gates = _known({name: _gate(g, spec, context, found) for name, g in spec.gates.items()})
    outside = check_vectors(spec, edits, reads, gates, doc, found)
    sae_digests, saes = check_saes(spec, edits, reads, tree, doc, found)
    outside |= sae_digests
    for group in spec.prompts.values():
        if group.file is not None and (digest := _digest(doc.folder, group.file.file)):
            outside[group.file.file] = digest
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if digest := _digest(context.tokens.folder, name):
            outside[f"model:{name}"] = digest
    outside |= check_functions(edits, reads, doc, found)
    arms = plan_arms(spec, edits, overrides, prompts, doc, found)
    logits.check_bans(edits, arms, doc, found)
    check_gated(spec, edits, gates, arms, prompts, overrides, doc, found)
    reads = with_parts(reads)
    worked = arms_with_parts(arms, reads)
    parted = check_parts(ranks(spec.engine.vllm), edits, reads, gates, tree, doc, found)
    pipeline.check_stages(pipeline.stages(spec.engine.vllm), edits, reads, gates, tree, doc, found)
    locations = plan_locations(spec, edits, reads, worked, gates, doc, found)
    functions = {("edit", name) for name, p in edits.items() if p.edit.breaks}
    functions |= {("read", name) for name, p in reads.items() if p.read.python is not None}
    every = [one.where for one in spec.acting() if EVERYWHERE in spec.texts(one.at)]
    mode, reason, locations = choose(spec.engine, context.compiled, locations, functions, _eager(spec))
    check_ranges(spec, doc, found)
    check_selectors(spec, arms, prompts, overrides, doc, found)
    if has_errors(found) or spec.broken:
        return None, found
    dtype = tree.dtype if spec.model.dtype == "auto" else spec.model.dtype
    edits = plan_sources(spec, edits, reads, arms, prompts, context.runs, dtype, doc, found, outside)
    means = plan_means(spec, edits, reads, gates, arms, prompts, doc, found)
    check_normalized(spec, arms, prompts, doc, found)
    stages = plan_stages(spec, doc, found)
    if has_errors(found):
        return None, found
    reads = {
        name: replace(
            p,
            step_rows=step_rows(p.read.tokens, readings(name, worked, edits, prompts, overrides)),
            requests=sum(one.n for one in readings(name, worked, edits, prompts, overrides)),
            classes=classes_of(p, spec, doc),
        )
        for name, p in reads.items()
    }
    gates = {name: loads(p, arms, edits, prompts, overrides) for name, p in gates.items()}
    facts = TreeFacts(
        digest=tree.digest,
        architecture=tree.architecture,
        vllm=tree.vllm,
        dtype=dtype,
        dimensions=tree.dimensions,
        final_norm=final_norm(tree),
    )
    patched = check_patches(spec, edits, facts.dtype, doc, found)
    if mode == "taps" or any(p.read.where in every and p.requests for p in reads.values()):
        check_memory(spec, slots_of(spec.engine.vllm, reads, facts.dtype, gates), doc, found, mode, patched)
    if has_errors(found):
        return None, found
    plan = Plan(
        spec, facts, mode, reason, locations, edits, reads, overrides, metrics, arms, prompts,
        dict(sorted(outside.items())),
        {where: tree.forwards[where] for where in sorted({f for p in locations for f in p.site.functions})},
        context.everywhere if every else None, saes, gates, stages, means, parted,
    )  # fmt: skip
    return plan, found


def _known(items: dict[str, T | None]) -> dict[str, T]:
    return {name: item for name, item in items.items() if item is not None}


def _digest(folder: Path, name: str) -> str | None:
    """Of a file's bytes, None where there is no such file."""
    try:
        return digests.of_file(path_in(folder, name))
    except OSError:
        return None


def _sites(at: At, spec: Spec, context: Context, found: list[Diagnostic]) -> tuple[Site, ...]:
    """Sites in execution order, each once."""
    out: dict[str, Site] = {}
    for text, where in zip(at.texts, at.wheres, strict=True):
        span = context.doc.at(*where)
        if ("taps", text) in spec.broken:
            continue
        pieces = spec.taps[text].texts if text in spec.taps else (text,)
        for piece in pieces:
            sites, problems = locate(context.tree, piece, span)
            if spec.engine.mode == "taps":
                no_tap = _everywhere(span) if piece == EVERYWHERE else _not_taps(sites, context, span)
                problems = [*problems, *no_tap]
            if text in spec.taps:
                at_tap = context.doc.at("taps", text)
                problems = [replace(p, span=at_tap) for p in problems]
            elif spec.taps and (close := nearest(text, spec.taps)) is not None:
                problems = [_with_tap(p, spec.taps, close) for p in problems]
            found.extend(problems)
            out.update({s.name: s for s in sites})
    return tuple(sorted(out.values(), key=lambda s: (s.order, s.name)))


def _everywhere(span: Span) -> list[Diagnostic]:
    """VT209 for ``**`` where the taps engine is asked for by name."""
    return [Diagnostic("VT209", f"`{EVERYWHERE}` is every module output, {NOT_TAPS}", span, note=EAGER_DOES)]


def _not_taps(sites: tuple[Site, ...], context: Context, span: Span) -> list[Diagnostic]:
    """VT209 where the taps engine, asked for by name, cannot serve a site; one finding for all of a location."""
    missing = [s for s in sites if context.compiled.tap(s) is None]
    if not missing:
        return []
    first = missing[0]
    more = f" (and {len(missing) - 1} more alike)" if len(missing) > 1 else ""
    return [
        Diagnostic(
            "VT209",
            f"{first.name} is not a tap: {context.compiled.why_not(first)}{more}",
            span,
            note=EAGER_DOES,
        )
    ]


def _eager(spec: Spec) -> dict[NodePath, str]:
    """What needs the eager engine: where it is defined → what it is."""
    return {one.where: "is at `**`, every module output" for one in spec.acting() if EVERYWHERE in spec.texts(one.at)}


def _against_taps(spec: Spec, doc: Document) -> list[Diagnostic]:
    """VT503 for an engine argument that does not go with the taps engine, where that is asked for by name."""
    blocked = engine_args.against_taps(spec.engine.vllm) if spec.engine.mode == "taps" else None
    if blocked is None:
        return []
    path, why = blocked
    text = f"engine.vllm.{'.'.join(path)} does not go with the taps engine"
    note = f"{why}; turn it off, or say `mode: eager`"
    return [Diagnostic("VT503", text, doc.at("engine", "vllm", *path), note=note)]


def _with_tap(d: Diagnostic, taps: Mapping[str, At], close: str) -> Diagnostic:
    if d.code not in ("VT202", "VT205"):
        return d
    return replace(d, valid=(*sorted(taps), *d.valid), nearest=close)


def _edit(edit: Edit, spec: Spec, context: Context, found: list[Diagnostic]) -> EditPlan | None:
    doc, before = context.doc, len(found)
    sites = _sites(edit.at, spec, context, found)
    if not sites:
        return None
    if edit.verb != "python" and EVERYWHERE in spec.texts(edit.at):
        message = f"`{EVERYWHERE}` is for reads and for edits in Python; `{edit.verb}` names its locations"
        found.append(Diagnostic("VT217", message, doc.at(*edit.where, "at")))
        return None
    for site in sites:
        if not site.editable:
            found.append(
                Diagnostic(
                    "VT208",
                    f"{site.name} holds no floating-point rows: it can be read, not edited",
                    doc.at(*edit.where, "at"),
                    note="`overrides` replace what was sampled" if site.name == SAMPLES else None,
                )
            )
    found += _numbers(edit, doc)
    found += logits.check_rows(edit, sites, doc)
    found += logits.check_edit(edit, sites, doc)
    shapes = {(s.width, s.heads if edit.heads else None): s.name for s in sites}
    narrowed = edit.heads is not None or edit.dims is not None or edit.ids is not None
    if len(shapes) > 1 and (narrowed or edit.vector is not None or edit.vectors or edit.matrices):
        listed = ", ".join(f"{name} is {width} wide" for (width, _), name in sorted(shapes.items(), key=str))
        found.append(
            Diagnostic("VT301", f"the locations of {edit.name!r} differ in shape: {listed}", doc.at(*edit.where, "at"))
        )
    columns = None
    if narrowed and len(found) == before:
        by_token = edit.ids is not None and edit.heads is None
        columns = _tokens(edit, context, found) if by_token else columns_of(edit, sites[0], doc, found)
    return EditPlan(edit, sites, columns) if len(found) == before else None


def _gate(gate: Gate, spec: Spec, context: Context, found: list[Diagnostic]) -> GatePlan | None:
    sites = _sites(gate.at, spec, context, found)
    return plan_gate(gate, sites, context.doc, found) if sites else None


def _numbers(edit: Edit, doc: Document) -> list[Diagnostic]:
    """VT104 for a number that is not finite, VT324 for bounds that bound nothing."""
    where = (*edit.where, edit.verb)
    said = {edit.coefficient_key: edit.coefficient, "min": edit.low, "max": edit.high}
    found = [
        Diagnostic("VT104", f"{key} must be a finite number", doc.at(*where, str(key)))
        for key, value in said.items()
        if value is not None and not math.isfinite(value) and not logits.bans(edit)
    ]
    if edit.verb == "clamp" and edit.low is None and edit.high is None:
        found.append(Diagnostic("VT324", "clamp has neither `min` nor `max`", doc.at(*where), ("min", "max")))
    if edit.low is not None and edit.high is not None and edit.low > edit.high:
        found.append(Diagnostic("VT324", f"min {edit.low:g} is above max {edit.high:g}", doc.at(*where, "min")))
    return found


def _tokens(edit: Edit, context: Context, found: list[Diagnostic]) -> tuple[Interval, ...]:
    where = (*edit.where, edit.verb, "ids")
    ids = [context.token(token, (*where, i), found) for i, token in enumerate(edit.ids or ())]
    return tuple(merge((i, i + 1) for i in ids))


def _read(read: Read, spec: Spec, context: Context, found: list[Diagnostic]) -> ReadPlan | None:
    before = len(found)
    if read.budget is not None:
        found += check_budget(read.kind, read.where, context.doc)
    if any(is_pattern(text) for text in spec.texts(read.at)):
        plan = plan_pattern(read, spec, context.tree, context.doc, found)
        if plan is not None and spec.engine.mode == "taps":
            parts = tuple(s for a in plan.attention for s in (a.query, a.key))
            found += _not_taps(parts, context, context.doc.at(*read.where, "at"))
        return plan
    sites = _sites(read.at, spec, context, found)
    found += logits.check_rows(read, sites, context.doc)
    found += logits.check_read(read, sites, context.doc)
    ids: tuple[int, ...] | None = None
    if read.kind == "features" and read.ids is not None:
        ids = tuple(int(i) for i in read.ids)
    if read.heads is not None:
        found.append(Diagnostic("VT346", "`heads` is for a read of `pattern`", context.doc.key(*read.where, "heads")))
    if read.store is not None:
        found += check_store(read.store, read.kind, read.where, context.doc)
    if read.kind == "lens":
        stray = [s for s in sites if not (s.alias or "").startswith(("resid_", "embed")) and s.name != LOGITS]
        if stray:
            found.append(
                Diagnostic(
                    "VT320",
                    f"a lens reads the residual stream; {stray[0].name} is not the stream",
                    context.doc.at(*read.where, "at"),
                    ("embed", "resid_pre[i]", "resid_mid[i]", "resid_post[i]", LOGITS),
                )
            )
        elif final_norm(context.tree) is None and any(s.name != LOGITS for s in sites):
            found.append(
                Diagnostic(
                    "VT206",
                    f"the final norm of {context.tree.architecture} is not known: no lens",
                    context.doc.at(*read.where, "lens"),
                )
            )
        if read.ids is not None:
            where = (*read.where, "lens", "ids")
            ids = tuple(context.token(t, (*where, i), found) for i, t in enumerate(read.ids))
        vocab = context.tree.dimensions.vocab
        if read.top is not None and read.top > vocab:
            found.append(
                Diagnostic("VT104", f"the vocabulary has {vocab} tokens", context.doc.at(*read.where, "lens", "top"))
            )
    return ReadPlan(read, sites, ids) if sites and len(found) == before else None


def _metric(metric: Metric, context: Context, found: list[Diagnostic]) -> MetricPlan | None:
    before = len(found)
    single = metric.kind != "logit_diff"
    where = (*metric.where, metric.kind)
    ids = tuple(context.token(t, where if single else (*where, i), found) for i, t in enumerate(metric.of))
    if not logits.sampled_only(metric.tokens):
        found.append(
            Diagnostic(
                "VT310",
                "a metric exists at rows that are sampled",
                context.doc.at(*metric.where, "tokens"),
                logits.SAMPLED_ROWS,
            )
        )
    if len(found) > before:
        return None
    return MetricPlan(metric, ids, tuple(context.tokens.pieces(ids)))


def _overrides(spec: Spec, context: Context, found: list[Diagnostic]) -> dict[str, OverridePlan]:
    out = {}
    vocab = context.tree.dimensions.vocab
    for name, override in spec.overrides.items():
        ids = override.ids if override.ids is not None else context.tokens.ids(override.text or "")
        where = context.doc.at(*override.where, "ids" if override.ids is not None else "text")
        over = [i for i in ids if not 0 <= i < vocab]
        if over:
            found.append(Diagnostic("VT314", f"token id {over[0]} is not in the vocabulary (0 … {vocab - 1})", where))
        elif not ids:
            found.append(Diagnostic("VT314", "the override has no tokens", where))
        else:
            out[name] = OverridePlan(override, tuple(ids))
    return out


def _prompts(spec: Spec, context: Context, found: list[Diagnostic]) -> dict[str, tuple[ReadyPrompt, ...]]:
    encoder = Encoder(context.tokens, context.tree.dimensions.vocab)
    out: dict[str, tuple[ReadyPrompt, ...]] = {}
    for name, group in spec.prompts.items():
        loaded = load_group(group, context.doc, found)
        ready = (encoder.encode(name, p, span, found) for p, span in loaded)
        out[name] = tuple(r for r in ready if r is not None)
    return out

"""Plan + Block → Lock: the program of a run, resolved, as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import PurePosixPath
from typing import Any

from vtaps.codegen.block import Block
from vtaps.spec import digests
from vtaps.spec.behind import SAMPLES
from vtaps.spec.expand import digest, expand
from vtaps.spec.plan import ArmPlan, EditPlan, GatePlan, LocationPlan, MetricPlan, Plan, ReadPlan
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.saes import key_of
from vtaps.spec.source import op_text
from vtaps.spec.sources import outside_name
from vtaps.spec.spec import BAN, FeatureUse, Spec
from vtaps.spec.vector_use import definition
from vtaps.spec.vllm_version import VLLM_RANGE

LOCK_VERSION = 1


def names(spec_file: str) -> tuple[str, str]:
    """The block's and the lock's file name beside a spec: ``paris.yaml`` → ``paris.block.py``, ``paris.lock.json``."""
    stem = PurePosixPath(spec_file.replace("\\", "/")).name
    for suffix in (".yaml", ".yml"):
        stem = stem.removesuffix(suffix)
    return f"{stem}.block.py", f"{stem}.lock.json"


def build(plan: Plan, block: Block) -> dict[str, Any]:
    spec = plan.spec
    spec_name = PurePosixPath(spec.file.replace("\\", "/")).name
    sites = {p.site.name: p for p in plan.locations}
    # What no arm lists is in no location of the block, so its sites are not in the lock either.
    listed = {(s.kind, s.name) for p in plan.locations for s in p.statements}
    gates = {name: p for name, p in plan.gates.items() if ("gate", name) in listed}
    edits = {name: p for name, p in plan.edits.items() if ("edit", name) in listed}
    patterns = {name: p for name, p in plan.reads.items() if p.attention and p.requests}
    listed |= {("read", name) for name in patterns}
    sites |= {s.name: LocationPlan(s, (), "computed") for p in patterns.values() for s in p.sites}
    reads = {name: p for name, p in plan.reads.items() if ("read", name) in listed}
    used = {
        n for a in plan.arms.values() for p in a.points for e in p.edits if (n := e.vector) is not None
    } | {v for r in reads.values() for v in r.read.vectors} | {
        e.edit.vector for e in edits.values() if e.edit.vector is not None
    } | {v for e in edits.values() for v in (*e.edit.vectors, *e.edit.matrices)} | {
        g.gate.vector for g in gates.values()
    }  # fmt: skip
    return {
        "lock": LOCK_VERSION,
        "spec": {"file": spec_name, "digest": digest(expand(spec))},
        "block": {"file": names(spec.file)[0], "digest": block.digest, "structure": block.structure},
        "tree": {
            "digest": plan.tree.digest,
            "architecture": plan.tree.architecture,
            "vllm": plan.tree.vllm,
            "vllm_range": VLLM_RANGE,
        },
        "model": {
            "path": spec.model.path,
            "dtype": plan.tree.dtype,
            "revision": spec.model.revision,
            "tokenizer": spec.model.tokenizer,
            "config": plan.outside.get("model:config.json"),
        },
        "engine": {
            "mode": plan.mode,
            "reason": plan.reason,
            "vllm": dict(spec.engine.vllm),
            "tap_memory": spec.engine.tap_memory,
        },
        "lens": {"norm": plan.tree.final_norm},
        "sites": {name: _site(location, plan) for name, location in sites.items()},
        **_forwards(plan),
        **({"gates": {name: _gate(p) for name, p in gates.items()}} if gates else {}),
        "edits": {
            name: {
                "verb": p.edit.operation,
                "sites": [s.name for s in p.sites],
                "columns": None if p.columns is None else [list(c) for c in p.columns],
                "tokens": p.edit.tokens.to_json(),
                **({"vectors": list(p.edit.vectors)} if p.edit.vectors else {}),
                **({"keep_norm": True} if p.edit.keep_norm else {}),
                **({"matrices": list(p.edit.matrices)} if p.edit.matrices else {}),
                **_feature(p.edit.feature, spec),
                **({"value": True} if p.edit.by_value else {}),
                **({} if p.edit.when is None else {"when": p.edit.when}),
                **_rows(p, plan),
                **_python(p.edit.python, plan),
            }
            for name, p in edits.items()
        },
        "reads": {
            name: {
                "sites": [s.name for s in p.sites],
                "kind": p.read.kind,
                **({"mean_over": "run"} if p.read.over == "run" else {}),
                "tokens": p.read.tokens.to_json(),
                "sees": p.read.sees or "after_edits",
                "step_rows": p.step_rows,
                "requests": p.requests,
                "vectors": list(p.read.vectors),
                "top": p.read.top,
                "ids": None if p.ids is None else list(p.ids),
                **({} if p.read.sae is None else {"sae": spec.saes[p.read.sae].path}),
                **({"store": p.read.store.to_json()} if p.read.store is not None else {}),
                **({"allow": list(p.read.allow)} if p.read.allow else {}),
                **({"budget": p.read.budget} if p.read.budget is not None else {}),
                **_attention(p),
                **_python(p.read.python, plan),
            }
            for name, p in reads.items()
        },
        "overrides": {
            name: {"start": p.override.start, "ids": list(p.ids), "text": p.override.text}
            for name, p in plan.overrides.items()
        },
        "metrics": {
            name: {
                "kind": p.metric.kind,
                "ids": list(p.ids),
                "texts": list(p.texts),
                "tokens": p.metric.tokens.to_json(),
                **_normalize(p),
            }
            for name, p in plan.metrics.items()
        },
        "vectors": {
            name: {
                **definition(spec.vectors[name], spec.saes),
                **_means(name, plan),
                "digest": plan.outside.get(spec.vectors[name].file or ""),
            }
            for name in sorted(used)
        },
        "prompts": {
            name: {
                "count": len(items),
                "digest": _prompt_digest(items),
                "file": None if (ref := spec.prompts[name].file) is None else ref.file,
            }
            for name, items in plan.prompts.items()
        },
        "arms": {name: _arm(p) for name, p in plan.arms.items()},
        "outside": dict(plan.outside),
    }


def _gate(plan: GatePlan) -> dict[str, Any]:
    gate = plan.gate
    return {
        "site": plan.site.name,
        "score": gate.kind,
        "tokens": gate.tokens.to_json(),
        "holds": gate.holds,
        **({} if gate.reduce is None else {"reduce": gate.reduce}),
        "step_rows": plan.step_rows,
        "requests": plan.requests,
    }


def _rows(edit: EditPlan, plan: Plan) -> dict[str, Any]:
    """Whose rows an edit sets, and how many."""
    rows = edit.edit.rows
    if rows is None or edit.source is None:
        return {}
    run = {} if rows.run is None else {"run": rows.run, "digest": plan.outside.get(outside_name(rows))}
    return {"rows": {**run, "arm": rows.arm, "read": rows.read, "slots": edit.source.slots}}


def _normalize(metric: MetricPlan) -> dict[str, Any]:
    arms = metric.metric.normalize
    return {} if arms is None else {"normalize": dict(zip(("one", "zero"), arms, strict=True))}


def _means(name: str, plan: Plan) -> dict[str, Any]:
    """Where the numbers of a vector come from in the run: for each location of use, that of the read."""
    return {
        key: {"arm": source.arm, "read": source.read, "sites": dict(sorted(source.sites.items()))}
        for key, source in plan.means.get(name, {}).items()
    }


def _python(named: tuple[str, str] | None, plan: Plan) -> dict[str, Any]:
    if named is None:
        return {}
    file, function = named
    return {"python": {"file": file, "function": function, "digest": plan.outside.get(file)}}


def _feature(use: FeatureUse | None, spec: Spec) -> dict[str, Any]:
    """The folder, or file, of an edit's SAE and what is done to the feature, which each point names."""
    if use is None:
        return {}
    path = spec.saes[use.sae].path
    return {"sae": {key_of(path): path, "does": use.does}}


def _attention(plan: ReadPlan) -> dict[str, Any]:
    if not plan.attention:
        return {}
    pairs = zip(plan.sites, plan.attention, strict=True)
    return {
        "heads": list(plan.heads),
        "attention": {s.name: {"module": a.module, "query": a.query.name, "key": a.key.name} for s, a in pairs},
    }


def _forwards(plan: Plan) -> dict[str, Any]:
    """The functions that get taps; a lock without such has no entry."""
    found = {
        where: {"file": f.file, "line": f.line, "digest": f"sha256:{f.digest}", "ops": [op_text(op) for op in f.ops]}
        for where, f in plan.forwards.items()
    }
    return {"forwards": found} if found else {}


def _site(location: LocationPlan, plan: Plan) -> dict[str, Any]:
    site = location.site
    return {
        "module": site.module,
        **({"op": site.op, "forward": site.forward} if site.op is not None else {}),
        **({"inside": site.inside} if site.inside is not None else {}),
        "output": site.element if site.side == "output" else None,
        "input": site.element if site.side == "input" else None,
        **({"rows": "sampled"} if site.sampled else {}),
        "residual": site.residual,
        "columns": None if site.columns is None else list(site.columns),
        "layer": site.layer,
        "width": site.width,
        "heads": site.heads,
        "dtype": plan.tree.dtype if site.name != SAMPLES else "int32",
        "hf_hidden_states": site.hf_index,
        "mode": location.mode,
        "shard": "columns" if site.name in plan.parted else None,
    }


def _arm(plan: ArmPlan) -> dict[str, Any]:
    return {
        "prompts": sorted(plan.prompts),
        "reads": list(plan.arm.reads),
        "edits": list(plan.arm.edits),
        "metrics": list(plan.arm.metrics),
        "sampling": dict(plan.sampling),
        "points": [
            {
                "values": dict(point.values),
                "edits": [
                    {
                        "edit": e.edit,
                        "sites": list(e.sites),
                        "coefficient": BAN if e.coefficient == float(BAN) else e.coefficient,
                        "vector": e.vector,
                        **({} if (e.low, e.high) == (None, None) else {"min": e.low, "max": e.high}),
                        **({} if e.feature is None else {"feature": e.feature}),
                        **({} if e.position is None else {"position": e.position}),
                    }
                    for e in point.edits
                ],
                "overrides": [{"override": name, "start": start} for name, start in point.overrides],
                **({"gates": [dataclasses.asdict(g) for g in point.gates]} if point.gates else {}),
            }
            for point in plan.points
        ],
    }


def _prompt_digest(items: tuple[ReadyPrompt, ...]) -> str:
    hashed = hashlib.sha256()
    for item in items:
        hashed.update(json.dumps([item.id, item.ids, dict(item.columns)], sort_keys=True, default=str).encode())
    return "sha256:" + hashed.hexdigest()


def to_text(lock: dict[str, Any]) -> str:
    """Sorted keys, one leaf list a line: stable, and readable in a diff."""
    return _pretty(lock, 0) + "\n"


def _pretty(value: Any, depth: int) -> str:
    flat = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value:
        return flat
    leaf = all(not isinstance(v, dict | list) for v in (value.values() if isinstance(value, dict) else value))
    if (leaf and len(flat) <= 110 - depth) or (isinstance(value, list) and len(flat) <= 60):
        return flat
    pad, end = " " * (depth + 1), " " * depth
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + _pretty(v, depth + 1) for v in value) + f"\n{end}]"
    items = (f"{pad}{json.dumps(k, ensure_ascii=False)}: {_pretty(v, depth + 1)}" for k, v in sorted(value.items()))
    return "{\n" + ",\n".join(items) + f"\n{end}}}"


def lock_digest(lock: dict[str, Any]) -> str:
    return digests.of_text(to_text(lock))

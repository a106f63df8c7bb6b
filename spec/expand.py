"""The spec with every default written out: what ``check --expand`` prints and what the lock hashes."""

from __future__ import annotations

import re
from typing import Any

import yaml

from vtaps.spec import digests
from vtaps.spec.rows import Interval, Rows
from vtaps.spec.saes import key_of
from vtaps.spec.sizes import exact
from vtaps.spec.spec import (
    BAN,
    BOUNDS,
    MATRICES,
    PROBE,
    Arm,
    At,
    Edit,
    Gate,
    Metric,
    Override,
    PromptGroup,
    Read,
    RowsOf,
    Spec,
    Vector,
)
from vtaps.spec.yaml import scalar


class _Flow(dict[str, Any]):
    """A mapping written on one line."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _flow(dumper: _Dumper, data: _Flow) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True)


def _line(dumper: _Dumper, data: list[Any]) -> yaml.Node:
    plain = all(not isinstance(i, dict) for i in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=plain)


def _text(dumper: _Dumper, data: str) -> yaml.Node:
    """Plain where every reader takes it for the text it is, in double quotes elsewhere."""
    plain = _PLAIN.fullmatch(data) is not None and scalar(data) == data and _AMBIGUOUS.fullmatch(data) is None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')


_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*|-?[0-9]+\.\.-?[0-9]+")
_AMBIGUOUS = re.compile(r"y|n|yes|no|on|off", re.IGNORECASE)
"""Words that a YAML 1.1 reader takes for booleans."""

_Dumper.add_representer(_Flow, _flow)
_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _line)


def expand(spec: Spec) -> dict[str, Any]:
    """A spec that means the same, with nothing left to a default; sections sorted by name, arms' lists as written."""

    def each(items: Any, write: Any) -> dict[str, Any]:
        return {name: write(items[name]) for name in sorted(items)}

    return {
        "vtaps": 1,
        "model": {
            "path": spec.model.path,
            "dtype": spec.model.dtype,
            "revision": spec.model.revision,
            "tokenizer": spec.model.tokenizer,
        },
        "engine": {
            "mode": spec.engine.mode,
            "tap_memory": exact(spec.engine.tap_memory),
            "vllm": dict(sorted(spec.engine.vllm.items())),
        },
        **({"saes": each(spec.saes, lambda sae: {key_of(sae.path): sae.path})} if spec.saes else {}),
        "vectors": each(spec.vectors, _vector),
        "taps": each(spec.taps, _at),
        "reads": each(spec.reads, read_of),
        **({"gates": each(spec.gates, gate_of)} if spec.gates else {}),
        "edits": each(spec.edits, edit_of),
        "overrides": each(spec.overrides, _override),
        "metrics": each(spec.metrics, _metric),
        "prompts": {name: _group(group) for name, group in spec.prompts.items()},
        "arms": {name: _arm(arm, spec) for name, arm in spec.arms.items()},
        "sampling": dict(sorted(spec.sampling.items())),
    }


def to_yaml(expanded: dict[str, Any]) -> str:
    """YAML 1.2 text, one definition a line.  Texts that older readers would take for something else are quoted."""
    shaped: dict[str, Any] = {}
    for section, value in expanded.items():
        if section in ("saes", "vectors", "reads", "gates", "edits", "overrides", "metrics", "arms") and value:
            shaped[section] = {k: _Flow(v) for k, v in value.items()}
        elif isinstance(value, dict) and section in ("model", "engine", "sampling"):
            shaped[section] = _Flow(value)
        else:
            shaped[section] = value
    return yaml.dump(shaped, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def digest(expanded: dict[str, Any]) -> str:
    """sha256 of the canonical JSON of an expanded spec."""
    return digests.of_json(expanded)


def one_line(definition: dict[str, Any]) -> str:
    """A definition in flow style, for a comment in the block."""
    return yaml.dump(_Flow(definition), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6).strip()


def written(ranges: tuple[Interval, ...]) -> list[int | str]:
    """Inclusive ranges as the language writes them: ``[0, "4..9"]``."""
    return [a if a == b else f"{a}..{b}" for a, b in ranges]


def rows_of(rows: Rows) -> Any:
    """A selector as the language writes it: a bare word where that says it all."""
    out: dict[str, Any] = {}
    if rows.steps is not None:
        out["steps"] = written(rows.steps)
    if rows.positions is not None:
        out["positions"] = written(rows.positions)
    if rows.match is not None:
        out["match"] = rows.match
    if rows.ids is not None:
        out["ids"] = list(rows.ids)
    if rows.turn is not None:
        out |= {"turn": rows.turn, "skip": rows.skip}
    if rows.after is not None:
        out["after"] = rows.after
    if rows.exclude is not None:
        out["except"] = rows_of(rows.exclude)
    if not out:
        return rows.word
    return _Flow({"rows": rows.word, **out})


def _vector(vector: Vector) -> dict[str, Any]:
    if vector.random:
        return {"random": {"seed": vector.seed, "norm": vector.norm}}
    if vector.sae is not None:
        return {"sae": vector.sae, "feature": vector.feature} | ({} if vector.norm is None else {"norm": vector.norm})
    if vector.read is not None:
        scaled = {} if vector.norm is None else {"norm": vector.norm}
        return {**{key: rows_from(of) for key, of in vector.means}, **scaled}
    out: dict[str, Any] = {"file": vector.file}
    if vector.tensor is not None:
        out["tensor"] = vector.tensor
    if vector.row is not None:
        out["row"] = vector.row
    if vector.norm is not None:
        out["norm"] = vector.norm
    return out


def _at(at: At) -> Any:
    return at.texts[0] if len(at.texts) == 1 else list(at.texts)


def edit_of(edit: Edit) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if edit.vector is not None:
        body["vector"] = edit.vector
    if edit.vectors:
        body["vectors"] = list(edit.vectors)
    if edit.rows is not None:
        body["rows"] = rows_from(edit.rows)
    body |= dict(zip(MATRICES, edit.matrices, strict=False))
    if edit.low is not None:
        body["min"] = edit.low
    if edit.high is not None:
        body["max"] = edit.high
    if edit.keep_norm:
        body["keep_norm"] = True
    if edit.feature is not None:
        body |= {"sae": edit.feature.sae, "index": edit.feature.index}
    if edit.coefficient is not None and edit.coefficient_key is not None:
        body[edit.coefficient_key] = BAN if edit.coefficient == float(BAN) else edit.coefficient
    if edit.feature is not None:
        body["error"] = edit.feature.error
    if edit.heads is not None:
        body["heads"] = written(edit.heads)
    if edit.dims is not None:
        body["dims"] = written(edit.dims)
    if edit.ids is not None:
        body["ids"] = list(edit.ids)
    said = _Flow(body) if edit.python is None else ":".join(edit.python)
    when = {} if edit.when is None else {"when": edit.when}
    return {"at": _at(edit.at), "tokens": rows_of(edit.tokens), edit.verb: said, **when}


def gate_of(gate: Gate) -> dict[str, Any]:
    out = {"at": _at(gate.at), "tokens": rows_of(gate.tokens), gate.kind: gate.vector}
    if gate.reduce is not None:
        out["reduce"] = gate.reduce
    out |= {key: bound for key in BOUNDS if (bound := getattr(gate, key)) is not None}
    return {**out, "holds": gate.holds}


def rows_from(rows: RowsOf) -> Any:
    """``clean.stream``, or with the folder of a run."""
    if rows.run is None:
        return f"{rows.arm}.{rows.read}"
    return _Flow({"run": rows.run, "arm": rows.arm, "read": rows.read})


def read_of(read: Read) -> dict[str, Any]:
    out: dict[str, Any] = {"at": _at(read.at), "tokens": rows_of(read.tokens)}
    if read.sees is not None:
        out["sees"] = read.sees
    if read.kind == "mean":
        out["mean_over"] = read.over
    elif read.kind == "norm":
        out["norm"] = True
    elif read.kind == "project":
        out["project"] = _Flow({"vectors": list(read.vectors)})
    elif read.kind == "probe":
        out["probe"] = _Flow(dict(zip(PROBE, read.vectors, strict=False)))
    elif read.kind == "features":
        chosen = {"top": read.top} if read.top is not None else {"ids": list(read.ids or ())}
        out["features"] = _Flow({"sae": read.sae, **chosen})
    elif read.kind == "lens":
        out["lens"] = _Flow({"top": read.top} if read.top is not None else {"ids": list(read.ids or ())})
    elif read.python is not None:
        out["python"] = ":".join(read.python)
    if read.allow:
        out["allow"] = list(read.allow)
    if read.budget is not None:
        out["budget"] = _Flow({"tokens": read.budget})
    if read.heads is not None:
        out["heads"] = written(read.heads)
    if read.store is not None:
        out["store"] = _Flow(read.store.to_json())
    return out


def _override(override: Override) -> dict[str, Any]:
    given = {"text": override.text} if override.text is not None else {"ids": list(override.ids or ())}
    return {"start": override.start, **given}


def _metric(metric: Metric) -> dict[str, Any]:
    of = list(metric.of) if metric.kind == "logit_diff" else metric.of[0]
    out = {metric.kind: of, "tokens": rows_of(metric.tokens)}
    if metric.normalize is not None:
        out["normalize"] = _Flow(zip(("one", "zero"), metric.normalize, strict=True))
    return out


def _group(group: PromptGroup) -> Any:
    if group.file is not None:
        ident = {"id": {"column": group.file.id_column}} if group.file.id_column is not None else {}
        return {"file": group.file.file, **ident, group.file.kind: {"column": group.file.column}}
    return [{"id": p.id, p.kind: p.content, **p.columns} for p in group.items]


def _arm(arm: Arm, spec: Spec) -> dict[str, Any]:
    out: dict[str, Any] = {
        "prompts": list(arm.prompts if arm.prompts is not None else spec.prompts),
        "reads": list(arm.reads),
        "edits": list(arm.edits),
        "overrides": list(arm.overrides),
        "metrics": list(arm.metrics),
        "sampling": dict(sorted({**spec.sampling, **arm.sampling}.items())),
    }
    if arm.sweep:
        factors = [
            {axis.path: "each" if axis.values is None else list(axis.values) for axis in factor} for factor in arm.sweep
        ]
        out["sweep"] = factors
    return out

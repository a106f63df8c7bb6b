"""Document → Spec.  The schema has already been held against the text; definitions that failed it are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document, NodePath
from vtaps.spec.rows import WORDS, Interval, Rows
from vtaps.spec.sizes import parse_size
from vtaps.spec.spec import (
    GATE_KINDS,
    MATRICES,
    PROBE,
    TAP_MEMORY,
    Arm,
    At,
    Axis,
    Edit,
    EngineRef,
    FeatureUse,
    Gate,
    Metric,
    ModelRef,
    Override,
    Prompt,
    PromptFile,
    PromptGroup,
    Read,
    RowsOf,
    Sae,
    Spec,
    Vector,
)
from vtaps.spec.store import Store

VERBS = ("add", "scale", "zero", "set", "project_out", "clamp", "affine", "feature", "python")
SCALED = ("add", "set", "project_out", "affine")
PROMPT_KINDS = ("text", "chat", "ids")
METRIC_KINDS = ("logprob", "logit_diff", "rank")
SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
SECTIONS = ("saes", "vectors", "taps", "reads", "gates", "edits", "overrides", "metrics", "prompts", "arms")

T = TypeVar("T")


def broken_paths(doc: Document, found: list[Diagnostic]) -> frozenset[NodePath]:
    """The definitions (or whole top-level keys) in which a finding of the loader stands."""
    out: set[NodePath] = set()
    for d in found:
        inside = [
            path
            for path, span in doc.values.items()
            if 0 < len(path) <= 2
            and (len(path) == 1 or path[0] in SECTIONS)
            and _start(path, doc) <= (d.span.line, d.span.column) < (span.end_line, max(span.end_column, 2))
        ]
        out.update({max(inside, key=len)} if inside else {()})
    return frozenset(out)


def _start(path: NodePath, doc: Document) -> tuple[int, int]:
    span = doc.key(*path)
    return span.line, span.column


def parse(doc: Document, found: list[Diagnostic] | None = None, refused: Iterable[NodePath] = ()) -> Spec | None:
    """The spec of a document, of which the loader said ``found`` and the schema refused ``refused``
    (:func:`vtaps.spec.schema.held`); None where the root itself is not a mapping or the model, engine or sampling
    sections cannot be used."""
    broken = broken_paths(doc, found or []) | {p if p and p[0] in SECTIONS else p[:1] for p in refused}
    data = doc.data
    if not isinstance(data, dict) or {("model",), ("engine",), ("sampling",)} & broken:
        return None
    if any(len(path) == 1 and path[0] in SECTIONS for path in broken) or not isinstance(data.get("model"), dict):
        return None

    def each(section: str, build: Callable[[str, Any, NodePath], T]) -> dict[str, T]:
        return {
            name: build(name, value, (section, name))
            for name, value in data.get(section, {}).items()
            if (section, name) not in broken
        }

    model, engine = data["model"], data.get("engine", {})
    return Spec(
        file=doc.file,
        model=ModelRef(
            path=model["path"],
            dtype=model.get("dtype", "auto"),
            revision=model.get("revision"),
            tokenizer=model.get("tokenizer"),
        ),
        engine=EngineRef(
            mode=engine.get("mode", "auto"),
            vllm=engine.get("vllm", {}),
            tap_memory=parse_size(engine.get("tap_memory", TAP_MEMORY)),
        ),
        vectors=each("vectors", _vector),
        taps=each("taps", lambda name, value, where: _at(value, where)),
        reads=each("reads", _read),
        edits=each("edits", _edit),
        overrides=each("overrides", _override),
        metrics=each("metrics", _metric),
        prompts=each("prompts", _group),
        arms=each("arms", _arm),
        sampling={**SAMPLING_DEFAULTS, **data.get("sampling", {})},
        broken=broken,
        saes=each("saes", lambda name, value, where: Sae(name, where, value.get("dir") or value["file"])),
        gates=each("gates", _gate),
    )


def _vector(name: str, data: Mapping[str, Any], where: NodePath) -> Vector:
    if "random" in data:
        draw = data["random"] or {}
        return Vector(name, where, seed=int(draw.get("seed", 0)), norm=float(draw.get("norm", 1.0)))
    norm = None if "norm" not in data else float(data["norm"])
    if "sae" in data:
        return Vector(name, where, norm=norm, sae=data["sae"], feature=data["feature"])
    if "read" in data:
        minus = _rows_of(data["minus"]) if "minus" in data else None
        return Vector(name, where, norm=norm, read=_rows_of(data["read"]), minus=minus)
    return Vector(name, where, file=data["file"], tensor=data.get("tensor"), row=data.get("row"), norm=norm)


def _at(value: str | list[str], where: NodePath) -> At:
    if isinstance(value, str):
        return At((value,), (where,))
    return At(tuple(value), tuple((*where, i) for i in range(len(value))))


def parse_ranges(items: list[int | str]) -> tuple[Interval, ...]:
    """``[0, "4..9", -1]`` as inclusive ranges."""

    def one(item: int | str) -> Interval:
        if isinstance(item, int):
            return item, item
        first, last = item.split("..")
        return int(first), int(last)

    return tuple(one(i) for i in items)


def parse_rows(data: Any) -> Rows:
    if isinstance(data, str):
        return Rows(word=_word(data))
    return Rows(
        word=_word(data.get("rows", "all")),
        steps=parse_ranges(data["steps"]) if "steps" in data else None,
        positions=parse_ranges(data["positions"]) if "positions" in data else None,
        match=data.get("match"),
        ids=tuple(data["ids"]) if "ids" in data else None,
        turn=data.get("turn"),
        skip=data.get("skip", 0),
        after=data.get("after"),
        exclude=parse_rows(data["except"]) if "except" in data else None,
    )


def _word(text: str) -> Any:
    assert text in WORDS, text
    return text


def _edit(name: str, data: Mapping[str, Any], where: NodePath) -> Edit:
    verb = next(v for v in VERBS if v in data)
    body = {} if verb == "python" else data[verb] or {}
    key = "value" if "value" in body else "scale"
    own = verb in SCALED and "rows" not in body
    coefficient = body.get(key, 1.0) if own else body.get("to", body.get("by"))
    return Edit(
        name=name,
        where=where,
        at=_at(data["at"], (*where, "at")),
        tokens=parse_rows(data["tokens"]),
        verb=verb,  # type: ignore[arg-type]
        coefficient=None if coefficient is None else float(coefficient),
        vector=body.get("vector"),
        heads=parse_ranges(body["heads"]) if "heads" in body else None,
        dims=parse_ranges(body["dims"]) if "dims" in body else None,
        vectors=tuple(body.get("vectors", ())),
        low=float(body["min"]) if "min" in body else None,
        high=float(body["max"]) if "max" in body else None,
        keep_norm=bool(body.get("keep_norm")),
        matrices=tuple(body[key] for key in MATRICES if key in body),
        python=_function(data["python"]) if verb == "python" else None,
        feature=_feature(body) if verb == "feature" else None,
        ids=tuple(body["ids"]) if "ids" in body else None,
        when=data.get("when"),
        rows=_rows_of(body["rows"]) if "rows" in body else None,
    )


def _gate(name: str, data: Mapping[str, Any], where: NodePath) -> Gate:
    kind = next(k for k in GATE_KINDS if k in data)
    return Gate(
        name,
        where,
        at=_at(data["at"], (*where, "at")),
        tokens=parse_rows(data["tokens"]),
        kind=kind,  # type: ignore[arg-type]
        vector=data[kind],
        holds=data["holds"],
        reduce=data.get("reduce"),
        above=float(data["above"]) if "above" in data else None,
        below=float(data["below"]) if "below" in data else None,
    )


def _feature(body: Mapping[str, Any]) -> FeatureUse:
    return FeatureUse(body["sae"], body["index"], "to" if "to" in body else "by", body.get("error", "keep"))


def _rows_of(data: str | Mapping[str, str]) -> RowsOf:
    if isinstance(data, str):
        arm, _, read = data.partition(".")
        return RowsOf(arm, read)
    return RowsOf(data["arm"], data["read"], data["run"])


def _function(text: str) -> tuple[str, str]:
    file, _, function = text.rpartition(":")
    return file, function


def _read(name: str, data: Mapping[str, Any], where: NodePath) -> Read:
    store = Store.from_json(data["store"]) if "store" in data else None
    heads = parse_ranges(data["heads"]) if "heads" in data else None
    read = Read(
        name, where, _at(data["at"], (*where, "at")), parse_rows(data["tokens"]), sees=data.get("sees"), store=store,
        heads=heads, budget=data["budget"]["tokens"] if "budget" in data else None, allow=tuple(data.get("allow", ())),
    )  # fmt: skip
    if "mean_over" in data:
        return replace(read, kind="mean", over=data["mean_over"])
    if data.get("norm"):
        return replace(read, kind="norm")
    if "project" in data:
        return replace(read, kind="project", vectors=tuple(data["project"]["vectors"]))
    if "probe" in data:
        return replace(read, kind="probe", vectors=tuple(data["probe"][key] for key in PROBE if key in data["probe"]))
    if "features" in data:
        said = data["features"]
        ids = tuple(said["ids"]) if "ids" in said else None
        return replace(read, kind="features", sae=said["sae"], top=said.get("top"), ids=ids)
    if "lens" in data:
        lens = data["lens"]
        return replace(read, kind="lens", top=lens.get("top"), ids=tuple(lens["ids"]) if "ids" in lens else None)
    if "python" in data:
        return replace(read, kind="python", python=_function(data["python"]))
    return read


def _override(name: str, data: Mapping[str, Any], where: NodePath) -> Override:
    ids = tuple(data["ids"]) if "ids" in data else None
    return Override(name, where, start=data["start"], text=data.get("text"), ids=ids)


def _metric(name: str, data: Mapping[str, Any], where: NodePath) -> Metric:
    kind = next(k for k in METRIC_KINDS if k in data)
    of = data[kind] if isinstance(data[kind], list) else [data[kind]]
    normalize = (data["normalize"]["one"], data["normalize"]["zero"]) if "normalize" in data else None
    return Metric(name, where, kind, tuple(of), parse_rows(data["tokens"]), normalize)  # type: ignore[arg-type]


def _group(name: str, data: Any, where: NodePath) -> PromptGroup:
    if isinstance(data, dict):
        kind = next(k for k in PROMPT_KINDS if k in data)
        id_column = data["id"]["column"] if "id" in data else None
        return PromptGroup(name, where, file=PromptFile(data["file"], kind, data[kind]["column"], id_column))  # type: ignore[arg-type]
    items = []
    for i, item in enumerate(data):
        kind = next(k for k in PROMPT_KINDS if k in item)
        columns = {k: v for k, v in item.items() if k not in ("id", kind)}
        items.append(Prompt(item["id"], kind, item[kind], (*where, i), columns))  # type: ignore[arg-type]
    return PromptGroup(name, where, items=tuple(items))


def _arm(name: str, data: Mapping[str, Any], where: NodePath) -> Arm:
    def names(key: str) -> tuple[str, ...]:
        return tuple(data.get(key, ()))

    sweep = data.get("sweep", {})
    at = (*where, "sweep")
    factors: list[tuple[Axis, ...]]
    if isinstance(sweep, dict):
        factors = [(_axis(path, values, (*at, path)),) for path, values in sweep.items()]
    else:
        factors = [
            tuple(_axis(path, values, (*at, i, path)) for path, values in item.items()) for i, item in enumerate(sweep)
        ]
    return Arm(
        name=name,
        where=where,
        prompts=tuple(data["prompts"]) if "prompts" in data else None,
        reads=names("reads"),
        edits=names("edits"),
        overrides=names("overrides"),
        metrics=names("metrics"),
        sampling=data.get("sampling", {}),
        sweep=tuple(factors),
    )


def _axis(path: str, values: Any, where: NodePath) -> Axis:
    return Axis(path, None if values == "each" else tuple(values), where)

"""A lock's JSON → :class:`~vtaps.runtime.program.Program`, every entry checked and named where it is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vtaps.runtime.block import gate_key
from vtaps.runtime.program import (
    KINDS,
    METRICS,
    USES_VECTOR,
    VERBS,
    WITHOUT_COEFFICIENT,
    ArmEntry,
    EditEntry,
    ForwardEntry,
    GateEntry,
    LockError,
    MetricEntry,
    OverrideEntry,
    PatternEntry,
    Point,
    PointEdit,
    Program,
    ReadEntry,
    SiteEntry,
)
from vtaps.spec.arms import is_identity
from vtaps.spec.pattern import KEYS, QUERIES
from vtaps.spec.rows import Rows
from vtaps.spec.source import parse_op
from vtaps.spec.store import Store

MODES = ("taps", "eager")
DOES = ("to", "by")
SITE_MODES = ("recorded", "break", "hook", "eager")

T = TypeVar("T")


def load_program(lock_path: Path, folder: Path | None = None) -> Program:
    """Read a lock file; ``folder`` is where relative names start (default: the lock's own).

    Raises LockError.
    """
    try:
        data = json.loads(lock_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LockError(lock_path.name, f"cannot be read: {error}") from error
    return parse_program(data, folder or lock_path.parent)


def parse_program(lock: Mapping[str, Any], folder: Path) -> Program:
    """Raises LockError, naming the entry that is wrong."""
    if lock.get("lock") != 1:
        raise LockError("lock", f"version {lock.get('lock')!r} is not known; this is version 1")
    mode = (lock.get("engine") or {}).get("mode", "eager")
    if mode not in MODES:
        raise LockError("engine", f"mode {mode!r} is not one of {', '.join(MODES)}")
    lock, patterns = _without_patterns(lock)
    acting = [*(lock.get("edits") or {}).values(), *(lock.get("reads") or {}).values()]
    broken = [one for one in acting if {one.get("verb"), one.get("kind")} & {"python", "reconstruct"}]
    python = {s for one in broken for s in one.get("sites") or ()}
    sites = _each(lock, "sites", lambda name, data: _site(name, data, mode, name in python))
    overrides = _each(lock, "overrides", lambda n, d: OverrideEntry(tuple(int(i) for i in d["ids"])))
    vectors: dict[str, Mapping[str, Any]] = dict(lock.get("vectors") or {})
    edits = _each(lock, "edits", _edit)
    reads = _each(lock, "reads", _read)
    metrics = _each(lock, "metrics", _metric)
    gates = {gate_key(n): g for n, g in _each(lock, "gates", _gate).items()}
    for name, data in (lock.get("gates") or {}).items():
        edits[gate_key(name)], reads[gate_key(name)] = _uses_of_gate(data)
    arms = _each(lock, "arms", lambda name, data: _arm(data, edits))
    block = lock["block"]
    program = Program(
        folder=folder,
        structure=block["structure"],
        block_digest=block["digest"],
        block_lines={int(k): int(v) for k, v in (block.get("lines") or {}).items()},
        spec_file=(lock.get("spec") or {}).get("file", "spec"),
        sites=sites,
        edits=edits,
        reads=reads,
        overrides=overrides,
        metrics=metrics,
        vectors=vectors,
        arms=arms,
        lens_norm=(lock.get("lens") or {}).get("norm"),
        mode=mode,
        tap_memory=(lock.get("engine") or {}).get("tap_memory"),
        forwards=_each(lock, "forwards", _forward),
        outside=dict(lock.get("outside") or {}),
        gates=gates,
        patterns=patterns,
    )
    _check_names(program)
    return program


def _without_patterns(lock: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, PatternEntry]]:
    """The lock with the reads of queries and keys that patterns are made of in the patterns' place."""
    reads = lock.get("reads") or {}
    made = {name: data for name, data in reads.items() if data.get("kind") == "pattern"}
    patterns = _each({"reads": made}, "reads", _pattern)
    if not patterns:
        return lock, {}
    sites = {name: data for name, data in lock["sites"].items() if data.get("mode") != "computed"}
    arms = {}
    for name, arm in lock["arms"].items():
        listed = [n for r in arm.get("reads") or () for n in ((r + QUERIES, r + KEYS) if r in patterns else (r,))]
        arms[name] = {**arm, "reads": listed}
    kept = {name: data for name, data in reads.items() if name not in patterns}
    return {**lock, "sites": sites, "reads": kept, "arms": arms}, patterns


def _pattern(name: str, data: Mapping[str, Any]) -> PatternEntry:
    sites = {site: (str(a["module"]), str(a["query"]), str(a["key"])) for site, a in data["attention"].items()}
    return PatternEntry(sites, tuple(int(h) for h in data["heads"]))


def _each(lock: Mapping[str, Any], section: str, parse: Callable[[str, Any], T]) -> dict[str, T]:
    out: dict[str, T] = {}
    entries = lock.get(section) or {}
    if not isinstance(entries, Mapping):
        raise LockError(section, f"{type(entries).__name__} where a mapping was expected")
    for name, data in entries.items():
        try:
            out[name] = parse(name, data)
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise LockError(f"{section}.{name}", what) from error
    return out


def _site(name: str, data: Mapping[str, Any], engine: str, python: bool) -> SiteEntry:
    columns = data.get("columns")
    sampled = data.get("rows") == "sampled"
    usual = "eager" if engine == "eager" else "hook" if sampled else "break" if python else "recorded"
    return SiteEntry(
        name=name,
        module=data["module"],
        output=data.get("output"),
        input=data.get("input"),
        residual=data.get("residual"),
        columns=None if columns is None else (int(columns[0]), int(columns[1])),
        layer=data.get("layer"),
        width=int(data["width"]),
        sampled=sampled,
        mode=_one_of(data.get("mode", usual), SITE_MODES, "mode"),
        op=data.get("op"),
        forward=data.get("forward"),
        inside=data.get("inside"),
        heads=data.get("heads"),
        shared=data.get("shard") is not None,
    )


def _forward(name: str, data: Mapping[str, Any]) -> ForwardEntry:
    for op in data["ops"]:
        parse_op(op)
    return ForwardEntry(str(data["file"]), str(data["digest"]), tuple(data["ops"]))


def _one_of(value: Any, known: tuple[Any, ...], what: str) -> Any:
    if value not in known:
        raise ValueError(f"{what} {value!r} is not one of {', '.join(map(str, known))}")
    return value


def _edit(name: str, data: Mapping[str, Any]) -> EditEntry:
    verb = _one_of(data["verb"], VERBS, "verb")
    python = _python(data["python"]) if verb == "python" else None
    vectors, tokens = tuple(data.get("vectors") or ()), Rows.from_json(data["tokens"])
    if verb == "project_out" and not vectors:
        raise ValueError("project_out has no vectors")
    matrices = tuple(data.get("matrices") or ())
    if verb == "affine" and not 2 <= len(matrices) <= 3:
        raise ValueError("affine has no down and up")
    sae = _sae(data["sae"]) if verb in ("feature", "reconstruct") else None
    kept, value = bool(data.get("keep_norm")), bool(data.get("value"))
    when = None if data.get("when") is None else gate_key(str(data["when"]))
    slots = int(data["rows"]["slots"]) if verb == "put" else 0
    return EditEntry(verb, tuple(data["sites"]), tokens, vectors, kept, matrices, python, sae, value, when, slots)


def _gate(name: str, data: Mapping[str, Any]) -> GateEntry:
    score = _one_of(data["score"], ("project", "cosine"), "score")
    holds = _one_of(data["holds"], ("row", "request"), "holds")
    reduce = _one_of(data.get("reduce"), ("max", "mean", "last") if holds == "request" else (None,), "reduce")
    return GateEntry(score == "cosine", reduce)


def _uses_of_gate(data: Mapping[str, Any]) -> tuple[EditEntry, ReadEntry]:
    """What a gate is beside edits and reads: see :class:`~vtaps.runtime.program.Program`."""
    sites, tokens = (str(data["site"]),), Rows.from_json(data["tokens"])
    steps, requests = (None if data.get(k) is None else int(data[k]) for k in ("step_rows", "requests"))
    return EditEntry("gate", sites, tokens), ReadEntry("gate", sites, tokens, step_rows=steps, requests=requests)


def _python(said: Mapping[str, Any]) -> tuple[str, str, str | None]:
    return str(said["file"]), str(said["function"]), said.get("digest")


def _sae(said: Mapping[str, Any]) -> tuple[str, str]:
    return str(said["file"] if "file" in said else said["dir"]), _one_of(said["does"], DOES, "does")


def _read(name: str, data: Mapping[str, Any]) -> ReadEntry:
    kind = _one_of(data["kind"], KINDS, "kind")
    ids = data.get("ids")
    return ReadEntry(
        kind=kind,
        sites=tuple(data["sites"]),
        tokens=Rows.from_json(data["tokens"]),
        vectors=tuple(data.get("vectors") or ()),
        top=data.get("top"),
        ids=None if ids is None else tuple(int(i) for i in ids),
        step_rows=None if data.get("step_rows") is None else int(data["step_rows"]),
        requests=None if data.get("requests") is None else int(data["requests"]),
        python=_python(data["python"]) if kind == "python" else None,
        sae=str(data["sae"]) if kind == "features" else None,
        store=Store.from_json(data.get("store") or {}),
    )


def _metric(name: str, data: Mapping[str, Any]) -> MetricEntry:
    kind = _one_of(data["kind"], METRICS, "kind")
    ids = tuple(int(i) for i in data["ids"])
    if len(ids) != (2 if kind == "logit_diff" else 1):
        raise ValueError(f"{kind} with {len(ids)} token ids")
    return MetricEntry(kind, ids, Rows.from_json(data["tokens"]))


def _arm(data: Mapping[str, Any], edits: Mapping[str, EditEntry]) -> ArmEntry:
    def number(entry: Mapping[str, Any]) -> float | None:
        return None if entry.get("coefficient") is None else float(entry["coefficient"])

    def uses(point: Mapping[str, Any]) -> tuple[PointEdit, ...]:
        found = (
            PointEdit(
                e["edit"],
                tuple(e["sites"]),
                number(e),
                e.get("vector"),
                e.get("min"),
                e.get("max"),
                e.get("feature"),
                e.get("position"),
            )
            for e in point.get("edits") or ()
        )
        # An identity touches no row: its vector may even be NaN.
        acting = tuple(e for e in found if e.edit not in edits or not _identity(edits[e.edit], e.coefficient))
        used = {edits[e.edit].when for e in acting if e.edit in edits}
        return acting + tuple(g for g in gates(point) if g.edit in used)

    def gates(point: Mapping[str, Any]) -> Iterator[PointEdit]:
        for gate in point.get("gates") or ():
            key = gate_key(gate["gate"])
            sites = edits[key].sites if key in edits else ()
            yield PointEdit(key, sites, None, gate["vector"], gate.get("above"), gate.get("below"))

    points = tuple(
        Point(
            edits=uses(point),
            overrides={o["override"]: int(o["start"]) for o in point.get("overrides") or ()},
        )
        for point in data["points"]
    )
    return ArmEntry(
        reads=tuple(data.get("reads") or ()),
        metrics=tuple(data.get("metrics") or ()),
        points=points,
        sampling=dict(data.get("sampling") or {}),
    )


def _identity(edit: EditEntry, coefficient: float | None) -> bool:
    return is_identity(edit.verb, coefficient, None if edit.sae is None else edit.sae[1])


def _check_names(program: Program) -> None:
    """Every name that an entry uses is defined, and every edit has what its verb needs."""

    def known(entry: str, names: tuple[str, ...], section: str, table: Mapping[str, Any]) -> None:
        for name in names:
            if name not in table:
                raise LockError(entry, f"{section} has no {name}")

    for name, site in program.sites.items():
        if site.op is not None:
            known(f"sites.{name}", site.functions or ("None",), "forwards", program.forwards)
    for name, edit in program.edits.items():
        known(f"edits.{name}", edit.sites, "sites", program.sites)
        known(f"edits.{name}", (*edit.vectors, *edit.matrices), "vectors", program.vectors)
        if edit.when is not None and any(program.sites[s].sampled for s in edit.sites):
            raise LockError(f"edits.{name}", "a gate decides for rows of tokens, and here are rows of requests")
        known(f"edits.{name}", (edit.when,) if edit.when is not None else (), "gates", program.gates)
    for name, read in program.reads.items():
        known(f"reads.{name}", read.sites, "sites", program.sites)
        known(f"reads.{name}", read.vectors, "vectors", program.vectors)
        if read.kind in ("lens", "features") and (read.top is None) == (read.ids is None):
            raise LockError(f"reads.{name}", f"{'a lens' if read.kind == 'lens' else read.kind} has either top or ids")
        if read.kind == "probe" and not 1 <= len(read.vectors) <= 2:
            raise LockError(f"reads.{name}", "a probe has a weight, and a bias or none")
        if read.kind == "lens" and program.lens_norm is None and not all(program.sites[s].sampled for s in read.sites):
            raise LockError("lens", f"reads.{name} needs the path of the final norm")
    for name, arm in program.arms.items():
        entry = f"arms.{name}"
        known(entry, arm.reads, "reads", program.reads)
        known(entry, arm.metrics, "metrics", program.metrics)
        for point in arm.points:
            known(entry, tuple(point.overrides), "overrides", program.overrides)
            known(entry, tuple(e.edit for e in point.edits), "edits", program.edits)
            for edit_use in point.edits:
                known(
                    entry, edit_use.sites, f"edits.{edit_use.edit}", dict.fromkeys(program.edits[edit_use.edit].sites)
                )
                verb, when = program.edits[edit_use.edit].verb, program.edits[edit_use.edit].when
                if when is not None and when not in (e.edit for e in point.edits):
                    raise LockError(entry, f"{edit_use.edit} acts by {when}, of which the point says nothing")
                if verb in USES_VECTOR and edit_use.vector is None and not program.edits[edit_use.edit].value:
                    raise LockError(entry, f"{edit_use.edit} ({verb}) has no vector")
                if program.edits[edit_use.edit].sae is not None and edit_use.feature is None:
                    raise LockError(entry, f"{edit_use.edit} ({verb}) has no feature")
                if verb not in WITHOUT_COEFFICIENT and edit_use.coefficient is None:
                    raise LockError(entry, f"{edit_use.edit} ({verb}) has no coefficient")
                if edit_use.vector is not None:
                    known(entry, (edit_use.vector,), "vectors", program.vectors)

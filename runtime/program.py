"""The lock as a worker needs it: what each arm and sweep point does, frozen and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from vtaps.spec.rows import Facts, Interval, Rows, Selection, compile_rows
from vtaps.spec.vectors import Floats, VectorError, file_digest, read_vector

Verb = Literal["add", "scale", "zero", "set"]
VERBS: tuple[Verb, ...] = ("add", "scale", "zero", "set")
USES_VECTOR = ("add", "set")
Kind = Literal["rows", "mean", "norm", "project", "lens"]
KINDS: tuple[Kind, ...] = ("rows", "mean", "norm", "project", "lens")
MetricKind = Literal["logprob", "logit_diff", "rank"]
METRICS: tuple[MetricKind, ...] = ("logprob", "logit_diff", "rank")

MODES = ("taps", "eager")
SITE_MODES = ("recorded", "hook", "eager")

T = TypeVar("T")


class LockError(Exception):
    """The lock cannot be served; the message starts with the entry that is wrong."""

    def __init__(self, entry: str, message: str) -> None:
        super().__init__(f"{entry}: {message}")
        self.entry = entry


@dataclass(frozen=True)
class SiteEntry:
    """Where a location is.  ``sampled``: its tensor has one row a request (logits), not one a token; ``mode``: how it
    is served, see docs/serving.md."""

    name: str
    module: str
    output: int | None
    input: str | None
    residual: int | str | None
    columns: Interval | None
    layer: int | None
    width: int
    sampled: bool = False
    mode: str = "eager"


@dataclass(frozen=True)
class EditEntry:
    verb: Verb
    sites: tuple[str, ...]
    tokens: Rows


@dataclass(frozen=True)
class ReadEntry:
    """``step_rows``: the most rows that one request selects in one step; ``requests``: how many of the run take them.
    None where that was not worked out."""

    kind: Kind
    sites: tuple[str, ...]
    tokens: Rows
    vectors: tuple[str, ...] = ()
    top: int | None = None
    ids: tuple[int, ...] | None = None
    step_rows: int | None = None
    requests: int | None = None


@dataclass(frozen=True)
class OverrideEntry:
    ids: tuple[int, ...]


@dataclass(frozen=True)
class MetricEntry:
    kind: MetricKind
    ids: tuple[int, ...]
    tokens: Rows


@dataclass(frozen=True)
class PointEdit:
    edit: str
    sites: tuple[str, ...]
    coefficient: float | None
    vector: str | None


@dataclass(frozen=True)
class Point:
    """``overrides``: name → first generated step that it replaces."""

    edits: tuple[PointEdit, ...]
    overrides: Mapping[str, int]


@dataclass(frozen=True)
class ArmEntry:
    reads: tuple[str, ...]
    metrics: tuple[str, ...]
    points: tuple[Point, ...]
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class Compiled:
    """One request's selectors, compiled: the distinct ones and, for each use, which it is."""

    selections: tuple[Selection, ...]
    edits: tuple[tuple[PointEdit, int], ...]
    reads: tuple[tuple[str, int], ...]
    metrics: tuple[tuple[str, int], ...]
    overrides: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def idle(self) -> bool:
        return not (self.edits or self.reads or self.metrics or self.overrides)

    @cached_property
    def by_position(self) -> bool:
        """Whether no selector looks at token ids."""
        return all(s.by_position for s in self.selections)


@dataclass(frozen=True)
class Program:
    """A lock, parsed.  ``folder`` is what its relative file names start from; ``mode`` is ``taps`` or ``eager``."""

    folder: Path
    structure: str
    block_digest: str
    block_lines: Mapping[int, int]
    spec_file: str
    sites: Mapping[str, SiteEntry]
    edits: Mapping[str, EditEntry]
    reads: Mapping[str, ReadEntry]
    overrides: Mapping[str, OverrideEntry]
    metrics: Mapping[str, MetricEntry]
    vectors: Mapping[str, Mapping[str, Any]]
    arms: Mapping[str, ArmEntry]
    lens_norm: str | None
    mode: str = "eager"
    tap_memory: int | None = None
    checked: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    compiled: dict[tuple[str, int, int], Compiled] = field(default_factory=dict, repr=False, compare=False)

    def point(self, arm: str, point: int) -> Point:
        """Raises LockError where there is no such arm or point."""
        if arm not in self.arms:
            raise LockError(f"arms.{arm}", f"no such arm; there are {', '.join(sorted(self.arms))}")
        points = self.arms[arm].points
        if not 0 <= point < len(points):
            raise LockError(f"arms.{arm}", f"it has {len(points)} sweep points; there is no point {point}")
        return points[point]

    def compile(self, arm: str, point: int, prompt: int, asked: Mapping[str, Any]) -> Compiled:
        """The selectors of one request of ``prompt`` tokens; ``asked`` holds its ``matches`` and ``turns``.

        Raises LockError.
        """
        key = None if asked.get("matches") or asked.get("turns") else (arm, point, prompt)
        if key is None:
            return self._compile(arm, point, prompt, asked)
        if key not in self.compiled:
            self.compiled[key] = self._compile(arm, point, prompt, asked)
        return self.compiled[key]

    def _compile(self, arm: str, point: int, prompt: int, asked: Mapping[str, Any]) -> Compiled:
        chosen = self.point(arm, point)
        entry = self.arms[arm]
        facts = Facts(
            prompt=prompt,
            matches={
                text: [(int(a), int(b)) for a, b in spans] for text, spans in (asked.get("matches") or {}).items()
            },
            turns=[(str(role), int(a), int(b)) for role, a, b in asked.get("turns") or ()],
            overrides={n: (s, len(self.overrides[n].ids)) for n, s in chosen.overrides.items()},
        )
        index: dict[Rows, int] = {}
        selections: list[Selection] = []

        def use(rows: Rows, where: str) -> int:
            if rows not in index:
                try:
                    selections.append(compile_rows(rows, facts))
                except KeyError as error:
                    raise LockError(where, f"the request says nothing of {error}") from error
                index[rows] = len(selections) - 1
            return index[rows]

        return Compiled(
            edits=tuple((e, use(self.edits[e.edit].tokens, f"edits.{e.edit}")) for e in chosen.edits),
            reads=tuple((r, use(self.reads[r].tokens, f"reads.{r}")) for r in entry.reads),
            metrics=tuple((m, use(self.metrics[m].tokens, f"metrics.{m}")) for m in entry.metrics),
            overrides=tuple((start, self.overrides[n].ids) for n, start in chosen.overrides.items()),
            selections=tuple(selections),
        )

    @cached_property
    def uses_of(self) -> Mapping[str, Mapping[PointEdit, int]]:
        """Edit → its distinct uses over all arms and sweep points, numbered from 1: what a row's entry in the row
        table counts."""
        found: dict[str, dict[PointEdit, int]] = {name: {} for name in self.edits}
        for arm in self.arms.values():
            for point in arm.points:
                for edit in point.edits:
                    found[edit.edit].setdefault(edit, len(found[edit.edit]) + 1)
        return found

    @cached_property
    def vectors_of(self) -> Mapping[str, tuple[str, ...]]:
        """Edit → the vectors its points name, in order: what a row's vector index counts."""
        found: dict[str, dict[str, None]] = {name: {} for name in self.edits}
        for arm in self.arms.values():
            for point in arm.points:
                for edit in point.edits:
                    if edit.vector is not None:
                        found[edit.edit][edit.vector] = None
        return {name: tuple(vectors) for name, vectors in found.items()}

    @cached_property
    def used_at(self) -> Mapping[str, Mapping[str, frozenset[str]]]:
        """Edit → site → the vectors that some point uses there."""
        found: dict[str, dict[str, set[str]]] = {}
        for arm in self.arms.values():
            for point in arm.points:
                for edit in point.edits:
                    for site in edit.sites:
                        names = found.setdefault(edit.edit, {}).setdefault(site, set())
                        if edit.vector is not None:
                            names.add(edit.vector)
        return {e: {s: frozenset(v) for s, v in sites.items()} for e, sites in found.items()}

    def load_vector(self, name: str, site: SiteEntry) -> Floats:
        """float32 ``[site.width]``, its file's digest checked once.  Raises LockError."""
        definition = self.vectors[name]
        entry = f"vectors.{name}"
        try:
            if definition.get("random") is None:
                self._check_digest(entry, definition)
            return read_vector(definition, self.folder, site.layer, site.width)
        except VectorError as error:
            raise LockError(entry, f"{error.message} (used at {site.name})") from error

    def _check_digest(self, entry: str, definition: Mapping[str, Any]) -> None:
        expected, file = definition.get("digest"), str(definition["file"])
        if file not in self.checked:
            self.checked[file] = file_digest(self.folder / file)
        if expected is not None and expected != self.checked[file]:
            raise LockError(entry, f"{file} changed since compile: its digest is {self.checked[file]}")


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
    sites = _each(lock, "sites", lambda name, data: _site(name, data, mode))
    overrides = _each(lock, "overrides", lambda n, d: OverrideEntry(tuple(int(i) for i in d["ids"])))
    vectors: dict[str, Mapping[str, Any]] = dict(lock.get("vectors") or {})
    edits = _each(lock, "edits", _edit)
    reads = _each(lock, "reads", _read)
    metrics = _each(lock, "metrics", _metric)
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
    )
    _check_names(program)
    return program


def _each(lock: Mapping[str, Any], section: str, parse: Callable[[str, Any], T]) -> dict[str, T]:
    out: dict[str, T] = {}
    for name, data in (lock.get(section) or {}).items():
        try:
            out[name] = parse(name, data)
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise LockError(f"{section}.{name}", what) from error
    return out


def _site(name: str, data: Mapping[str, Any], engine: str) -> SiteEntry:
    columns = data.get("columns")
    sampled = data.get("rows") == "sampled"
    usual = "eager" if engine == "eager" else "hook" if sampled else "recorded"
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
    )


def _one_of(value: Any, known: tuple[Any, ...], what: str) -> Any:
    if value not in known:
        raise ValueError(f"{what} {value!r} is not one of {', '.join(known)}")
    return value


def _edit(name: str, data: Mapping[str, Any]) -> EditEntry:
    verb = _one_of(data["verb"], VERBS, "verb")
    return EditEntry(verb, tuple(data["sites"]), Rows.from_json(data["tokens"]))


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
    )


def _metric(name: str, data: Mapping[str, Any]) -> MetricEntry:
    kind = _one_of(data["kind"], METRICS, "kind")
    ids = tuple(int(i) for i in data["ids"])
    if len(ids) != (2 if kind == "logit_diff" else 1):
        raise ValueError(f"{kind} with {len(ids)} token ids")
    return MetricEntry(kind, ids, Rows.from_json(data["tokens"]))


def _arm(data: Mapping[str, Any], edits: Mapping[str, EditEntry]) -> ArmEntry:
    def uses(point: Mapping[str, Any]) -> tuple[PointEdit, ...]:
        found = (
            PointEdit(e["edit"], tuple(e["sites"]), e.get("coefficient"), e.get("vector"))
            for e in point.get("edits") or ()
        )
        # An identity touches no row: its vector may even be NaN.
        return tuple(
            e
            for e in found
            if e.edit not in edits or (edits[e.edit].verb, e.coefficient) not in (("add", 0), ("scale", 1))
        )

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


def _check_names(program: Program) -> None:
    """Every name that an entry uses is defined, and every edit has what its verb needs."""

    def known(entry: str, names: tuple[str, ...], section: str, table: Mapping[str, Any]) -> None:
        for name in names:
            if name not in table:
                raise LockError(entry, f"{section} has no {name}")

    for name, edit in program.edits.items():
        known(f"edits.{name}", edit.sites, "sites", program.sites)
    for name, read in program.reads.items():
        known(f"reads.{name}", read.sites, "sites", program.sites)
        known(f"reads.{name}", read.vectors, "vectors", program.vectors)
        if read.kind == "lens" and (read.top is None) == (read.ids is None):
            raise LockError(f"reads.{name}", "a lens has either top or ids")
        if read.kind == "lens" and program.lens_norm is None:
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
                verb = program.edits[edit_use.edit].verb
                if verb in USES_VECTOR and edit_use.vector is None:
                    raise LockError(entry, f"{edit_use.edit} ({verb}) has no vector")
                if verb != "zero" and edit_use.coefficient is None:
                    raise LockError(entry, f"{edit_use.edit} ({verb}) has no coefficient")
                if edit_use.vector is not None:
                    known(entry, (edit_use.vector,), "vectors", program.vectors)

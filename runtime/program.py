"""The lock as a worker needs it: what each arm and sweep point does, frozen and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vtaps.runtime.entries import (
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
    ReadEntry,
    SiteEntry,
)  # fmt: skip
from vtaps.runtime.patch_rows import patches_of
from vtaps.spec.rows import OPEN, Facts, Interval, Rows, Selection, compile_rows
from vtaps.spec.saes import Sae, files_of, folder_at, open_sae
from vtaps.spec.vectors import Floats, VectorError, file_digest, read_affine, read_probe, read_vector

__all__ = ["KINDS", "METRICS", "USES_VECTOR", "VERBS", "WITHOUT_COEFFICIENT", "ArmEntry", "Compiled", "EditEntry",
           "ForwardEntry", "GateEntry", "LockError", "MetricEntry", "OverrideEntry", "PatternEntry", "Point",
           "PointEdit", "Program", "ReadEntry", "SiteEntry"]  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """One request's selectors, compiled: the distinct ones and, for each use, which it is; ``gated``: edit → its
    gate, and whether that decides for the whole request."""

    selections: tuple[Selection, ...]
    edits: tuple[tuple[PointEdit, int], ...]
    reads: tuple[tuple[str, int], ...]
    metrics: tuple[tuple[str, int], ...]
    overrides: tuple[tuple[int, tuple[int, ...]], ...]
    gated: Mapping[str, tuple[str, bool]] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        return not (self.edits or self.reads or self.metrics or self.overrides)

    @cached_property
    def by_position(self) -> bool:
        """Whether no selector looks at token ids."""
        return all(s.by_position for s in self.selections)


@dataclass(frozen=True)
class Program:
    """A lock, parsed.  ``folder`` is what its relative file names start from; ``mode`` is ``taps`` or ``eager``.
    ``known``: (vector, site) → its numbers, of vectors that a read of the run gives.

    A gate is an edit, whose uses are its bounds, and a read, of its scores, under one key (``gates.NAME``)."""

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
    forwards: Mapping[str, ForwardEntry] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    gates: Mapping[str, GateEntry] = field(default_factory=dict)
    patterns: Mapping[str, PatternEntry] = field(default_factory=dict)
    known: dict[tuple[str, str], Floats] = field(default_factory=dict, repr=False, compare=False)
    checked: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    saes: dict[str, Sae] = field(default_factory=dict, repr=False, compare=False)
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
        """The selectors of one request of ``prompt`` tokens; ``asked``: its ``matches``, ``turns`` and ``patches``.

        Raises LockError.
        """
        key = None if asked.get("matches") or asked.get("turns") else (arm, point, prompt)
        compiled = None if key is None else self.compiled.get(key)
        if compiled is None:
            compiled = self._compile(arm, point, prompt, asked)
        if key is not None:
            self.compiled[key] = compiled
        if any(self.edits[use.edit].verb == "put" for use, _ in compiled.edits):
            self._check_patches(compiled, prompt, asked)
        return compiled

    def _check_patches(self, compiled: Compiled, prompt: int, asked: Mapping[str, Any]) -> None:
        """Raises LockError where a request would have a row set that is in no slot."""
        patches = patches_of(asked)
        for use, which in compiled.edits:
            selection, patch = compiled.selections[which], patches.get(use.edit)
            if self.edits[use.edit].verb != "put" or not selection.intervals:
                continue
            if patch is None:
                raise LockError(f"edits.{use.edit}", "it sets rows, and this request has no source for them")
            # Which rows hold an id is known at the step, which looks again.
            if selection.by_position and patch.slots(selection.select(0, np.zeros(prompt, np.int64))) is None:
                raise LockError(f"edits.{use.edit}", "it sets rows, and this request has no source for some of them")

    def _compile(self, arm: str, point: int, prompt: int, asked: Mapping[str, Any]) -> Compiled:
        chosen = self.point(arm, point)
        entry = self.arms[arm]
        self._check_known(chosen, entry)
        facts = Facts(
            prompt=prompt,
            matches={
                text: [(int(a), int(b)) for a, b in spans] for text, spans in (asked.get("matches") or {}).items()
            },
            turns=[(str(role), int(a), int(b)) for role, a, b in asked.get("turns") or ()],
            overrides={n: (s, len(self.overrides[n].ids)) for n, s in chosen.overrides.items()},
        )
        reads = [*entry.reads, *(e.edit for e in chosen.edits if e.edit in self.gates)]
        index: dict[tuple[Rows, Interval], int] = {}
        selections: list[Selection] = []

        def use(rows: Rows, where: str, within: Interval = (0, OPEN)) -> int:
            if (rows, within) not in index:
                try:
                    found = compile_rows(rows, facts)
                except KeyError as error:
                    raise LockError(where, f"the request says nothing of {error}") from error
                selections.append(found.within(within))
                index[rows, within] = len(selections) - 1
            return index[rows, within]

        def edited(edit: PointEdit) -> int:
            entry, last = self.edits[edit.edit], OPEN if self.edits[edit.edit].verb != "put" else prompt
            within = (0, last) if edit.position is None else (edit.position, min(edit.position + 1, last))
            return use(entry.tokens, f"edits.{edit.edit}", within)

        return Compiled(
            edits=tuple((e, edited(e)) for e in chosen.edits),
            reads=tuple((r, use(self.reads[r].tokens, f"reads.{r}")) for r in reads),
            metrics=tuple((m, use(self.metrics[m].tokens, f"metrics.{m}")) for m in entry.metrics),
            overrides=tuple((start, self.overrides[n].ids) for n, start in chosen.overrides.items()),
            gated={
                e.edit: (when, self.gates[when].reduce is not None)
                for e in chosen.edits
                if (when := self.edits[e.edit].when) is not None
            },
            selections=tuple(selections),
        )

    def _check_known(self, point: Point, arm: ArmEntry) -> None:
        """Raises LockError where an arm uses a vector at a point that the run has not made yet."""
        uses = [(n, e.sites) for e in point.edits for n in (e.vector, *self.edits[e.edit].vectors) if n is not None]
        uses += [(n, self.reads[r].sites) for r in arm.reads for n in self.reads[r].vectors]
        for name, sites in uses:
            if self.vectors[name].get("read") is not None and any((name, s) not in self.known for s in sites):
                raise LockError(f"vectors.{name}", "it is the mean of a read, and nobody has given its numbers yet")

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
        """Edit → the vectors, or features, its points name, in order: what a row's vector index counts."""
        found: dict[str, dict[str, None]] = {name: {} for name in self.edits}
        for arm in self.arms.values():
            for point in arm.points:
                for edit in point.edits:
                    if edit.operand is not None:
                        found[edit.edit][edit.operand] = None
        return {name: tuple(vectors) for name, vectors in found.items()}

    @cached_property
    def used_at(self) -> Mapping[str, Mapping[str, frozenset[str]]]:
        """Edit → site → the vectors, or features, that some point uses there."""
        found: dict[str, dict[str, set[str]]] = {}
        for arm in self.arms.values():
            for point in arm.points:
                for edit in point.edits:
                    for site in edit.sites:
                        names = found.setdefault(edit.edit, {}).setdefault(site, set())
                        if edit.operand is not None:
                            names.add(edit.operand)
        return {e: {s: frozenset(v) for s, v in sites.items()} for e, sites in found.items()}

    def load_vector(self, name: str, site: SiteEntry) -> Floats:
        """float32 ``[site.width]``, its file's digest checked once; NaN until a run makes it.  Raises LockError."""
        definition = self.vectors[name]
        if definition.get("read") is not None:
            found = self.known.get((name, site.name))
            return np.full(site.width, np.nan, np.float32) if found is None else site.own(found)
        entry = f"vectors.{name}"
        try:
            if definition.get("sae") is not None:
                self.load_sae(entry, str(definition["sae"]), site)
            elif definition.get("random") is None:
                self._check_digest(entry, definition)
            return site.own(read_vector(definition, self.folder, site.layer, site.whole))
        except VectorError as error:
            raise LockError(entry, f"{error.message} (used at {site.name})") from error

    def load_affine(self, names: Sequence[str], site: SiteEntry) -> tuple[Floats, Floats, Floats]:
        """Down and up, float32 ``[rank, width]``, and bias ``[rank]``.  Raises LockError."""
        self._check_digests(names, site)
        try:
            down, up, bias = read_affine([self.vectors[n] for n in names], names, self.folder, site.layer, site.whole)
            return site.own(down), site.own(up), bias
        except VectorError as error:
            raise LockError(f"vectors.{names[0]}", f"{error.message} (used at {site.name})") from error

    def load_probe(self, names: Sequence[str], site: SiteEntry) -> tuple[Floats, Floats]:
        """Weight, float32 ``[classes, width]``, and bias ``[classes]``.  Raises LockError."""
        self._check_digests(names, site)
        try:
            weight, bias = read_probe([self.vectors[n] for n in names], names, self.folder, site.layer, site.whole)
            return site.own(weight), bias
        except VectorError as error:
            raise LockError(f"vectors.{names[0]}", f"{error.message} (used at {site.name})") from error

    def load_sae(self, entry: str, folder: str, site: SiteEntry) -> Sae:
        """The SAE in ``folder`` for a site, its files' digests checked once.  Raises LockError."""
        try:
            folder = folder_at(folder, site.layer)
            for file in files_of(folder):
                self._check_digest(entry, {"file": file, "digest": self.outside.get(file)})
            if folder not in self.saes:
                self.saes[folder] = open_sae(self.folder, folder)
        except VectorError as error:
            raise LockError(entry, f"{error.message} (used at {site.name})") from error
        if (sae := self.saes[folder]).d_in != site.width:
            raise LockError(entry, f"{folder} is {sae.d_in} wide; {site.width} is needed at {site.name}")
        return sae

    def _check_digests(self, names: Sequence[str], site: SiteEntry) -> None:
        for name in names:
            entry, definition = f"vectors.{name}", self.vectors[name]
            if definition.get("sae") is not None:
                self.load_sae(entry, str(definition["sae"]), site)
            elif definition.get("random") is None:
                self._check_digest(entry, definition)

    def _check_digest(self, entry: str, definition: Mapping[str, Any]) -> None:
        expected, file = definition.get("digest"), str(definition["file"])
        if file not in self.checked:
            self.checked[file] = file_digest(self.folder / file)
        if expected is not None and expected != self.checked[file]:
            raise LockError(entry, f"{file} changed since compile: its digest is {self.checked[file]}")

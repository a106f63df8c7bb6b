"""One finished request against the reference: every read, edit, metric and token of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.program import Point, PointEdit, Program, ReadEntry
from vtaps.runtime.records import Completion, Finished, Request
from vtaps.runtime.reference.forward import Edit, HuggingFace, Seen
from vtaps.runtime.reference.gates import off
from vtaps.runtime.reference.kinds import METRICS, READS, Context, Errors, apart, largest, log_softmax
from vtaps.runtime.reference.known import gate_name, strange, strange_arm
from vtaps.runtime.reference.places import place_of
from vtaps.runtime.reference.rows import selected
from vtaps.runtime.reference.verbs import REPLACES, VERBS, NotChecked, Use, change
from vtaps.runtime.results.expected import facts_of, fired_positions, row_count
from vtaps.spec.pattern import part_of
from vtaps.spec.rows import Facts, Rows

STEERING = {"temperature", "max_tokens", "ignore_eos", "logprobs", "n", "seed", "stop", "stop_token_ids", "top_k",
            "top_p", "min_p", "include_stop_str_in_output", "skip_special_tokens", "detokenize"}  # fmt: skip
"""Sampling parameters that leave a greedy choice what it is."""


@dataclass(frozen=True)
class Measured:
    """One comparison: ``what`` (``read``, ``edit``, ``metric``, ``logprobs``, ``tokens``), the name in the spec, the
    site, the largest error of ``rows`` rows, and the position that has it."""

    what: str
    name: str
    site: str
    error: float
    rows: int
    position: int | None
    request: str


@dataclass(frozen=True)
class Skipped:
    """What was not compared, and why."""

    what: str
    name: str
    reason: str


@dataclass(frozen=True)
class Count:
    """Rows of an edit: how many fired, how many are its; ``same``: they are the same ones."""

    edit: str
    request: str
    fired: int
    expected: int
    same: bool


@dataclass(frozen=True)
class Held:
    """``growth``: site → ``[rows]``, see :class:`~.forward.Seen`; empty where the request could not be repeated.
    ``moved``: edit → the largest change that it made in the reference."""

    measured: tuple[Measured, ...]
    skipped: tuple[Skipped, ...]
    growth: Mapping[str, Errors]
    moved: Mapping[str, float] = field(default_factory=dict)


class Meant:
    """What a lock says, read by the reference's own definitions.  Raises LockError."""

    def __init__(self, lock: Mapping[str, Any], folder: Path) -> None:
        self.lock = lock
        self.program: Program = parse_program(lock, folder)
        self.architecture = str((lock.get("tree") or {}).get("architecture"))

    def point(self, request: Request) -> Point:
        return self.program.point(request.arm, request.point)

    def tokens(self, request: Request, completion: Completion) -> list[int]:
        """The token that each row holds."""
        ids = [*request.prompt_token_ids, *completion.token_ids]
        return ids[: row_count(request, completion)]

    def rows(
        self, rows: Rows, facts: Facts, tokens: list[int], sites: tuple[str, ...] = (), sampled: bool = False
    ) -> list[int]:
        at_logits = sampled or (bool(sites) and all(self.program.sites[s].sampled for s in sites))
        return selected(rows, facts, tokens, sampled=at_logits)

    def acting(self, use: PointEdit, facts: Facts, tokens: list[int], completion: Completion) -> list[int]:
        """The rows that an edit of a point acts on: those that it selects and its gate, if any, let through.

        A gate's decisions are those of the engine: its scores are held against the reference's, and what it decided
        against its scores (:meth:`_One.gate`)."""
        entry = self.program.edits[use.edit]
        rows = self.rows(entry.tokens, facts, tokens, use.sites)
        if use.position is not None:
            rows = [p for p in rows if p == use.position]
        if entry.when is None:
            return rows
        told = completion.record.gates.get(gate_name(entry.when))
        if told is None:
            return []
        if self.program.gates[entry.when].reduce is not None:
            return rows if told.passed.any() else []
        passed = set(told.positions[told.passed].tolist())
        return [p for p in rows if p in passed]

    def sites(self) -> list[str]:
        """Those that some arm reads or edits."""
        found: dict[str, None] = {}
        for arm in self.program.arms.values():
            for name in arm.reads:
                found.update(dict.fromkeys(self.program.reads[name].sites))
            for point in arm.points:
                found.update(dict.fromkeys(s for e in point.edits for s in e.sites))
        return list(found)

    def placed(self) -> list[str]:
        return [s for s in self.sites() if place_of(self.architecture, s) is not None]

    def unplaced(self) -> list[str]:
        return [s for s in self.sites() if place_of(self.architecture, s) is None]

    def unknown(self, request: Request) -> Skipped | None:
        """The first edit of the request that the Hugging Face reference cannot make: nothing behind it can be held."""
        found = strange_arm(self.program, request.arm, request.point)
        if found is not None:
            return Skipped(*found)
        for use in self.point(request).edits:
            if use.edit in self.program.gates:
                if place_of(self.architecture, use.sites[0]) is None:
                    reason = f"{use.sites[0]} is no alias with a place in Hugging Face's model"
                    return Skipped("gate", gate_name(use.edit), reason)
                continue
            verb = self.program.edits[use.edit].verb
            formula = VERBS.get(verb, NotChecked(f"{verb} is not known to the reference"))
            if isinstance(formula, NotChecked):
                return Skipped("edit", use.edit, formula.reason)
            missing = [s for s in use.sites if place_of(self.architecture, s) is None]
            if missing:
                return Skipped("edit", use.edit, f"{missing[0]} is no alias with a place in Hugging Face's model")
        return None

    def counts(self, finished: Finished) -> Iterator[Count]:
        """Rows fired against rows selected, for every edit of the request's arm."""
        request = finished.request
        facts = facts_of(self.lock, request)
        acting = {e.edit: e for e in self.point(request).edits}
        for completion in finished.completions:
            tokens = self.tokens(request, completion)
            fired = completion.record.fired
            for name in dict.fromkeys([*acting, *fired]):
                if name in self.program.gates:
                    continue
                entry = self.program.edits.get(name)
                if any(strange(one) for one in (entry, acting.get(name)) if one is not None):
                    continue  # which rows are its own is not known: see `unknown`
                wanted = self.acting(acting[name], facts, tokens, completion) if entry and name in acting else []
                if name in acting and not all(self.program.sites[s].sampled for s in acting[name].sites):
                    wanted = [p for p in wanted if not any(a <= p < b for a, b in completion.record.cached)]
                got = fired_positions(fired.get(name, ()), len(tokens)).tolist()
                yield Count(name, request.key, len(got), len(wanted), got == wanted)

    def not_greedy(self, sampling: Mapping[str, Any]) -> str | None:
        """Why the sampled tokens are not the most likely ones."""
        if sampling.get("temperature", 1.0) != 0:
            return f"sampling with temperature {sampling.get('temperature', 1.0):g}"
        other = sorted(set(sampling) - STEERING)
        return f"sampling.{other[0]} changes the choice" if other else None


def layer_of(site: str) -> int:
    """``pattern[5]`` → 5."""
    return int(site.partition("[")[2].removesuffix("]"))


class Holder:
    """Requests of a lock against a Hugging Face model that was made for its sites."""

    def __init__(self, meant: Meant, model: HuggingFace) -> None:
        self.meant, self.model = meant, model
        self._layers = frozenset(layer_of(s) for p in meant.program.patterns.values() for s in p.sites)

    def hold(self, finished: Finished, sampling: Mapping[str, Any], reads: tuple[str, ...] | None = None) -> Held:
        """``reads``: those that are compared, None for all of the arm's; with some, nothing else is."""
        unknown = self.meant.unknown(finished.request)
        if unknown is not None:
            return Held((), (unknown, *self._behind(finished.request, unknown)), {})
        measured: list[Measured] = []
        skipped: dict[Skipped, None] = {}
        growth: dict[str, Errors] = {}
        moved: dict[str, float] = {}
        for completion in finished.completions:
            seen, facts, tokens = self.repeat(finished.request, completion)
            growth = growth or {**seen.growth, "": seen.last}
            for (edit, _), change_made in seen.moved.items():
                moved[edit] = max(moved.get(edit, 0.0), change_made)
            one = _One(self.meant, self.model, finished.request, completion, seen, facts, tokens)
            for found in one.all(sampling, reads):
                if isinstance(found, Skipped):
                    skipped[found] = None
                else:
                    measured.append(found)
        return Held(tuple(measured), tuple(skipped), growth, moved)

    def _behind(self, request: Request, unknown: Skipped) -> Iterator[Skipped]:
        arm = self.meant.program.arms[request.arm]
        why = f"arm {request.arm} has the {unknown.what} {unknown.name}, which is not checked"
        reads = dict.fromkeys(map(part_of, arm.reads))
        yield from (Skipped("read", f"{name} (arm {request.arm})", why) for name in reads)
        yield from (Skipped("metric", f"{name} (arm {request.arm})", why) for name in arm.metrics)
        yield Skipped("tokens", f"arm {request.arm}", why)

    def repeat(self, request: Request, completion: Completion) -> tuple[Seen, Facts, list[int]]:
        """The forward over what the engine computed, with the request's edits at the rows that they select."""
        facts = facts_of(self.meant.lock, request)
        tokens = self.meant.tokens(request, completion)
        edits: dict[str, list[Edit]] = {}
        for use in self.meant.point(request).edits:
            if use.edit in self.meant.program.gates:
                continue
            rows = self.meant.acting(use, facts, tokens, completion)
            for site in use.sites:
                edits.setdefault(site, []).append(self._edit(use, site, rows))
        self.model.attention = self._layers
        return self.model.forward(tokens, {site: found for site, found in edits.items()}), facts, tokens

    def _edit(self, use: PointEdit, site: str, rows: list[int]) -> Edit:
        entry = self.meant.program.edits[use.edit]
        columns = (self.meant.lock["edits"][use.edit] or {}).get("columns")
        ranges = None if columns is None else tuple((int(a), int(b)) for a, b in columns)
        meant = Use(self.meant.program, entry, use, self.meant.program.sites[site], ranges)
        return Edit(use.edit, rows, change(meant), entry.verb in REPLACES and ranges is None)


@dataclass(frozen=True)
class _One:
    """One completion beside its forward."""

    meant: Meant
    model: HuggingFace
    request: Request
    completion: Completion
    seen: Seen
    facts: Facts
    tokens: list[int]

    def all(self, sampling: Mapping[str, Any], reads: tuple[str, ...] | None) -> Iterator[Measured | Skipped]:
        arm = self.meant.program.arms[self.request.arm]
        listed = dict.fromkeys(map(part_of, arm.reads))
        for name in listed if reads is None else [r for r in listed if r in reads]:
            yield from self.pattern(name) if name in self.meant.program.patterns else self.read(name)
        if reads is None:
            for use in self.meant.point(self.request).edits:
                if use.edit in self.meant.program.gates:
                    yield self.gate(use)
            for name in arm.metrics:
                yield self.metric(name)
            yield from self.logprobs()
            yield self.greedy(sampling)

    def read(self, name: str) -> Iterator[Measured | Skipped]:
        entry = self.meant.program.reads[name]
        compare = READS.get(entry.kind, NotChecked(f"{entry.kind} is not known to the reference"))
        told = compare.reason if isinstance(compare, NotChecked) else strange(entry)
        if isinstance(compare, NotChecked) or told is not None:
            yield Skipped("read", name, str(told))
            return
        rows = self.meant.rows(entry.tokens, self.facts, self.tokens, entry.sites)
        early = (self.meant.lock["reads"][name] or {}).get("sees") == "before_edits"
        for site in entry.sites:
            values = (self.seen.before if early else self.seen.after).get(site)
            if values is None:
                yield Skipped("read", name, f"{site} is no alias with a place in Hugging Face's model")
                continue
            got = self.completion.record.reads.get((name, site))
            if got is None:
                yield self._told("read", name, site, np.full(min(len(rows), 1), np.inf), [])
                continue
            if got.positions[got.positions < len(self.tokens)].tolist() != rows:
                yield self._told("read", name, site, np.full(1, np.inf), [])
                continue
            want, growth = values[rows], self.seen.growth[site][rows]
            kept = len(got.positions) == len(rows)
            context = Context(self.meant.program, entry, self.meant.program.sites[site], self.model.lens, growth)
            errors = compare(got, want, context) if kept else np.full(1, np.inf)
            yield self._told("read", name, site, errors, rows)

    def pattern(self, name: str) -> Iterator[Measured]:
        """Attention probabilities, against those of the forward's own softmax."""
        entry, said = self.meant.program.patterns[name], self.meant.lock["reads"][name]
        rows = self.meant.rows(Rows.from_json(said["tokens"]), self.facts, self.tokens)
        compare = READS["pattern"]
        assert not isinstance(compare, NotChecked)
        for site, (_, query, _) in entry.sites.items():
            got = self.completion.record.reads.get((name, site))
            if got is None or got.positions.tolist() != rows:
                yield self._told("read", name, site, np.full(min(len(rows), 1) if got is None else 1, np.inf), [])
                continue
            whole = self.seen.attention[layer_of(site)][list(entry.heads)][:, rows]
            want = whole.transpose(1, 0, 2)[:, :, : max(rows, default=-1) + 1].copy()
            for i, row in enumerate(rows):
                want[i, :, row + 1 :] = np.nan
            growth = self.seen.growth[query][rows] if query in self.seen.growth else np.ones(len(rows))
            read = ReadEntry("rows", (query,), Rows())
            context = Context(self.meant.program, read, self.meant.program.sites[query], self.model.lens, growth)
            yield self._told("read", name, site, compare(got, want, context), rows)

    def gate(self, use: PointEdit) -> Measured:
        """A gate's scores against the reference's, and what it decided against its own scores."""
        program, name, site = self.meant.program, gate_name(use.edit), use.sites[0]
        rows = self.meant.rows(program.edits[use.edit].tokens, self.facts, self.tokens, use.sites)
        told = self.completion.record.gates.get(name)
        if not rows or told is None or told.positions.tolist() != rows:
            wrong = bool(rows) or (told is not None and len(told.positions) > 0)
            return self._told("gate", name, site, np.full(int(wrong), np.inf), [])
        x, growth = self.seen.before[site][rows].astype(np.float64), self.seen.growth[site][rows]
        assert use.vector is not None
        vector = program.load_vector(use.vector, program.sites[site]).astype(np.float64)
        return self._told("gate", name, site, off(program.gates[use.edit], use, told, x, vector, growth), rows)

    def metric(self, name: str) -> Measured | Skipped:
        entry = self.meant.program.metrics[name]
        distance = METRICS.get(entry.kind, NotChecked(f"{entry.kind} is not known to the reference"))
        told = distance.reason if isinstance(distance, NotChecked) else strange(entry)
        if isinstance(distance, NotChecked) or told is not None:
            return Skipped("metric", name, str(told))
        rows = self.meant.rows(entry.tokens, self.facts, self.tokens, sampled=True)
        positions, values = self.completion.record.metrics.get(name, (np.empty(0, np.int64), np.empty(0)))
        inside = positions < len(self.tokens)
        if positions[inside].tolist() != rows:
            return self._told("metric", name, "logits", np.full(1, np.inf), [])
        logits = self.seen.logits[rows].astype(np.float64)
        off = distance(values[inside].astype(np.float64), logits, entry)
        return self._told("metric", name, "logits", self._relative(off, rows), rows)

    def logprobs(self) -> Iterator[Measured | Skipped]:
        told = self.completion.logprobs
        if told is None or not self.completion.token_ids:
            return
        rows = list(range(self.facts.prompt - 1, len(self.tokens)))
        want = log_softmax(self.seen.logits[rows])[np.arange(len(rows)), list(self.completion.token_ids)]
        off = np.abs(np.array(told, np.float64) - want)
        yield self._told("logprobs", "", "logits", self._relative(off, rows), rows)

    def greedy(self, sampling: Mapping[str, Any]) -> Measured | Skipped:
        """By how much a token leads that the engine did not choose: 0 where it is the engine's own."""
        why = self.meant.not_greedy(sampling)
        if why is not None:
            return Skipped("tokens", f"arm {self.request.arm}", why)
        steps = [i for i in range(len(self.completion.token_ids)) if i not in set(self._overridden())]
        rows = [self.facts.prompt - 1 + i for i in steps]
        logits = self.seen.logits[rows].astype(np.float64)
        chosen = logits[np.arange(len(rows)), [self.completion.token_ids[i] for i in steps]]
        return self._told("tokens", "", "logits", self._relative(logits.max(1, initial=-np.inf) - chosen, rows), rows)

    def _overridden(self) -> Iterator[int]:
        for start, length in self.facts.overrides.values():
            yield from range(start, start + length)

    def _relative(self, off: Any, rows: list[int]) -> Errors:
        # Logits that are all alike are no reason to hold their logarithms to nothing.
        size = np.maximum(largest(self.seen.logits[rows]), 1.0) * self.seen.last[rows]
        return apart(np.asarray(off), np.zeros(len(rows)), size)

    def _told(self, what: str, name: str, site: str, errors: Errors, rows: list[int]) -> Measured:
        at = int(errors.argmax()) if len(errors) else None
        position = rows[at] if at is not None and len(rows) == len(errors) else None
        return Measured(what, name, site, float(errors.max(initial=0.0)), len(errors), position, self.request.key)

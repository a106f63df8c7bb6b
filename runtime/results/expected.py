"""Which rows every edit, read and metric of one completion should have touched, from the lock's selectors alone.

With P prompt tokens and n generated tokens the rows of a completion are positions 0 … P+n−2.  A row past that was
computed by a scheduler that ran on after the stop; it is nobody's row and never counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vtaps.runtime.records import Completion, Request
from vtaps.spec.arms import is_identity
from vtaps.spec.rows import Facts, Interval, Ints, Rows, compile_rows, from_ranges

Lock = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """Sorted absolute positions by name.  ``edits`` holds every edit that some point of the arm uses, empty where
    this point leaves it out or makes it an identity; of an edit with a gate all rows that it selects; ``gates``: those
    that the point's gates score; ``overrides`` holds generated steps and their token ids."""

    rows: int
    edits: Mapping[str, Ints]
    reads: Mapping[str, Ints]
    metrics: Mapping[str, Ints]
    gates: Mapping[str, Ints]
    overrides: Mapping[str, tuple[tuple[int, int], ...]]
    cached: Mapping[str, int]


def caches(lock: Lock) -> bool:
    """Whether rows may come from vLLM's prefix cache."""
    return bool((lock.get("engine") or {}).get("vllm", {}).get("enable_prefix_caching"))


def row_count(request: Request, completion: Completion) -> int:
    """P+n−1, the number of rows of a completion; P where nothing was generated."""
    return len(request.prompt_token_ids) + max(len(completion.token_ids), 1) - 1


def point_of(lock: Lock, arm: str, point: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = lock["arms"][arm]["points"][point]
    return found


def facts_of(lock: Lock, request: Request) -> Facts:
    """What the selectors need to know of ``request``; an override's start is the one of the request's point."""
    used = point_of(lock, request.arm, request.point)["overrides"]
    overrides = {o["override"]: (int(o["start"]), len(lock["overrides"][o["override"]]["ids"])) for o in used}
    return Facts(
        prompt=len(request.prompt_token_ids),
        matches=request.matches,
        turns=request.turns,
        overrides=overrides,
    )


def acts_nowhere(edit: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Whether an edit of a point changes nothing, so that the worker leaves it out."""
    does = (edit.get("sae") or {}).get("does")
    return not entry["sites"] or is_identity(edit["verb"], entry.get("coefficient"), does)


def expect(lock: Lock, request: Request, completion: Completion) -> Expected:
    """The rows that ``completion`` should show.  Raises KeyError where the request lacks a fact that a selector
    names (see :func:`vtaps.spec.rows.compile_rows`)."""
    facts = facts_of(lock, request)
    count = row_count(request, completion)
    tokens = np.array((request.prompt_token_ids + completion.token_ids)[:count], np.int64)
    arm = lock["arms"][request.arm]
    point = point_of(lock, request.arm, request.point)

    def positions(
        data: Mapping[str, Any], sites: Iterable[str], sampled: bool = False, alone: int | None = None
    ) -> Ints:
        found = compile_rows(Rows.from_json(data), facts).select(0, tokens)
        if alone is not None:
            found = found[found == alone]
        names = list(sites)
        # Sites such as the logits exist only for rows whose output is sampled.
        if sampled or (names and all(lock["sites"][s].get("rows") == "sampled" for s in names)):
            found = found[found >= facts.prompt - 1]
        return np.unique(found)

    acting = {e["edit"]: e for e in point["edits"] if not acts_nowhere(lock["edits"][e["edit"]], e)}
    used = {e["edit"] for p in arm["points"] for e in p["edits"]}
    none = np.empty(0, np.int64)
    generated = len(completion.token_ids)
    edits = {
        name: positions(edit["tokens"], acting[name]["sites"], alone=acting[name].get("position"))
        if name in acting
        else none
        for name, edit in lock["edits"].items()
        if name in used
    }
    # What is done to logits is done to each of them, whatever the cache holds of their rows.
    inside = {n for n in edits if not all(lock["sites"][s].get("rows") == "sampled" for s in lock["edits"][n]["sites"])}
    held = from_ranges(completion.record.cached)
    cached = {n: np.isin(p, held) & (n in inside) for n, p in edits.items()}
    return Expected(
        rows=count,
        edits={n: p[~cached[n]] for n, p in edits.items()},
        reads={name: positions(lock["reads"][name]["tokens"], lock["reads"][name]["sites"]) for name in arm["reads"]},
        metrics={name: positions(lock["metrics"][name]["tokens"], (), True) for name in arm["metrics"]},
        gates={
            g["gate"]: positions(lock["gates"][g["gate"]]["tokens"], [lock["gates"][g["gate"]]["site"]])
            for g in point.get("gates") or ()
        },
        overrides={
            name: tuple(
                (facts.overrides[name][0] + i, int(token))
                for i, token in enumerate(lock["overrides"][name]["ids"])
                if facts.overrides[name][0] + i < generated
            )
            for name in (o["override"] for o in point["overrides"])
        },
        cached={n: int(c.sum()) for n, c in cached.items()},
    )


def fired_positions(ranges: Iterable[Interval], count: int) -> Ints:
    """Half-open ranges of a record as positions below ``count``."""
    return np.unique(from_ranges((max(a, 0), min(b, count)) for a, b in ranges if a < min(b, count)))

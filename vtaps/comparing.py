"""Two records of one request against each other: what two engines, batches or schedules made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from vtaps.runtime.records import Completion, Finished, ReadRows
from vtaps.runtime.reference.holding import Measured
from vtaps.runtime.reference.kinds import Errors, apart, between


def difference(one: Finished, other: Finished) -> str | None:
    """What of the first completions is not the same to the bit; None where everything is."""
    a, b = one.completions[0], other.completions[0]
    if a.token_ids != b.token_ids:
        return "tokens"
    if a.logprobs != b.logprobs:
        return "logprobs"
    for (name, site), rows in a.record.reads.items():
        if not _same(rows, b.record.reads.get((name, site))):
            return f"read {name} at {site}"
    for name, (positions, values) in a.record.metrics.items():
        found = b.record.metrics.get(name)
        if found is None or not (np.array_equal(found[0], positions) and found[1].tobytes() == values.tobytes()):
            return f"metric {name}"
    return None


def _same(a: ReadRows, b: ReadRows | None) -> bool:
    if b is None or not np.array_equal(a.positions, b.positions) or set(a.values) != set(b.values):
        return False
    pairs = ((values, b.values[field]) for field, values in a.values.items())
    return all(np.ascontiguousarray(v).tobytes() == np.ascontiguousarray(w).tobytes() for v, w in pairs)


def compared(got: Finished, want: Finished, what: str, growth: Mapping[str, Errors]) -> Iterator[Measured]:
    """``got`` against ``want``, whose tokens are the same: every read of ``want`` and the tokens' log probabilities.

    ``growth``: site → ``[rows]``, see :class:`vtaps.runtime.reference.forward.Seen`; 1 where a site has none.
    """
    key = want.request.key
    a, b = got.completions[0], want.completions[0]
    for (name, site), rows in b.record.reads.items():
        found = a.record.reads.get((name, site))
        positions = rows.positions
        grown = growth.get(site, np.ones(0))
        here = grown[positions] if len(grown) > positions.max(initial=-1) else np.ones(len(positions))
        errors = np.full(1, np.inf) if found is None else between(found, rows, here)
        at = int(errors.argmax()) if len(errors) else None
        position = int(positions[at]) if at is not None and len(positions) == len(errors) else None
        yield Measured(what, name, site, float(errors.max(initial=0.0)), len(errors), position, key)
    yield from _logprobs(a, b, what, key, growth.get("", np.ones(0)))


def _logprobs(a: Completion, b: Completion, what: str, key: str, growth: Errors) -> Iterator[Measured]:
    if a.logprobs is None or b.logprobs is None or not b.logprobs:
        return
    told, name = np.array(b.logprobs), "" if what == "logprobs" else "logprobs"
    if a.token_ids != b.token_ids:
        yield Measured(what, name, "logits", float("inf"), len(told), None, key)
        return
    grown = growth[-len(told) :] if len(growth) >= len(told) else np.ones(len(told))
    errors = apart(np.array(a.logprobs), told, SIZE * grown)
    yield Measured(what, name, "logits", float(errors.max(initial=0.0)), len(told), None, key)


SIZE = 10.0
"""Of the logits of a row, where only log probabilities are known: those of language models reach tens."""


def compared_metrics(got: Finished, want: Finished) -> Iterator[Measured]:
    """The metrics of ``got`` against those of ``want``."""
    a, b = got.completions[0].record.metrics, want.completions[0].record.metrics
    for name, (positions, values) in b.items():
        found = a.get(name)
        if found is None or not np.array_equal(found[0], positions):
            yield Measured("metric", name, "logits", float("inf"), len(values), None, want.request.key)
            continue
        errors = apart(found[1], values, np.maximum(np.abs(values), SIZE))
        yield Measured("metric", name, "logits", float(errors.max(initial=0.0)), len(values), None, want.request.key)


def lead(one: Finished, free: Finished, same: Finished) -> Measured:
    """Where the reference engine by itself (``free``) chose another token: by how much its own leads.  ``same`` is the
    reference with the tokens of ``one``."""
    ours, theirs = one.completions[0], free.completions[0]
    count = min(len(ours.token_ids), len(theirs.token_ids))
    error = 0.0
    for step in range(count):
        if ours.token_ids[step] != theirs.token_ids[step]:
            told = same.completions[0].logprobs
            assert theirs.logprobs is not None and told is not None
            error = max(0.0, theirs.logprobs[step] - told[step]) / SIZE
            count = step + 1  # behind it the texts are two texts
            break
    return Measured("tokens", "", "logits", error, count, None, one.request.key)

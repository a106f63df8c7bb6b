"""The proof at start: every tap fires in every shape and mode that the engine will serve."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

PROOF_SECONDS = 120.0
"""What the proof may take: far beyond that, something is wrong with the machine."""


class ProofError(Exception):
    """A tap did not fire; the message names it, and where."""


@dataclass(frozen=True)
class Pass:
    """One forward over ``rows`` dummy rows: ``mode`` is vLLM's name for how it runs (FULL, PIECEWISE, NONE)."""

    mode: str
    rows: int
    run: Callable[[], Any]


def beyond(config: Any, captured: int, most: int) -> list[int]:
    """Numbers of rows past the largest captured graph: the smallest that each compiled form of the model serves."""
    ranges = [(r.start, r.end) for r in config.get_compile_ranges()] or [(1, most)]
    return sorted({max(start, captured + 1) for start, end in ranges if min(end, most) > captured})


def prove(worker: Any) -> dict[str, Any]:
    """Run every pass of a worker with the proof's table: each location inside the model counts its launches, writes
    its sentinel where it edits, and keeps the sentinel where it reads.  At a break a function has no row to change.

    Returns what was proved: mode → the numbers of rows, and the seconds it took.  Raises ProofError.
    """
    session, runner = worker.vtaps_session, worker.vtaps_runner
    started = time.monotonic()
    proved: dict[str, list[int]] = {}
    names = [at.name for at in session.at]
    wanted = session.counts.proved
    session.serve()
    runner.proving = session.proving = True
    try:
        for one in runner.passes() if wanted.any() else ():
            before = session.counts.done()
            session.boards.prove(one.rows)
            one.run()
            wrong = session.boards.unproved(one.rows)
            times = session.counts.done() - before
            for number in np.flatnonzero((wanted > 0) & (times != wanted)):
                raise ProofError(
                    f"the tap {names[number]} fired {times[number]} times, {wanted[number]} were due, in a forward of "
                    f"{one.rows} rows ({one.mode})"
                )
            if wrong:
                raise ProofError(
                    f"the tap {wrong[0]} did not keep what it saw in a forward of {one.rows} rows ({one.mode})"
                )
            proved.setdefault(one.mode, []).append(one.rows)
            if time.monotonic() - started > PROOF_SECONDS:
                raise ProofError(f"the proof took more than {PROOF_SECONDS:.0f} s")
    finally:
        runner.proving = session.proving = False
        session.boards.clear()
    session.counts.rebase()
    return {"passes": proved, "taps": int((wanted > 0).sum()), "seconds": round(time.monotonic() - started, 2)}

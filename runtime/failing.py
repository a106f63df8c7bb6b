"""Faults in a worker's step, held against the requests that they concern: those fail, the step goes on for the others.

Each of these raises what is the device's, for then nobody's rows are to be trusted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vtaps.runtime.faults import DELIVERED, PLANNED, PYTHON, Fault, in_words
from vtaps.runtime.fills import Fill, StepPlan
from vtaps.runtime.functions import Failed
from vtaps.runtime.live import Live, TableError
from vtaps.runtime.program import LockError
from vtaps.runtime.records import Collected
from vtaps.runtime.rowtable import RowTable
from vtaps.runtime.spool import SpoolError
from vtaps.runtime.store import collected

Lost = deque[tuple[Sequence[Live], Exception]]
"""What did not get to its requests; filled by any thread."""


def admit(table: RowTable, request_id: str, asked: Mapping[str, Any] | None, prompt: int, **end: int) -> None:
    """:meth:`RowTable.admit`, where a request that cannot be taken in fails alone."""
    try:
        table.admit(request_id, asked, prompt, **end)
    except Exception as error:
        table.refuse(request_id, Fault(PLANNED, _told(error)))


def unprepared(table: RowTable, plan: StepPlan | None, shift: int, error: Exception) -> StepPlan | None:
    """The step's tables could not be filled as planned: what is left of the plan without the requests concerned."""
    if plan is None:
        raise error
    lives = error.lives if isinstance(error, TableError) and not shift else ()
    concerned(table, lives or plan.lives, error, PLANNED, since=0)
    return plan.sound()


def concerned(
    table: RowTable, lives: Iterable[Live], error: Exception, code: str = DELIVERED, since: int | None = None
) -> None:
    """``error`` is the fault of each of ``lives``; ``since`` as in :meth:`RowTable.fail`."""
    told = _told(error)
    for live in lives:
        table.fail(live, Fault(code, told), since)


def functions(
    table: RowTable, definition: str, location: str, failed: Failed, edits: Sequence[Fill] = (), shift: int = 0
) -> None:
    """A function failed at a location; ``edits``: where it was an edit's, the fills that have its rows."""
    parts = [part for fill in edits if f"edits.{fill.name}" == definition for part in fill.parts]
    for live, error in failed:
        since = min((int(p.positions[0]) + shift for p in parts if p.live is live), default=None)
        table.fail(live, Fault(PYTHON, f"{location}: {definition}: {error}", definition), since)


def delivered(table: RowTable, lost: Lost) -> None:
    """The requests whose rows or metrics were lost on their way have failed."""
    while lost:
        lives, error = lost.popleft()
        concerned(table, lives, error)


def handed_over(live: Live, generated: int) -> Collected:
    """What a request of ``generated`` tokens put out, or its fault."""
    if live.fault is None:
        try:
            return collected(live, generated)
        except Exception as error:
            live.fault = Fault(DELIVERED, _told(error))
    return Collected(fault=live.fault)


def _told(error: Exception) -> str:
    return in_words(error, TableError, LockError, SpoolError)

"""Which requests of a run ``vtaps verify`` serves."""

from __future__ import annotations

from collections.abc import Sequence

from vtaps.runtime.records import Request
from vtaps.spec.plan import Plan
from vtaps.spec.stages import vectors_of


def dependent(plan: Plan) -> dict[str, str]:
    """Arms that are not served, since they need what requests of other arms, or another run, kept → what that is."""
    found: dict[str, str] = {}
    for name, arm in plan.arms.items():
        rows = next((e for e in arm.arm.edits if plan.edits[e].source is not None), None)
        means = next((v for v in vectors_of(plan.spec, arm.arm) if v in plan.means), None)
        if rows is not None:
            found[name] = f"its edit {rows} sets rows that another request kept"
        elif means is not None:
            found[name] = f"its vector {means} is made of what other requests kept"
    return found


def in_turn(requests: Sequence[Request], limit: int) -> list[Request]:
    """At most ``limit``, of every arm in turn, in their own order."""
    arms: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        arms.setdefault(request.arm, []).append(number)
    chosen: list[int] = []
    longest = max((len(numbers) for numbers in arms.values()), default=0)
    for turn in range(longest):
        chosen += [numbers[turn] for numbers in arms.values() if turn < len(numbers)]
    return [requests[number] for number in sorted(chosen[:limit])]

"""What a request says when it is added, and what its driver makes of it when it has ended: whole, or failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vtaps.runtime.compat.frontend import Output
from vtaps.runtime.errors import RequestError
from vtaps.runtime.faults import Fault
from vtaps.runtime.live import RequestKey
from vtaps.runtime.records import Completion, Finished, Record, Request

Ended = tuple[Request, tuple[Output, ...]]


def asked_of(request: Request) -> dict[str, Any]:
    """What the worker is to know of a request: its ``extra_args["vtaps"]``."""
    asked: dict[str, Any] = {"key": request.key, "arm": request.arm, "point": request.point}
    if request.matches:
        asked["matches"] = {text: [list(s) for s in spans] for text, spans in request.matches.items()}
    if request.turns:
        asked["turns"] = [list(turn) for turn in request.turns]
    if request.patches:
        told = request.patches.items()
        asked["patches"] = {n: {"first": at, "positions": [list(r) for r in ranges]} for n, (at, ranges) in told}
    return asked


def lines_of(lock: Mapping[str, Any]) -> dict[str, int]:
    """The spec's line of each edit and read, where the lock has lines: ``edits.NAME`` → line."""
    sections = (("edits", lock["edits"]), ("reads", lock["reads"]))
    return {f"{s}.{n}": int(d["line"]) for s, entries in sections for n, d in entries.items() if d.get("line")}


def fault_of(outputs: Sequence[Output]) -> Fault | None:
    """Why vLLM's scheduler ended a request itself; None where it did not."""
    told = next((o.error for o in outputs if o.error is not None), None)
    if told is None:
        return None
    # Without our wrap's word it is an error of vLLM's own, which has no words.
    return Fault.from_json(told) if told else Fault("VT603", "vLLM ended it with an error")


def ended_as(
    request: Request, outputs: Sequence[Output], records: Mapping[RequestKey, Record], lines: Mapping[str, int]
) -> Finished | RequestError:
    """The request with its completions, or the fault of any of them."""
    found = [records.get((request.key, o.index)) for o in outputs]
    fault = fault_of(outputs) or next((r.fault for r in found if r is not None and r.fault is not None), None)
    if fault is not None:
        message = f"arm {request.arm}: {fault.message}"
        return RequestError(fault.code, message, request.key, fault.definition, lines.get(fault.definition))
    return Finished(
        request,
        tuple(
            Completion(
                index=o.index,
                token_ids=o.token_ids,
                text=o.text,
                finish_reason=o.finish_reason,
                record=records[request.key, o.index],
                logprobs=o.logprobs,
            )
            for o in outputs
        ),
    )

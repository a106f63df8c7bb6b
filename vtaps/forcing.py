"""Locks that serve again what was served: the same tokens, whatever the model would say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vtaps.runtime.records import Finished, Request

Lock = Mapping[str, Any]


def forced(lock: Lock, finished: Sequence[Finished], *, edits: bool) -> tuple[dict[str, Any], list[Request]]:
    """``lock`` with an arm for each of ``finished`` that replaces every token by the one that stands in its first
    completion, and the requests of those arms; ``edits``: with the edits of its point, or with none.

    The lock is of the same structure: an engine can load it.
    """
    arms: dict[str, Any] = dict(lock["arms"])
    overrides: dict[str, Any] = dict(lock["overrides"])
    requests = []
    for number, one in enumerate(finished):
        request, name = one.request, f"verify/{number}"
        point = lock["arms"][request.arm]["points"][request.point]
        overrides[name] = {"start": 0, "ids": list(one.completions[0].token_ids), "text": None}
        arms[name] = {
            **lock["arms"][request.arm],
            "points": [
                {
                    "values": {},
                    "edits": list(point["edits"]) if edits else [],
                    "gates": list(point.get("gates") or ()) if edits else [],
                    "overrides": [*point["overrides"], {"override": name, "start": 0}],
                }
            ],
        }
        requests.append(replace(request, arm=name, point=0))
    return {**lock, "arms": arms, "overrides": overrides}, requests


def on_eager(lock: Lock) -> dict[str, Any]:
    """``lock`` for the eager engine: the same block at the same places, by hooks."""
    sites = {name: {**site, "mode": "eager"} for name, site in lock["sites"].items()}
    return {**lock, "engine": {**lock["engine"], "mode": "eager"}, "sites": sites}

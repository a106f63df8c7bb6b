"""Reads that end a run early: which requests are still to be started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from vtaps.runtime.records import Request
from vtaps.runtime.results.expected import Lock, facts_of
from vtaps.spec.rows import Rows, compile_rows


class Budgets:
    """How many rows each read with a budget has kept, and how many more the requests on their way will bring at least.

    ``kept``: read → rows of the requests that are whole already.  An arm is ended by any of its reads whose budget is
    kept.  What is started is decided by rows of prompts alone, which every request brings, whatever it generates; so
    what ends up over the budget is less than the rows of one request and what those on their way generate.
    """

    def __init__(self, lock: Lock, kept: Mapping[str, int]) -> None:
        self._lock = lock
        self.limits = {name: int(read["budget"]) for name, read in lock["reads"].items() if read.get("budget")}
        self._kept = {name: kept.get(name, 0) for name in self.limits}
        self._coming: dict[str, dict[str, int]] = {}

    def of(self, request: Request) -> list[str]:
        """The reads of its arm that have a budget."""
        return [name for name in self._lock["arms"][request.arm]["reads"] if name in self.limits]

    def covered(self, request: Request) -> bool:
        """Whether nothing more is wanted of the request's arm."""
        return any(self._total(name) >= self.limits[name] for name in self.of(request))

    def _total(self, name: str) -> int:
        return self._kept[name] + sum(rows.get(name, 0) for rows in self._coming.values())

    def start(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Those that are wanted when their turn comes."""
        for request in requests:
            if not self.covered(request):
                self._coming[request.key] = {name: self._least(name, request) for name in self.of(request)}
                yield request

    def _least(self, name: str, request: Request) -> int:
        rows = Rows.from_json(self._lock["reads"][name]["tokens"])
        prompt = np.array(request.prompt_token_ids, np.int64)
        found = len(compile_rows(rows, facts_of(self._lock, request)).select(0, prompt))
        return found * int(self._lock["arms"][request.arm]["sampling"].get("n", 1))

    def done(self, request: Request, kept: Mapping[str, int]) -> None:
        """A request is whole: ``kept`` are all rows of each read so far."""
        self._coming.pop(request.key, None)
        self._kept = {name: kept.get(name, 0) for name in self.limits}

    def failed(self, key: str) -> None:
        self._coming.pop(key, None)


def rows_kept(entry: Mapping[str, Any]) -> dict[str, int]:
    """Read → rows that a journal entry holds."""
    out: dict[str, int] = {}
    for completion in entry["completions"]:
        for name, read in completion["reads"].items():
            out[name] = out.get(name, 0) + int(read["rows"])
    return out

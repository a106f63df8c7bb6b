"""What several workers report of a request, put together: no rank asked another for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.entries import Part
from vtaps.runtime.errors import EngineError
from vtaps.runtime.live import RequestKey
from vtaps.runtime.parts import joined, owned
from vtaps.runtime.program import Program
from vtaps.runtime.records import ReadRows, Record
from vtaps.spec.rows import Interval

Array = npt.NDArray[Any]
Records = Mapping[RequestKey, Record]


class Merging:
    """Of workers that have parts of some sites each, or sites of a stage each.  ``told``: what each said at the
    hand-shake.

    Raises EngineError (VT601) where some columns of a site are on no rank, or a site is on no worker.
    """

    def __init__(self, program: Program, told: Sequence[Mapping[str, Any]]) -> None:
        self.program = program
        self._parts: dict[str, list[Part]] = {}
        self._counted: dict[str, list[tuple[Interval, ...]]] = {}
        stages = [int(worker.get("stage", 0)) for worker in told]
        self._stages = [[i for i, stage in enumerate(stages) if stage == n] for n in sorted(set(stages))]
        for name, site in program.sites.items():
            if not site.shared:
                continue
            have = [i for i, worker in enumerate(told) if name in worker["parts"]]
            if have not in self._stages:
                raise EngineError("VT601", f"of {name}, workers {have} have parts, which are no stage")
            held = [told[i]["parts"][name] for i in have]
            parts = [Part(int(width), tuple((int(a), int(b)) for a, b in pieces)) for width, pieces in held]
            try:
                self._parts[name], self._counted[name] = parts, owned(parts)
            except ValueError as error:
                raise EngineError("VT601", f"{name}: {error}") from error

    def records(self, answers: Sequence[Records]) -> dict[RequestKey, Record]:
        """Raises EngineError (VT603) where the workers were not of one mind."""
        if len(answers) == 1:
            return dict(answers[0])
        return {
            key: self._line(key, [self._record(key, [answers[i][key] for i in some]) for some in self._stages])
            for key in answers[0]
        }

    def _line(self, key: RequestKey, stages: Sequence[Record]) -> Record:
        """What the stages of a pipeline saw; tokens and metrics are the last one's."""
        last = stages[-1]
        fired: dict[str, tuple[Interval, ...]] = {}
        for stage in stages:
            for edit, rows in stage.fired.items():
                if fired.setdefault(edit, rows) != rows:
                    raise EngineError("VT603", f"request {key[0]!r}: stages edited other rows by {edit}")
        reads = {name: rows for stage in stages for name, rows in stage.reads.items()}
        gates = {name: told for stage in stages for name, told in stage.gates.items()}
        selected = {name: rows for stage in stages for name, rows in stage.selected.items()}
        return replace(last, fired=fired, reads=reads, gates=gates, selected=selected)

    def _record(self, key: RequestKey, ranks: Sequence[Record]) -> Record:
        first = ranks[0]
        for number, other in enumerate(ranks[1:], 1):
            if other.fired != first.fired or other.overridden != first.overridden:
                raise EngineError("VT603", f"request {key[0]!r}: rank {number} edited other rows than rank 0")
        names = {name: None for record in ranks for name in record.reads}
        return replace(first, reads={name: self._read(key, name, ranks) for name in names})

    def _read(self, key: RequestKey, name: tuple[str, str], ranks: Sequence[Record]) -> ReadRows:
        read, site = name
        kind, parts = self.program.reads[read].kind, self._parts.get(site)
        held = [(rank, record.reads[name]) for rank, record in enumerate(ranks) if name in record.reads]
        if parts is None and (kind != "lens" or self.program.sites[site].sampled):
            held = held[:1]  # all have it alike
        elif len(held) != len(ranks) or any(not np.array_equal(o.positions, held[0][1].positions) for _, o in held):
            raise EngineError("VT603", f"request {key[0]!r}: ranks have other rows of {read} at {site}")
        rows = held[0][1]
        if len(held) == 1:
            return rows
        if parts is None:
            top = self.program.reads[read].top
            return replace(rows, values=_vocabulary([one.values for _, one in held], top))
        if kind in ("rows", "mean"):
            field = "rows" if kind == "rows" else "mean"
            whole = joined(parts[0].width, [(parts[rank], one.values[field]) for rank, one in held])
            return replace(rows, values={**rows.values, field: whole})
        counted = [one.values[kind].astype(np.float64) for rank, one in held if self._counted[site][rank]]
        if kind == "norm":
            counted = [part**2 for part in counted]
        total = np.sum(counted, axis=0)
        return replace(rows, values={kind: (np.sqrt(total) if kind == "norm" else total).astype(np.float32)})


def _vocabulary(ranks: Sequence[Mapping[str, Array]], top: int | None) -> dict[str, Array]:
    """What a lens reads, of what it read of each part of the vocabulary."""
    logits, ids = (np.concatenate([rank[field] for rank in ranks], axis=-1) for field in ("logits", "ids"))
    sums = np.logaddexp.reduce([rank["logsumexp"].astype(np.float64) for rank in ranks]).astype(np.float32)
    if top is None:
        chosen = np.max([rank["logits"] for rank in ranks], axis=0)
        return {"ids": ranks[0]["ids"], "logits": chosen, "logsumexp": sums}
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :top]
    picked = {"ids": np.take_along_axis(ids, order, -1), "logits": np.take_along_axis(logits, order, -1)}
    return {**picked, "logsumexp": sums}

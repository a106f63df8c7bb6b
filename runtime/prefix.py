"""Under what a request's blocks of the KV cache are kept: the values of the edits that made them, and their rows.

vLLM names a block by the tokens in it and before it.  A block that holds edited rows gets a key beside those: what acts
on which of its rows, by value.  Blocks before the first edited row keep the name that a plain request gives them, and
requests that are edited alike have the same names.  No vLLM and no torch: the driver works out what a request says
(:class:`Prefix`), the scheduler asks it of each block (:func:`block_key`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.entries import PointEdit
from vtaps.runtime.program import Compiled, Program
from vtaps.spec.rows import OPEN, Selection
from vtaps.spec.saes import files_of, folder_at
from vtaps.spec.vectors import VectorError

Ints = npt.NDArray[np.int64]
Said = dict[str, Any]
"""What a request's ``extra_args["vtaps"]["kv"]`` holds: ``edits``, a list of [digest, selection]; ``first``, the first
row of the prompt that a read needs, None where it needs none; ``own``, what tells it from every other request, where
nobody can say that another would be edited alike.  JSON alone."""


class Prefix:
    """Works out what the requests of a program say; anew for another program, or where a vector gets other numbers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple[PointEdit, tuple[Any, ...]], str] = {}

    def said(self, compiled: Compiled, tokens: Sequence[int], nonce: str) -> Said | None:
        """What a request's blocks are kept under; None where no edit acts inside the model and no read needs a row of
        the prompt that the cache could serve.  ``tokens``: the prompt's ids; ``nonce``: the request's own.

        The last row of the prompt is always computed, since its output is sampled."""
        edits, own = [], False
        for edit, which in compiled.edits:
            entry = self.program.edits[edit.edit]
            if entry.verb == "gate" or all(self.program.sites[s].sampled for s in edit.sites):
                continue  # what is done to logits shows in the tokens
            edits.append([self._identity(compiled, edit), _to_json(compiled.selections[which])])
            # Rows of another request, and what a function does, are known when it runs.
            own = own or entry.verb == "put" or entry.python is not None
        first = self._first_read(compiled, np.asarray(tokens, np.int64))
        if not edits and first is None:
            return None
        return {"edits": edits, "first": first, **({"own": nonce} if own else {})}

    def _first_read(self, compiled: Compiled, tokens: Ints) -> int | None:
        found = [
            int(rows[0])
            for read, which in compiled.reads
            if not all(self.program.sites[s].sampled for s in self.program.reads[read].sites)
            and len(rows := compiled.selections[which].select(0, tokens[:-1]))
        ]
        return min(found, default=None)

    def _identity(self, compiled: Compiled, edit: PointEdit) -> str:
        """A digest of everything that decides what an edit makes of a row, but for the row."""
        program, entry = self.program, self.program.edits[edit.edit]
        bounds = tuple(use for use, _ in compiled.edits if use.edit == entry.when)
        scored = tuple(compiled.selections[which] for name, which in compiled.reads if name == entry.when)
        if (known := self._known.get((edit, (bounds, scored)))) is not None:
            return known
        told: dict[str, Any] = {
            # What a statement narrows an edit to stands in the block.
            "block": program.block_digest,
            "name": edit.edit,
            "entry": _fields(entry, without=("tokens", "sites", "slots")),
            **_use(program, edit),
            "vectors": {n: _vector(program, n, edit.sites) for n in (*entry.vectors, *entry.matrices)},
        }
        if entry.sae is not None:
            told["sae"] = _sae(program, entry.sae[0], edit.sites)
        if entry.when is not None:
            told["gate"] = [
                dataclasses.asdict(program.gates[entry.when]),
                [_use(program, use) for use in bounds],
                [_to_json(rows) for rows in scored],
            ]
        digest = self._known[edit, (bounds, scored)] = _digest(told)
        return digest


def _use(program: Program, edit: PointEdit) -> dict[str, Any]:
    """A use of an edit, or of a gate, by value."""
    return {
        "use": _fields(edit, without=("edit", "position")),
        "sites": [dataclasses.asdict(program.sites[s]) for s in edit.sites],
        "vector": None if edit.vector is None else _vector(program, edit.vector, edit.sites),
    }


def _vector(program: Program, name: str, sites: Sequence[str]) -> dict[str, Any]:
    definition = dict(program.vectors[name])
    definition.pop("line", None)
    told: dict[str, Any] = {"definition": definition}
    if definition.get("read") is not None:
        told["numbers"] = [hashlib.sha256(program.known[name, s].tobytes()).hexdigest() for s in sites]
    if definition.get("sae") is not None:
        told["sae"] = _sae(program, str(definition["sae"]), sites)
    return told


def _sae(program: Program, folder: str, sites: Sequence[str]) -> dict[str, str | None]:
    """The digests of the files of an SAE at some sites."""
    found: dict[str, str | None] = {}
    for site in sites:
        try:
            files = files_of(folder_at(folder, program.sites[site].layer))
        except VectorError:
            continue  # the layer has none, and its location is not edited
        found.update({file: program.outside.get(file) for file in files})
    return found


def _fields(of: Any, without: Sequence[str]) -> dict[str, Any]:
    return {f.name: getattr(of, f.name) for f in dataclasses.fields(of) if f.name not in without}


def _digest(told: Any) -> str:
    text = json.dumps(told, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    return repr(value)


def _to_json(selection: Selection) -> list[Any]:
    ids = None if selection.ids is None else sorted(selection.ids)
    exclude = None if selection.exclude is None else _to_json(selection.exclude)
    return [[[a, b] for a, b in selection.intervals], ids, exclude]


def _from_json(told: Sequence[Any]) -> Selection:
    intervals, ids, exclude = told
    return Selection(
        tuple((int(a), int(b)) for a, b in intervals),
        None if ids is None else frozenset(ids),
        None if exclude is None else _from_json(exclude),
    )


def salt(kv: Said) -> str | None:
    """One name for all blocks of a request, for a scheduler that does not ask for each; None where nothing is edited:
    requests that are edited alike at the same positions share it."""
    return f"vtaps-{_digest([kv['edits'], kv.get('own')])}" if kv["edits"] else None


def block_key(kv: Said, start: int, tokens: Sequence[int], child: int) -> str | None:
    """The key of a block that holds ``tokens`` from position ``start`` on; None where no row of it is edited.
    ``child``: number of the request among those of one prompt with n > 1."""
    ids: Ints | None = None
    acting = []
    for digest, told in kv["edits"]:
        # Most blocks are before or behind every edited row, and a request has a block every few tokens.
        if not any(a < start + len(tokens) and b > start for a, b in told[0]):
            continue
        ids = np.asarray(tokens, np.int64) if ids is None else ids
        if len(rows := _from_json(told).select(start, ids)):
            acting.append([digest, (rows - start).tolist()])
    if not acting:
        return None
    return _digest([acting, [kv["own"], child] if "own" in kv else None])


def first_edited(kv: Said) -> int:
    """The first position that an edit may act on; OPEN where there is none."""
    return min((int(a) for _, told in kv["edits"] for a, b in told[0] if a < b), default=OPEN)

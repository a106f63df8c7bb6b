"""Edits and reads by a function of the user's: ``def flip(rows, at)`` in a file beside the spec.

It gets the selected rows of one location in one step, ``[n, width]`` in the model's dtype on the model's device (of a
residual pair the sum); a function of one parameter gets the rows alone.  The rows are a copy.

An edit says what stands there instead: a tensor of the same shape, or None where it changed ``rows`` in place.  A read
says what is kept: a tensor with a row for each of ``rows``, ``[n, …]``, of one shape and dtype at each location.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vtaps.runtime.block import Note
from vtaps.runtime.fills import Fill, StepPlan
from vtaps.runtime.imports import import_file
from vtaps.runtime.kernels import LocationProgram
from vtaps.runtime.program import LockError, Program, SiteEntry
from vtaps.spec import digests

KEPT = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""The dtypes of what a read keeps."""


@dataclass(frozen=True)
class At:
    """Where the rows of one call are from: ``location`` as the results name it, the path of its ``module`` in the
    model, of a location before the module its parameter ``input``; an entry a row: ``positions`` (int64 ``[n]``,
    counted from the prompt's start) and ``requests`` (their keys)."""

    location: str
    module: str
    input: str | None
    layer: int | None
    positions: npt.NDArray[np.int64]
    requests: tuple[str, ...]


class FunctionFault(Exception):
    """The function failed or gave back something else; the message names its file and line."""


@dataclass(frozen=True)
class Function:
    """One edit's or read's function, ready to be called; ``alone``: it takes the rows and nothing else."""

    name: str
    call: Callable[..., Any]
    alone: bool

    def edited(self, rows: Tensor, at: At) -> Tensor:
        """What stands in place of ``rows``, as they are.  Raises FunctionFault."""
        given = self._given(rows, at)
        if given is None:
            return rows
        self._tensor(given)
        if given.shape != rows.shape or given.device != rows.device:
            raise FunctionFault(
                f"{self.name} gave back {list(given.shape)} on {given.device}, where "
                f"{list(rows.shape)} on {rows.device} was due"
            )
        tensor: Tensor = given.to(rows.dtype)
        return tensor

    def kept(self, rows: Tensor, at: At) -> Tensor:
        """What is kept of ``rows``, ``[n, …]`` with one of the dtypes :data:`KEPT`.  Raises FunctionFault."""
        count = len(rows)
        given = self._given(rows, at)
        if given is None:
            raise FunctionFault(f"{self.name} gave back nothing: what a read's function gives back is what is kept")
        self._tensor(given)
        if given.dim() == 0 or len(given) != count:
            due = f"{count} rows: one for each" if count != 1 else "1 row: one"
            raise FunctionFault(f"{self.name} gave back {list(given.shape)} for {due} was due")
        if not given.numel():
            raise FunctionFault(f"{self.name} gave back {list(given.shape)}: there is nothing to keep")
        if (dtype := _name(given.dtype)) not in KEPT:
            raise FunctionFault(f"{self.name} gave back {dtype}; a read keeps {', '.join(KEPT)}")
        tensor: Tensor = given.detach()
        return tensor

    def _given(self, rows: Tensor, at: At) -> Any:
        try:
            return self.call(rows) if self.alone else self.call(rows, at)
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == self._file]
            line = frames[-1].lineno if frames else self.call.__code__.co_firstlineno
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise FunctionFault(f"{Path(self._file).name}:{line}, in {self.name}: {what}") from error

    def _tensor(self, given: Any) -> None:
        if not isinstance(given, Tensor):
            raise FunctionFault(f"{self.name} gave back {type(given).__name__}, not a tensor")

    @property
    def _file(self) -> str:
        return str(self.call.__code__.co_filename)


class Functions:
    """The functions of a program's edits and reads, each file imported once.  Raises LockError."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._of: dict[tuple[str, str], Function] = {}
        self._kept: dict[tuple[str, str], tuple[list[int], torch.dtype]] = {}
        modules: dict[str, Any] = {}
        named = [("edits", name, edit.python) for name, edit in program.edits.items()]
        named += [("reads", name, read.python) for name, read in program.reads.items()]
        for section, name, python in named:
            if python is None:
                continue
            file, function, digest = python
            if file not in modules:
                modules[file] = _import(f"{section}.{name}", program.folder / Path(file).expanduser(), digest)
            call = getattr(modules[file], function, None)
            if not inspect.isfunction(call):
                raise LockError(f"{section}.{name}", f"{file} has no function {function}")
            kinds = inspect.signature(call).parameters.values()
            alone = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in kinds) == 1
            self._of[section, name] = Function(f"{file}:{function}", call, alone)

    def run(
        self,
        note: Note,
        plan: StepPlan | None,
        shift: int,
        x: Tensor,
        residual: Tensor | None,
        site: SiteEntry,
        place: LocationProgram,
    ) -> Tensor | None:
        """Let the edit or read of ``note`` have its rows of ``x`` ``[rows, columns]`` at a location: those of the
        step's ``plan``, ``shift`` steps after it was made.

        An edit changes them in place; of a pair the whole stream goes to ``x``, and the residual of those rows becomes
        0.  For a read: what it keeps of each row of its fill, in order; None where it has none.  Raises FunctionFault.
        """
        fills: tuple[Fill, ...] = ()
        if plan is not None:
            edits, reads = (
                (plan.sampled_edits, plan.sampled_reads) if site.sampled else (plan.edits, plan.reads)
            )  # fmt: skip
            fills = edits if note.verb else reads
        fill = next((f for f in fills if f.name == note.name), None)
        if fill is None:
            return None
        chosen = np.ones(len(fill.rows), bool)
        if fill.points is not None:
            # A sweep may turn the edit off at some of its locations.
            uses = self._program.uses_of[note.name].items()
            chosen = np.isin(fill.points, [number for use, number in uses if site.name in use.sites])
            if not chosen.any():
                return None
        owners = np.repeat(np.arange(len(fill.lives)), np.diff(fill.bounds))[chosen]
        keys = tuple(fill.lives[i].key[0] for i in owners.tolist())
        at = At(site.name, site.module, site.input, site.layer, fill.positions[chosen] + shift, keys)
        rows = torch.from_numpy(np.ascontiguousarray(fill.rows[chosen])).to(x.device)
        cut = slice(place.first, place.first + place.width)
        hidden, rest = x[:, cut], None if residual is None or residual is x else residual[:, cut]
        stream = hidden.index_select(0, rows)
        if rest is not None:
            stream = (stream.float() + rest.index_select(0, rows).float()).to(x.dtype)
        if note.kind:
            return self._keep(note.name, stream, at)
        hidden.index_copy_(0, rows, self._of["edits", note.name].edited(stream, at))
        if rest is not None:
            rest.index_fill_(0, rows, 0.0)
        return None

    def _keep(self, read: str, stream: Tensor, at: At) -> Tensor:
        """What ``read`` keeps: of the shape and dtype that its first call at the location gave."""
        function = self._of["reads", read]
        kept = function.kept(stream, at)
        shape, dtype = list(kept.shape[1:]), kept.dtype
        first, kind = self._kept.setdefault((read, at.location), (shape, dtype))
        if (shape, dtype) != (first, kind):
            raise FunctionFault(
                f"{function.name} gave back {_name(dtype)} {shape} a row, after {_name(kind)} {first} in its first call"
            )
        return kept


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _import(entry: str, path: Path, digest: str | None) -> Any:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LockError(entry, f"{path.name}: {error.strerror}") from error
    if digest is not None and digests.of_bytes(content) != digest:
        raise LockError(entry, f"{path.name} changed since compile: its digest is {digests.of_bytes(content)}")
    try:
        return import_file(f"vtaps_python_{digests.of_bytes(content)[7:23]}", path)
    except Exception as error:
        raise LockError(entry, f"{path.name} cannot be imported: {type(error).__name__}: {error}") from error

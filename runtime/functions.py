"""Edits by a function of the user's: ``def flip(rows, at)`` in a file beside the spec.

It gets the selected rows of one location in one step, ``[n, width]`` in the model's dtype on the model's device (of a
residual pair the sum), and says what stands there instead: a tensor of the same shape, or None where it changed
``rows`` in place.  A function of one parameter gets the rows alone.
"""

from __future__ import annotations

import inspect
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vtaps.runtime.fills import Fill
from vtaps.runtime.imports import import_file
from vtaps.runtime.kernels import LocationProgram
from vtaps.runtime.program import LockError, Program, SiteEntry
from vtaps.spec import digests


@dataclass(frozen=True)
class At:
    """Where the rows of one call are from, an entry a row: ``positions`` (int64 ``[n]``, counted from the prompt's
    start) and ``requests`` (their keys)."""

    location: str
    layer: int | None
    positions: npt.NDArray[np.int64]
    requests: tuple[str, ...]


class FunctionFault(Exception):
    """The function failed or gave back something else; the message names its file and line."""


@dataclass(frozen=True)
class Function:
    """One edit's function, ready to be called; ``alone``: it takes the rows and nothing else."""

    name: str
    call: Callable[..., Any]
    alone: bool

    def __call__(self, rows: Tensor, at: At) -> Tensor:
        """Raises FunctionFault."""
        try:
            given = self.call(rows) if self.alone else self.call(rows, at)
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == self._file]
            line = frames[-1].lineno if frames else self.call.__code__.co_firstlineno
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise FunctionFault(f"{Path(self._file).name}:{line}, in {self.name}: {what}") from error
        if given is None:
            return rows
        if not isinstance(given, Tensor):
            raise FunctionFault(f"{self.name} gave back {type(given).__name__}, not a tensor")
        if given.shape != rows.shape or given.device != rows.device:
            raise FunctionFault(
                f"{self.name} gave back {list(given.shape)} on {given.device}, where "
                f"{list(rows.shape)} on {rows.device} was due"
            )
        return given.to(rows.dtype)

    @property
    def _file(self) -> str:
        return str(self.call.__code__.co_filename)


@dataclass(frozen=True)
class _Chosen:
    """The rows of a plan's fill at one location: the same in each of its steps, ``shift`` positions later."""

    fill: weakref.ref[Fill]
    rows: Tensor
    positions: npt.NDArray[np.int64]
    requests: tuple[str, ...]


class Functions:
    """The functions of a program's edits, each file imported once.  Raises LockError."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._of: dict[str, Function] = {}
        self._chosen: dict[tuple[str, str], _Chosen] = {}
        modules: dict[str, Any] = {}
        for name, edit in program.edits.items():
            if edit.python is None:
                continue
            file, function, digest = edit.python
            if file not in modules:
                modules[file] = _import(f"edits.{name}", program.folder / Path(file).expanduser(), digest)
            call = getattr(modules[file], function, None)
            if not inspect.isfunction(call):
                raise LockError(f"edits.{name}", f"{file} has no function {function}")
            kinds = inspect.signature(call).parameters.values()
            alone = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in kinds) == 1
            self._of[name] = Function(f"{file}:{function}", call, alone)

    def run(
        self,
        edit: str,
        fills: Sequence[Fill],
        shift: int,
        x: Tensor,
        residual: Tensor | None,
        site: SiteEntry,
        place: LocationProgram,
    ) -> None:
        """Let ``edit`` change its rows of ``x`` ``[rows, columns]`` at a location, in place: those of the step's
        ``fills``, ``shift`` steps after they were planned.  Of a pair the whole stream goes to ``x``, and the residual
        of those rows becomes 0.

        Raises FunctionFault.
        """
        fill = next((f for f in fills if f.name == edit), None)
        if fill is None or fill.points is None:
            return
        known = self._chosen.get((edit, site.name))
        if known is None or known.fill() is not fill:
            known = self._chosen[edit, site.name] = self._choose(edit, fill, site.name, x.device)
        rows = known.rows
        if not len(rows):
            return
        cut = slice(place.first, place.first + place.width)
        hidden, rest = x[:, cut], None if residual is None or residual is x else residual[:, cut]
        stream = hidden.index_select(0, rows)
        if rest is not None:
            stream = (stream.float() + rest.index_select(0, rows).float()).to(x.dtype)
        at = At(site.name, site.layer, known.positions + shift, known.requests)
        hidden.index_copy_(0, rows, self._of[edit](stream, at))
        if rest is not None:
            rest.index_fill_(0, rows, 0.0)

    def _choose(self, edit: str, fill: Fill, site: str, device: torch.device) -> _Chosen:
        # A sweep may turn the edit off at some of its locations.
        active = [number for use, number in self._program.uses_of[edit].items() if site in use.sites]
        chosen = np.isin(fill.points, active) if fill.points is not None else np.zeros(len(fill.rows), bool)
        owners = np.repeat(np.arange(len(fill.lives)), np.diff(fill.bounds))[chosen]
        rows = torch.from_numpy(np.ascontiguousarray(fill.rows[chosen]))
        if device.type == "cuda":
            # From other memory the copy would wait for the device.
            rows = rows.pin_memory().to(device, non_blocking=True)
        keys = tuple(fill.lives[i].key[0] for i in owners.tolist())
        return _Chosen(weakref.ref(fill), rows, fill.positions[chosen], keys)


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

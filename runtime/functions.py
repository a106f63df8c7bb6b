"""Edits and reads that Python does: an SAE's reconstruction in a row's place (:class:`~vtaps.runtime.sae.Autoencoder`),
or a function of the user's, ``def flip(rows, at)`` in a file beside the spec.

Either gets the selected rows of one location in one step, ``[n, width]`` in the model's dtype on the model's device (of
a residual pair the sum); a function of one parameter gets the rows alone.  The rows are a copy.

An edit says what stands there instead: a tensor of the same shape, or None where it changed ``rows`` in place.  A read
says what is kept: a tensor with a row for each of ``rows``, ``[n, …]``, of one shape and dtype at each location.
"""

from __future__ import annotations

import inspect
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vtaps.runtime.faults import of_device
from vtaps.runtime.fills import Fill
from vtaps.runtime.imports import import_file
from vtaps.runtime.kernels import LocationProgram
from vtaps.runtime.live import Live
from vtaps.runtime.program import LockError, Program, SiteEntry
from vtaps.runtime.sae import Autoencoder
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
    input: int | str | None
    layer: int | None
    positions: npt.NDArray[np.int64]
    requests: tuple[str, ...]


class FunctionFault(Exception):
    """The function failed or gave back something else; the message names its file and line."""


Failed = list[tuple[Live, FunctionFault]]
"""Requests for which a function failed, and how."""


@dataclass(frozen=True)
class Function:
    """One edit's or read's function, ready to be called; ``alone``: it takes the rows and nothing else."""

    name: str
    call: Callable[..., Any]
    alone: bool

    def __call__(self, rows: Tensor, at: At) -> Tensor:
        """What stands in place of ``rows``.  Raises FunctionFault."""
        given = self._given(rows, at)
        if given is None:
            return rows
        if given.shape != rows.shape or given.device != rows.device:
            raise FunctionFault(
                f"{self.name} gave back {list(given.shape)} on {given.device}, where "
                f"{list(rows.shape)} on {rows.device} was due"
            )
        return given.to(rows.dtype)

    def kept(self, rows: Tensor, at: At) -> Tensor:
        """What is kept of ``rows``, ``[n, …]`` with one of the dtypes :data:`KEPT`.  Raises FunctionFault."""
        count = len(rows)
        given = self._given(rows, at)
        if given is None:
            raise FunctionFault(f"{self.name} gave back nothing: what a read's function gives back is what is kept")
        if given.dim() == 0 or len(given) != count:
            due = f"{count} rows: one for each" if count != 1 else "1 row: one"
            raise FunctionFault(f"{self.name} gave back {list(given.shape)} for {due} was due")
        if not given.numel():
            raise FunctionFault(f"{self.name} gave back {list(given.shape)}: there is nothing to keep")
        if (dtype := _name(given.dtype)) not in KEPT:
            raise FunctionFault(f"{self.name} gave back {dtype}; a read keeps {', '.join(KEPT)}")
        return given.detach()

    def _given(self, rows: Tensor, at: At) -> Tensor | None:
        try:
            given = self.call(rows) if self.alone else self.call(rows, at)
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == self._file]
            line = frames[-1].lineno if frames else self.call.__code__.co_firstlineno
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise FunctionFault(f"{Path(self._file).name}:{line}, in {self.name}: {what}") from error
        if given is not None and not isinstance(given, Tensor):
            raise FunctionFault(f"{self.name} gave back {type(given).__name__}, not a tensor")
        return given

    @property
    def _file(self) -> str:
        return str(self.call.__code__.co_filename)


@dataclass(frozen=True)
class _Chosen:
    """The rows of a plan's fill at one location, a range where they follow each other: the same in each of its steps,
    ``shift`` positions later.  ``owners`` ``[n]``: whose each is, by its place in the fill; ``numbers`` ``[n]``: the
    rows, and ``among`` ``[n]``: their places in the fill; ``points``: of an edit with an SAE, the use of each."""

    fill: weakref.ref[Fill]
    rows: Tensor | slice
    numbers: npt.NDArray[np.int64]
    among: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    requests: tuple[str, ...]
    points: Tensor | None = None

    def at(self, site: SiteEntry, shift: int) -> At:
        return At(site.name, site.module, site.input, site.layer, self.positions + shift, self.requests)

    def only(self, owners: Sequence[int], device: torch.device) -> _Chosen:
        """The rows of some of the requests."""
        return self._some(np.flatnonzero(np.isin(self.owners, owners)), device)

    def passed(self, let: Tensor, device: torch.device) -> _Chosen:
        """Those of them that are not 0 in ``let``."""
        return self._some(np.flatnonzero(let[self.rows].cpu().numpy()), device)

    def _some(self, which: npt.NDArray[np.int64], device: torch.device) -> _Chosen:
        numbers, points = self.numbers[which], self.points
        if points is not None:
            points = points[torch.from_numpy(which).to(points.device)]
        keys = tuple(self.requests[i] for i in which.tolist())
        rest = self.among[which], self.positions[which], self.owners[which]
        return _Chosen(self.fill, _rows(numbers, device), numbers, *rest, keys, points)


class Functions:
    """The functions of a program's edits and reads, each file imported once.  Raises LockError."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.autoencoders: Mapping[tuple[str, str], Autoencoder] = {}
        """(edit, site) → what does an edit that is no function of the user's; :meth:`run` looks here first."""
        self._of: dict[tuple[str, str], Function] = {}
        self._chosen: dict[tuple[str, str], _Chosen] = {}
        self._first: dict[tuple[str, str], tuple[list[int], torch.dtype]] = {}
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
        edit: str,
        fills: Sequence[Fill],
        shift: int,
        x: Tensor,
        residual: Tensor | None,
        site: SiteEntry,
        place: LocationProgram,
        let: Tensor | None = None,
    ) -> Failed:
        """Let ``edit`` change its rows of ``x`` ``[rows, columns]`` at a location, in place: those of the step's
        ``fills``, ``shift`` steps after they were planned.  Of a pair the whole stream goes to ``x``, and the residual
        of those rows becomes 0.  ``let``: of an edit with a gate what the row table says, int ``[rows of the table]``:
        rows that are 0 there are left alone.  Looking there waits for the device.

        Returns the requests that failed, whose rows stay as they are.  Raises FunctionFault where the device failed.
        """
        fill = next((f for f in fills if f.name == edit), None)
        if fill is None or fill.points is None:
            return []
        known = self._chosen.get((edit, site.name))
        if known is None or known.fill() is not fill:
            known = self._chosen[edit, site.name] = self._choose(edit, fill, site.name, x.device)
        if let is not None:
            known = known.passed(let, x.device)
        whole = self.autoencoders.get((edit, site.name))

        def change(chosen: _Chosen) -> Tensor:
            stream = _stream(x, residual, chosen.rows, place)
            if whole is None:
                return self._of["edits", edit](stream, chosen.at(site, shift))
            assert chosen.points is not None
            return whole(stream, chosen.points)

        done, given, failed = self._each(change, known, fill, x.device)
        if done is not None and given is not None:
            rows = done.rows
            hidden, rest = _halves(x, residual, place)
            if isinstance(rows, slice):
                hidden[rows].copy_(given)
            else:
                hidden.index_copy_(0, rows, given)
            if rest is not None:
                rest[rows].zero_() if isinstance(rows, slice) else rest.index_fill_(0, rows, 0.0)
        return failed

    def read(
        self,
        read: str,
        fills: Sequence[Fill],
        shift: int,
        x: Tensor,
        residual: Tensor | None,
        site: SiteEntry,
        place: LocationProgram,
    ) -> tuple[Tensor | None, Failed]:
        """What ``read`` keeps of the rows of its fill at a location, in their order, ``[n, …]``: of the shape and dtype
        that its first call there gave.  None where the step has no row for it; the rest as in :meth:`run`.

        Rows of requests that failed are zero: nobody gets them.
        """
        fill = next((f for f in fills if f.name == read), None)
        if fill is None:
            return None, []
        known = self._chosen.get((read, ""))
        if known is None or known.fill() is not fill:
            known = self._chosen[read, ""] = _of_fill(fill, np.ones(len(fill.rows), bool), x.device)
        function = self._of["reads", read]

        def keep(chosen: _Chosen) -> Tensor:
            kept = function.kept(_stream(x, residual, chosen.rows, place), chosen.at(site, shift))
            shape, dtype = list(kept.shape[1:]), kept.dtype
            first, kind = self._first.setdefault((read, site.name), (shape, dtype))
            if (shape, dtype) != (first, kind):
                told = f"{_name(dtype)} {shape} a row, after {_name(kind)} {first} in its first call"
                raise FunctionFault(f"{function.name} gave back {told}")
            return kept

        done, kept, failed = self._each(keep, known, fill, x.device)
        if done is None or kept is None or len(done.among) == len(fill.rows):
            return kept, failed
        whole = kept.new_zeros((len(fill.rows), *kept.shape[1:]))
        whole[torch.from_numpy(done.among).to(kept.device)] = kept
        return whole, failed

    def _each(
        self, call: Callable[[_Chosen], Tensor], known: _Chosen, fill: Fill, device: torch.device
    ) -> tuple[_Chosen | None, Tensor | None, Failed]:
        """What ``call`` gives, and for which rows; the requests for which it fails.

        Which requests come together is the scheduler's choice.  Where a call fails that is for several it is made again
        for each alone, and then for those for which it did not fail, as it would have been without the others.  What
        fails for all of them together and for none alone is the failure of each.
        """
        if not len(known.positions):
            return None, None, []
        try:
            return known, call(known), []
        except FunctionFault as error:
            first = _of_a_request(error)
        # What is chosen for failed requests is chosen anew, without them.
        self._chosen.clear()
        owners = [int(o) for o in np.unique(known.owners)]
        failed: dict[int, FunctionFault] = {}
        for owner in owners if len(owners) > 1 else ():
            try:
                call(known.only([owner], device))
            except FunctionFault as error:
                failed[owner] = _of_a_request(error)
        sound = [owner for owner in owners if owner not in failed]
        if failed and sound:
            rest = known.only(sound, device)
            try:
                return rest, call(rest), [(fill.lives[owner], error) for owner, error in failed.items()]
            except FunctionFault as error:
                first = _of_a_request(error)
        return None, None, [(fill.lives[owner], failed.get(owner, first)) for owner in owners]

    def _choose(self, edit: str, fill: Fill, site: str, device: torch.device) -> _Chosen:
        # A sweep may turn the edit off at some of its locations.
        active = [number for use, number in self._program.uses_of[edit].items() if site in use.sites]
        chosen = np.isin(fill.points, active) if fill.points is not None else np.zeros(len(fill.rows), bool)
        found = _of_fill(fill, chosen, device)
        if (edit, site) not in self.autoencoders or fill.points is None:
            return found
        return replace(found, points=_tensor(fill.points[chosen].astype(np.int64), device))


def _of_a_request(error: FunctionFault) -> FunctionFault:
    """Raises what is the device's."""
    if of_device(error):
        raise error
    return error


def _of_fill(fill: Fill, chosen: npt.NDArray[np.bool_], device: torch.device) -> _Chosen:
    owners = np.repeat(np.arange(len(fill.lives)), np.diff(fill.bounds))
    chosen = chosen & np.array([live.fault is None for live in fill.lives], bool)[owners]
    owners, numbers = owners[chosen], fill.rows[chosen]
    keys = tuple(fill.lives[i].key[0] for i in owners.tolist())
    among = np.flatnonzero(chosen)
    return _Chosen(weakref.ref(fill), _rows(numbers, device), numbers, among, fill.positions[chosen], owners, keys)


def _rows(found: npt.NDArray[np.int64], device: torch.device) -> Tensor | slice:
    if len(found) and found[-1] - found[0] == len(found) - 1:
        return slice(int(found[0]), int(found[-1]) + 1)
    return _tensor(found, device)


def _tensor(found: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    rows = torch.from_numpy(np.ascontiguousarray(found))
    # From other memory the copy would wait for the device.
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


def _halves(x: Tensor, residual: Tensor | None, place: LocationProgram) -> tuple[Tensor, Tensor | None]:
    """A location's columns of both halves; None where there is but one."""
    cut = slice(place.first, place.first + place.width)
    return x[:, cut], None if residual is None or residual is x else residual[:, cut]


def _stream(x: Tensor, residual: Tensor | None, rows: Tensor | slice, place: LocationProgram) -> Tensor:
    """A copy of the sum of both halves at ``rows``, rounded once."""
    hidden, rest = _halves(x, residual, place)
    own = hidden[rows] if isinstance(rows, slice) else hidden.index_select(0, rows)
    if rest is None:
        return own.clone() if isinstance(rows, slice) else own
    # torch adds numbers of 16 bits in float32 and rounds once.
    return own + (rest[rows] if isinstance(rows, slice) else rest.index_select(0, rows))


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

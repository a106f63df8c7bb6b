"""Sparse autoencoders on a worker: the features that edits move, and the encoder that reads put rows through.

The formulas are those of :mod:`vtaps.spec.saes`; numbers are as the files have them, products in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtaps.runtime.program import EditEntry, LockError, Program, SiteEntry
from vtaps.spec.saes import Sae
from vtaps.spec.tensor_files import VectorError

WORK_BYTES = 64 << 20
"""Bytes that float32 preactivations, and a float32 copy of a part of the encoder, may take at once."""

_DTYPES = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of the weights on the device, by that of the file."""


@dataclass(frozen=True)
class Features:
    """The features of one edit at one site, all float32: ``encoders`` and ``decoders`` ``[n, width]``, ``bounds``
    ``[2, n]``, the bias of each preactivation and what it must be above."""

    encoders: Any
    decoders: Any
    bounds: Any


def features_of(program: Program, name: str, edit: EditEntry, site: SiteEntry, used: Sequence[str]) -> Features:
    """``used``: the features by number.  Raises LockError."""
    entry = f"edits.{name}"
    assert edit.sae is not None
    sae = program.load_sae(entry, edit.sae[0], site)
    try:
        found = [sae.feature(int(index)) for index in used]
    except VectorError as error:
        raise LockError(entry, f"{error.message} (at {site.name})") from error
    return Features(
        np.stack([f.encoder for f in found]), np.stack([f.decoder for f in found]),
        np.array([[f.bias for f in found], [f.threshold for f in found]], np.float32),
    )  # fmt: skip


@dataclass
class Encoder:
    """``weight`` ``[width, columns]`` as the file has it; ``bias``, ``gain`` (of gated) and ``threshold`` (of jumprelu
    and gated) float32 ``[columns]``, see :class:`vtaps.spec.saes.Columns`.  ``columns`` are all features, or the chosen
    ``ids``."""

    weight: Tensor
    bias: Tensor
    gain: Tensor | None
    threshold: Tensor | None
    k: int | None
    ids: Tensor | None

    @staticmethod
    def load(sae: Sae, ids: tuple[int, ...] | None, device: torch.device) -> Encoder:
        """Raises VectorError (feature, nonfinite)."""
        for index in ids or ():
            sae.check(index)
        count, _ = sae.held(ids)
        found = sae.columns(slice(None) if count == sae.d_sae or ids is None else list(ids))
        bias, gain, threshold = (
            None if t is None else torch.from_numpy(t.astype(np.float32)).to(device)
            for t in (found.bias, found.gain, found.threshold)
        )
        assert bias is not None
        return Encoder(
            # Cast back to what the file has: exact.
            torch.from_numpy(found.weight).to(_DTYPES[sae.dtype]).to(device), bias, gain, threshold, sae.k,
            None if ids is None else torch.tensor(ids, device=device),
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        tensors = (self.weight, self.bias, self.gain, self.threshold)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def read(self, rows: Tensor, *, top: int | None) -> dict[str, Tensor]:
        """``rows`` ``[n, width]`` → ``ids`` int32 and ``activations`` float32 ``[n, top]``, most active first, or ``[n,
        ids]`` in the order of the chosen ones.  Where fewer than ``top`` features are active the others have the id -1
        and the activation 0."""
        at_once = max(1, WORK_BYTES // (4 * self.weight.shape[1]))
        found = [self._some(part.float(), top) for part in rows.split(at_once)]
        ids, activations = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"ids": ids.to(torch.int32), "activations": activations}

    def _some(self, rows: Tensor, top: int | None) -> tuple[Tensor, Tensor]:
        before = self._before(rows)
        if self.k is not None:
            # Of the k largest: `topk` puts them in order.
            values, ids = before.topk(self.k, dim=-1)
            values = values.clamp_min(0.0)
            if self.ids is None:
                return _padded(ids, values, top or 1)
            chosen = self.ids.expand(rows.shape[0], -1)
            same = ids.unsqueeze(1) == chosen.unsqueeze(2)
            return chosen, (same * values.unsqueeze(1)).sum(-1)
        active = self._active(before)
        if self.ids is not None:
            return self.ids.expand(rows.shape[0], -1), active
        values, ids = active.topk(min(top or 1, active.shape[-1]), dim=-1)
        return _padded(ids, values, top or 1)

    def dense(self, rows: Tensor) -> Tensor:
        """``rows`` float32 ``[n, width]`` → the activations of all columns, float32 ``[n, columns]``."""
        before = self._before(rows)
        if self.k is None:
            return self._active(before)
        values, ids = before.topk(self.k, dim=-1)
        return torch.zeros_like(before).scatter_(1, ids, values.clamp_min(0.0))

    def _active(self, before: Tensor) -> Tensor:
        active = before.clamp_min_(0.0)
        if self.threshold is not None:
            active = active.masked_fill_(active <= self.threshold, 0.0)
        return active

    def _before(self, rows: Tensor) -> Tensor:
        """The preactivations, float32 ``[n, columns]``."""
        bias = self.bias if self.gain is None else self.bias.new_zeros(())
        before = _product(rows, self.weight, bias)
        return before if self.gain is None else before.mul_(self.gain).add_(self.bias)


def _product(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``rows`` float32 ``[n, k]`` times ``weight`` ``[k, columns]`` plus ``bias``, float32 ``[n, columns]``."""
    if weight.dtype == torch.float32:
        return torch.addmm(bias, rows, weight)
    depth, columns = weight.shape
    bias = bias.expand(columns)
    out = torch.empty((rows.shape[0], columns), dtype=torch.float32, device=rows.device)
    step = max(1, WORK_BYTES // (4 * depth))
    for a in range(0, columns, step):
        some = slice(a, a + step)
        torch.addmm(bias[some], rows, weight[:, some].float(), out=out[:, some])
    return out


@dataclass(frozen=True)
class Autoencoder:
    """What an edit puts in a row's place at one location: a W_dec + b_dec, with one activation of a set to a value
    (``does``: ``to``) or moved by one (``by``).  ``decoder`` ``[features, width]`` as the file has it, ``bias`` float32
    ``[width]``; of each of the edit's uses, counted from 1, ``features`` int64 and ``values`` float32 ``[uses + 1]``.
    """

    encoder: Encoder
    decoder: Tensor
    bias: Tensor
    does: str
    features: Tensor
    values: Tensor

    def __call__(self, rows: Tensor, points: Tensor) -> Tensor:
        """``rows`` ``[n, width]`` and the use of each, int ``[n]`` → what stands in their place, in their dtype."""
        at_once = max(1, WORK_BYTES // (4 * self.decoder.shape[0]))
        parts = zip(rows.split(at_once), points.split(at_once), strict=True)
        return torch.cat([self._some(some, which) for some, which in parts])

    def _some(self, rows: Tensor, points: Tensor) -> Tensor:
        active = self.encoder.dense(rows.float())
        column, value = self.features[points].unsqueeze(1), self.values[points].unsqueeze(1)
        active = (active.scatter_add_ if self.does == "by" else active.scatter_)(1, column, value)
        return self._decoded(active).to(rows.dtype)

    def _decoded(self, active: Tensor) -> Tensor:
        if self.decoder.dtype == torch.float32:
            return torch.addmm(self.bias, active, self.decoder)
        out = self.bias.repeat(len(active), 1)
        step = max(1, WORK_BYTES // (4 * self.decoder.shape[1]))
        for a in range(0, len(self.decoder), step):
            out.addmm_(active[:, a : a + step], self.decoder[a : a + step].float())
        return out


def encoded(rows: Tensor, encoders: Sequence[Encoder], top: int | None) -> dict[str, Tensor]:
    """``rows`` ``[n, sites, width]``, an encoder a site → the fields of :meth:`Encoder.read`, ``[n, sites, k]``."""
    found = [one.read(rows[:, i], top=top) for i, one in enumerate(encoders)]
    return {name: torch.stack([one[name] for one in found], dim=1) for name in found[0]}


def _padded(ids: Tensor, values: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The first ``top`` of ``ids`` and ``values``, -1 and 0 where nothing is active."""
    ids, values = ids[:, :top], values[:, :top]
    ids = ids.masked_fill(values <= 0, -1)
    if (short := top - ids.shape[1]) > 0:
        ids = torch.nn.functional.pad(ids, (0, short), value=-1)
        values = torch.nn.functional.pad(values, (0, short))
    return ids, values


Loaded = dict[tuple[str, tuple[int, ...] | None], Encoder]
"""(SAE, chosen features) → its encoder: reads and edits share it."""


def encoders(program: Program, device: torch.device, loaded: Loaded) -> dict[str, dict[str, Encoder]]:
    """Read → site → the encoder that its rows go through; sites of one SAE share it.  Raises LockError."""
    found: dict[str, dict[str, Encoder]] = {}
    for name, read in program.reads.items():
        for site in read.sites if read.sae is not None else ():
            sae = program.load_sae(f"reads.{name}", str(read.sae), program.sites[site])
            found.setdefault(name, {})[site] = _encoder(f"reads.{name}", sae, site, read.ids, device, loaded)
    return found


def autoencoders(program: Program, device: torch.device, loaded: Loaded) -> dict[tuple[str, str], Autoencoder]:
    """(edit, site) → what it puts in a row's place there.  Raises LockError."""
    found: dict[tuple[str, str], Autoencoder] = {}
    decoders: dict[str, tuple[Tensor, Tensor]] = {}
    for name, site in _whole(program):
        entry, edit = f"edits.{name}", program.edits[name]
        assert edit.sae is not None
        sae = program.load_sae(entry, edit.sae[0], program.sites[site])
        uses = [use for use in program.uses_of[name] if site in use.sites]
        try:
            for use in uses:
                sae.check(int(use.feature or 0))
            if sae.folder not in decoders:
                decoder, bias = (torch.from_numpy(t) for t in sae.decode())
                kept = _DTYPES[sae.tensors["W_dec"].dtype]
                decoders[sae.folder] = decoder.to(kept).to(device), bias.to(device)
        except VectorError as error:
            raise LockError(entry, f"{error.message} (at {site})") from error
        count = len(program.uses_of[name]) + 1
        features, values = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
        for use in uses:
            number = program.uses_of[name][use]
            features[number], values[number] = int(use.feature or 0), float(use.coefficient or 0.0)
        encoder = _encoder(entry, sae, site, None, device, loaded)
        tables = features.to(device), values.to(device)
        found[name, site] = Autoencoder(encoder, *decoders[sae.folder], edit.sae[1], *tables)
    return found


def load_saes(
    program: Program, device: torch.device
) -> tuple[dict[str, dict[str, Encoder]], dict[tuple[str, str], Autoencoder], int]:
    """:func:`encoders`, :func:`autoencoders` and what both take of the device.  Raises LockError."""
    loaded: Loaded = {}
    reads, edits = encoders(program, device, loaded), autoencoders(program, device, loaded)
    return reads, edits, bytes_of(loaded, edits)


def _encoder(
    entry: str, sae: Sae, site: str, ids: tuple[int, ...] | None, device: torch.device, loaded: Loaded
) -> Encoder:
    if (key := (sae.folder, ids)) not in loaded:
        try:
            loaded[key] = Encoder.load(sae, ids, device)
        except VectorError as error:
            raise LockError(entry, f"{error.message} (at {site})") from error
    return loaded[key]


def _whole(program: Program) -> list[tuple[str, str]]:
    """(edit, site) of every use that puts a reconstruction in a row's place."""
    used = ((name, program.used_at.get(name, {})) for name, edit in program.edits.items() if edit.verb == "reconstruct")
    return [(name, site) for name, sites in used for site in sites]


def bytes_of(loaded: Loaded, autoencoders: Mapping[tuple[str, str], Autoencoder]) -> int:
    """What they take of the device."""
    decoders = {id(one.decoder): (one.decoder, one.bias) for one in autoencoders.values()}
    tensors = [tensor for both in decoders.values() for tensor in both]
    return sum(one.bytes for one in loaded.values()) + sum(int(t.numel() * t.element_size()) for t in tensors)


def predicted(program: Program) -> int:
    """Bytes that :func:`encoders` and :func:`autoencoders` take.  Raises LockError."""
    sizes: dict[tuple[str, Any], int] = {}
    for name, read in program.reads.items():
        for site in read.sites if read.sae is not None else ():
            sae = program.load_sae(f"reads.{name}", str(read.sae), program.sites[site])
            sizes[sae.folder, read.ids] = sae.held(read.ids)[1]
    for name, site in _whole(program):
        edit = program.edits[name]
        assert edit.sae is not None
        sae = program.load_sae(f"edits.{name}", edit.sae[0], program.sites[site])
        sizes[sae.folder, None] = sae.held(None)[1]
        sizes[sae.folder, "decoder"] = sae.whole - sae.held(None)[1]
    return sum(sizes.values())

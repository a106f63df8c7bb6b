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
    """``weight`` ``[width, columns]`` as the file has it; ``bias`` and ``threshold`` (of jumprelu) float32
    ``[columns]``, the bias with what b_dec takes away.  ``columns`` are all features, or the chosen ``ids``."""

    weight: Tensor
    bias: Tensor
    threshold: Tensor | None
    k: int | None
    ids: Tensor | None

    @staticmethod
    def load(sae: Sae, ids: tuple[int, ...] | None, device: torch.device) -> Encoder:
        """Raises VectorError (feature, nonfinite)."""
        for index in ids or ():
            if not 0 <= index < sae.d_sae:
                raise VectorError("feature", f"{sae.folder} has the features 0 … {sae.d_sae - 1}, not {index}")
        count, _ = sae.held(ids)
        some: Any = slice(None) if count == sae.d_sae or ids is None else list(ids)
        weight = sae.tensors["W_enc"].read((slice(None), some))
        bias = sae.tensors["b_enc"].read((some,)).astype(np.float64)
        if sae.centred:
            bias -= sae.tensors["b_dec"].read(()).astype(np.float64) @ weight.astype(np.float64)
        if bad := int(weight.size - np.isfinite(weight).sum() + bias.size - np.isfinite(bias).sum()):
            raise VectorError("nonfinite", f"the encoder of {sae.folder} holds {bad} values that are not finite")
        threshold = None
        if sae.architecture == "jumprelu":
            threshold = torch.from_numpy(sae.tensors["threshold"].read((some,))).to(device)
        return Encoder(
            # Cast back to what the file has: exact.
            torch.from_numpy(weight).to(_DTYPES[sae.dtype]).to(device),
            torch.from_numpy(bias.astype(np.float32)).to(device), threshold, sae.k,
            None if ids is None else torch.tensor(ids, device=device),
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        tensors = (self.weight, self.bias, self.threshold)
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
        active = before.clamp_min_(0.0)
        if self.threshold is not None:
            active = active.masked_fill_(active <= self.threshold, 0.0)
        if self.ids is not None:
            return self.ids.expand(rows.shape[0], -1), active
        values, ids = active.topk(min(top or 1, active.shape[-1]), dim=-1)
        return _padded(ids, values, top or 1)

    def _before(self, rows: Tensor) -> Tensor:
        """The preactivations, float32 ``[n, columns]``."""
        width, columns = self.weight.shape
        if self.weight.dtype == torch.float32:
            return torch.addmm(self.bias, rows, self.weight)
        out = torch.empty((rows.shape[0], columns), dtype=torch.float32, device=rows.device)
        step = max(1, WORK_BYTES // (4 * width))
        for a in range(0, columns, step):
            some = slice(a, a + step)
            torch.addmm(self.bias[some], rows, self.weight[:, some].float(), out=out[:, some])
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


def encoders(program: Program, device: torch.device) -> dict[str, dict[str, Encoder]]:
    """Read → site → the encoder that its rows go through; sites of one SAE share it.  Raises LockError."""
    found: dict[str, dict[str, Encoder]] = {}
    loaded: dict[tuple[str, tuple[int, ...] | None], Encoder] = {}
    for name, read in program.reads.items():
        for site in read.sites if read.sae is not None else ():
            entry = f"reads.{name}"
            sae = program.load_sae(entry, str(read.sae), program.sites[site])
            key = (sae.folder, read.ids)
            if key not in loaded:
                try:
                    loaded[key] = Encoder.load(sae, read.ids, device)
                except VectorError as error:
                    raise LockError(entry, f"{error.message} (at {site})") from error
            found.setdefault(name, {})[site] = loaded[key]
    return found


def bytes_of(encoders: Mapping[str, Mapping[str, Encoder]]) -> int:
    """What they take of the device."""
    return sum({id(one): one.bytes for sites in encoders.values() for one in sites.values()}.values())


def predicted(program: Program) -> int:
    """Bytes that :func:`encoders` takes.  Raises LockError."""
    sizes = {}
    for name, read in program.reads.items():
        for site in read.sites if read.sae is not None else ():
            sae = program.load_sae(f"reads.{name}", str(read.sae), program.sites[site])
            sizes[sae.folder, read.ids] = sae.held(read.ids)[1]
    return sum(sizes.values())

"""Rows on their way to the host in fewer bytes, as `store` asks for."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from vtaps.spec.store import LARGEST, Store

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}


def narrowed(rows: Tensor, store: Store) -> tuple[dict[str, Tensor], str]:
    """``rows`` ``[n, sites, width]`` of the model's dtype or float32 → the stored fields and the rows' dtype.

    ``rows`` ``[n, sites, width]``, float8 as its bits in uint8; with a scale also ``scale`` ``[n, sites]`` float32, by
    which the stored numbers are multiplied to get a row back.  A row that is not finite has a scale that is not.
    """
    if store.dtype is None or not store.scaled:
        kept = rows if store.dtype is None else rows.to(DTYPES[store.dtype])
        return {"rows": kept}, str(kept.dtype).removeprefix("torch.")
    wide = rows.float()
    # Not below the smallest normal number: a device may take anything smaller for zero.
    scale = (wide.abs().amax(-1) / LARGEST[store.dtype]).clamp_min(torch.finfo(torch.float32).tiny)
    small = (wide / scale[..., None]).to(DTYPES[store.dtype])
    bits = small.view(torch.uint8) if small.dtype == torch.float8_e4m3fn else small
    return {"rows": bits, "scale": scale}, store.dtype


def as_numpy(t: Tensor) -> npt.NDArray[Any]:
    """numpy has no bfloat16: its bits travel as uint16."""
    array: npt.NDArray[Any] = t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()
    return array

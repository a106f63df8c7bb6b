"""The sparse autoencoder of the grid's rows with features: random, of four features a column of the stream."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.grid_shapes import Shape

FOLDER = "sae"
TIMES = 4


def write_sae(folder: Path, shape: Shape, seed: int) -> None:
    """``folder/sae`` in SAELens's layout: ``standard``, in the model's dtype."""
    width = int(shape.config["hidden_size"])
    features, dtype = TIMES * width, getattr(torch, shape.dtype)
    draw = torch.Generator().manual_seed(seed)
    encoder = torch.randn((width, features), generator=draw) / width**0.5
    tensors = {"W_enc": encoder, "b_enc": torch.zeros(features), "W_dec": encoder.T, "b_dec": torch.zeros(width)}
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.to(dtype).contiguous() for name, t in tensors.items()}, folder / FOLDER / "sae_weights.safetensors"
    )
    said = {"architecture": "standard", "d_in": width, "d_sae": features, "dtype": shape.dtype}
    (folder / FOLDER / "cfg.json").write_text(json.dumps(said), encoding="utf-8")

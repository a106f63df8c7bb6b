"""Random sparse autoencoders in the layouts of SAELens and Gemma Scope, and what they compute, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Floats = np.ndarray[Any, Any]


def write_sae(
    folder: Path, architecture: str, width: int, features: int, *, seed: int = 0, dtype: torch.dtype = torch.float32,
    size: float = 1.0, **config: Any,
) -> dict[str, Floats]:  # fmt: skip
    """Writes it and gives its tensors as the file has them, in float64; ``config``: further entries of ``cfg.json``,
    ``size``: how long the rows are that it is made for."""
    rng = np.random.default_rng(seed)
    made = {
        "W_enc": rng.normal(size=(width, features)) / np.sqrt(width),
        "b_enc": rng.normal(size=features) * size / 4,
        "W_dec": rng.normal(size=(features, width)) / np.sqrt(width),
        "b_dec": rng.normal(size=width) * size / 2,
    }
    if architecture == "gated":
        made["b_gate"] = made.pop("b_enc")
        made["b_mag"] = rng.normal(size=features) * size / 4
        made["r_mag"] = rng.normal(size=features) / 2
    if architecture == "jumprelu":
        made["threshold"] = np.abs(rng.normal(size=features)) * size
        made["threshold"][0] = -1.0
    said = {"architecture": architecture, "d_in": width, "d_sae": features, "dtype": "float32", **config}
    return save_sae(folder, made, said, dtype)


def save_sae(
    folder: Path, made: dict[str, Floats], said: dict[str, Any], dtype: torch.dtype = torch.float32
) -> dict[str, Floats]:
    """``made`` in ``dtype`` with a ``cfg.json`` of ``said``; the tensors as the file has them, in float64."""
    tensors = {name: torch.from_numpy(values).to(dtype) for name, values in made.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(said), encoding="utf-8")
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def save_npz(
    file: Path, made: dict[str, Floats], dtype: Any = np.float32, save: Callable[..., None] = np.savez
) -> dict[str, Floats]:
    """``made`` in ``dtype`` as Gemma Scope has it; the tensors as the file has them, in float64."""
    tensors = {name: values.astype(dtype) for name, values in made.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    save(file, **tensors)
    return {name: values.astype(np.float64) for name, values in tensors.items()}


def drawn_npz(width: int, features: int, *, seed: int = 0, size: float = 1.0) -> dict[str, Floats]:
    """A jumprelu SAE for rows of ``size``."""
    rng = np.random.default_rng(seed)
    return {
        "W_enc": rng.normal(size=(width, features)) / np.sqrt(width),
        "b_enc": rng.normal(size=features) * size / 4,
        "W_dec": rng.normal(size=(features, width)) / np.sqrt(width),
        "b_dec": rng.normal(size=width) * size / 2,
        "threshold": np.abs(rng.normal(size=features)) * size / 2,
    }


def exact_sae(width: int, features: int) -> dict[str, Floats]:
    """A jumprelu SAE of small numbers of few bits: in float32 its products with such rows are exact."""
    rng = np.random.default_rng(4)
    made = {
        "W_enc": rng.integers(-1, 2, (width, features)), "b_enc": rng.integers(-3, 4, features),
        "W_dec": rng.integers(-1, 2, (features, width)) / 8, "b_dec": rng.integers(-2, 3, width),
        "threshold": rng.integers(1, 6, features),
    }  # fmt: skip
    return {name: values.astype(np.float64) for name, values in made.items()}


def activations(sae: dict[str, Floats], rows: Floats, *, k: int | None = None, centred: bool = True) -> Floats:
    """float64 ``[n, features]`` of ``rows`` ``[n, width]``, as ``SAE.encode`` of SAELens has it."""
    if "b_gate" in sae:
        product = (rows - sae["b_dec"] * centred) @ sae["W_enc"]
        gate = product + sae["b_gate"] > 0
        return gate * np.maximum(product * np.exp(sae["r_mag"]) + sae["b_mag"], 0.0)
    before = (rows - sae["b_dec"] * centred) @ sae["W_enc"] + sae["b_enc"]
    active = np.maximum(before, 0.0)
    if "threshold" in sae:
        active *= before > sae["threshold"]
    if k is not None:
        least = np.sort(before, axis=-1)[:, -k][:, None]
        active *= before >= least
    return active


def reconstruction(sae: dict[str, Floats], active: Floats) -> Floats:
    """``active`` ``[n, features]`` → ``[n, width]``, as ``SAE.decode`` of SAELens has it."""
    return active @ sae["W_dec"] + sae["b_dec"]

"""Tiny quantised checkpoints in the formats that vLLM loads, each with the dense checkpoint that it stands for.

The weights of every linear layer but the unembedding are rounded here, by the format's own definition; the dense twin
holds the rounded weights, so that Hugging Face computes with exactly what the quantised file means.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
Parts = dict[str, Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def int8(weight: Tensor) -> tuple[Parts, Tensor]:
    """One symmetric scale an output channel: ``q * scale``."""
    scale = weight.abs().amax(1, keepdim=True).float() / 127
    rounded = torch.round(weight.float() / scale).clamp(-127, 127)
    return {"weight": rounded.to(torch.int8), "weight_scale": scale}, rounded * scale


def fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    """One scale a tensor, e4m3: ``q * scale``."""
    scale = (weight.abs().max().float() / 448).reshape(1)
    rounded = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def awq(weight: Tensor) -> tuple[Parts, Tensor]:
    """Four bits with a scale and a zero point for each group of 32 inputs: ``(q - zero) * scale``, in float16."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = torch.round(-low / scale.float()).clamp(0, 15)
    each, shift = scale.float()[..., None], zero[..., None]
    rounded = (torch.round(groups / each) + shift).clamp(0, 15)
    parts = {
        "qweight": _packed(rounded.reshape(weight.shape).T),
        "qzeros": _packed(zero.T),
        "scales": scale.T.contiguous(),
    }
    return parts, ((rounded - shift) * each).reshape(weight.shape)


def _packed(numbers: Tensor) -> Tensor:
    """``[rows, columns]`` of four bits each → int32 ``[rows, columns / 8]`` in AWQ's order."""
    eight = numbers.to(torch.int64).reshape(len(numbers), -1, 8)[..., list(_AWQ_ORDER)]
    word = (eight << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).contiguous()


def _compressed(kind: str, weights: str, inputs: str, dynamic: bool = True) -> dict[str, Any]:
    def numbers(strategy: str, dynamic: bool) -> dict[str, Any]:
        return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}

    group = {
        "targets": ["Linear"],
        "weights": numbers(weights, False),
        "input_activations": numbers(inputs, dynamic),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[Callable[[Tensor], tuple[Parts, Tensor]], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "int8 a token": (int8, _compressed("int", "channel", "token")),
    "fp8 a tensor": (fp8, _compressed("float", "tensor", "tensor")),
}


def quantised(source: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """``(quantised, dense)``: ``source`` in one of :data:`FORMATS`, and the numbers that it stands for."""
    rounding, config = FORMATS[name]
    made, dense = folder / "quantised", folder / "dense"
    parts: Parts = {}
    plain: Parts = {}
    for key, weight in load_file(source / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            own, plain[key] = rounding(weight)
            parts |= {key.removesuffix("weight") + part: value.contiguous() for part, value in own.items()}
        else:
            parts[key] = plain[key] = weight
    for where, tensors in ((made, parts), (dense, plain)):
        shutil.copytree(source, where)
        save_file(tensors, where / "model.safetensors", {"format": "pt"})
    told = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**told, "quantization_config": config}, indent=1))
    return made, dense

"""What a quantised checkpoint takes from the promises of a run: read from its files, without vLLM.

Reads and edits are of activations in the model's dtype, whatever the weights are kept as.  Two things are not: rows
that share a scale with others of their step, and what leans on a dense unembedding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.spec import Spec

FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where a checkpoint says it beside ``config.json``."""

WEIGHTS_ALONE = ("awq", "auto_awq", "gptq", "auto_gptq", "bitsandbytes")
"""Methods that round weights and leave activations alone: rows cannot meet in a scale."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Quantised:
    """``couples``: why a row may hang on the other rows of its step, None where it cannot; ``head``: whether the
    unembedding is quantised."""

    method: str
    couples: str | None
    head: bool


def quantised(config: Mapping[str, Any], asked: str | None = None) -> Quantised | None:
    """Of a model's ``config`` (with its ``quantization_config``) and of ``engine.vllm.quantization``; None for a dense
    model."""
    told = config.get("quantization_config") or config.get("compression_config")
    if told is None:
        text = config.get("text_config")
        told = text.get("quantization_config") if isinstance(text, Mapping) else None
    if not isinstance(told, Mapping):
        return None if asked is None else Quantised(asked, _couples(asked, {}, config), False)
    method = str(told.get("quant_method") or asked or "unknown").lower()
    return Quantised(method, _couples(method, told, config), _head(method, told))


def _couples(method: str, told: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    if any(isinstance(config.get(name), int) and config[name] > 1 for name in EXPERTS):
        return "its experts are quantised, and no test of vtaps shows that rows stay apart there"
    if method in WEIGHTS_ALONE:
        return None
    if method == "compressed-tensors":
        groups = told.get("config_groups")
        inputs = [g.get("input_activations") for g in (groups if isinstance(groups, Mapping) else {}).values()]
        return next((why for one in inputs if one is not None and (why := _scale(one)) is not None), None)
    if method == "fp8":
        if told.get("activation_scheme") == "static" or told.get("weight_block_size"):
            return None
        return "its activations are scaled as they come, and vLLM's kernel may take one scale for all rows of a step"
    return f"no test of vtaps shows that rows stay apart under {method}"


def _scale(activations: Mapping[str, Any]) -> str | None:
    strategy, dynamic = str(activations.get("strategy")), activations.get("dynamic")
    if strategy in ("token", "group") or (strategy == "tensor" and dynamic is False):
        return None
    if strategy == "tensor" and dynamic is True:
        return "its activations are scaled as they come, one scale for all rows of a step"
    return f"no test of vtaps shows that rows stay apart with activations scaled by {strategy}"


def _head(method: str, told: Mapping[str, Any]) -> bool:
    if method == "compressed-tensors":
        groups = told.get("config_groups")
        targets = [
            str(t) for g in (groups if isinstance(groups, Mapping) else {}).values() for t in g.get("targets", ())
        ]
        left = any("lm_head" in str(name) for name in told.get("ignore") or ())
        return not left and any(t == "Linear" or "lm_head" in t for t in targets)
    return bool(told.get("lm_head"))


def check(spec: Spec, doc: Document, folder: Path) -> list[Diagnostic]:
    """VT507 (a warning) where unedited requests may change with their neighbours, VT508 for a lens on a quantised
    unembedding.  ``folder`` holds the model's ``config.json``."""
    config = _json(folder / "config.json")
    beside = (_json(folder / name) for name in FILES)
    if "quantization_config" not in config and (found := next((b for b in beside if b), None)) is not None:
        config = {**config, "quantization_config": found.get("quantization", found)}
    found_in = quantised(config, spec.engine.vllm.get("quantization"))
    if found_in is None:
        return []
    out = []
    where = doc.at("model", "path")
    if found_in.couples is not None:
        message = f"the model is quantised ({found_in.method}): {found_in.couples}"
        note = (
            "an unedited request may change in its last bits, or in a token, when a neighbour is edited: isolation is "
            "not promised; what is read and edited is still what the model computes"
        )
        out.append(Diagnostic("VT507", message, where, note=note))
    if found_in.head:
        for read in spec.reads.values():
            if read.kind == "lens":
                message = f"read {read.name!r} is a lens, and the model's unembedding is quantised ({found_in.method})"
                note = "read rows of the stream, or take a checkpoint that leaves `lm_head` dense"
                out.append(Diagnostic("VT508", message, doc.at(*read.where, "lens"), note=note))
    return out


def _json(path: Path) -> dict[str, Any]:
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return made if isinstance(made, dict) else {}

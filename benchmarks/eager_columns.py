"""What the eager benchmark compares: a column is one kind of engine, a row one load that every engine serves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.loads import Load, draw_ids

SCALE = 4.0
TOP = 10


LOADS = (Load("one", 1, 128, 64), Load("eight", 8, 128, 32))


@dataclass(frozen=True)
class Column:
    """``read`` and ``edit`` are what every request of this engine uses; ``goal`` is the least share of plain."""

    name: str
    title: str
    block: bool = True
    read: str | None = None
    edit: str | None = None
    goal: float | None = None


PLAIN, AGAIN = "plain", "again"
COLUMNS = {
    c.name: c
    for c in (
        Column(PLAIN, "plain", block=False),
        Column(AGAIN, "plain again", block=False),
        Column("idle", "idle block", goal=1.0),
        Column("one_layer", "one layer read", read="one_layer", goal=0.97),
        Column("every_layer", "every layer read", read="every_layer", goal=0.90),
        Column("steer", "one layer steered", edit="steer", goal=0.97),
        Column("lens", f"lens top-{TOP} of one layer", read="lens"),
    )
}


def layers_of(model: Path) -> int:
    return int(_config(model)["num_hidden_layers"])


def _config(model: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return data


def spec_text(column: Column, model: Path, dtype: str, seed: int) -> str:
    """The spec of one column, as YAML.

    The block of plain and idle reads every layer, for an arm that is never served: idle is the price of the hooks.
    """
    middle = layers_of(model) // 2
    reads = {
        "one_layer": {"at": f"resid_post[{middle}]", "tokens": "sampling"},
        "every_layer": {"at": "resid_post[*]", "tokens": "sampling"},
        "lens": {"at": f"resid_post[{middle}]", "tokens": "sampling", "lens": {"top": TOP}},
    }
    edits = {
        "steer": {"at": f"resid_post[{middle}]", "tokens": "sampling", "add": {"vector": "noise", "scale": SCALE}},
    }
    used: dict[str, Any] = {}
    if column.read:
        used["reads"] = [column.read]
    if column.edit:
        used["edits"] = [column.edit]
    arms: dict[str, Any] = {
        load.name: {"prompts": [load.name], "sampling": {"max_tokens": load.generated}, **used} for load in LOADS
    }
    spec: dict[str, Any] = {
        "vtaps": 1,
        "model": {"path": str(model), "dtype": dtype},
        "engine": {"vllm": {"max_model_len": 256}},
    }
    if column.edit:
        spec["vectors"] = {"noise": {"random": {"seed": seed}}}
        spec["edits"] = {column.edit: edits[column.edit]}
    elif column.read:
        spec["reads"] = {column.read: reads[column.read]}
    else:
        spec["reads"] = {"every_layer": reads["every_layer"]}
        arms["not_served"] = {"prompts": [LOADS[0].name], "reads": ["every_layer"]}
    spec["prompts"] = {load.name: prompts(load, model, seed) for load in LOADS}
    spec["arms"] = arms
    spec["sampling"] = {"temperature": 0, "ignore_eos": True}
    text: str = yaml.safe_dump(spec, sort_keys=False, default_flow_style=None, width=4096)
    return text


def prompts(load: Load, model: Path, seed: int) -> list[dict[str, Any]]:
    """Token ids drawn evenly from the vocabulary, special tokens at its start left out."""
    ids = draw_ids([seed, load.requests], load.requests, load.prompt, int(_config(model)["vocab_size"]))
    return [{"id": str(i), "ids": row.tolist()} for i, row in enumerate(ids)]


def rows_expected(column: Column, load: Load, layers: int) -> int:
    """Rows that a load must deliver: each generated token has one at each location; plain and idle deliver none."""
    if column.edit:
        return load.tokens
    return load.tokens * {"every_layer": layers, None: 0}.get(column.read, 1)

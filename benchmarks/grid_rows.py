"""What the grid compares: rows (what the requests use), columns (what serves them), and the spec of an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.grid_shapes import Shape, loads_of
from benchmarks.loads import Load, draw_ids

PYTHON = """\
def clamp(rows):
    rows.clamp_(-100.0, 100.0)

def largest(rows):
    return rows.abs().amax(-1)
"""
TOP = 10
SCALE = 4.0
HEAD = 3
BIASED = 64
GATE = "seen"


@dataclass(frozen=True)
class Row:
    """``installs`` is the definition (section, name) in the block, ``idle`` whether the row's requests leave it
    unused.  ``goal``, ``eager_goal``: the least share of plain's tokens a second, for the taps and the eager engine.
    """

    name: str
    title: str
    load: str
    installs: tuple[str, str] | None
    goal: float | None = None
    eager_goal: float | None = None
    idle: bool = False

    @property
    def uses(self) -> tuple[str, str] | None:
        return None if self.idle else self.installs


_ONE, _EVERY = ("reads", "one_layer"), ("reads", "every_layer")
ROWS = {
    r.name: r
    for r in (
        Row("generate", "plain generation, nothing installed", "one", None),
        Row("idle", "every layer's read installed, not used", "one", _EVERY, 0.99, idle=True),
        Row("one_layer", "one layer read at every sampled row", "one", _ONE, 0.99, 0.97),
        Row("every_layer", "every layer read at every sampled row", "one", _EVERY, 0.97, 0.90),
        Row("every_layer_prompt", "every layer read at all rows", "one", ("reads", "every_layer_prompt"), 0.90),
        Row("steer_one", "one layer steered at all rows", "one", ("edits", "steer_one"), 0.99),
        Row("steer_every", "every layer steered at all rows", "one", ("edits", "steer_every"), 0.97),
        Row("lens", f"lens top-{TOP} of one layer at every sampled row", "one", ("reads", "lens"), 0.95),
        Row("norm_one", "the length of one layer's stream at every sampled row", "one", ("reads", "norm_one"), 0.98),
        Row("project_one", "two dot products at every sampled row", "one", ("reads", "project_one"), 0.98),
        Row("probe_one", "a linear probe at every sampled row", "one", ("reads", "probe_one"), 0.98),
        Row("mean_one", "the mean of one layer's stream over all rows", "one", ("reads", "mean_one"), 0.98),
        Row("every_layer_float8", "every layer read as float8", "one", ("reads", "every_layer_float8"), 0.95),
        Row("python_read_one", "a number by Python at every sampled row", "one", ("reads", "python_read_one"), 0.95),
        Row("head", "one head zeroed at all rows", "one", ("edits", "head"), 0.99),
        Row("scale_one", "one layer scaled at all rows", "one", ("edits", "scale_one"), 0.99),
        Row("set_one", "one layer set to a vector at all rows", "one", ("edits", "set_one"), 0.99),
        Row("keep_norm_one", "one layer steered at its own length", "one", ("edits", "keep_norm_one"), 0.98),
        Row("pattern_one", "attention of two heads of one layer", "one", ("reads", "pattern_one"), 0.95),
        Row("project_out_one", "two directions taken out at one layer", "one", ("edits", "project_out_one"), 0.98),
        Row("clamp_one", "one layer clamped along a direction", "one", ("edits", "clamp_one"), 0.98),
        Row("affine_one", "a rank-1 map at one layer", "one", ("edits", "affine_one"), 0.98),
        Row("feature_one", "an SAE's feature set at one layer", "one", ("edits", "feature_one"), 0.98),
        Row("reconstruct_one", "an SAE's reconstruction at one layer", "one", ("edits", "reconstruct_one"), 0.85),
        Row(
            "features_top",
            f"an SAE's top-{TOP} of one layer at every sampled row",
            "one",
            ("reads", "features_top"),
            0.95,
        ),
        Row("logit_bias", f"{BIASED} logits raised at every sampled row", "one", ("edits", "logit_bias"), 0.98),
        Row("gate_one", "one layer steered by a gate of rows before it", "one", ("edits", "gate_one"), 0.98),
        Row("python_one", "Python at one layer, all rows", "one", ("edits", "python_one"), 0.95),
        Row("python_every", "Python at every layer, all rows", "one", ("edits", "python_every"), 0.75),
        Row("override", "every token overridden", "one", ("overrides", "override"), 0.98),
        Row("eight_one_layer", "one layer read at every sampled row", "eight", _ONE, 0.98),
        Row("thirtytwo_one_layer", "one layer read at every sampled row", "thirtytwo", _ONE, 0.97),
        Row("eight_every_layer", "every layer read at every sampled row", "eight", _EVERY, 0.93),
        Row("eight_python_one", "Python at one layer, all rows", "eight", ("edits", "python_one"), 0.95),
        Row("eight_python_every", "Python at every layer, all rows", "eight", ("edits", "python_every"), 0.75),
        Row("sweep_256", "a sweep of a steering scale, a request each point", "sweep", ("edits", "steer_one"), 0.95),
        Row("prompts_1024", "short prompts, one layer read", "prompts", _ONE, 1 / 1.10),
    )
}


@dataclass(frozen=True)
class Column:
    """``kind``: ``plain`` (vLLM alone), ``vtaps`` (``mode`` is the spec's ``engine.mode``) or ``peer``.  ``base`` is
    the column that its share is of."""

    name: str
    title: str
    kind: str
    base: str
    eager: bool = False
    mode: str = ""


PLAIN, AGAIN = "plain", "plain2"
COLUMNS = {
    c.name: c
    for c in (
        Column(PLAIN, "plain vLLM, compiled, CUDA graphs", "plain", PLAIN),
        Column("plain_eager", "plain vLLM, eager", "plain", PLAIN, eager=True),
        Column("vtaps_taps", "vtaps, taps", "vtaps", PLAIN, mode="taps"),
        Column("vtaps_eager", "vtaps, eager", "vtaps", "plain_eager", eager=True, mode="eager"),
        Column("nnsight", "nnsight", "peer", PLAIN),
        Column("plain_eager2", "plain vLLM, eager, again", "plain", "plain_eager", eager=True),
        Column(AGAIN, "plain vLLM again", "plain", PLAIN),
    )
}
"""In the order of a round: plain stands at both ends."""

AGAIN_OF = {PLAIN: AGAIN, "plain_eager": "plain_eager2"}
"""Base column → the same engine once more: what the two differ by is the resolution."""

DEFAULT_COLUMNS = (PLAIN, "plain_eager", "vtaps_taps", "vtaps_eager", AGAIN)


def goal_of(row: Row, column: Column) -> float | None:
    if column.kind != "vtaps":
        return None
    return row.eager_goal if column.eager else row.goal


def groups(rows: Sequence[Row], install: str, share: Sequence[str] = ()) -> list[tuple[str, list[Row]]]:
    """How rows share engines: (name, rows) for each.

    ``each``: an engine a row; ``block``: rows with the same definition installed; ``together``: one for all.  Those in
    ``share`` have one of their own.
    """
    if install == "together":
        return [("together", list(rows))] if rows else []
    out: dict[str, list[Row]] = {}
    for row in rows:
        if row.name in share:
            out.setdefault("+".join(share), []).append(row)
            continue
        shared = row.installs[1] if row.installs else "nothing"
        out.setdefault(row.name if install == "each" else shared, []).append(row)
    return list(out.items())


def override_ids(load: Load, shape: Shape, seed: int) -> list[int]:
    ids: list[int] = draw_ids([seed, 1], 1, load.generated, shape.vocabulary)[0].tolist()
    return ids


def _definition(where: tuple[str, str], load: Load, shape: Shape, seed: int) -> dict[str, Any]:
    middle = shape.layers // 2
    one, every = f"resid_post[{middle}]", "resid_post[*]"
    add = {"vector": "noise", "scale": SCALE}
    known: dict[tuple[str, str], dict[str, Any]] = {
        _ONE: {"at": one, "tokens": "sampling"},
        _EVERY: {"at": every, "tokens": "sampling"},
        ("reads", "every_layer_prompt"): {"at": every, "tokens": "all"},
        ("reads", "lens"): {"at": one, "tokens": "sampling", "lens": {"top": TOP}},
        ("reads", "pattern_one"): {"at": f"pattern[{middle}]", "tokens": "sampling", "heads": [0, HEAD]},
        ("reads", "norm_one"): {"at": one, "tokens": "sampling", "norm": True},
        ("reads", "project_one"): {"at": one, "tokens": "sampling", "project": {"vectors": ["noise", "more"]}},
        ("reads", "probe_one"): {"at": one, "tokens": "sampling", "probe": {"weight": "noise"}},
        ("reads", "mean_one"): {"at": one, "tokens": "all", "mean_over": "request"},
        ("reads", "every_layer_float8"): {
            "at": every,
            "tokens": "sampling",
            "store": {"dtype": "float8_e4m3", "scale": "per_row"},
        },
        ("reads", "python_read_one"): {"at": one, "tokens": "sampling", "python": "edits.py:largest"},
        ("edits", "scale_one"): {"at": one, "tokens": "all", "scale": {"by": 1.5}},
        ("edits", "set_one"): {"at": one, "tokens": "all", "set": add},
        ("edits", "keep_norm_one"): {"at": one, "tokens": "all", "add": {**add, "keep_norm": True}},
        ("edits", "reconstruct_one"): {
            "at": one,
            "tokens": "all",
            "feature": {"sae": "noise", "index": 7, "to": 1.0, "error": "drop"},
        },
        ("edits", "steer_one"): {"at": one, "tokens": "all", "add": add},
        ("edits", "steer_every"): {"at": every, "tokens": "all", "add": add},
        ("edits", "head"): {"at": f"z[{middle}]", "tokens": "all", "zero": {"heads": [HEAD]}},
        ("edits", "project_out_one"): {"at": one, "tokens": "all", "project_out": {"vectors": ["noise", "more"]}},
        ("edits", "clamp_one"): {"at": one, "tokens": "all", "clamp": {"vector": "noise", "min": -1.0, "max": 1.0}},
        ("edits", "affine_one"): {"at": one, "tokens": "all", "affine": {"down": "noise", "up": "noise", "scale": 0.1}},
        ("edits", "feature_one"): {"at": one, "tokens": "all", "feature": {"sae": "noise", "index": 7, "to": 1.0}},
        ("reads", "features_top"): {"at": one, "tokens": "sampling", "features": {"sae": "noise", "top": TOP}},
        ("edits", "logit_bias"): {
            "at": "logits",
            "tokens": "sampling",
            "add": {"value": SCALE, "ids": [*range(BIASED)]},
        },
        ("edits", "gate_one"): {"at": one, "tokens": "all", "add": add, "when": GATE},
        ("edits", "python_one"): {"at": one, "tokens": "all", "python": "edits.py:clamp"},
        ("edits", "python_every"): {"at": every, "tokens": "all", "python": "edits.py:clamp"},
        ("overrides", "override"): {"start": 0, "ids": override_ids(load, shape, seed)},
    }
    return known[where]


def uses_sae(row: Row) -> bool:
    """Whether the row's spec needs :mod:`benchmarks.grid_sae`."""
    return row.installs is not None and row.installs[1] in ("feature_one", "features_top", "reconstruct_one")


def _vectors(said: Mapping[str, Any]) -> list[str]:
    """The vectors that a definition names."""
    one = [said[verb]["vector"] for verb in ("add", "set", "clamp") if "vector" in said.get(verb, {})]
    one += [said["probe"]["weight"]] if "probe" in said else []
    matrices = [said["affine"][key] for key in ("down", "up")] if "affine" in said else []
    return list(dict.fromkeys([*one, *said.get("project_out", {}).get("vectors", ()), *matrices]))


def spec_text(
    rows: Sequence[Row], shape: Shape, model: Path, mode: str, vllm: dict[str, Any], seed: int
) -> tuple[str, dict[str, str]]:
    """The spec of one engine, as YAML, and the prompt files beside it (name → text).

    An arm a row.  The prompts are those of the first repeat, so that whatever is sized by prompts has its size.
    """
    loads = {row.load: loads_of(shape)[row.load] for row in rows}
    spec: dict[str, Any] = {
        "vtaps": 1,
        "model": {"path": str(model), "dtype": shape.dtype},
        "engine": {"mode": mode, "vllm": vllm},
    }
    arms: dict[str, Any] = {}
    files: dict[str, str] = {}
    used = {row.uses for row in rows}
    for row in rows:
        load = loads[row.load]
        if row.installs:
            section, name = row.installs
            spec.setdefault(section, {})[name] = _definition(row.installs, load, shape, seed)
            if row.installs not in used:
                arms["not_served"] = {"prompts": [load.name], section: [name]}
            if "when" in spec[section][name]:
                # Every row passes, so that it is known what there is to do.
                at = f"resid_post[{shape.layers // 2 - 1}]"
                gate = {"at": at, "tokens": "all", "cosine": "noise", "above": -2.0, "holds": "row"}
                spec["gates"] = {GATE: gate}
            if "python" in spec[section][name]:
                files["edits.py"] = PYTHON
            if uses_sae(row):
                spec["saes"] = {"noise": {"dir": "sae"}}
            for number, vector in enumerate(_vectors(spec[section][name])):
                spec.setdefault("vectors", {})[vector] = {"random": {"seed": seed + number}}
        arm: dict[str, Any] = {"prompts": [load.name], "sampling": sampling(load)}
        if row.uses:
            section, name = row.uses
            arm[section] = [name]
            if load.same_prompt:
                scales = [round(SCALE * (i + 1) / load.requests, 6) for i in range(load.requests)]
                arm["sweep"] = {f"{name}.add.scale": scales}
        arms[row.name] = arm
    spec["prompts"] = {
        name: {"file": f"{name}.jsonl", "id": {"column": "id"}, "ids": {"column": "ids"}} for name in loads
    }
    spec["arms"] = arms
    files |= {f"{name}.jsonl": _prompt_file(load, shape, seed) for name, load in loads.items()}
    return yaml.safe_dump(spec, sort_keys=False, default_flow_style=None, width=4096), files


def sampling(load: Load) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": load.generated, "ignore_eos": True}


def prompt_ids(load: Load, shape: Shape, seed: int, repeat: int) -> list[tuple[int, ...]]:
    """The prompts of one repeat, one a request; the same in every column."""
    drawn = draw_ids([seed, 0, load.requests, load.prompt, repeat], load.prompts, load.prompt, shape.vocabulary)
    ids = [tuple(row) for row in drawn.tolist()]
    return ids * (load.requests // len(ids))


def _prompt_file(load: Load, shape: Shape, seed: int) -> str:
    ids = prompt_ids(load, shape, seed, 0)[: load.prompts]
    return "".join(json.dumps({"id": str(i), "ids": row}) + "\n" for i, row in enumerate(ids))


@dataclass(frozen=True)
class Due:
    """What the requests of a row must bring, all together: ``keys`` (read, site) pairs, ``rows`` of reads,
    ``fired`` rows of edits, ``overridden`` tokens."""

    tokens: int
    keys: int = 0
    rows: int = 0
    fired: int = 0
    overridden: int = 0


def due(row: Row | None, load: Load, shape: Shape) -> Due:
    """``row`` None: plain vLLM, which brings tokens only."""
    section, name = (row.uses if row else None) or ("", "")
    n, everywhere = load.requests, load.prompt + load.generated - 1
    if section == "reads":
        sites = shape.layers if name.startswith("every_layer") else 1
        each = everywhere if name in ("every_layer_prompt", "mean_one") else load.generated
        return Due(load.tokens, keys=n * sites, rows=n * sites * each)
    if section == "edits":
        return Due(load.tokens, fired=n * (load.generated if name == "logit_bias" else everywhere))
    if section == "overrides":
        return Due(load.tokens, overridden=load.tokens)
    return Due(load.tokens)

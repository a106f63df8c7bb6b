"""Whole specs drawn from what the language allows: locations and widths from a model's own tree and its alias table,
engine arguments and sampling from the schemas.  A part of the draws is then bent: odd values, keys and YAML.

Everything is drawn from one ``random.Random``, which hypothesis hands out (and shrinks) in tests.
"""

# long because: one draw for each thing that the language has, a line or two each.

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.trees import DATA
from vtaps.schemas import load
from vtaps.spec import aliases
from vtaps.spec.snapshot import read_tree
from vtaps.spec.tree import Dimensions, ModelTree

GOLDEN = DATA.parent / "golden"
FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "mixtral", "phi3", "olmoe", "ernie4_5")
WORDS = ("all", "prompt", "sampling", "generated")
TOKENS = (" Paris", " Rome", 5, 6, 7, 12)
TEXTS = (
    "The capital of France is",
    "The capital of Italy is",
    "The capital of Japan is called",
    "The capital, é 日本 😀",
)
PROBES = """MARK = open(__file__ + ".ran", "w")


def look(rows, at):
    return rows


def flip(rows):
    return -rows
"""


@dataclass(frozen=True)
class Family:
    """``places``: alias → (width, heads), each at a layer that has it; ``layers`` is how many there are."""

    name: str
    tree: ModelTree
    sizes: Dimensions
    layers: int
    places: dict[str, tuple[int, int | None]]
    modules: tuple[str, ...]
    ops: tuple[str, ...]


@cache
def family(name: str) -> Family:
    tree = read_tree(DATA / "trees" / f"{name}.json")
    layers = aliases.layer_count(tree)
    places = {}
    for alias in aliases.names(tree):
        if (site := aliases.site_or_none(tree, alias, 1)) is not None and site.editable and site.width is not None:
            places[alias] = (site.width, site.heads)
    called = [m for m in tree.modules.values() if m.path and m.enter is not None]
    modules = tuple(m.path for m in called if m.output is not None and m.output.kind == "tensor")
    ops = tuple(
        f"{m.path}.source.{op.name}" for m in called if m.forward for op in tree.forwards[m.forward].ops if not op.fixed
    )
    return Family(name, tree, tree.dimensions, layers, places, modules, ops)


def lay_out(folder: Path) -> None:
    """The files that drawn specs name, in ``folder``: a mark appears beside ``probes.py`` when it is run."""
    (folder / "probes.py").write_text(PROBES, encoding="utf-8")
    shutil.copytree(GOLDEN / "blocks" / "saes" / "saes", folder / "saes")
    widths = {width for name in FAMILIES for width, _ in family(name).places.values()}
    rng = np.random.default_rng(0)
    for width in sorted(widths):
        rows = rng.normal(size=(5, width)).astype(np.float32)
        save_file({"v": rows[0], **{f"layer_{i}": rows[i % 5] for i in range(40)}}, folder / f"v{width}.safetensors")
        save_file(
            {"a": rows[:3].copy(), "b": rows[2:].copy(), "c": rows[0, :3].copy()}, folder / f"m{width}.safetensors"
        )
        np.save(folder / f"v{width}.npy", rows)
    lines = [{"name": f"p{i}", "q": text, "chat": [{"role": "user", "content": text}]} for i, text in enumerate(TEXTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def whole(r: Random) -> dict[str, Any]:
    """The data of one spec that means something, in most draws."""
    return _Draw(r, family(r.choice(FAMILIES))).spec()


class _Draw:
    def __init__(self, r: Random, family: Family) -> None:
        self.r, self.of = r, family
        self.vectors: dict[str, Any] = {}
        self.taps: dict[str, Any] = {}
        self.gates: dict[str, Any] = {}
        self.saes: dict[str, Any] = {}
        self.edits: dict[str, Any] = {}
        self.reads: dict[str, Any] = {}
        self.overrides: dict[str, Any] = {}
        self.sources: dict[str, list[str]] = {}
        self.chat = r.random() < 0.25

    def some(self, share: float = 0.5) -> bool:
        return self.r.random() < share

    def spec(self) -> dict[str, Any]:
        r = self.r
        if self.some(0.3):
            said: dict[str, Any] = {"text": " is Paris"} if self.some() else {"ids": [5, 6]}
            self.overrides["think"] = {"start": r.choice([0, 1, 2]), **said}
        for i in range(r.choice([0, 1, 1, 2, 3])):
            self.edit(f"e{i}")
        for i in range(r.choice([0, 1, 1, 2, 3])):
            self.read(f"r{i}")
        metrics = {f"m{i}": self.metric() for i in range(r.choice([0, 0, 1, 2]))}
        spec: dict[str, Any] = {
            "vtaps": 1,
            "model": {"path": f"data/configs/{self.of.name}", "tokenizer": "data/tokenizer"},
        }
        if self.some():
            spec["model"]["dtype"] = r.choice(["auto", "float32", "bfloat16", "float16"])
        if self.some(0.4):
            spec["engine"] = self.engine()
        sections = {"saes": self.saes, "vectors": self.vectors, "taps": self.taps, "reads": self.reads}
        sections |= {"gates": self.gates, "edits": self.edits, "overrides": self.overrides, "metrics": metrics}
        spec |= {name: section for name, section in sections.items() if section or self.some(0.05)}
        spec["prompts"] = self.prompts()
        spec["arms"] = self.arms(metrics)
        if self.some():
            spec["sampling"] = self.sampling()
        return spec

    # Where, and which rows

    def place(self, edit: bool) -> tuple[str, int | None, int | None]:
        """A location, its width and heads; None where they are not known here."""
        r, of = self.r, self.of
        kind = r.random()
        if kind < 0.04:
            return "logits", of.sizes.vocab, None
        if kind < 0.10:
            path = r.choice(of.modules)
            return f"{path}.{r.choice(['output', 'output', 'input'])}", None, None
        if kind < 0.14 and of.ops:
            return r.choice(of.ops), None, None
        alias = r.choice(list(of.places))
        width, heads = of.places[alias]
        return (f"{alias}[{self.layers(edit)}]" if aliases.layered(of.tree, alias) else alias), width, heads

    def layers(self, edit: bool) -> str:
        r, count = self.r, self.of.layers
        first = r.randrange(count)
        last = r.randrange(first, count)
        few = [str(first), str(first), f"{first - count}", f"{first}..{last}"]
        return r.choice([*few, f"{first}, {last}", f"{first - count}..-1", "*"])

    def tokens(self, sampled: bool = False) -> Any:
        r = self.r
        if sampled:
            return r.choice(["sampling", "generated", {"steps": [0]}, {"steps": ["1..3", 0]}])
        if self.some(0.6):
            return r.choice(WORDS)
        picks: list[dict[str, Any]] = [
            {"steps": [r.randrange(4)]},
            {"steps": [f"{r.randrange(2)}..{r.randrange(2, 9)}"]},
            {"positions": [0, "1..2", -1][: r.randrange(1, 4)]},
            {"positions": [-1]},
            {"match": r.choice(["capital", "The", " capital"])},
            {"ids": [r.randrange(300), 7]},
            {
                "rows": r.choice(WORDS),
                "except": r.choice([{"positions": [0]}, {"steps": [1]}, {"positions": ["0..1"]}]),
            },
            {"rows": r.choice(WORDS), "positions": ["0..3"]},
        ]
        if self.chat:
            picks += [{"turn": r.choice(["user", "assistant"])}, {"turn": "user", "skip": r.randrange(3)}]
        if self.overrides:
            picks.append({"after": "think"})
        return r.choice(picks)

    def at(self, text: str) -> Any:
        if self.some(0.15):
            name = f"tap{len(self.taps)}"
            self.taps[name] = text if self.some() else [text]
            return name
        return text if self.some(0.9) else [text]

    # What is done there

    def number(self) -> float | int:
        return self.r.choice([0, 1, 2, -1, 0.5, 3.25, -7.5, 8.0, 1e-3, 40, 1e6])

    def vector(self, width: int | None) -> str:
        r = self.r
        name = r.choice(["v", "push", "a-b", "_x", "V"]) + str(len(self.vectors))
        if width is None or self.some(0.5):
            self.vectors[name] = {"random": r.choice([{}, {"seed": r.randrange(9)}, {"seed": 1, "norm": 2.0}])}
        elif self.some(0.7):
            self.vectors[name] = {"file": f"v{width}.safetensors", "tensor": "v"}
        else:
            self.vectors[name] = {"file": f"v{width}.npy", "row": r.randrange(5)}
        if "file" in self.vectors[name] and self.some(0.2):
            self.vectors[name]["norm"] = 1.5
        return name

    def columns(self, width: int | None, heads: int | None) -> dict[str, Any]:
        r = self.r
        if width is None or self.some(0.6):
            return {}
        if heads and self.some():
            return {"heads": [r.randrange(heads)] if self.some() else [f"0..{heads - 1}"]}
        return {"dims": [r.randrange(width)] if self.some() else [f"0..{r.randrange(width)}"]}

    def edit(self, name: str) -> None:
        r = self.r
        at, width, heads = self.place(True)
        verb = r.choice(
            ["add", "add", "scale", "zero", "set", "project_out", "clamp", "affine", "feature", "python", "rows"]
        )
        out: dict[str, Any] = {"at": self.at(at), "tokens": self.tokens(at == "logits")}
        narrow = self.columns(width, heads)
        if at == "logits" and self.some():
            narrow = {"ids": r.sample(TOKENS, 2)}
        if verb in ("add", "set") and self.some(0.3):
            out[verb] = {"value": self.number(), **(narrow or {"dims": [0]})}
        elif verb == "set" and at == "logits":
            out[verb] = {"value": "-inf", "ids": [" Paris"]}
        elif verb == "add":
            out[verb] = {"vector": self.vector(width), "scale": self.number(), **narrow}
            out[verb] |= {"keep_norm": True} if at.startswith("resid") and self.some(0.2) else {}
        elif verb == "set":
            out[verb] = {"vector": self.vector(width), **narrow}
        elif verb == "scale":
            out[verb] = {"by": self.number(), **narrow}
        elif verb == "project_out":
            out[verb] = {"vectors": [self.vector(width) for _ in range(r.randrange(1, 3))], "scale": 0.5}
        elif verb == "clamp":
            out[verb] = {"vector": self.vector(width), "min": -1.5, **({"max": 2} if self.some() else {})}
        elif verb == "affine" and width is not None:
            for key in "abc":
                self.vectors[f"{key}{width}"] = {"file": f"m{width}.safetensors", "tensor": key}
            out[verb] = {"down": f"a{width}", "up": f"b{width}"} | ({"bias": f"c{width}"} if self.some() else {})
        elif verb == "feature" and width == 128:
            self.saes["topk"] = {"dir": "saes/topk"}
            out[verb] = {"sae": "topk", "index": r.randrange(8), r.choice(["to", "by"]): 3}
        elif verb == "python" and at != "logits":
            out[verb] = r.choice(["probes.py:flip", "probes.py:look"])
        elif verb == "rows" and at.startswith("resid") and "[" in at:
            self.reads["source"] = {"at": at, "tokens": "prompt", "sees": "before_edits"}
            self.sources["source"] = ["rows"]
            out |= {"tokens": "prompt", "set": {"rows": "base.source"}}
        else:
            out["zero"] = narrow
        if self.some(0.1) and at.startswith("resid") and "python" not in out and out.get("set", {}).get("rows") is None:
            self.gates["loud"] = {
                "at": "embed",
                "tokens": "all",
                "cosine": self.vector(None),
                "above": 0.1,
                "holds": "row",
            }
            out["when"] = "loud"
        self.edits[name] = out

    def read(self, name: str) -> None:
        r = self.r
        kind = r.choice(
            ["rows", "rows", "mean", "norm", "project", "probe", "lens", "features", "python", "pattern", "**"]
        )
        at, width, _ = self.place(False)
        out: dict[str, Any] = {
            "at": self.at(at),
            "tokens": self.tokens(at == "logits"),
            "sees": r.choice(["before_edits", "after_edits"]),
        }
        if kind == "mean":
            out["mean_over"] = r.choice(["request", "run"])
        elif kind == "norm":
            out["norm"] = True
        elif kind == "project":
            out["project"] = {"vectors": [self.vector(width) for _ in range(r.randrange(1, 4))]}
        elif kind == "probe" and width is not None:
            self.vectors[f"a{width}"] = {"file": f"m{width}.safetensors", "tensor": "a"}
            self.vectors[f"c{width}"] = {"file": f"m{width}.safetensors", "tensor": "c"}
            out["probe"] = {"weight": f"a{width}", "bias": f"c{width}"}
        elif kind == "lens":
            out["at"] = f"resid_post[{self.layers(False)}]"
            out["lens"] = r.choice([{"top": r.randrange(1, 9)}, {"ids": r.sample(TOKENS, 3)}])
        elif kind == "features" and width == 128:
            self.saes["jump"] = {"dir": "saes/jump"}
            out["features"] = {"sae": "jump", **r.choice([{"top": 4}, {"ids": [7, 0]}])}
        elif kind == "python" and at != "logits":
            out["python"] = "probes.py:look"
        elif kind == "pattern":
            out = {"at": f"pattern[{r.randrange(self.of.layers)}]", "tokens": self.tokens()}
            out |= {"heads": [0]} if self.some() else {}
        elif kind == "**":
            out |= {"at": "**", "norm": True}
        elif self.some(0.4):
            out["store"] = r.choice(
                [
                    {"dtype": "float16"},
                    {"shard": "1 MiB"},
                    {"dtype": "float8_e4m3", "scale": "per_row"},
                    {"shard": {"rows": 9}},
                ]
            )
        if kind != "mean" and self.some(0.1):
            out["budget"] = {"tokens": r.choice([1, 100, 10**6])}
        self.reads[name] = out

    def metric(self) -> dict[str, Any]:
        r = self.r
        of: dict[str, Any] = r.choice(
            [{"logprob": r.choice(TOKENS)}, {"rank": r.choice(TOKENS)}, {"logit_diff": r.sample(TOKENS, 2)}]
        )
        return {**of, "tokens": self.tokens(True)}

    # Around it

    def prompts(self) -> dict[str, Any]:
        r = self.r
        if self.chat:
            said = [{"role": "user", "content": r.choice(TEXTS)}]
            return (
                {"chats": [{"id": "hello", "chat": said}]}
                if self.some()
                else {"file": {"file": "prompts.jsonl", "chat": {"column": "chat"}}}
            )
        texts = r.sample(TEXTS, r.randrange(1, 4))
        out: dict[str, Any] = {
            "facts": [
                {"id": f"p{i}", "text": text} | ({"n": i} if self.some(0.2) else {}) for i, text in enumerate(texts)
            ]
        }
        if self.some(0.1):
            out["file"] = {"file": "prompts.jsonl", "id": {"column": "name"}, "text": {"column": "q"}}
        if not any("match" in json.dumps(x) for x in (*self.edits.values(), *self.reads.values())) and self.some(0.1):
            out["raw"] = [{"id": "x", "ids": [5, 6, 7, 8, 9]}]
        return out

    def arms(self, metrics: dict[str, Any]) -> dict[str, Any]:
        r = self.r
        reads = [n for n in self.reads if n not in self.sources]
        out: dict[str, Any] = {"base": {"reads": [*self.sources]} if self.sources else {}}
        main: dict[str, Any] = {
            "edits": [*self.edits],
            "reads": reads,
            "metrics": [*metrics],
            "overrides": [*self.overrides],
        }
        main = {k: v for k, v in main.items() if v or self.some(0.1)}
        if self.some(0.3) and (axes := self.axes()):
            main["sweep"] = axes if self.some(0.8) else [{k: v} for k, v in axes.items()]
        if self.some(0.2):
            main["sampling"] = {"max_tokens": r.choice([1, 8, 300])}
        out["main"] = main
        if self.some(0.2):
            out["Other-arm_2"] = {"reads": reads, "overrides": [*self.overrides]}
        return out

    def axes(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, edit in self.edits.items():
            if self.some(0.4):
                out[f"{name}.on"] = [True, False]
            if "scale" in edit and self.some():
                out[f"{name}.scale.by"] = [0.5, 2]
            if "add" in edit and "vector" in edit["add"] and self.some():
                out[f"{name}.add.scale"] = [0, 4.5, -1]
            if self.some(0.2):
                out[f"{name}.at"] = "each"
        if self.gates and self.some():
            out["loud.above"] = [0.0, 0.25]
        if self.overrides and self.some(0.3):
            out["think.start"] = [0, 2]
        return out

    def engine(self) -> dict[str, Any]:
        r = self.r
        out: dict[str, Any] = {"mode": r.choice(["auto", "auto", "eager", "taps"])} if self.some(0.7) else {}
        if self.some(0.3):
            out["tap_memory"] = r.choice(["4 GiB", "512 MiB", "2.5 GB", 10**9])
        if self.some(0.6):
            names = ["max_model_len", "max_num_seqs", "seed", "max_num_batched_tokens", "block_size"]
            said = {"max_model_len": 512, "max_num_seqs": 8, "seed": 3, "max_num_batched_tokens": 512, "block_size": 16}
            out["vllm"] = {k: said[k] for k in r.sample(names, r.randrange(4))}
            if self.some(0.1):
                arguments = load("vllm-0.32-engine-args.json")["properties"]
                name = r.choice(list(arguments))
                out["vllm"][name] = r.choice([True, False, 1, 0.5, "x", None, {}])
        return out

    def sampling(self) -> dict[str, Any]:
        said = {
            "temperature": 0.5,
            "max_tokens": 8,
            "min_tokens": 1,
            "top_p": 0.9,
            "top_k": 4,
            "seed": 1,
            "stop": ["."],
        }
        said |= {"n": 2, "logprobs": 3, "ignore_eos": True, "presence_penalty": 0.5}
        return {k: said[k] for k in self.r.sample(list(said), self.r.randrange(5))}

"""Locks and finished requests made by hand, as a worker that does everything right would have made them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np

from vtaps.runtime.records import Completion, Finished, ReadRows, Record, Request
from vtaps.runtime.results.expected import expect
from vtaps.spec.rows import to_ranges

WIDTH = 4
SITES = ("resid_post[10]", "resid_post[11]")


def site(layer: int) -> dict[str, Any]:
    return {"module": f"model.layers.{layer}", "layer": layer, "width": WIDTH, "dtype": "float32"}


def edit(verb: str, rows: dict[str, Any], *sites: str) -> dict[str, Any]:
    return {"verb": verb, "sites": list(sites), "columns": None, "tokens": rows, "line": 16}


def read(kind: str, rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = {"sites": list(SITES), "kind": kind, "tokens": rows, "sees": "after_edits", "line": 12}
    return base | {"vectors": [], "top": None, "ids": None} | more


def use(name: str, coefficient: float | None, *sites: str) -> dict[str, Any]:
    return {"edit": name, "sites": list(sites), "coefficient": coefficient, "vector": None}


def arm(**more: Any) -> dict[str, Any]:
    point: dict[str, Any] = {"values": {}, "edits": [], "overrides": []}
    return {"prompts": ["facts"], "reads": [], "edits": [], "metrics": [], "sampling": {}, "points": [point]} | more


def steered(scale: float) -> dict[str, Any]:
    edits = [use("steer", scale, SITES[0]), use("no_h3", None, SITES[1])]
    return {"values": {"steer.add.scale": scale}, "edits": edits, "overrides": []}


LOCK: dict[str, Any] = {
    "lock": 1,
    "spec": {"file": "paris.yaml", "digest": "sha256:" + "1" * 64},
    "block": {"file": "paris.block.py", "digest": "sha256:" + "2" * 64, "structure": "sha256:" + "3" * 64},
    "tree": {"digest": "sha256:" + "4" * 64, "architecture": "LlamaForCausalLM", "vllm": "0.32.0"},
    "model": {"path": "../models/tiny", "dtype": "float32", "revision": None, "tokenizer": None, "config": None},
    "engine": {"mode": "eager", "reason": "asked", "vllm": {}},
    "sites": {SITES[0]: site(10), SITES[1]: site(11)},
    "edits": {
        "steer": edit("add", {"rows": "sampling"}, SITES[0]),
        "no_h3": edit("scale", {"rows": "prompt"}, SITES[1]),
    },
    "reads": {
        "stream": read("rows", {"rows": "sampling"}),
        "lens": read("lens", {"rows": "sampling"}, top=3),
        "average": read("mean", {"rows": "prompt"}),
    },
    "overrides": {"think": {"start": 1, "ids": [77, 78], "text": " Hm.", "line": 19}},
    "metrics": {
        "paris": {"kind": "logprob", "ids": [7], "texts": [" Paris"], "tokens": {"rows": "all", "steps": [[0, 0]]}}
    },
    "vectors": {},
    "prompts": {"facts": {"count": 2, "digest": "sha256:" + "5" * 64, "file": None}},
    "arms": {
        "base": arm(reads=["stream", "lens", "average"], metrics=["paris"]),
        "steered": arm(
            reads=["stream", "lens"],
            edits=["steer", "no_h3"],
            metrics=["paris"],
            points=[steered(s) for s in (0, 4, 8.5)],
        ),
        "forced": arm(points=[{"values": {}, "edits": [], "overrides": [{"override": "think", "start": 1}]}]),
    },
    "outside": {},
}  # fmt: skip

PROMPTS = {"france": (5, 6, 7, 8, 9), "japan": (1, 2, 3)}


def lock(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(LOCK) | changes


def requests(locked: dict[str, Any] = LOCK) -> list[Request]:
    """Every request of the lock over two prompts, in the order of the results."""
    return [
        Request(
            key=f"{prompt}/{name}/{point}",
            arm=name,
            point=point,
            group="facts",
            prompt_id=prompt,
            prompt_token_ids=ids,
            columns={"capital": {"france": "Paris", "japan": "Tokyo"}[prompt], "size": len(ids)},
            prompt_text=f"The capital of {prompt} is",
        )
        for prompt, ids in PROMPTS.items()
        for name, a in locked["arms"].items()
        for point in range(len(a["points"]))
    ]


def value(request: Request, site: str, position: int) -> np.ndarray[Any, Any]:
    """What a read of kind rows holds there: a number that says where it is from."""
    where = len(request.key) * 1000 + SITES.index(site) * 100 + position + 1
    return where + np.arange(WIDTH, dtype=np.float32) / 8


def fields(kind: str, request: Request, site: str, positions: np.ndarray[Any, Any]) -> dict[str, Any]:
    rows = np.stack([value(request, site, int(p)) for p in positions]) if len(positions) else np.empty((0, WIDTH), "f4")
    if kind == "mean":
        return {"mean": rows.mean(axis=0, keepdims=True), "count": np.array([len(positions)], np.int64)}
    if kind == "lens":
        ids = np.tile(np.array([4, 5, 6], np.int64), (len(positions), 1))
        return {"ids": ids, "logits": rows[:, :3], "logsumexp": rows[:, 3]}
    return {"rows": rows}


def complete(
    request: Request,
    tokens: tuple[int, ...] = (21, 22, 23, 24),
    locked: dict[str, Any] = LOCK,
    text: str | None = None,
    index: int = 0,
) -> Completion:
    """A completion whose record holds exactly what is expected of it."""
    wanted = list(tokens)
    for used in locked["arms"][request.arm]["points"][request.point]["overrides"]:
        for i, token in enumerate(locked["overrides"][used["override"]]["ids"]):
            if used["start"] + i < len(wanted):
                wanted[used["start"] + i] = token
    answer = text if text is not None else f" answer to {request.prompt_id} in {request.arm}"
    bare = Completion(index, tuple(wanted), answer, "length", Record(), tuple(-0.5 for _ in wanted))
    expected = expect(locked, request, bare)
    record = Record(
        fired={n: tuple(to_ranges(p)) for n, p in expected.edits.items() if len(p)},
        reads={
            (name, s): ReadRows(p, fields(locked["reads"][name]["kind"], request, s, p), "float32")
            for name, p in expected.reads.items()
            for s in locked["reads"][name]["sites"]
        },
        metrics={n: (p, np.full(len(p), -1.5 - request.point, np.float32)) for n, p in expected.metrics.items()},
        overridden=tuple(s for tokens in expected.overrides.values() for s, _ in tokens),
    )
    return replace(bare, record=record)


def finish(request: Request, locked: dict[str, Any] = LOCK) -> Finished:
    return Finished(request, (complete(request, locked=locked),))

"""Every shard label of a tree against numbers: a model's values on one rank and on each of two, the same weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny
from tests.spec.trees import tree
from vtaps.spec.tree import Value

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
UNWRITTEN = re.compile(r"torch_empty_0|output_0|output_view_0|output_1|\w*unified_attention_with_output_0\.input\[3\]")
"""Ops and an argument in ``Attention.forward`` whose value is memory that the kernel has yet to fill."""


def values(family: str, folder: Path) -> list[dict[Any, Any]]:
    """Of the model on one rank, of the first of two and of the second."""
    import torch

    checkpoint = tiny(family)
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
    outs = []
    for ranks in (1, 2):
        running = []
        for rank in range(ranks):
            outs.append(folder / f"{ranks}.{rank}")
            command = [sys.executable, "-m", "tests.engine.two_ranks", checkpoint, outs[-1], str(rank), str(ranks)]
            running.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2]))
        assert [process.wait(timeout=300) for process in running] == [0] * ranks
    return [torch.load(out) for out in outs]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "falcon", "qwen3moe"])
def test_a_label_says_what_two_ranks_have(family: str, tmp_path: Path) -> None:
    alone, *ranks = values(family, tmp_path)
    seen: Counter[str] = Counter()
    for (path, kind, name, where), value in alone.items():
        module = tree(family).modules[path]
        known = {"input": dict(module.inputs), "op": dict(module.ops), "output": {"": module.output}}[kind].get(name)
        for i in where:
            known = known.items[i] if known is not None and known.kind == "tuple" else None
        if known is None or (module.cls == "Attention" and UNWRITTEN.fullmatch(name)) or not value.numel():
            continue
        label = known.mark or ("sharded" if known.shards else "whole")
        held = [rank.get((path, kind, name, where)) for rank in ranks]
        assert _is(label, known, value, held), f"{path} {kind} {name}{list(where)} is not {label}"
        seen[label] += 1
    assert min(seen[label] for label in ("whole", "sharded", "partial", "alone")) > 0 and seen.total() > 200


def _is(label: str, known: Value, value: Any, held: list[Any]) -> bool:
    if label == "alone":
        return held == [None, None]
    if label == "partial":
        # A bias that the first rank alone adds has no second term.
        terms = [term for term in held if term is not None]
        return _close(sum(terms), value) and (len(terms) == 1 or not any(_close(term, value) for term in terms))
    if any(part is None for part in held):
        return False
    if label == "whole":
        return all(_close(part, value) for part in held)
    ((axis, part),) = known.shards
    size = value.shape[axis] // 2 if part is None else part
    return all(p.shape[axis] == size for p in held) and _cover(value, held, axis)


def _close(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool((one.double() - other.double()).abs().max() <= _near(other))


def _near(value: Any) -> float:
    return TOLERANCE * max(1.0, float(value.double().abs().max()))


def _cover(value: Any, held: list[Any], axis: int) -> bool:
    """Each slice of a part is one of the whole's, and each of the whole's is in a part, whatever their order."""
    import torch

    whole, *parts = (x.double().movedim(axis, 0).reshape(x.shape[axis], -1) for x in (value, *held))
    apart = torch.cdist(whole, torch.cat(parts), p=float("inf"))
    near = _near(value)
    return bool((apart.min(0).values <= near).all() and (apart.min(1).values <= near).all())

"""The committed snapshots, read once."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from vtaps.spec.snapshot import read_tree
from vtaps.spec.tree import ModelTree

DATA = Path(__file__).parent.parent / "data"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gemma", "phi3", "ernie4_5")
OTHERS = ("dbrx", "falcon", "opt", "qwen3moe")
"""Without a table of aliases."""


@lru_cache(maxsize=16)
def tree(family: str) -> ModelTree:
    return read_tree(DATA / "trees" / f"{family}.json")

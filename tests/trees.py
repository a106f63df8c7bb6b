"""The committed trees of the small configurations, where the program looks for its cached ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vtaps.runtime import trees

DATA = Path(__file__).parent / "data"
VLLM = "0.32.0"


def seed_cache(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the tree of every configuration in ``tests/data`` be found in a cache below ``folder``, with vLLM or
    without it."""
    patch.setenv("XDG_CACHE_HOME", os.fspath(folder))
    patch.setattr(trees, "vllm_version", lambda: VLLM)
    for snapshot in (DATA / "trees").glob("*.json"):
        config = json.loads((DATA / "configs" / snapshot.stem / "config.json").read_text(encoding="utf-8"))
        for dtype in ("auto", "float32"):
            cached = trees.cache_file(config, VLLM, dtype)
            cached.parent.mkdir(parents=True, exist_ok=True)
            cached.write_bytes(snapshot.read_bytes())


def model_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the tests' data beside it, and its trees in the cache."""
    seed_cache(tmp_path / "cache", monkeypatch)
    here = tmp_path / "here"
    here.mkdir()
    (here / "data").symlink_to(DATA)
    monkeypatch.chdir(here)
    return here

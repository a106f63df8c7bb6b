"""Faults that users of such tools have reported, as kinds: those that no other test stands for.  docs/guarantees.md has
them all."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden.test_blocks import CASES
from tests.trees import seed_cache
from vtaps.check import check_file
from vtaps.compiling import compile_plan

ROOT = Path(__file__).parents[2]
GUARANTEES = ROOT / "docs" / "guarantees.md"
REPORTS = (
    "speculators 279", "vllm 44485", "vLLM-Hook 14", "vLLM-Hook 6", "vLLM-Hook 11", "nnterp 42", "nnsight 630",
    "nnterp 51", "TransformerLens 1639", "vllm 48124", "TorchSpec 87", "speculators 705", "CAA 3",
    "steering-vectors 60", "EasySteer 19", "nnsight 631", "Language-Specific-Neurons 7", "nnsight 670", "vllm 16607",
    "vllm 44116", "llama.cpp 16908", "kvpress 129", "ControlLM 1", "TransformerLens 1624", "TransformerLens 1005",
    "llama.cpp 20541", "hotwire-vllm 0.1.2", "interp-engine 1.14.2", "nnsight 0.8.1: prefix cache",
    "nnsight 0.8.1: preemption", "nnsight 0.8.1: full graphs",
)  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_has_a_test_that_exists(report: str) -> None:
    """`tests/docs/test_docs.py::test_tests_that_a_page_names_exist` looks the names up."""
    rows = [line.split("|") for line in GUARANTEES.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    [row] = [cells for cells in rows if report in [name.strip() for name in cells[1].split(",")]]
    assert re.search(r"`tests/[\w/]+\.py::\w+`", row[3]), f"{report} names no test"


def keys_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(value, dict):
            yield (*at, key)
        yield from keys_of(inner, (*at, key))


DEFAULTS: dict[str, list[tuple[Any, ...]]] = {
    "gates": [
        ("model", "dtype"),
        ("vectors", "seen", "random", "norm"),
        ("edits", "later", "tokens", "rows"),
        ("edits", "steer", "add", "scale"),  # swept
    ],
    "reads": [("model", "dtype"), ("vectors", "probe", "random", "seed"), ("sampling", "temperature")],
    "verbs": [("model", "dtype")],
}
"""Keys that say what holds without them, or that every arm's sweep gives another value."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_easysteer_19_every_key_of_a_spec_reaches_the_lock(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is left out changes the lock beyond the digest of the spec, or what `check` says: no key is taken and
    ignored."""
    seed_cache(tmp_path / "cache", monkeypatch)
    shutil.copytree(CASES, tmp_path / "blocks")
    file = tmp_path / "blocks" / name / "spec.yaml"
    data = yaml.safe_load(file.read_text())
    for key in {"path", "tokenizer"} & data["model"].keys():
        data["model"][key] = str((CASES / name / data["model"][key]).resolve())

    def compiled(spec: Any) -> tuple[Any, ...]:
        file.write_text(json.dumps(spec))
        result = check_file(file)
        told = {(d.code, d.message) for d in result.diagnostics}
        if result.plan is None:
            return (told,)
        done, _ = compile_plan(result.plan)
        assert done is not None
        return told, {**done.lock, "spec": None, "block": None}

    whole = compiled(data)
    assert len(whole) == 2
    ignored = []
    for path in keys_of(data):
        without = copy.deepcopy(data)
        inner = without
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        if compiled(without) == whole:
            ignored.append(path)
    assert ignored == DEFAULTS[name]

"""``check --expand``: the spec with every default written out is a spec, and means the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtaps.spec.expand import digest, expand, one_line, to_yaml
from vtaps.spec.parse import parse
from vtaps.spec.schema import validate
from vtaps.spec.spec import Spec
from vtaps.spec.yaml import load, loads

ROOT = Path(__file__).parents[2]
SPECS = sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("tests/golden/blocks/*/spec.yaml")])


def parsed(text: str, folder: Path) -> Spec:
    doc, found = loads(text, "spec.yaml", folder)
    assert doc is not None and found == [], [d.message for d in found]
    assert validate(doc) == []
    spec = parse(doc)
    assert spec is not None
    return spec


@pytest.mark.parametrize("path", SPECS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_expanded_spec_means_the_same(path: Path) -> None:
    doc, _ = load(path)
    assert doc is not None
    spec = parse(doc)
    assert spec is not None
    again = parsed(to_yaml(expand(spec)), path.parent)
    assert expand(again) == expand(spec)
    assert digest(expand(again)) == digest(expand(spec))


def test_nothing_is_left_to_a_default() -> None:
    text = """vtaps: 1
model: {path: m}
edits: {a: {at: "resid_post[1]", tokens: all, add: {vector: v}}, b: {at: "z[1]", tokens: all, set: {vector: v}}}
vectors: {v: {random: {}}}
prompts: {p: [{id: a, text: b}]}
arms: {x: {edits: [a, b]}}
"""
    out = expand(parsed(text, Path()))
    assert out["model"] == {"path": "m", "dtype": "auto", "revision": None, "tokenizer": None}
    assert out["engine"] == {"mode": "auto", "tap_memory": "4 GiB", "vllm": {}}
    assert out["edits"]["a"]["add"] == {"vector": "v", "scale": 1.0}
    assert out["edits"]["b"]["set"] == {"vector": "v", "scale": 1.0}
    assert out["vectors"]["v"] == {"random": {"seed": 0, "norm": 1.0}}
    assert out["sampling"] == {"temperature": 0, "max_tokens": 16}
    arm = {"prompts": ["p"], "reads": [], "edits": ["a", "b"], "overrides": [], "metrics": []}
    assert out["arms"]["x"] == arm | {"sampling": {"temperature": 0, "max_tokens": 16}}


@given(st.text(st.characters(blacklist_categories=("Cs",)), max_size=20))
def test_any_text_survives(text: str) -> None:
    """As a value in flow style: a word of YAML 1.1 or 1.2, quotes, line breaks, a leading dash."""
    line = one_line({"text": text})
    assert "\n" not in line
    doc, found = loads(f"a: {line}\n", "a.yaml", Path())
    assert doc is not None and found == []
    assert doc.data == {"a": {"text": text}}

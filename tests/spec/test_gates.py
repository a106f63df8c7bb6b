"""What is known of rows before a run: on which side of the prompt's end they lie, and whether an edit has scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given

from tests.spec.test_rows import FACT_SETS, FORMS
from tests.trees import seed_cache
from vtaps.check import check_file
from vtaps.spec.gates import in_answer, in_prompt
from vtaps.spec.rows import Facts, Rows, compile_rows

DATA = Path(__file__).parents[1] / "data"


@given(rows=FORMS, facts=FACT_SETS)
def test_what_lies_in_the_prompt_or_after_it_lies_there(rows: Rows, facts: Facts) -> None:
    """Whatever the request: a request gate is sound where its rows are of the first kind, the edit's of the second."""
    matches = {text: [(a, min(b, facts.prompt)) for a, b in found] for text, found in facts.matches.items()}
    found = compile_rows(rows, replace(facts, matches=matches)).select(0, np.zeros(facts.prompt + 12, np.int64))
    event(f"prompt {in_prompt(rows)}, answer {in_answer(rows)}, {len(found) > 0}")
    assert not in_prompt(rows) or (found < facts.prompt).all()
    assert not in_answer(rows) or (found >= facts.prompt).all()


SPEC = """vtaps: 1
model: {{path: {data}/configs/llama, dtype: float32, tokenizer: {data}/tokenizer}}
engine: {{mode: {mode}}}
vectors: {{v: {vector}}}
gates: {{g: {{at: "{gate}", tokens: {scored}, cosine: v, above: 0.1, holds: {holds}}}}}
edits: {{e: {{at: "{edit}", tokens: {edited}, scale: {{by: 0.5}}, when: g}}}}
prompts: {{p: [{{id: a, text: "The capital of France is"}}, {{id: b, text: "So is"}}]}}
arms: {{a: {{edits: [e]}}}}
"""
USUAL = {
    "mode": "auto", "vector": "{random: {seed: 1}}", "gate": "resid_post[1]", "scored": "all", "holds": "row",
    "edit": "resid_post[2]", "edited": "all",
}  # fmt: skip
REQUEST = {"holds": "request, reduce: max", "scored": "prompt", "edited": "generated"}


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({}, []),
        ({"edit": "resid_post[1]"}, []),
        ({"edit": "resid_mid[1]"}, ["VT331"]),
        # A gate for requests decides for later forwards.
        ({**REQUEST, "edit": "resid_mid[0]"}, []),
        ({**REQUEST, "scored": "{match: capital, rows: all}", "edited": "{steps: [2..5]}"}, []),
        ({**REQUEST, "scored": "{steps: [0]}"}, []),
        ({**REQUEST, "scored": "{steps: [0, 1]}"}, ["VT332"]),
        ({**REQUEST, "edited": "{steps: [0..2]}"}, ["VT332"]),
        ({**REQUEST, "scored": "generated"}, ["VT332"]),
        # Branches of a layer, which a compiler may run in either order.
        ({"gate": "q[1]", "edit": "z[1]"}, ["VT331"]),
        ({"gate": "q[1]", "edit": "z[1]", "mode": "eager"}, []),
        ({"gate": "q[1]", "edit": "z[2]"}, []),
        ({"scored": "{positions: [3]}", "edited": "prompt"}, ["VT334"]),
        ({"scored": "generated", "edited": "prompt"}, ["VT333"]),
        ({"scored": "sampling", "edited": "generated"}, []),
        ({"scored": "{ids: [3]}", "edited": "all"}, []),
    ],
)
def test_where_a_gate_can_decide(
    change: dict[str, str], codes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_cache(tmp_path, monkeypatch)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(data=DATA, **{**USUAL, **change}), encoding="utf-8")
    result = check_file(spec)
    told = [d.code for d in result.diagnostics]
    # A selector may be wrong on its own besides.
    assert [code for code in told if code != "VT311"] == codes, [d.message for d in result.diagnostics]


def test_a_vector_of_zeros_has_no_angle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    np.save(tmp_path / "zero.npy", np.zeros(128, np.float32))
    spec = tmp_path / "spec.yaml"
    for kind, codes in (("cosine", ["VT323"]), ("project", [])):
        text = SPEC.format(data=DATA, **{**USUAL, "vector": "{file: zero.npy}"}).replace("cosine", kind)
        spec.write_text(text, encoding="utf-8")
        assert [d.code for d in check_file(spec).diagnostics] == codes

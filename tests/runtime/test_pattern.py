"""Attention probabilities against softmax by hand in float64, and what is handed on where something is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vtaps.runtime.errors import EngineError
from vtaps.runtime.pattern import Attention, attended, probabilities, with_patterns
from vtaps.runtime.program import PatternEntry
from vtaps.runtime.records import ReadRows, Record

PLAIN = Attention(heads=4, kv_heads=2, head_size=8, scale=0.3)
RNG = np.random.default_rng(2)
QUERIES, KEYS = (RNG.normal(size=(12, n * 8)).astype(np.float32) * 3 for n in (4, 2))


def by_hand(row: int, head: int, attention: Attention) -> list[float]:
    q = QUERIES[row, 8 * head : 8 * head + 8].astype(np.float64)
    group = head // (attention.heads // attention.kv_heads)
    first = max(0, row - attention.window + 1) if attention.window else 0
    logits = [float(q @ KEYS[j, 8 * group : 8 * group + 8]) * attention.scale for j in range(first, row + 1)]
    if attention.softcap:
        logits = [attention.softcap * np.tanh(x / attention.softcap) for x in logits]
    weights = np.exp(np.array(logits) - max(logits))
    return [0.0] * first + (weights / weights.sum()).tolist()


@pytest.mark.parametrize(
    "attention",
    [
        PLAIN,
        replace(PLAIN, softcap=2.0),
        replace(PLAIN, window=4),
        replace(PLAIN, window=1),
        replace(PLAIN, kv_heads=2, window=12),
    ],
)
def test_every_row_head_and_key(attention: Attention) -> None:
    positions = np.array([0, 3, 4, 11])
    got = probabilities(QUERIES[positions], KEYS, positions, (3, 0, 1), attention)
    assert got.shape == (4, 3, 12) and got.dtype == np.float32
    for n, row in enumerate(positions.tolist()):
        for m, head in enumerate((3, 0, 1)):
            np.testing.assert_allclose(got[n, m, : row + 1], by_hand(row, head, attention), rtol=2e-5, atol=1e-6)
            assert np.isnan(got[n, m, row + 1 :]).all()


def test_logits_far_apart_do_not_overflow() -> None:
    got = probabilities(1e4 * QUERIES, KEYS, np.arange(12), range(4), PLAIN)
    assert np.nansum(got, axis=-1) == pytest.approx(1.0)


def record(dtype: str = "float32", keys: int = 12) -> Record:
    def rows(values: np.ndarray, positions: Any) -> ReadRows:
        if dtype == "bfloat16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        return ReadRows(np.array(positions), {"rows": values}, dtype)

    reads = {
        ("p.q", "rot_q[1]"): rows(QUERIES[[2, 9]], [2, 9]),
        ("p.k", "rot_k[1]"): rows(KEYS[:keys], range(keys)),
        ("other", "rot_q[1]"): rows(QUERIES[:1], [0]),
    }
    return Record(reads=reads)


PATTERNS = {"p": PatternEntry({"pattern[1]": ("attn", "rot_q[1]", "rot_k[1]")}, (0, 2))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pattern_takes_the_place_of_queries_and_keys(dtype: str) -> None:
    found = with_patterns(record(dtype), PATTERNS, {"attn": PLAIN}).reads
    assert found.keys() == {("p", "pattern[1]"), ("other", "rot_q[1]")}
    made = found["p", "pattern[1]"]
    assert made.values["pattern"].shape == (2, 2, 10) and made.values["keys"].tolist() == [3, 10]
    tolerance = 2e-5 if dtype == "float32" else 0.2
    np.testing.assert_allclose(made.values["pattern"][1, 1], by_hand(9, 2, PLAIN), rtol=tolerance, atol=tolerance / 10)


def test_a_row_without_all_of_its_keys_has_no_pattern() -> None:
    found = with_patterns(record(keys=9), PATTERNS, {"attn": PLAIN}).reads["p", "pattern[1]"]
    assert found.positions.tolist() == [2]
    lost = record()
    keys = lost.reads["p.k", "rot_k[1]"]
    holed = replace(keys, positions=keys.positions[1:], values={"rows": KEYS[1:]})
    reads = {**lost.reads, ("p.k", "rot_k[1]"): holed}
    assert ("p", "pattern[1]") not in with_patterns(Record(reads=reads), PATTERNS, {"attn": PLAIN}).reads


def test_what_a_layer_does_that_is_not_known_is_refused() -> None:
    # A rank has half of the heads.
    facts = {"heads": 2, "kv_heads": 1, "head_size": 8, "scale": 0.3, "softcap": 0.0, "window": 0}
    widths = {"rot_q[1]": 32, "rot_k[1]": 16}
    assert attended(PATTERNS, widths, [{"attention": {"attn": facts}}]) == {"attn": PLAIN}
    # Another stage of a pipeline has the layer, or none has.
    assert attended(PATTERNS, widths, [{"attention": {}}, {"attention": {"attn": facts}}]) == {"attn": PLAIN}
    with pytest.raises(EngineError, match="the model has no attn"):
        attended(PATTERNS, widths, [{"attention": {}}, {"attention": {}}])
    with pytest.raises(EngineError, match=r"reads\.p: pattern\[1\] is not known: its attention has sinks") as refused:
        attended(PATTERNS, widths, [{"attention": {"attn": {"refused": "its attention has sinks"}}}])
    assert refused.value.code == "VT346"

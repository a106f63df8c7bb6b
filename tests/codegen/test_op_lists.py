"""The ops of forwards that specs name often, as vLLM has them: ``op_lists/FAMILY.txt``; ``pytest --regen`` writes them.

A name that changes here breaks specs that use it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from vtaps.codegen.source_ops import ops_of
from vtaps.runtime.forward_text import find_texts
from vtaps.spec.source import op_text

LISTS = Path(__file__).parent / "op_lists"
MODELS = "vllm/model_executor/models"
FORWARDS: dict[str, tuple[str, ...]] = {
    "llama": ("llama.LlamaDecoderLayer", "llama.LlamaAttention", "llama.LlamaMLP"),
    "qwen3": ("qwen3.Qwen3DecoderLayer", "qwen3.Qwen3Attention", "qwen2.Qwen2MLP"),
    "gemma3": ("gemma3.Gemma3DecoderLayer", "gemma3.Gemma3Attention", "gemma3.Gemma3MLP"),
    "gpt2": ("gpt2.GPT2Block", "gpt2.GPT2Attention", "gpt2.GPT2MLP"),
    "qwen3_moe": (
        "qwen3_moe.Qwen3MoeDecoderLayer", "qwen3_moe.Qwen3MoeAttention", "qwen3_moe.Qwen3MoeSparseMoeBlock",
        "qwen3_moe.Qwen3MoeMLP",
    ),
    "cohere": (
        "commandr.CohereDecoderLayer", "commandr.CohereAttention", "commandr.CohereAttention._apply_qk_norm",
        "commandr.CohereMLP",
    ),
    "granitemoehybrid": (
        "granitemoehybrid.GraniteMoeHybridModel", "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer",
        "granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer", "granitemoehybrid.GraniteMoeHybridAttention",
        "granitemoe.GraniteMoeMoE", "granitemoeshared.GraniteMoeSharedMLP",
    ),
    "lfm2": (
        "lfm2.Lfm2ShortConvDecoderLayer", "lfm2.Lfm2AttentionDecoderLayer", "lfm2.Lfm2Attention", "lfm2.Lfm2MLP",
    ),
}  # fmt: skip


def listed(family: str) -> str:
    """Each forward under its name, an op a line, indented."""
    lines = []
    for place in FORWARDS[family]:
        file, _, cls = place.partition(".")
        method = "" if "." in cls else ".forward"
        where = f"{MODELS.replace('/', '.')}.{file}.{cls}{method}"
        (text,) = find_texts(where, f"{MODELS}/{file}.py")
        lines += [where, *(f"  {op_text(op)}" for op in ops_of(text))]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("family", FORWARDS)
def test_names_stay(family: str, regen: bool) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    expected = LISTS / f"{family}.txt"
    text = listed(family)
    if regen:
        LISTS.mkdir(exist_ok=True)
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8"), "if this is right: pytest tests/codegen --regen"

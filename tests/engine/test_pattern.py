"""Attention probabilities from a spec's text to the files of its run, against Hugging Face's eager attention.

Gemma 2 has a softcap and every other layer a window of 16; prompts come in pieces beside rows of others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM  # noqa: E402

import vtaps  # noqa: E402
from tests.engine.case import ON_GPU_YAML  # noqa: E402
from tests.models import tiny  # noqa: E402
from vtaps.check import check_file  # noqa: E402
from vtaps.running import run_checked  # noqa: E402

pytestmark = pytest.mark.engine

# On CUDA vLLM's attention multiplies float32 in TF32.
TOLERANCE = 4e-3 if torch.cuda.is_available() else 2e-5
PROMPTS = {"one": [9], "five": [5, 90, 201, 7, 44], "long": [7 + (i * 37) % 250 for i in range(37)]}
SPEC = """vtaps: 1
model: {{path: {model}, dtype: float32}}
engine:
  mode: {mode}
  vllm: {{max_model_len: 128, max_num_seqs: 4, max_num_batched_tokens: 16, kv_cache_memory_bytes: 67108864{on_gpu}}}
edits:
  turn: {{at: "{query}[1]", tokens: all, scale: {{by: -0.5, heads: [1]}}}}
reads:
  every: {{at: "pattern[*]", tokens: all}}
  some:  {{at: ["pattern[-1]", "pattern[0]"], tokens: {{positions: [-1]}}, heads: [0, 3]}}
prompts:
  all: [{prompts}]
arms:
  base:   {{reads: [every, some]}}
  turned: {{reads: [every], edits: [turn]}}
sampling: {{temperature: 0, max_tokens: 4, ignore_eos: true}}
"""


class Twin:
    def __init__(self, family: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            tiny(family), dtype=torch.float32, attn_implementation="eager"
        )
        self.turned = False
        layers = self.model.transformer.h if family == "gpt2" else self.model.model.layers
        attention = layers[1].attn if family == "gpt2" else layers[1].self_attn
        size = self.model.config.hidden_size // 4 if family == "gpt2" else attention.head_dim
        # A rotation keeps factors; a norm before it does not, so queries are scaled behind the norm.
        place = attention.c_attn if family == "gpt2" else getattr(attention, "q_norm", attention.q_proj)

        def turn(_: Any, args: Any, out: Any) -> Any:
            if not self.turned:
                return None
            out = out.clone()
            if out.dim() == 4:
                out[:, :, 1] *= -0.5
            else:
                out[..., size : 2 * size] *= -0.5
            return out

        place.register_forward_hook(turn)

    def attentions(self, ids: list[int], turned: bool) -> list[np.ndarray]:
        """Of each layer ``[rows, heads, keys]``."""
        self.turned = turned
        with torch.no_grad():
            found = self.model(torch.tensor([ids]), output_attentions=True).attentions
        return [a[0].transpose(0, 1).numpy() for a in found]


@pytest.mark.parametrize(
    ("family", "mode"),
    # A start of the taps engine compiles: the family with a window and a softcap has one.
    [("llama", "eager"), ("qwen3", "eager"), ("gemma2", "eager"), ("gemma2", "taps"), ("gpt2", "eager")],
)
def test_patterns_are_those_of_hugging_face(family: str, mode: str, tmp_path: Path) -> None:
    said = ", ".join(f"{{id: {name}, ids: {ids}}}" for name, ids in PROMPTS.items())
    spec = tmp_path / "spec.yaml"
    query = "q" if family == "gpt2" else "rot_q"
    text = SPEC.format(on_gpu=ON_GPU_YAML, model=tiny(family), mode=mode, prompts=said, query=query)
    spec.write_text(text, encoding="utf-8")
    checked = check_file(spec)
    assert checked.plan is not None, [d.message for d in checked.diagnostics]
    assert run_checked(checked, tmp_path / "run").findings == []
    run, twin = vtaps.load(tmp_path / "run"), Twin(family)
    assert run.reads == ("every", "some") and run["every"].fields == ("pattern", "keys")
    assert run["every"].layers == (0, 1, 2, 3) and run["some"].sites == ("pattern[0]", "pattern[3]")
    moved = 0.0
    for row in run.requests.to_pylist():
        ids = [*row["prompt_token_ids"], *row["token_ids"][:-1]]
        want = twin.attentions(ids, row["arm"] == "turned")
        read = run["every"].sel(prompt=row["prompt"], arm=row["arm"])
        values, keys = read.values, read.numpy("keys")
        assert values.shape == (len(ids), 4, 4, 40) and (keys[:, 0] == np.arange(1, len(ids) + 1)).all()
        for layer in range(4):
            for position in range(len(ids)):
                got = values[position, layer]
                assert np.isnan(got[:, position + 1 :]).all()
                expected = want[layer][position, :, : position + 1]
                assert abs(got[:, : position + 1] - expected).max() < TOLERANCE, (row["request"], layer, position)
        if row["arm"] == "turned":
            moved = max(moved, abs(want[1] - twin.attentions(ids, False)[1]).max())
        else:
            some = run["some"].sel(prompt=row["prompt"])
            last = len(row["prompt_token_ids"]) - 1
            assert some.rows["position"].to_pylist() == [last]
            want_some = values[last][[0, 3]][:, [0, 3], : last + 1]
            np.testing.assert_allclose(some.values[0, :, :, : last + 1], want_some, rtol=1e-5, atol=1e-7)
    assert moved > 0.05
    if family == "gemma2":
        # Two layers have a window: what lies before it has no weight at all.
        far = run["every"].sel(prompt="long", arm="base").values[30, :, :, :10]
        assert (far.max((1, 2)) == 0).sum() == 2

"""The router's logits of a model with experts, read and edited from a spec's text, against Hugging Face.

In this family vLLM hands the gate to the experts' runner, which calls it inside of a custom op: no compiler sees it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.engine.case import ON_GPU_YAML  # noqa: E402
from tests.engine.runs import run_spec  # noqa: E402
from tests.models import tiny  # noqa: E402

pytestmark = pytest.mark.engine

TOLERANCE = 4e-3 if torch.cuda.is_available() else 2e-5
PROMPTS = {"five": [5, 90, 201, 7, 44], "long": [7 + (i * 37) % 250 for i in range(21)]}
SPEC = """vtaps: 1
model: {{path: {model}, dtype: float32}}
engine:
  mode: {mode}
  vllm: {{max_model_len: 128, max_num_seqs: 4, max_num_batched_tokens: 16, kv_cache_memory_bytes: 67108864{on_gpu}}}
vectors: {{push: {{file: push.npy}}}}
edits:
  route: {{at: "router_logits[0]", tokens: all, add: {{vector: push, scale: 3.0}}}}
  never: {{at: "router_logits[1]", tokens: {{positions: [2, 3]}}, zero: {{dims: [0..3]}}}}
reads:
  routes: {{at: "router_logits[*]", tokens: all, sees: after_edits}}
  stream: {{at: "resid_post[*]", tokens: all}}
prompts:
  all: [{prompts}]
arms:
  base:   {{reads: [routes, stream]}}
  edited: {{reads: [routes, stream], edits: [route, never]}}
sampling: {{temperature: 0, max_tokens: 3, ignore_eos: true}}
"""
PUSH = np.array([1, -2, 0.5, 0, 2, -1, 0, 1], np.float32)


def reference(ids: list[int], edited: bool) -> dict[str, Any]:
    """``[rows, …]`` by site, with the gates' own routing of the logits that are there."""
    model = AutoModelForCausalLM.from_pretrained(
        tiny("qwen3_moe"), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    found: dict[str, Any] = {}

    def route(number: int, gate: Any, hidden: Any) -> Any:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        if edited and number == 0:
            logits = logits + 3.0 * torch.from_numpy(PUSH)
        if edited and number == 1:
            logits[2:4, :4] = 0.0
        found[f"router_logits[{number}]"] = logits
        chances = torch.softmax(logits, -1)
        values, experts = torch.topk(chances, gate.top_k, -1)
        return logits, values / values.sum(-1, keepdim=True), experts

    for number, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate
        gate.forward = lambda hidden, number=number, gate=gate: route(number, gate, hidden)
        layer.register_forward_hook(
            lambda _, args, out, number=number: found.update(
                {f"resid_post[{number}]": (out[0] if isinstance(out, tuple) else out)[0]}
            )
        )
    with torch.no_grad():
        model(torch.tensor([ids]))
    return found


@pytest.mark.parametrize("mode", ["taps", "eager"])
def test_router_logits_are_read_and_edited(mode: str, tmp_path: Path) -> None:
    np.save(tmp_path / "push.npy", PUSH)
    said = ", ".join(f"{{id: {name}, ids: {ids}}}" for name, ids in PROMPTS.items())
    # In a process of its own: one that has served another model has no group of experts.
    text = SPEC.format(on_gpu=ON_GPU_YAML, model=tiny("qwen3_moe"), mode=mode, prompts=said)
    run = run_spec(text, tmp_path).result
    assert not run.info.get("findings")
    changed = 0
    for row in run.requests.to_pylist():
        ids = [*row["prompt_token_ids"], *row["token_ids"][:-1]]
        want = reference(ids, row["arm"] == "edited")
        plain = reference(ids, False)
        for name in ("routes", "stream"):
            read = run[name].sel(prompt=row["prompt"], arm=row["arm"])
            for site in read.sites:
                got, expected = read.site(site), want[site].numpy()
                assert got.shape == expected.shape
                assert abs(got - expected).max() < TOLERANCE * abs(expected).max(), (row["request"], site)
                changed += abs(expected - plain[site].numpy()).max() > 1e-2 * abs(expected).max()
    # The edits send rows to other experts.
    assert changed >= 6

"""What a checkpoint's own words on quantisation say of rows and of its unembedding."""

from __future__ import annotations

from typing import Any

import pytest

from vtaps.spec.quantised import quantised


def compressed(inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


def scaled(strategy: str, dynamic: bool | str) -> dict[str, Any]:
    return {"num_bits": 8, "strategy": strategy, "dynamic": dynamic}


@pytest.mark.parametrize(
    ("told", "couples"),
    [
        ({"quant_method": "awq", "bits": 4}, None),
        ({"quant_method": "gptq", "bits": 4}, None),
        (compressed(None), None),
        (compressed(scaled("token", True)), None),
        (compressed(scaled("tensor", False)), None),
        (compressed(scaled("group", True)), None),
        (compressed(scaled("tensor", True)), "one scale for all rows of a step"),
        (compressed(scaled("tensor_group", "local")), "scaled by tensor_group"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, None),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "may take one scale for all rows of a step"),
        ({"quant_method": "mxfp4"}, "under mxfp4"),
    ],
)
def test_which_activations_share_a_scale(told: dict[str, Any], couples: str | None) -> None:
    found = quantised({"quantization_config": told})
    assert found is not None
    assert found.couples is None if couples is None else couples in (found.couples or "")
    # Experts are named until a test shows the same of them.
    found = quantised({"quantization_config": told, "num_local_experts": 4})
    assert found is not None and "experts" in (found.couples or "")


def test_a_dense_model_says_nothing_and_one_that_is_rounded_at_load_does() -> None:
    assert quantised({}) is None and quantised({"num_local_experts": 8}) is None
    found = quantised({}, "fp8")
    assert found is not None and found.method == "fp8" and found.couples is not None
    inside = quantised({"text_config": {"quantization_config": {"quant_method": "awq"}}})
    assert inside is not None and inside.method == "awq"


@pytest.mark.parametrize(
    ("told", "head"),
    [
        (compressed(None), False),
        (compressed(None, ignore=["re:.*lm_head"]), False),
        (compressed(None, ignore=[]), True),
        ({"quant_method": "awq", "lm_head": True}, True),
        ({"quant_method": "gptq", "lm_head": False}, False),
        ({"quant_method": "fp8"}, False),
    ],
)
def test_the_head(told: dict[str, Any], head: bool) -> None:
    found = quantised({"quantization_config": told})
    assert found is not None and found.head is head

"""SAEs on disk: what either form of SAELens's configuration says, what is refused, where they were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.saes import write_sae  # noqa: E402
from vtaps.spec.saes import alias_of, folder_at, open_sae  # noqa: E402
from vtaps.spec.tensor_files import VectorError, map_tensors  # noqa: E402


def configured(folder: Path, said: dict[str, Any], architecture: str = "standard") -> None:
    write_sae(folder / "s", architecture, 16, 8)
    (folder / "s/cfg.json").write_text(json.dumps(said), encoding="utf-8")


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, ("standard", None, True, None)),
        # Before version 6 of SAELens everything stood at the top.
        ({"hook_point": "blocks.3.hook_mlp_out", "activation_fn_str": "relu", "normalize_activations": False},
         ("standard", None, True, "blocks.3.hook_mlp_out")),
        ({"hook_name": "blocks.3.hook_resid_pre", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}},
         ("topk", 3, True, "blocks.3.hook_resid_pre")),
        ({"architecture": "topk", "k": 2, "apply_b_dec_to_input": False, "metadata": {"hook_name": "hook_embed"}},
         ("topk", 2, False, "hook_embed")),
        ({"architecture": "standard", "metadata": None, "normalize_activations": "none", "device": "cuda"},
         ("standard", None, True, None)),
    ],
)  # fmt: skip
def test_what_a_configuration_says(said: dict[str, Any], wanted: tuple[Any, ...], tmp_path: Path) -> None:
    configured(tmp_path, said)
    sae = open_sae(tmp_path, "s/")
    assert (sae.architecture, sae.k, sae.centred, sae.hook) == wanted
    assert (sae.d_in, sae.d_sae, sae.dtype) == (16, 8, "F32")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"architecture": "gated"}, "the architecture gated is not served; standard, jumprelu, topk are"),
        ({"architecture": "jumprelu_transcoder"}, "the architecture jumprelu_transcoder is not served"),
        ({"activation_fn": "tanh-relu"}, "the activation function tanh-relu is not served"),
        ({"normalize_activations": True}, "normalize_activations is expected_average_only_in: .*fold_activation_norm"),
        ({"normalize_activations": "constant_norm_rescale"}, "each row was scaled by its own length"),
        ({"normalize_activations": "something"}, "normalize_activations is something: fold"),
        ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor is on"),
        ({"architecture": "topk"}, "says no k"),
        ({"architecture": "topk", "k": 9}, "k is 9, and there are 8 features"),
        ({"architecture": "topk", "k": 2, "rescale_acts_by_decoder_norm": True}, "fold_W_dec_norm"),
        ({"architecture": "jumprelu"}, "has no threshold"),
        ({"architecture": ["topk"], "activation_fn_kwargs": [1]}, r"the architecture \['topk'\] is not served"),
        ({"d_in": 17}, r"says d_in is 17, and W_enc is \[16, 8\]"),
        ([], "cfg.json is no mapping"),
    ],
)
def test_what_is_refused(said: Any, message: str, tmp_path: Path) -> None:
    configured(tmp_path, said)
    with pytest.raises(VectorError, match=message):
        open_sae(tmp_path, "s")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parts_of_a_file_are_what_the_whole_is(dtype: Any, tmp_path: Path) -> None:
    whole = write_sae(tmp_path / "s", "standard", 16, 8, dtype=dtype)
    found = map_tensors(tmp_path / "s/sae_weights.safetensors")
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        assert np.array_equal(tensor.read(()), whole[name].astype(np.float32))
    assert np.array_equal(found["W_enc"].read((slice(None), 3)), whole["W_enc"][:, 3].astype(np.float32))
    assert np.array_equal(found["W_enc"].read((slice(None), [7, 0])), whole["W_enc"][:, [7, 0]].astype(np.float32))


def test_the_places_of_hooks() -> None:
    assert alias_of("blocks.8.hook_resid_post") == "resid_post[8]"
    assert alias_of("blocks.11.attn.hook_z") == "z[11]"
    assert alias_of("hook_embed") == "embed"
    # TransformerLens has it before the weight of the norm, and vLLM after.
    assert alias_of("blocks.8.ln2.hook_normalized") is None
    assert folder_at("saes/{layer}", 3) == "saes/3"
    with pytest.raises(VectorError, match="this location has none"):
        folder_at("saes/{layer}", None)

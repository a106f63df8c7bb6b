"""SAEs on disk: what either form of SAELens's configuration says, what is refused, where they were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.saes import drawn_npz, save_npz, save_sae, write_sae  # noqa: E402
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
        ({"architecture": "matching"}, "the architecture matching is not served; standard, jumprelu, topk, gated are"),
        ({"architecture": "gated"}, "has no b_gate, r_mag, b_mag; it holds W_dec, W_enc, b_dec, b_enc"),
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


def test_a_gated_sae_whose_gains_are_no_numbers(tmp_path: Path) -> None:
    write_sae(tmp_path / "s", "gated", 16, 8)
    assert open_sae(tmp_path, "s").feature(3).threshold >= 0
    tensors = write_sae(tmp_path / "s", "gated", 16, 8)
    tensors["r_mag"][3] = 100.0
    save_sae(tmp_path / "s", tensors, {"architecture": "gated"})
    assert open_sae(tmp_path, "s").feature(2)
    with pytest.raises(VectorError, match=r"exp\(r_mag\) of s has 1 values that are not finite"):
        open_sae(tmp_path, "s").feature(3)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", ">f4"])
def test_an_npz_is_what_numpy_reads_of_it(save: Any, dtype: str, tmp_path: Path) -> None:
    made = drawn_npz(16, 8)
    made["W_dec"] = np.asfortranarray(made["W_dec"])
    save_npz(tmp_path / "params.npz", made, dtype, save)
    sae = open_sae(tmp_path, "params.npz")
    assert (sae.architecture, sae.d_in, sae.d_sae, sae.centred, sae.k) == ("jumprelu", 16, 8, False, None)
    assert sae.dtype == {"2": "F16", "4": "F32", "8": "F64"}[dtype[-1]]
    with np.load(tmp_path / "params.npz") as file:
        for name, tensor in sae.tensors.items():
            assert np.array_equal(tensor.read(()), file[name].astype(np.float32)), name
        assert np.array_equal(sae.decoder(5), file["W_dec"][5].astype(np.float32))
        assert np.array_equal(sae.columns([3, 0]).weight, file["W_enc"][:, [3, 0]].astype(np.float32))
    mapped = isinstance(sae.tensors["W_enc"].bits, np.memmap)
    assert mapped == (save is np.savez)


def test_an_npz_without_a_threshold_is_a_standard_one(tmp_path: Path) -> None:
    made = drawn_npz(16, 8)
    del made["threshold"]
    save_npz(tmp_path / "s.npz", made)
    assert open_sae(tmp_path, "s.npz").architecture == "standard"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W_dec": None}, "it has no W_dec; it holds W_enc, b_enc, b_dec, threshold"),
        ({"scale": np.ones(8)}, "it holds scale, which a jumprelu SAE has no use for"),
        ({"b_enc": np.ones(7)}, r"b_enc has the shape \[7\]; \[8\] is needed beside a W_enc of \[16, 8\]"),
        ({"b_enc": np.ones(8, np.int64)}, '"b_enc" of s.npz is int64, which is not floating point'),
        ({"b_enc": np.array([{}], object)}, '"b_enc" of s.npz is object, which is not floating point'),
    ],
)
def test_an_npz_that_is_none(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = {k: v.astype(np.float32) for k, v in drawn_npz(16, 8).items()} | change
    np.savez(tmp_path / "s.npz", **{name: value for name, value in made.items() if value is not None})
    with pytest.raises(VectorError, match="s.npz: " + message):
        open_sae(tmp_path, "s.npz")


def test_an_npz_that_is_damaged(tmp_path: Path) -> None:
    save_npz(tmp_path / "s.npz", drawn_npz(16, 8))
    whole = (tmp_path / "s.npz").read_bytes()
    for content in (b"", whole[:-30], b"PK\x03\x04" + whole[:50], b"no zip"):
        (tmp_path / "s.npz").write_bytes(content)
        with pytest.raises(VectorError, match=r"s.npz: s.npz is (not a .npz file|empty)"):
            open_sae(tmp_path, "s.npz")
    with pytest.raises(VectorError, match=r"t.npz: there is no file t.npz"):
        open_sae(tmp_path, "t.npz")
    save_npz(tmp_path / "s.npz", drawn_npz(16, 8), save=np.savez_compressed)
    packed = bytearray((tmp_path / "s.npz").read_bytes())
    packed[300:400] = bytes(100)
    (tmp_path / "s.npz").write_bytes(packed)
    with pytest.raises(VectorError, match=r"s.npz"):
        open_sae(tmp_path, "s.npz").columns(slice(None))


def test_the_places_of_hooks() -> None:
    assert alias_of("blocks.8.hook_resid_post") == "resid_post[8]"
    assert alias_of("blocks.11.attn.hook_z") == "z[11]"
    assert alias_of("hook_embed") == "embed"
    # TransformerLens has it before the weight of the norm, and vLLM after.
    assert alias_of("blocks.8.ln2.hook_normalized") is None
    assert folder_at("saes/{layer}", 3) == "saes/3"
    with pytest.raises(VectorError, match="this location has none"):
        folder_at("saes/{layer}", None)

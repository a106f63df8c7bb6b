"""Vectors: what is read, and each way in which a file cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from vtaps.spec.vectors import TensorInfo, VectorError, file_digest, read_vector, tensors_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    save_file({"layer_3": rng.normal(size=8).astype(np.float16)}, tmp_path / "one.safetensors")
    save_file(
        {
            "layer_3": np.arange(8, dtype=np.float32),
            "layer_4": np.arange(8, dtype=np.float64) + 0.5,
            "many": np.arange(24, dtype=np.float32).reshape(3, 8),
            "ints": np.arange(8),
            "cube": np.zeros((2, 2, 2), np.float32),
            "nan": np.array([0, np.nan] * 4, np.float32),
            "huge": np.full(8, 1e300),
        },
        tmp_path / "all.safetensors",
    )
    np.save(tmp_path / "row.npy", np.arange(16, dtype=np.float32).reshape(2, 8))
    np.save(tmp_path / "ints.npy", np.arange(8))
    np.save(tmp_path / "scalar.npy", np.float32(3))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    whole = (tmp_path / "all.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) - 7])
    (tmp_path / "cut.npy").write_bytes((tmp_path / "row.npy").read_bytes()[:-5])
    (tmp_path / "nothing.safetensors").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("not a tensor")
    (tmp_path / "folder.safetensors").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("definition", "layer", "expected"),
    [
        ({"file": "all.safetensors", "tensor": "layer_{layer}"}, 3, np.arange(8)),
        ({"file": "all.safetensors", "tensor": "layer_{layer}"}, 4, np.arange(8) + 0.5),
        ({"file": "all.safetensors", "tensor": "many", "row": 2}, None, np.arange(16, 24)),
        ({"file": "all.safetensors", "tensor": "many", "row": -3}, None, np.arange(8)),
        ({"file": "row.npy", "row": 1}, 0, np.arange(8, 16)),
    ],
)
def test_values(definition: dict[str, Any], layer: int | None, expected: Any, folder: Path) -> None:
    vector = read_vector(definition, folder, layer, 8)
    assert vector.dtype == np.float32
    np.testing.assert_array_equal(vector, expected)


def test_the_only_tensor_needs_no_name(folder: Path) -> None:
    expected = np.random.default_rng(0).normal(size=8).astype(np.float16)
    np.testing.assert_array_equal(read_vector({"file": "one.safetensors"}, folder, None, 8), expected)


def test_bfloat16_is_read_without_torch(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    wanted = torch.linspace(-3, 3, 16).to(torch.bfloat16).reshape(2, 8)
    save_torch({"pad": torch.zeros(5), "v": wanted}, folder / "half.safetensors")
    vector = read_vector({"file": "half.safetensors", "tensor": "v", "row": 1}, folder, None, 8)
    np.testing.assert_array_equal(vector, wanted[1].float().numpy())


@pytest.mark.parametrize(
    ("definition", "kind", "says"),
    [
        ({"file": "gone.safetensors"}, "missing", "there is no file gone.safetensors"),
        ({"file": "folder.safetensors"}, "unreadable", "is a directory"),
        ({"file": "nothing.safetensors"}, "unreadable", "zero bytes"),
        ({"file": "text.safetensors"}, "unreadable", "not a safetensors file"),
        ({"file": "cut.safetensors", "tensor": "nan"}, "unreadable", "not a safetensors file"),
        ({"file": "cut.npy", "row": 0}, "unreadable", "not a .npy file"),
        ({"file": "objects.npy"}, "unreadable", "not a .npy file"),
        ({"file": "all.safetensors"}, "ambiguous", "7 tensors"),
        ({"file": "all.safetensors", "tensor": "many"}, "ambiguous", "3 vectors: say which with `row`"),
        ({"file": "all.safetensors", "tensor": "layer_9"}, "tensor", 'no tensor "layer_9"; it holds cube, huge'),
        ({"file": "all.safetensors", "tensor": "ints"}, "tensor", "I64; a vector is floating point"),
        ({"file": "ints.npy"}, "tensor", "int64; a vector is floating point"),
        ({"file": "all.safetensors", "tensor": "cube"}, "tensor", "has 3 axes"),
        ({"file": "scalar.npy"}, "tensor", "has 0 axes"),
        ({"file": "all.safetensors", "tensor": "many", "row": 3}, "tensor", "there is no row 3"),
        ({"file": "all.safetensors", "tensor": "layer_3", "row": 0}, "tensor", "one vector"),
        ({"file": "row.npy", "tensor": "x", "row": 0}, "tensor", "one unnamed tensor"),
        ({"file": "all.safetensors", "tensor": "layer_{layer}"}, "tensor", "asks for a layer"),
        ({"file": "all.safetensors", "tensor": "nan"}, "nonfinite", "4 values"),
        ({"file": "all.safetensors", "tensor": "huge"}, "nonfinite", "8 values"),
    ],
)
def test_refused(definition: dict[str, Any], kind: str, says: str, folder: Path) -> None:
    with pytest.raises(VectorError) as caught:
        read_vector(definition, folder, None, 8)
    assert caught.value.kind == kind
    assert says in caught.value.message


def test_a_width_names_both_numbers(folder: Path) -> None:
    with pytest.raises(VectorError, match="8 wide; 576 is needed") as caught:
        read_vector({"file": "one.safetensors"}, folder, None, 576)
    assert caught.value.kind == "width"


def test_random_draws_depend_on_seed_and_layer_alone(tmp_path: Path) -> None:
    def vector(seed: int, layer: int | None, width: int = 64) -> Any:
        return read_vector({"random": {"seed": seed, "norm": 3.0}}, tmp_path, layer, width)

    assert abs(float(np.linalg.norm(vector(1, 2).astype(np.float64))) - 3) < 1e-6
    np.testing.assert_array_equal(vector(1, 2), vector(1, 2))
    np.testing.assert_array_equal(vector(1, None), vector(1, 0))
    assert abs(float(vector(1, 2) @ vector(1, 3))) < 5
    assert not np.array_equal(vector(1, 2), vector(2, 2))
    # The draws of one machine are the draws of every machine.
    expected = np.random.Generator(np.random.Philox(key=np.array([1, 2], np.uint64))).standard_normal(64)
    np.testing.assert_allclose(vector(1, 2), 3 * expected / np.linalg.norm(expected), rtol=1e-6)


def test_headers_alone(folder: Path) -> None:
    found = tensors_in(folder / "all.safetensors")
    assert found["many"] == TensorInfo("F32", (3, 8))
    assert found["ints"] == TensorInfo("I64", (8,))
    assert tensors_in(folder / "row.npy") == {"": TensorInfo("float32", (2, 8))}


def test_digest_of_known_bytes(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert file_digest(tmp_path / "abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

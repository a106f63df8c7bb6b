"""Vectors in .pt and GGUF files: what torch and gguf wrote, read without torch; and files that want to run code."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vtaps.spec.tensor_files import TensorInfo, VectorError, array_in, tensors_in
from vtaps.spec.torch_files import TorchFileError, read_torch
from vtaps.spec.vectors import read_vector

torch = pytest.importorskip("torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def save(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shown",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:, 2:5],
        lambda x: x[:, ::2],
        lambda x: x[1:2].expand(4, -1),
        lambda x: torch.nn.Parameter(x),
        lambda x: x[0:0],
    ],
)
def test_a_tensor_is_what_torch_saved(dtype: Any, shown: Any, folder: Path) -> None:
    value = shown(torch.arange(24.0).reshape(4, 6).to(dtype) / 7)
    found = array_in(save(folder / "x.pt", value), None)
    np.testing.assert_array_equal(found.astype(np.float64), value.detach().double().numpy())


def test_names_are_the_way_to_a_tensor(folder: Path) -> None:
    value = {"layers": [torch.zeros(3), {"mlp": torch.ones(2, 2)}], 7: torch.zeros(1, dtype=torch.int64), "note": "x"}
    path = save(folder / "x.pth", value)
    assert tensors_in(path) == {
        "layers.0": TensorInfo("F32", (3,)), "layers.1.mlp": TensorInfo("F32", (2, 2)), "7": TensorInfo("I64", (1,)),
    }  # fmt: skip
    assert array_in(path, "layers.1.mlp").tolist() == [[1, 1], [1, 1]]
    with pytest.raises(VectorError, match="I64; a vector is floating point"):
        array_in(path, "7")
    with pytest.raises(VectorError, match=r'no tensor "layers\.2"'):
        array_in(path, "layers.2")


def test_a_state_dict_and_shared_storage(folder: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    path = save(folder / "x.bin", {**layer.state_dict(), "again": layer.weight})
    for name, tensor in (("weight", layer.weight), ("bias", layer.bias), ("again", layer.weight)):
        np.testing.assert_array_equal(array_in(path, name), tensor.detach().numpy())


def test_a_vector_of_a_layer_scaled(folder: Path) -> None:
    save(folder / "v.pt", {f"layer_{i}": torch.full((4,), float(i)) for i in range(3)})
    definition = {"file": "v.pt", "tensor": "layer_{layer}", "norm": 3.0}
    np.testing.assert_allclose(read_vector(definition, folder, 2, 4), [1.5] * 4)
    with pytest.raises(VectorError, match="is zero: it cannot be scaled") as caught:
        read_vector(definition, folder, 0, 4)
    assert caught.value.kind == "direction"


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("inside", [lambda x: x, lambda x: {"a": torch.zeros(2), "b": x}])
def test_a_file_that_wants_to_run_code_is_refused(inside: Any, folder: Path) -> None:
    save(folder / "x.pt", inside(Runs(folder / "ran")))
    with pytest.raises(VectorError, match="only tensors are read, nothing is run"):
        tensors_in(folder / "x.pt")
    assert not (folder / "ran").exists()


def zipped(path: Path, pickled: bytes, storage: bytes = b"\0" * 16, **how: Any) -> Path:
    with zipfile.ZipFile(path, "w", **how) as file:
        file.writestr("x/data.pkl", pickled)
        file.writestr("x/data/0", storage)
    return path


def tensor_pickle(offset: int, shape: Any, strides: Any) -> bytes:
    """A pickle of one float32 tensor on storage 0."""
    out = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value[1:] if isinstance(value, tuple) and value[:1] == ("stored",) else None

    class Made:
        def __reduce__(self) -> Any:
            stored = ("stored", "storage", torch.FloatStorage, "0", "cpu", 4)
            return torch._utils._rebuild_tensor_v2, (stored, offset, shape, strides, False, None)

    Pickler(out, protocol=2).dump(Made())
    return out.getvalue()


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (5,), (1,)), (3, (2,), (1,)), (0, (2, 2), (9, 1)), (-1, (1,), (1,)), (0, (2,), (-1,))],
)
def test_a_tensor_beyond_its_storage_is_refused(offset: int, shape: Any, strides: Any, folder: Path) -> None:
    path = zipped(folder / "x.pt", tensor_pickle(offset, shape, strides))
    with pytest.raises(VectorError, match="past the end"):
        array_in(path, None)


def test_the_same_file_by_hand_is_read(folder: Path) -> None:
    path = zipped(folder / "x.pt", tensor_pickle(1, (3,), (1,)), np.arange(4, dtype="<f4").tobytes())
    assert array_in(path, None).tolist() == [1, 2, 3]


def test_what_is_no_such_file_says_so(folder: Path) -> None:
    (folder / "text.pt").write_text("no tensor")
    with pytest.raises(VectorError, match="save it again"):
        tensors_in(folder / "text.pt")
    with pytest.raises(TorchFileError, match="did not write"):
        with zipfile.ZipFile(folder / "zip.pt", "w") as file:
            file.writestr("a", "b")
        read_torch(folder / "zip.pt")
    with pytest.raises(TorchFileError, match="does not load"):
        read_torch(zipped(folder / "cut.pt", tensor_pickle(0, (1,), (1,))[:-9]))
    with pytest.raises(TorchFileError, match="compressed"):
        read_torch(zipped(folder / "bomb.pt", tensor_pickle(0, (1,), (1,)), compression=zipfile.ZIP_DEFLATED))


def test_no_torch_is_needed(folder: Path) -> None:
    save(folder / "x.pt", {"v": torch.arange(3.0)})
    code = (
        "import sys; from pathlib import Path; from vtaps.spec.tensor_files import array_in;"
        f"print(array_in(Path({str(folder / 'x.pt')!r}), 'v').tolist(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[0.0,", "1.0,", "2.0]", "False"]


def test_gguf_control_vectors(folder: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(folder / "x.gguf", "controlvector")
    rng = np.random.default_rng(0)
    vectors = {i: rng.normal(size=8).astype(np.float32) for i in (1, 2)}
    for i, vector in vectors.items():
        writer.add_tensor(f"direction.{i}", vector)
    writer.add_tensor("half", rng.normal(size=(2, 8)).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    definition = {"file": "x.gguf", "tensor": "direction.{layer}"}
    for i, vector in vectors.items():
        np.testing.assert_array_equal(read_vector(definition, folder, i, 8), vector)
    assert tensors_in(folder / "x.gguf")["half"] == TensorInfo("F16", (2, 8))
    assert read_vector({"file": "x.gguf", "tensor": "half", "row": 1}, folder, None, 8).shape == (8,)
    (folder / "cut.gguf").write_bytes((folder / "x.gguf").read_bytes()[:20])
    with pytest.raises(VectorError, match="is not a GGUF file"):
        tensors_in(folder / "cut.gguf")

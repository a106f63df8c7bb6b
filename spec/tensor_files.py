"""Tensors in files that people keep vectors in: safetensors, .npy, .pt and GGUF, with numpy and no torch."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from vtaps.spec import digests
from vtaps.spec.gguf_files import GgufFileError, GgufTensor, read_gguf
from vtaps.spec.torch_files import TorchFileError, TorchTensor, read_torch

Kind = Literal[
    "missing", "unreadable", "tensor", "width", "nonfinite", "ambiguous", "direction", "sae", "feature"
]  # fmt: skip

FLOATING = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""safetensors dtypes that a vector may have, with the numpy dtype of their bytes."""


class VectorError(Exception):
    """A vector that cannot be used; ``kind`` says why, ``message`` says it to a person."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor: ``dtype`` in the file's own spelling."""

    dtype: str
    shape: tuple[int, ...]


SUFFIXES = (".safetensors", ".npy", ".pt", ".pth", ".bin", ".gguf")
TORCH = (".pt", ".pth", ".bin")


def tensors_in(path: Path) -> dict[str, TensorInfo]:
    """Name → dtype and shape, from the header alone; what holds one unnamed tensor holds ``""``.

    Raises VectorError (missing, unreadable).
    """
    must_be_file(path)
    if path.suffix == ".npy":
        array = _open_npy(path)
        return {"": TensorInfo(str(array.dtype), array.shape)}
    if path.suffix in TORCH:
        return _infos_of(_torch(path))
    if path.suffix == ".gguf":
        return _infos_of(_gguf(path))
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {n: TensorInfo(s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise VectorError("unreadable", f"{path.name} is not a safetensors file: {error}") from error


def _infos_of(tensors: Mapping[str, TorchTensor | GgufTensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(t.dtype, t.shape) for name, t in tensors.items()}


def _torch(path: Path) -> dict[str, TorchTensor]:
    try:
        return read_torch(path)
    except TorchFileError as error:
        raise VectorError("unreadable", f"{path.name}: {error}") from error


def _gguf(path: Path) -> dict[str, GgufTensor]:
    try:
        return read_gguf(path)
    except GgufFileError as error:
        raise VectorError("unreadable", f"{path.name} is not a GGUF file: {error}") from error


def file_digest(path: Path) -> str:
    """``sha256:…`` of the file's bytes.  Raises VectorError (missing, unreadable)."""
    must_be_file(path)
    try:
        return digests.of_file(path)
    except OSError as error:
        raise VectorError("unreadable", f"{path.name}: {error.strerror or error}") from error


def must_be_file(path: Path) -> None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # a NUL, a lone surrogate
        raise VectorError("missing", f"there is no file {path.name}") from error
    except OSError as error:
        raise VectorError("unreadable", f"{path.name}: {error.strerror or error}") from error
    if stat.S_ISDIR(found.st_mode):
        raise VectorError("unreadable", f"{path.name} is a directory")
    if not stat.S_ISREG(found.st_mode):
        raise VectorError("unreadable", f"{path.name} is not a regular file")
    if found.st_size == 0:
        raise VectorError("unreadable", f"{path.name} is empty (zero bytes)")


def _open_npy(path: Path) -> npt.NDArray[Any]:
    try:
        # np.load would open an archive, or a pickle, by this name too.
        return np.lib.format.open_memmap(path, mode="r")  # type: ignore[no-untyped-call, no-any-return]
    except Exception as error:  # it raises what it likes at a damaged header
        raise VectorError("unreadable", f"{path.name} is not a .npy file: {error}") from error


def array_in(path: Path, name: str | None) -> npt.NDArray[Any]:
    """The named tensor as floating numpy values (bfloat16 widened to float32).  Raises VectorError."""
    must_be_file(path)
    if path.suffix == ".npy":
        if name is not None:
            raise VectorError("tensor", f"{path.name} is a .npy file, which holds one unnamed tensor")
        array = _open_npy(path)
        if array.dtype.kind != "f":
            raise VectorError("tensor", f"{path.name} holds {array.dtype}; a vector is floating point")
        return array
    # What such a file holds is found by reading all of its header: once.
    tensors: Mapping[str, TorchTensor | GgufTensor] | None = None
    if path.suffix in TORCH:
        tensors = _torch(path)
    elif path.suffix == ".gguf":
        tensors = _gguf(path)
    found = tensors_in(path) if tensors is None else _infos_of(tensors)
    if name is None:
        if len(found) != 1:
            raise VectorError(
                "ambiguous", f"{path.name} holds {len(found)} tensors ({_some(found)}): say which with `tensor`"
            )
        name = next(iter(found))
    if name not in found:
        raise VectorError("tensor", f'{path.name} has no tensor "{name}"; it holds {_some(found)}')
    info = found[name]
    if info.dtype not in FLOATING:
        raise VectorError("tensor", f"{spelled(path, name)} is {info.dtype}; a vector is floating point")
    if tensors is not None:
        try:
            array = tensors[name].read(path)
        except (TorchFileError, GgufFileError) as error:
            raise VectorError("unreadable", f"{path.name}: {error}") from error
        return _widened(array) if info.dtype == "BF16" else array
    if info.dtype == "BF16":
        return _widened(_raw(path, name).reshape(info.shape))
    with safe_open(path, framework="np") as file:
        return file.get_tensor(name)  # type: ignore[no-any-return]


def _widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _raw(path: Path, name: str) -> npt.NDArray[np.uint16]:
    """The bits of a bfloat16 tensor: numpy has no such dtype, so safetensors cannot hand it over."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + start)
        return np.frombuffer(file.read(stop - start), "<u2")


@dataclass(frozen=True)
class Mapped:
    """A floating tensor of a file, of which parts are read: ``bits[part]`` are their numbers (of BF16 the bits);
    ``dtype`` in safetensors' spelling."""

    dtype: str
    shape: tuple[int, ...]
    bits: Any

    def read(self, part: tuple[Any, ...]) -> npt.NDArray[np.float32]:
        """The numbers at ``part`` (an index of numpy's; ``()``: all), float32 and contiguous."""
        found = np.ascontiguousarray(self.bits[part])
        with np.errstate(over="ignore"):
            return _widened(found) if self.dtype == "BF16" else found.astype(np.float32)


def map_tensors(path: Path) -> dict[str, Mapped]:
    """The tensors of a safetensors file, mapped into memory: what is not read is not loaded.

    Raises VectorError (missing, unreadable, tensor).
    """
    infos = tensors_in(path)
    strange = sorted(name for name, info in infos.items() if info.dtype not in FLOATING)
    if strange:
        name = strange[0]
        raise VectorError("tensor", f"{spelled(path, name)} is {infos[name].dtype}, which is not floating point")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    out = {}
    for name, info in infos.items():
        kind = np.dtype(FLOATING[info.dtype]).newbyteorder("<")
        start = 8 + size + header[name]["data_offsets"][0]
        # An empty tensor cannot be mapped.
        empty = 0 in info.shape
        bits = np.empty(info.shape, kind) if empty else np.memmap(path, kind, "r", start, info.shape)
        out[name] = Mapped(info.dtype, info.shape, bits)
    return out


def spelled(path: Path, name: str | None) -> str:
    return path.name if name is None else f'"{name}" of {path.name}'


def _some(found: Mapping[str, TensorInfo]) -> str:
    names = sorted(found)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "no tensor"

"""Vectors from files and from random draws, with numpy alone: ``check`` and the workers read them the same way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from vtaps.spec import digests

Floats = npt.NDArray[np.float32]
Kind = Literal["missing", "unreadable", "tensor", "width", "nonfinite", "ambiguous", "direction"]

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


def read_vector(definition: Mapping[str, Any], folder: Path, layer: int | None, width: int) -> Floats:
    """The vector ``definition`` names at a site of ``layer``: float32 ``[width]``, finite.

    ``definition`` is ``{"file", "tensor"?, "row"?}`` (``file`` relative to ``folder``) or
    ``{"random": {"seed", "norm"}}``.

    Raises VectorError.
    """
    if definition.get("random") is not None:
        random = definition["random"]
        return draw(int(random.get("seed", 0)), float(random.get("norm", 1.0)), layer, width)
    path = folder / str(definition["file"])
    name = tensor_name(definition, layer)
    with np.errstate(over="ignore"):
        vector = _row(_array(path, name), definition.get("row"), path, name).astype(np.float32)
    if vector.shape[0] != width:
        raise VectorError("width", f"{_spelled(path, name)} is {vector.shape[0]} wide; {width} is needed here")
    bad = int(np.count_nonzero(~np.isfinite(vector)))
    if bad:
        raise VectorError("nonfinite", f"{_spelled(path, name)} holds {bad} values that are not finite")
    return vector


def draw(seed: int, norm: float, layer: int | None, width: int) -> Floats:
    """Normal draws scaled to an L2 norm of ``norm``, float32 ``[width]``.

    The generator is Philox keyed by (seed, layer or 0): a site's vector does not depend on which other sites
    there are.
    """
    key = np.array([seed % 2**64, layer or 0], dtype=np.uint64)
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(width)
    length = float(np.linalg.norm(values))
    vector = (values * (norm / length) if length else values).astype(np.float32)
    if not np.all(np.isfinite(vector)):
        raise VectorError("nonfinite", f"a random vector of norm {norm} is not finite in float32")
    return vector


DEPENDENT = 1e-6
"""A direction is no new one where less than this share of its length is left beside the ones before it."""


def directions(vectors: Sequence[Floats], names: Sequence[str], columns: Sequence[tuple[int, int]] | None) -> Floats:
    """Orthonormal directions that span ``vectors`` (float32 ``[width]`` each) in the half-open ``columns`` (None: all),
    in order: float32 ``[len(vectors), width]``, 0 in other columns.  Worked out in float64.

    Raises VectorError (direction) for a vector that is zero there, or a sum of the ones before it.
    """
    found: list[npt.NDArray[np.float64]] = []
    for vector, name in zip(vectors, names, strict=True):
        own = np.zeros(len(vector)) if columns is not None else vector.astype(np.float64)
        for a, b in columns or ():
            own[a:b] = vector[a:b]
        length = float(np.linalg.norm(own))
        if not length:
            where = "in the columns of this edit" if columns is not None else "here"
            raise VectorError("direction", f"{name} is zero {where}: it has no direction")
        own /= length
        for _ in range(2):  # once more, for what rounding left
            for other in found:
                own -= (own @ other) * other
        if float(np.linalg.norm(own)) < DEPENDENT:
            raise VectorError("direction", f"{name} lies in what the vectors before it span; leave it out")
        found.append(own / np.linalg.norm(own))
    return np.stack(found).astype(np.float32)


def tensor_name(definition: Mapping[str, Any], layer: int | None) -> str | None:
    """The tensor's name at ``layer``: ``{layer}`` replaced.  Raises VectorError where there is no layer."""
    name = definition.get("tensor")
    if name is None or "{layer}" not in name:
        return name
    if layer is None:
        raise VectorError("tensor", f'tensor "{name}" asks for a layer and this location has none')
    return str(name).replace("{layer}", str(layer))


def tensors_in(path: Path) -> dict[str, TensorInfo]:
    """Name → dtype and shape, from the header alone; a ``.npy`` file holds one tensor named ``""``.

    Raises VectorError (missing, unreadable).
    """
    _must_be_file(path)
    if path.suffix == ".npy":
        array = _open_npy(path)
        return {"": TensorInfo(str(array.dtype), array.shape)}
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {n: TensorInfo(s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise VectorError("unreadable", f"{path.name} is not a safetensors file: {error}") from error


def file_digest(path: Path) -> str:
    """``sha256:…`` of the file's bytes.  Raises VectorError (missing, unreadable)."""
    _must_be_file(path)
    try:
        return digests.of_file(path)
    except OSError as error:
        raise VectorError("unreadable", f"{path.name}: {error.strerror or error}") from error


def _must_be_file(path: Path) -> None:
    if path.is_dir():
        raise VectorError("unreadable", f"{path.name} is a directory")
    if path.exists() and not path.is_file():
        raise VectorError("unreadable", f"{path.name} is not a regular file")
    if not path.exists():
        raise VectorError("missing", f"there is no file {path.name}")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise VectorError("unreadable", f"{path.name}: {error.strerror or error}") from error
    if size == 0:
        raise VectorError("unreadable", f"{path.name} is empty (zero bytes)")


def _open_npy(path: Path) -> npt.NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, EOFError) as error:
        raise VectorError("unreadable", f"{path.name} is not a .npy file: {error}") from error


def _array(path: Path, name: str | None) -> npt.NDArray[Any]:
    """The named tensor as floating numpy values (bfloat16 widened to float32)."""
    found = tensors_in(path)
    if path.suffix == ".npy":
        if name is not None:
            raise VectorError("tensor", f"{path.name} is a .npy file, which holds one unnamed tensor")
        array = _open_npy(path)
        if array.dtype.kind != "f":
            raise VectorError("tensor", f"{path.name} holds {array.dtype}; a vector is floating point")
        return array
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
        raise VectorError("tensor", f"{_spelled(path, name)} is {info.dtype}; a vector is floating point")
    if info.dtype != "BF16":
        with safe_open(path, framework="np") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]
    bits = _raw(path, name).reshape(info.shape)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _raw(path: Path, name: str) -> npt.NDArray[np.uint16]:
    """The bits of a bfloat16 tensor: numpy has no such dtype, so safetensors cannot hand it over."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + start)
        return np.frombuffer(file.read(stop - start), "<u2")


def _row(array: npt.NDArray[Any], row: int | None, path: Path, name: str | None) -> npt.NDArray[Any]:
    """One vector ``[width]`` out of ``[width]`` or, with ``row``, ``[n, width]``."""
    where = _spelled(path, name)
    if array.ndim == 1 and row is None:
        return array
    if array.ndim == 2 and row is not None:
        if not -array.shape[0] <= row < array.shape[0]:
            raise VectorError("tensor", f"{where} has rows 0 to {array.shape[0] - 1}; there is no row {row}")
        return array[row]  # type: ignore[no-any-return]
    if array.ndim == 2:
        raise VectorError("ambiguous", f"{where} is {array.shape[0]} vectors: say which with `row`")
    if array.ndim == 1:
        raise VectorError("tensor", f"{where} is one vector; `row` is for tensors of two axes")
    raise VectorError("tensor", f"{where} has {array.ndim} axes; a vector has one, or two with `row`")


def _spelled(path: Path, name: str | None) -> str:
    return path.name if name is None else f'"{name}" of {path.name}'


def _some(found: Mapping[str, TensorInfo]) -> str:
    names = sorted(found)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "no tensor"

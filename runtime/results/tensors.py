"""safetensors files written row by row and read as memory maps, without holding them.

The layout is the one of https://github.com/huggingface/safetensors: eight bytes of header length, a JSON header,
then the tensors without gaps.  bfloat16 is its bits in uint16 here, float8_e4m3 its bits in uint8; NumPy has no such
types.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DTYPES: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?", "F8_E4M3": "<u1",
}  # fmt: skip
ORDER = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL")
"""In which order the safetensors library puts tensors into a file; those of one type go by name."""
PIECE = 32 << 20
"""Bytes that are copied at once."""
BITS = {("bfloat16", np.dtype(np.uint16)): "BF16", ("float8_e4m3", np.dtype(np.uint8)): "F8_E4M3"}
_NAMES = {np.dtype(v): k for k, v in DTYPES.items() if k not in BITS.values()}


def tensor_dtype(array: npt.NDArray[Any], said: str) -> str:
    """The safetensors name of an array's type; ``said`` is ``ReadRows.dtype``."""
    return BITS.get((said, array.dtype)) or _NAMES[array.dtype]


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies in a file; ``offset`` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(DTYPES[self.dtype]).itemsize


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a file.  Raises ValueError where it is not a whole safetensors file."""
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError("its header is cut off")
            header = json.loads(f.read(length))
            metadata = header.pop("__metadata__", {})
            tensors = {
                name: Tensor(t["dtype"], tuple(t["shape"]), 8 + length + t["data_offsets"][0])
                for name, t in header.items()
            }
            end = max((8 + length + t["data_offsets"][1] for t in header.values()), default=8 + length)
            if end != size:
                raise ValueError(f"it has {size} bytes where its header says {end}")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path} is not a whole safetensors file: {e}") from e
    return metadata, tensors


def memory_map(path: Path, tensor: Tensor) -> npt.NDArray[Any]:
    """A read-only view of one tensor; bfloat16 and float8 stay bits."""
    dtype = np.dtype(DTYPES[tensor.dtype])
    if not tensor.nbytes:
        return np.empty(tensor.shape, dtype)
    return np.memmap(path, dtype, "r", tensor.offset, tensor.shape)


def view(whole: npt.NDArray[np.uint8], tensor: Tensor) -> npt.NDArray[Any]:
    """One tensor in the bytes of a file; bfloat16 stays bits."""
    flat = whole[tensor.offset : tensor.offset + tensor.nbytes]
    return flat.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def as_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _e4m3() -> npt.NDArray[np.float32]:
    """The number of each of the 256 bit patterns of float8_e4m3: sign, four bits of exponent with bias 7, three of
    mantissa, no infinity (https://arxiv.org/abs/2209.05433)."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(bits & 0x7F) == 0x7F] = np.nan
    return np.where(bits < 128, size, -size).astype(np.float32)


E4M3 = _e4m3()


def decoded(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """An array of the safetensors type ``dtype`` as numbers: bits become float32, exactly; others are themselves."""
    if dtype == "BF16":
        return as_float32(values)
    return E4M3[values] if dtype == "F8_E4M3" else values


def write_tensors(fd: int, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write the bytes of ``safetensors.numpy.save(arrays, metadata)`` without holding them; every array has an axis.

    Arrays with equally many rows go side by side, some rows at a time: where they are parts of one memory, as the sites
    of a read are, it is read once and in its own order.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at: dict[str, int] = {}
    end = 0
    side_by_side: dict[int, list[str]] = {}
    for name in sorted(arrays, key=lambda n: (ORDER.index(_NAMES[arrays[n].dtype]), n)):
        array = arrays[name]
        at[name], stop = end, end + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, stop],
        }
        end = stop
        if array.size:
            side_by_side.setdefault(len(array), []).append(name)
    data = _write_header(fd, header)
    for rows, names in side_by_side.items():
        step = max(1, rows * PIECE // sum(arrays[n].nbytes for n in names))
        for first in range(0, rows, step):
            for name in names:
                piece = arrays[name][first : first + step]
                _write(fd, _bytes(piece), data + at[name] + first * (arrays[name].nbytes // rows))


class RowWriter:
    """A safetensors file of known size whose rows arrive piece by piece.

    ``fields`` maps a name to (safetensors dtype, shape of one row); every field has ``rows`` rows.
    """

    def __init__(self, path: Path, fields: Mapping[str, tuple[str, tuple[int, ...]]], rows: int) -> None:
        header: dict[str, Any] = {}
        self._at: dict[str, tuple[int, int]] = {}
        end = 0
        # Widest first keeps every tensor aligned to its item size, as the safetensors library does.
        for name in sorted(fields, key=lambda n: (-np.dtype(DTYPES[fields[n][0]]).itemsize, n)):
            dtype, shape = fields[name]
            stride = Tensor(dtype, shape, 0).nbytes
            header[name] = {
                "dtype": dtype,
                "shape": [rows, *shape],
                "data_offsets": [end, end + rows * stride],
            }
            self._at[name] = (end, stride)
            end += rows * stride
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._data = _write_header(self._fd, header)
            os.ftruncate(self._fd, self._data + end)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, field: str, row: int, array: npt.NDArray[Any]) -> None:
        """Put ``array`` ``[k, …]`` at rows ``row … row+k−1`` of ``field``."""
        start, stride = self._at[field]
        if array.size:
            _write(self._fd, _bytes(array), self._data + start + row * stride)

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)


def _write_header(fd: int, header: Mapping[str, Any]) -> int:
    """Returns where the tensors start."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    _write(fd, len(text).to_bytes(8, "little") + text, 0)
    return 8 + len(text)


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done

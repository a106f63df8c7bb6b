"""Tensors in GGUF files, by the format's own words: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

Every count is held against what is left of the file before anything is read by it: a header may claim anything.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TYPES = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
"""Those that are numbers; every other is a quantization."""
NUMBERS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a metadata value of a fixed size, by its type."""
STRING, ARRAY, UINT32 = 8, 9, 4
DEEPEST = 4


class GgufFileError(Exception):
    """The file cannot be read; the message says why."""


@dataclass(frozen=True)
class GgufTensor:
    """``shape`` with the rows first, as numpy has it; ``start``: its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, path: Path) -> npt.NDArray[Any]:
        """The numbers, bfloat16 as uint16.  Raises GgufFileError."""
        kind = np.dtype(NUMBERS[self.dtype])
        count = math.prod(self.shape)
        try:
            if self.start + count * kind.itemsize > path.stat().st_size:
                raise GgufFileError("a tensor reaches past the end of the file")
            return np.fromfile(path, kind, count, offset=self.start).reshape(self.shape)
        except (OSError, ValueError) as error:
            raise GgufFileError(str(error)) from error


def read_gguf(path: Path) -> dict[str, GgufTensor]:
    """Name → tensor, from the header alone.  Raises GgufFileError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(content).tensors()
    except (OSError, ValueError) as error:
        raise GgufFileError(str(error)) from error


class _Header:
    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at, self._size = content, 0, len(content)

    def tensors(self) -> dict[str, GgufTensor]:
        if self._content[:4] != b"GGUF":
            raise GgufFileError("it does not start with GGUF")
        self._skip(4)
        version = self._number("<I")
        if version not in (2, 3):
            other = "big-endian" if version & 0xFFFF == 0 else f"of version {version}; 2 and 3 are read"
            raise GgufFileError(f"it is {other}")
        tensors, values = self._number("<Q"), self._number("<Q")
        alignment = 32
        self._holds(values, 12)
        for _ in range(values):
            key, kind = self._text(), self._number("<I")
            if key == "general.alignment" and kind == UINT32:
                alignment = self._number("<I")
            else:
                self._value(kind, 0)
        self._holds(tensors, 24)
        listed = {}
        for _ in range(tensors):
            name, axes = self._text(), self._number("<I")
            self._holds(axes, 8)
            shape = tuple(self._number("<Q") for _ in range(axes))[::-1]
            kind = self._number("<I")
            listed[name] = GgufTensor(TYPES.get(kind, f"quantized (type {kind})"), shape, self._number("<Q"))
        if alignment < 1:
            raise GgufFileError(f"its alignment is {alignment}")
        data = -(-self._at // alignment) * alignment
        return {name: GgufTensor(t.dtype, t.shape, data + t.start) for name, t in listed.items()}

    def _value(self, kind: int, depth: int) -> None:
        if kind in SIZES:
            self._skip(SIZES[kind])
        elif kind == STRING:
            self._text()
        elif kind == ARRAY and depth < DEEPEST:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in SIZES:
                self._skip(SIZES[inner] * count)
            else:
                self._holds(count, 8)
                for _ in range(count):
                    self._value(inner, depth + 1)
        else:
            raise GgufFileError(f"its metadata holds a value of type {kind}")

    def _text(self) -> str:
        size = self._number("<Q")
        start = self._at
        self._skip(size)
        return self._content[start : self._at].decode("utf-8", "replace")

    def _number(self, form: str) -> int:
        start = self._at
        self._skip(struct.calcsize(form))
        return int(struct.unpack(form, self._content[start : self._at])[0])

    def _holds(self, count: int, least: int) -> None:
        """Whether what is left has room for ``count`` things of at least ``least`` bytes."""
        if count * least > self._size - self._at:
            raise GgufFileError("its header is cut off")

    def _skip(self, size: int) -> None:
        self._holds(1, size)
        self._at += size

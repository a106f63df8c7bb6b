"""Tensors in the zip files that ``torch.save`` writes, without torch and without running what a pickle asks for.

The pickle in such a file says how to put tensors together from numbered storages.  This reader knows those few calls
and refuses every other name, as ``torch.load(weights_only=True)`` does.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

LARGEST_PICKLE = 4 << 20
LARGEST_TENSOR = 1 << 30
"""Bytes of one tensor: an expanded one is larger than what is stored of it."""
DEEPEST = 8
LONGEST_NAME = 1000
MOST = 100_000
"""Things in the lists and dictionaries of a file, each counted as often as it is reached."""

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
NUMBERS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U8": "<u1", "BOOL": "<u1",
}  # fmt: skip
"""numpy's dtype of a storage's bytes; bfloat16 as its bits."""


class TorchFileError(Exception):
    """The file cannot be read this way; the message says why."""


@dataclass(frozen=True)
class TorchTensor:
    """Where one tensor lies: in ``member`` of the zip file, from element ``offset`` in steps of ``strides``."""

    member: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def read(self, path: Path) -> npt.NDArray[Any]:
        """The numbers, bfloat16 as uint16.  Raises TorchFileError."""
        kind = np.dtype(NUMBERS[self.dtype])
        try:
            with zipfile.ZipFile(path) as file:
                _stored(file, self.member)
                raw = np.frombuffer(file.read(self.member), kind)
        except TorchFileError:
            raise
        except Exception as error:  # a zip file of nonsense, or an encrypted one
            raise TorchFileError(f"{self.member} cannot be read: {error}") from error
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if 0 in self.shape:
            return np.empty(self.shape, kind)
        if self.offset < 0 or min(self.strides, default=0) < 0 or last >= len(raw):
            raise TorchFileError(f"a tensor reaches past the end of {self.member}")
        if math.prod(self.shape) * kind.itemsize > LARGEST_TENSOR:
            raise TorchFileError(f"a tensor of the shape {list(self.shape)} is larger than {LARGEST_TENSOR >> 30} GiB")
        strides = tuple(s * kind.itemsize for s in self.strides)
        return np.lib.stride_tricks.as_strided(raw[self.offset :], self.shape, strides, writeable=False).copy()


@dataclass(frozen=True)
class _Storage:
    member: str
    dtype: str


def read_torch(path: Path) -> dict[str, TorchTensor]:
    """Name → tensor.  A tensor by itself has the name ``""``; those in nested dictionaries and lists have the names of
    the way there, joined by dots.

    Raises TorchFileError for another format and for what is no tensor.
    """
    try:
        with zipfile.ZipFile(path) as file:
            members = [n for n in file.namelist() if n == "data.pkl" or n.endswith("/data.pkl")]
            if len(members) != 1:
                raise TorchFileError("it is a zip file that torch.save did not write")
            _stored(file, members[0])
            if file.getinfo(members[0]).file_size > LARGEST_PICKLE:
                raise TorchFileError(f"its pickle is larger than {LARGEST_PICKLE >> 20} MiB")
            root = members[0].removesuffix("data.pkl")
            if f"{root}byteorder" in file.namelist():
                _stored(file, f"{root}byteorder")
                if file.read(f"{root}byteorder") != b"little":
                    raise TorchFileError("its numbers are big-endian")
            loaded = _Unpickler(io.BytesIO(file.read(members[0])), root).load()
    except zipfile.BadZipFile as error:
        raise TorchFileError("it is no zip file: torch.save of 1.6 and later writes one; save it again") from error
    except TorchFileError:
        raise
    except Exception as error:  # a pickle of nonsense can raise anything
        raise TorchFileError(f"its pickle does not load: {type(error).__name__}: {error}") from error
    found: dict[str, TorchTensor] = {}
    for number, (name, tensor) in enumerate(_walk(loaded, "", 0)):
        if number >= MOST:
            raise TorchFileError(f"it holds more than {MOST:,} things")
        if tensor is not None:
            found[name] = tensor
    return found


def _stored(file: zipfile.ZipFile, member: str) -> None:
    """torch compresses nothing; what is compressed may be far larger than the file."""
    if file.getinfo(member).compress_type != zipfile.ZIP_STORED:
        raise TorchFileError(f"{member} is compressed, which torch.save does not do")


def _walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, TorchTensor | None]]:
    """Everything there is, with its name, and the tensor that it is."""
    yield name, value if isinstance(value, TorchTensor) else None
    if isinstance(value, (Mapping, list, tuple)) and depth < DEEPEST:
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            below = str(key)[:LONGEST_NAME]
            yield from _walk(item, f"{name}.{below}" if name else below, depth + 1)


class _Unpickler(pickle._Unpickler):
    """The one in Python: that in C makes room for as many things as a file says that there are, and lets it set the
    attributes of what it has found."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = pickle._Unpickler.dispatch.copy()

    def load_build(self) -> None:
        """What torch says of an OrderedDict beside its items."""
        self.stack.pop()

    dispatch[pickle.BUILD[0]] = load_build

    def __init__(self, data: io.BytesIO, root: str) -> None:
        super().__init__(data, encoding="utf-8")
        self._root = root

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _parameter
        if (module, name) == ("torch", "Size"):
            return tuple
        raise TorchFileError(f"it holds {module}.{name}: only tensors are read, nothing is run")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, *_ = pid
        if kind != "storage" or storage not in NUMBERS:
            raise TorchFileError(f"it holds a {kind} of {storage}")
        return _Storage(f"{self._root}data/{key}", storage)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TorchTensor:
    if not isinstance(storage, _Storage):
        raise TorchFileError("a tensor has no storage")
    sizes, steps = tuple(int(n) for n in shape), tuple(int(n) for n in strides)
    if len(sizes) != len(steps) or min(sizes, default=0) < 0:
        raise TorchFileError("a tensor's shape and strides do not fit")
    if math.prod(sizes) > 2**62 or max((*map(abs, steps), abs(int(offset))), default=0) > 2**62:
        raise TorchFileError(f"no tensor has the shape {list(sizes)}"[:200])
    return TorchTensor(storage.member, storage.dtype, sizes, steps, int(offset))


def _parameter(data: Any, *_: Any) -> Any:
    return data

"""The tensors of a .npz file, of which parts are read: those that were stored as they are stay in the file."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from vtaps.spec.tensor_files import Mapped, VectorError, must_be_file

_format: Any = np.lib.format  # its functions have no types
_SPELLED = {8: "F64", 4: "F32", 2: "F16"}
"""Bytes of a floating dtype → safetensors' spelling."""


@dataclass(frozen=True)
class Packed:
    """The numbers of a compressed member: read as a whole, once, when some of them are asked for."""

    path: Path
    name: str

    @cached_property
    def whole(self) -> npt.NDArray[Any]:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                found: npt.NDArray[Any] = file[self.name]
        except Exception as error:  # zlib, zipfile and numpy raise what they like at a damaged member
            raise VectorError("unreadable", f'"{self.name}" of {self.path.name} cannot be read: {error}') from error
        return found

    def __getitem__(self, part: tuple[Any, ...]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self.whole[part]
        return found


def map_npz(path: Path) -> dict[str, Mapped]:
    """The tensors of ``path`` by name.  Raises VectorError (missing, unreadable, tensor)."""
    must_be_file(path)
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            return {m.filename.removesuffix(".npy"): _tensor(path, archive, file, m) for m in members}
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise VectorError("unreadable", f"{path.name} is not a .npz file: {error}") from error


def _tensor(path: Path, archive: zipfile.ZipFile, file: IO[bytes], member: zipfile.ZipInfo) -> Mapped:
    name = member.filename.removesuffix(".npy")
    with archive.open(member) as stream:
        version = _format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{member.filename} is of version {version[0]}.{version[1]}")
        read = _format.read_array_header_1_0 if version == (1, 0) else _format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        header = stream.tell()
    if dtype.kind != "f" or dtype.itemsize not in _SPELLED:
        raise VectorError("tensor", f'"{name}" of {path.name} is {dtype}, which is not floating point')
    spelled = _SPELLED[dtype.itemsize]
    if member.compress_type != zipfile.ZIP_STORED or not member.file_size - header:
        return Mapped(spelled, shape, Packed(path, name))
    # What stands before a member is told there once more, and may differ in length from what the directory says.
    file.seek(member.header_offset + 26)
    lengths = np.frombuffer(file.read(4), "<u2")
    start = member.header_offset + 30 + int(lengths.sum()) + header
    return Mapped(spelled, shape, np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C"))

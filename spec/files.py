"""Files that a spec names, read without waiting for anybody; files written whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from io import BufferedReader
from pathlib import Path

from vtaps.spec.diagnostics import nearest

LARGEST_TEXT = 1 << 30
"""Bytes of a text file that a spec may name."""


def path_in(folder: Path, name: str) -> Path:
    """``name`` as a spec writes it (``~`` allowed), relative to ``folder``.  Raises OSError for what is no path."""
    try:
        path = folder / Path(name).expanduser()
        os.fsencode(path)
    except (RuntimeError, ValueError) as error:  # no home directory, a lone surrogate
        raise OSError(0, f"it is no path: {error}") from None
    if "\0" in name:
        raise OSError(0, "it is no path: it holds a NUL")
    return path


def open_regular(path: Path) -> BufferedReader:
    """A regular file, open to be read: a pipe or a device would never end.  Raises OSError, its ``strerror`` set."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(0, str(error)) from None
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        raise OSError(0, "it is a directory" if stat.S_ISDIR(kind) else "it is not a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """All of a regular file of at most ``most`` bytes.  Raises OSError, its ``strerror`` set."""
    with open_regular(path) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(0, f"it is larger than {most >> 20} MiB")
    return content


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """A UTF-8 text.  Raises OSError as :func:`read_bytes`, and where it is not UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError:
        raise OSError(0, "it is not UTF-8") from None


def nearest_file(path: Path, suffix: str = "") -> str | None:
    """The name beside ``path`` that is closest to its own, among those with the suffix."""
    try:
        return nearest(path.name, [p.name for p in path.parent.iterdir() if p.suffix == suffix or not suffix])
    except (OSError, ValueError):
        return None


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` (UTF-8) in one step.  Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def create_text(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) to a file that is not there yet.  Raises OSError: FileExistsError where anything stands at
    ``path``, which is left as it is."""
    content = text.encode("utf-8")
    with path.open("xb") as stream:
        try:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise

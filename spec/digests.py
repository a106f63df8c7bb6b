"""``sha256:…``, the one spelling of a digest in locks, blocks and run folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vtaps.spec.files import open_regular


def of_bytes(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def of_text(text: str) -> str:
    return of_bytes(text.encode())


def of_json(value: Any) -> str:
    """Of the canonical JSON of ``value``: sorted keys, no blanks, ASCII."""
    return of_text(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True))


def of_file(path: Path) -> str:
    """Of a regular file's bytes, read piece by piece.  Raises OSError."""
    with open_regular(path) as stream:
        return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"

"""What an engine's workers read at start: where the block and the lock are."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from vtaps.runtime.block import Block
from vtaps.runtime.imports import import_file
from vtaps.runtime.program import LockError
from vtaps.spec import digests

MANIFEST = "VTAPS_MANIFEST"
"""Environment variable that holds the path of the manifest, in every process of the engine."""


@dataclass(frozen=True)
class Manifest:
    """Where an engine's workers find their block and lock; ``folder`` is what the lock's file names start from.
    ``spool``, ``memory`` (bytes) and ``shared`` are the folder, the memory and the shared folder of
    :class:`~vtaps.runtime.spool.Spool`."""

    block: Path
    lock: Path
    folder: Path
    spool: Path | None = None
    memory: int | None = None
    shared: Path | None = None

    def write(self, path: Path) -> None:
        data = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        path.write_text(json.dumps(data), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Manifest:
        data = json.loads(path.read_text(encoding="utf-8"))
        spool, shared = (None if data[name] is None else Path(data[name]) for name in ("spool", "shared"))
        return Manifest(Path(data["block"]), Path(data["lock"]), Path(data["folder"]), spool, data["memory"], shared)


def import_block(path: Path, digest: str) -> Block:
    """Import a block file as a module named by its digest.

    A real file in ``sys.modules``: tracebacks show its lines. Raises LockError where the file is not the one that
    was locked, or holds no block.
    """
    content = path.read_bytes()
    if digests.of_bytes(content) != digest:
        raise LockError("block.digest", f"{path.name} is not the block that was locked; compile again")
    name = f"vtaps_block_{digest.removeprefix('sha256:')[:16]}"
    if name not in sys.modules:
        import_file(name, path)
    block = getattr(sys.modules[name], "BLOCK", None)
    if not isinstance(block, Block):
        raise LockError("block", f"{path.name} defines no BLOCK")
    return block

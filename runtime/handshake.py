"""What a worker says of the block that it serves, for the driver to hold against the lock."""

from __future__ import annotations

import os
from typing import Any

from vtaps.runtime.session import Session


def told(session: Session) -> dict[str, Any]:
    """``parts``: site of which this worker has some columns → how many there are in all, and which are its own."""
    return {
        "block": session.program.block_digest,
        "structure": session.program.structure,
        "locations": list(session.installed),
        "recorded": sorted(session.recorded),
        "breaks": sorted(session.breaks),
        "tap_bytes": session.device_bytes,
        "slots": {ring.key: ring.slots for ring in session.boards.rings},
        "parts": {n: [s.part.width, s.part.pieces] for n, s in session.program.sites.items() if s.part is not None},
        "stage": session.ranks.stage if session.ranks is not None else 0,
        "pid": os.getpid(),
    }

"""Rebuild the committed snapshots from ``configs/``: ``python tests/data/make_trees.py [FAMILY ...]``.

Needs vLLM; the tests that read the snapshots do not. The tiny families are built in float32, as the checkpoints
of ``tests/models.py`` are saved.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DTYPES = {"smollm2": "bfloat16"}


def main(families: list[str]) -> int:
    for folder in sorted((HERE / "configs").iterdir()):
        if families and folder.name not in families:
            continue
        out = HERE / "trees" / f"{folder.name}.json"
        dtype = DTYPES.get(folder.name, "float32")
        command = [sys.executable, "-m", "vtaps.runtime.compat.meta_tree", str(folder), str(out), "--dtype", dtype]
        subprocess.run(command, check=True, cwd=HERE.parent.parent)
        print(out.relative_to(HERE), out.stat().st_size)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

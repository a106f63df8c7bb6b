"""The vectors changed after compile, the spec did not."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.golden.cases import Found, compile_here, copy_of
from vtaps.codegen.drift import drift


def findings(folder: Path) -> Found:
    spec = copy_of("blocks/verbs", folder)
    doc, files = compile_here(spec)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    save_file({f"layer_{i}": np.full(128, i, np.float32) for i in range(4)}, folder / "vectors.safetensors")
    doc, files = compile_here(spec)
    return drift(files, doc.folder, doc.file), {}

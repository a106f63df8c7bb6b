"""A block edited by hand: the file no longer says what the spec says."""

from pathlib import Path

from tests.golden.cases import Found, compile_here, copy_of
from vtaps.codegen.drift import drift


def findings(folder: Path) -> Found:
    spec = copy_of("blocks/families", folder)
    doc, files = compile_here(spec)
    for name, text in files.items():
        (folder / name).write_text(text.replace("heads: [1..2]", "heads: [1..3]"), encoding="utf-8")
    return drift(files, doc.folder, doc.file), {}

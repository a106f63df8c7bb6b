"""``compile --check`` where nothing was compiled yet."""

from pathlib import Path

from tests.golden.cases import Found, compile_here, copy_of
from vtaps.codegen.drift import drift


def findings(folder: Path) -> Found:
    doc, files = compile_here(copy_of("blocks/families", folder))
    for name in files:
        (folder / name).unlink()
    return drift(files, doc.folder, doc.file), {}

"""A file of somebody else's has the name that the block would get."""

from pathlib import Path

from tests.golden.cases import Found, compile_here, copy_of
from vtaps.compiling import write_files


def findings(folder: Path) -> Found:
    doc, files = compile_here(copy_of("blocks/families", folder))
    (folder / "spec.block.py").write_text("print('mine')\n")
    return write_files(files, doc.folder, doc.file)[1], {}

"""What the programs among the golden cases share: their working folder is the one they are given."""

from __future__ import annotations

import shutil
from pathlib import Path

from vtaps import verification
from vtaps.check import check_file
from vtaps.compiling import compile_plan
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.yaml import load
from vtaps.verification import Verification

GOLDEN = Path(__file__).parent
DATA = GOLDEN.parent / "data"

Found = tuple[list[Diagnostic], dict[str, str]]


def copy_of(case: str, folder: Path) -> Path:
    """A golden spec and the files beside it, in ``folder``; its model is a link there, so that no path of this
    machine stands in the findings."""
    for file in (GOLDEN / case).iterdir():
        shutil.copy(file, folder / file.name)
    (folder / "data").symlink_to(DATA)
    spec = folder / "spec.yaml"
    spec.write_text(spec.read_text(encoding="utf-8").replace("../../../data", "data"), encoding="utf-8")
    return spec


def compile_here(spec: Path) -> tuple[Document, dict[str, str]]:
    result = check_file(spec.name)
    assert result.plan is not None and result.doc is not None, [d.message for d in result.diagnostics]
    compiled, wrong = compile_plan(result.plan)
    assert compiled is not None and not wrong
    return result.doc, compiled.files


VERIFIED = """vtaps: 1
model: {path: m}
reads:
  stream: {at: "resid_post[2, 3]", tokens: sampling}
edits:
  steer: {at: "resid_post[2]", tokens: sampling, add: {vector: v, scale: 8.0}}
"""


def verified(folder: Path, **found: object) -> Found:
    """The findings of a verification of :data:`VERIFIED` that found this."""
    (folder / "spec.yaml").write_text(VERIFIED, encoding="utf-8")
    doc, _ = load("spec.yaml")
    assert doc is not None
    told = Verification("spec.yaml", "taps", "float32", "huggingface", "", 1e-4, 2, 2, **found)  # type: ignore[arg-type]
    return verification.findings(told, doc), {doc.file: doc.text}

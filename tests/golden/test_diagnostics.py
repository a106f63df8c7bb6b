"""Each folder of ``diagnostics/`` is a spec and the findings it must give; ``pytest --regen`` writes them anew.

Codes of YAML, schema and engine arguments need no model: those cases name one that does not exist, and hold the
stages before it.  All other cases go through ``vtaps.check``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sarif import sarif
from tests.trees import seed_cache
from vtaps.check import check_file
from vtaps.spec import engine_args
from vtaps.spec.codes import CODES
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.reporters import render
from vtaps.spec.schema import validate
from vtaps.spec.yaml import load

CASES = Path(__file__).parent / "diagnostics"
NAMES = sorted(p.parent.name for p in CASES.glob("*/spec.yaml"))
WITHOUT_MODEL = re.compile("VT([01]..|50[1236])-")


def before_the_model(file: str) -> tuple[list[Diagnostic], dict[str, str]]:
    doc, found = load(file)
    if doc is None:
        path = Path(file)
        return found, {file: path.read_text(encoding="utf-8")} if found[0].code != "VT007" else {}
    found = [*found, *validate(doc)]
    engine = doc.data.get("engine") if isinstance(doc.data, dict) else None
    if isinstance(engine, dict) and isinstance(engine.get("vllm"), dict):
        found += engine_args.check(doc, ("engine", "vllm"), engine["vllm"])
    return found, {doc.file: doc.text}


@pytest.mark.parametrize("name", NAMES)
def test_findings(name: str, regen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    monkeypatch.chdir(CASES / name)
    if WITHOUT_MODEL.match(name):
        found, documents = before_the_model("spec.yaml")
        _no_more_from_check(found)
    else:
        checked = check_file("spec.yaml")
        found, documents = checked.diagnostics, checked.documents
    text = render(found, "text", documents)
    assert name[:5] in {d.code for d in found}
    sarif(found)
    expected = CASES / name / "expected.txt"
    if regen:
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8"), "if this is right: pytest tests/golden --regen"


def _no_more_from_check(found: list[Diagnostic]) -> None:
    """The whole check adds nothing to a fault of the text but that the model is not there."""
    check = check_file("spec.yaml")
    here = {(d.code, d.span, d.message) for d in found}
    more = {(d.code, d.span, d.message) for d in check.diagnostics if d.code != "VT213"}
    assert more == here


def test_every_code_of_these_stages_has_a_case() -> None:
    codes = {c for c in CODES if WITHOUT_MODEL.match(f"{c}-")}
    assert codes <= {n[:5] for n in NAMES}

"""Codes that a spec alone cannot cause: each folder holds ``case.py``, a small program that does, and what it says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.sarif import sarif
from tests.trees import seed_cache
from vtaps.spec.codes import CODES
from vtaps.spec.reporters import render

CASES = Path(__file__).parent / "diagnostics"
NAMES = sorted(p.parent.name for p in CASES.glob("*/case.py"))


@pytest.mark.parametrize("name", NAMES)
def test_findings(name: str, regen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path / "cache", monkeypatch)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    case = importlib.import_module(f"tests.golden.diagnostics.{name}.case")
    found, documents = case.findings(tmp_path / "here")
    text = re.sub(r"sha256:[0-9a-f]{64}|(?<=[+-]# tree      )\w+", "sha256:…", render(found, "text", documents))
    assert name[:5] in {d.code for d in found}
    sarif(found)
    assert str(tmp_path) not in text
    expected = CASES / name / "expected.txt"
    if regen:
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8"), "if this is right: pytest tests/golden --regen"


def test_every_code_has_a_case() -> None:
    """Those that need an engine run in tests/engine/test_golden_codes.py."""
    assert set(CODES) == {p.name[:5] for p in CASES.iterdir() if p.name.startswith("VT")}

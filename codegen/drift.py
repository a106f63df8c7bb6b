"""What is on disk against what would be written."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from vtaps.spec.diagnostics import Diagnostic, Span

DIFF_LINES = 40
"""How much of a diff a finding shows; ``vtaps compile`` and git show the rest."""


def drift(files: dict[str, str], folder: Path, spec_file: str) -> list[Diagnostic]:
    """Findings where the files beside a spec are not the ones that compiling it gives.  ``files``: name → text."""
    out: list[Diagnostic] = []
    spec_span = Span(spec_file)
    fix = f"run: vtaps compile {spec_file}"
    missing = [name for name in files if not (folder / name).exists()]
    if missing:
        what = f"{' and '.join(missing)} {'does' if len(missing) == 1 else 'do'} not exist"
        out.append(Diagnostic("VT403", what, spec_span, note=fix))
    for name, text in files.items():
        if name in missing:
            continue
        path = folder / name
        try:
            there = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            out.append(Diagnostic("VT403", f"{name} cannot be read: {error}", spec_span, note=fix))
            continue
        if there == text:
            continue
        changed = _outside(there, text) if name.endswith(".json") else []
        for file in changed:
            out.append(
                Diagnostic("VT402", f"{file} is not the file that {name} was compiled with", spec_span, note=fix)
            )
        if not changed:
            old, new = there.splitlines(), text.splitlines()
            diff = list(
                difflib.unified_diff(old, new, f"{name} (on disk)", f"{name} (from the spec)", lineterm="", n=1)
            )
            if len(diff) > DIFF_LINES:
                diff = [*diff[:DIFF_LINES], f"… {len(diff) - DIFF_LINES} more lines"]
            at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False), 1) if a != b), len(old))
            message = f"{name} is not what {spec_file} compiles to"
            out.append(Diagnostic("VT401", message, Span(str(path), at, 1, at, 1), note=fix, detail=tuple(diff)))
    return out


def _outside(there: str, text: str) -> list[str]:
    try:
        old = json.loads(there)["outside"]
    except (ValueError, KeyError, TypeError):
        return []
    new = json.loads(text)["outside"]
    return sorted(k for k in {*old, *new} if old.get(k) != new.get(k))

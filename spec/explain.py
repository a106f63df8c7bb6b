"""The page of a diagnostic code, as ``vtaps explain CODE`` prints it."""

from __future__ import annotations

import re
from importlib.resources import files

from vtaps.spec.codes import CODES
from vtaps.spec.diagnostics import nearest


class UnknownCode(LookupError):
    """No such code; ``nearest`` is the code that was probably meant, or None."""

    def __init__(self, code: str) -> None:
        digits = re.sub(r"\D", "", code)
        same = [c for c in CODES if c.startswith(f"VT{digits[:1]}")] if len(digits) == 3 else []
        self.nearest = min(same, key=lambda c: abs(int(c[2:]) - int(digits))) if same else nearest(code.upper(), CODES)
        hint = f"; nearest: {self.nearest}" if self.nearest else f"; codes run from {min(CODES)} to {max(CODES)}"
        super().__init__(f"no diagnostic code {code}{hint}")


def page(code: str) -> str:
    """The Markdown page of ``code`` (any case, ``VT`` optional).  Raises UnknownCode."""
    name = code.strip().upper()
    name = f"VT{name}" if re.fullmatch("[0-9]{3}", name) else name
    if name not in CODES:
        raise UnknownCode(code)
    return files("vtaps.spec").joinpath("pages", f"{name}.md").read_text(encoding="utf-8")

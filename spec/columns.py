"""Heads and dims of an edit → columns of its location."""

from __future__ import annotations

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.expand import written
from vtaps.spec.rows import Interval, merge
from vtaps.spec.spec import Edit
from vtaps.spec.tree import Site


def columns_of(edit: Edit, site: Site, doc: Document, found: list[Diagnostic]) -> tuple[Interval, ...] | None:
    """The columns of ``site`` that an edit's heads and dims name, merged; what is not there is found (VT302, VT303)."""
    where = (*edit.where, edit.verb)
    if edit.heads is not None and site.heads is None:
        found.append(
            Diagnostic(
                "VT302",
                f"{site.name} has no heads",
                doc.at(*where, "heads"),
                note="q, k, v, rot_q, rot_k and z have heads; `dims` narrows any location",
            )
        )
        return None
    if site.width is None:
        found.append(
            Diagnostic("VT303", f"the width of {site.name} is not known before the run", doc.at(*where, "dims"))
        )
        return None
    blocks = [(0, site.width)]
    if edit.heads is not None and site.heads is not None:
        size = site.width // site.heads
        heads = _picked(edit.heads, site.heads, f"{site.name} has heads", "VT302", doc, (*where, "heads"), found)
        blocks = [(h * size, (h + 1) * size) for h in heads]
    if edit.dims is not None:
        size = blocks[0][1] - blocks[0][0] if blocks else 0
        of = "each head has dims" if edit.heads is not None else f"{site.name} has dims"
        dims = _picked(edit.dims, size, of, "VT303", doc, (*where, "dims"), found)
        blocks = [(start + d, start + d + 1) for start, _ in blocks for d in dims]
    return tuple(merge(blocks))


def _picked(
    ranges: tuple[Interval, ...], size: int, what: str, code: str, doc: Document, where: tuple[str | int, ...],
    found: list[Diagnostic],
) -> list[int]:  # fmt: skip
    out: set[int] = set()
    for i, (first, last) in enumerate(ranges):
        a, b = (n + size if n < 0 else n for n in (first, last))
        if not (0 <= a <= b < size):
            [text] = written(((first, last),))
            found.append(Diagnostic(code, f"{what} 0 … {size - 1}, not {text}", doc.at(*where, i)))
        else:
            out.update(range(a, b + 1))
    return sorted(out)

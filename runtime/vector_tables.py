"""The vectors that an edit looks at in one location."""

from __future__ import annotations

import numpy as np

from vtaps.runtime.block import Note
from vtaps.runtime.program import LockError, Program, SiteEntry
from vtaps.spec.vectors import Floats, VectorError, directions


def vectors_at(program: Program, note: Note, site: SiteEntry, used: tuple[str, ...]) -> Floats:
    """float32 ``[n, width]``: the vectors that points name, or the directions of the edit or of a gate's cosine.

    NaN where a vector has no numbers yet.  Raises LockError.
    """
    edit, names = program.edits[note.name], used or program.edits[note.name].vectors
    loaded = [program.load_vector(name, site) for name in names]
    cosine = edit.verb == "gate" and program.gates[note.name].cosine
    if edit.verb not in ("project_out", "clamp") and not cosine:
        return np.stack(loaded).astype(np.float32)

    def spanned(vectors: list[Floats], of: list[str]) -> Floats:
        if any(np.isnan(vector).any() for vector in vectors):
            return np.full((len(vectors), site.width), np.nan, np.float32)
        return directions(vectors, of, note.columns)

    try:
        if edit.verb == "project_out":
            return spanned(loaded, list(names))
        return np.concatenate([spanned([v], [n]) for v, n in zip(loaded, names, strict=True)])
    except VectorError as error:
        raise LockError(f"{'edits.' * (not cosine)}{note.name}", f"{error.message} (at {site.name})") from error

"""A token as a spec names it, a text or an id → its id."""

from __future__ import annotations

from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.tokens import Tokens


def token_id(token: int | str, tokens: Tokens, vocab: int, span: Span, found: list[Diagnostic]) -> int:
    """VT309 for a text that is not one token, an id past the vocabulary; −1 then."""
    if isinstance(token, int):
        if not 0 <= token < vocab:
            found.append(Diagnostic("VT309", f"token id {token} is not in the vocabulary (0 … {vocab - 1})", span))
            return -1
        return token
    ids = tokens.ids(token)
    if len(ids) != 1:
        pieces = ", ".join(f"{p!r} ({i})" for p, i in zip(tokens.pieces(ids), ids, strict=True))
        spaced = tokens.ids(" " + token)
        close = repr(" " + token) if len(spaced) == 1 else None
        what = f"{token!r} is {len(ids)} tokens: {pieces}" if ids else f"{token!r} is no token"
        found.append(Diagnostic("VT309", what, span, nearest=close, note="give one token, or its id"))
        return -1
    return ids[0]

"""What the driver raises."""

from __future__ import annotations


class EngineError(Exception):
    """``code`` is one of the run-time diagnostics; the message is one line."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class RequestError(EngineError):
    """One request is refused before it is scheduled, or fails while it is served; the others go on.

    ``definition``: the edit or read that failed, ``edits.NAME`` or ``reads.NAME``, and ``line`` its line in the spec;
    "" and None where none did, or where the lock has no lines.
    """

    def __init__(self, code: str, message: str, key: str, definition: str = "", line: int | None = None) -> None:
        super().__init__(code, f"request {key}: {message}")
        self.reason = message
        self.key, self.definition, self.line = key, definition, line


def one_line(error: BaseException) -> str:
    """The reason in an exception's text: pydantic wraps it in a heading and a trailer."""
    text = str(error).strip()
    _, marked, reason = text.partition("Value error, ")
    if marked:
        text = reason.partition(" [type=")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""How findings about types and values are worded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from vtaps.spec.diagnostics import nearest
from vtaps.spec.yaml import scalar

_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "a mapping",
}
_OLD_BOOLEANS = frozenset(("yes", "no", "on", "off", "y", "n"))
INT_LIMIT = 2**63


def json_type(value: Any) -> str:
    """The JSON type of plain data; a whole float is a number, not an integer."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def fits(value: Any, types: Iterable[str]) -> bool:
    kind = json_type(value)
    return kind in types or (kind == "integer" and "number" in types)


def expected(types: Iterable[str]) -> str:
    """``a number, text or a list``"""
    return any_of([_TYPES[t] for t in types])


def any_of(words: list[str], last: str = "or") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def found(value: Any) -> str:
    """``the text "yes"``, ``a list``, ``nothing (null)``: what stands there instead."""
    kind = json_type(value)
    if kind == "null":
        return "nothing (null)"
    if kind in ("array", "object"):
        return _TYPES[kind]
    return {"string": "the text ", "boolean": ""}.get(kind, "the number ") + shown(value)


def shown(value: Any) -> str:
    """A scalar as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:56]} …{text[-1] if isinstance(value, str) else ''}"


def short(key: str) -> str:
    return key if len(key) <= 60 else f"{key[:58]} …"


def matches(pattern: str, text: str) -> bool:
    """Whether ``text`` has what the schema's ``pattern`` asks for; its ``$`` is the very end, as in ECMA 262."""
    return re.search(re.sub(r"\$\Z", r"\\Z", pattern), text) is not None


def close(key: str, names: Iterable[str]) -> str | None:
    """:func:`nearest`, which would take minutes over a key of a megabyte."""
    return nearest(key, names) if len(key) <= 100 else None


def type_note(value: Any, types: Iterable[str], written: str | None) -> str | None:
    """Why a value of the wrong type may stand there, or how to mend it.  ``written`` is its text in the file."""
    types = tuple(types)
    kind = json_type(value)
    if kind == "string" and value.lower() in _OLD_BOOLEANS and {"boolean", "number", "integer"} & {*types}:
        instead = "true or false" if "boolean" in types else "a number"
        return f"YAML 1.2 reads `{value}` as the text {shown(value)}: write {instead}"
    if kind == "string" and len(value) <= 100 and written != value:
        plain = scalar(value)
        if not isinstance(plain, str) and fits(plain, types):
            return f"without the quotes, {value} is {expected([json_type(plain)])}"
    if "string" in types and kind in ("integer", "number", "boolean"):
        return f"in quotes it is text: {json.dumps(written or shown(value))}"
    if kind == "number" and "integer" in types and float(value).is_integer() and abs(value) < INT_LIMIT:
        return f"write {int(value)}"
    if "array" in types and kind not in ("array", "object", "null"):
        return f"write a list: [{written or shown(value)}]"
    return None

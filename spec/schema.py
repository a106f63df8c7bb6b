"""A document against ``schemas/spec-v1.schema.json``: every fault at once, one finding per cause.

The schema stays the one source of keys, types and bounds.  It is walked here, and not by a validator library,
because a validator answers a wrong key inside a union with one error per branch, and takes half of the time that
``check`` may take just to be imported.
"""

from __future__ import annotations

import math
import re
from functools import cached_property
from typing import Any

from vtaps.schemas import load
from vtaps.spec.diagnostics import Diagnostic, Span, in_order
from vtaps.spec.document import Document, NodePath
from vtaps.spec.schema_words import (
    INT_LIMIT,
    any_of,
    close,
    expected,
    fits,
    found,
    json_type,
    matches,
    short,
    shown,
    type_note,
)

Schema = dict[str, Any]
# What the walker understands; a test holds the schema to it, so that no keyword is passed over in silence.
KEYWORDS = frozenset(
    """$ref type enum const minimum maximum exclusiveMinimum minLength pattern minItems maxItems uniqueItems items
    properties required additionalProperties propertyNames minProperties dependentRequired oneOf not anyOf if then
    """.split()  # noqa: SIM905
)
ANNOTATIONS = frozenset(("$schema", "$defs", "title", "description", "examples", "default"))

_MANY = 200


def validate(doc: Document) -> list[Diagnostic]:
    """Everything about ``doc`` that the schema refuses (VT101 … VT107), sorted.

    vLLM's engine arguments are only held to be a mapping: :mod:`vtaps.spec.engine_args` checks them.
    """
    return held(doc)[0]


def held(doc: Document) -> tuple[list[Diagnostic], frozenset[NodePath] | None]:
    """What :func:`validate` gives, and the parts of the spec that it is about: paths of two steps, or fewer.  None
    where nothing was held against the schema, since the spec is of another version.

    The paths are those of the data: what an alias repeats is refused everywhere, and said where its anchor stands.
    """
    schema = load("spec-v1.schema.json")
    data = doc.data
    if isinstance(data, dict) and "vtaps" in data and json_type(data["vtaps"]) + shown(data["vtaps"]) != "integer1":
        # Another version has other keys: what this one thinks of them is noise.
        version = found(data["vtaps"])
        message = f"version 1 is the only one this vtaps reads, not {version}"
        return [Diagnostic("VT106", message, doc.at("vtaps"), ("1",), note="write `vtaps: 1`")], None
    walker = _Walker(doc, schema["$defs"])
    walker.walk(data, schema, ())
    return in_order(walker.found), frozenset(walker.refused)


class _Walker:
    def __init__(self, doc: Document, definitions: dict[str, Schema]) -> None:
        self.found: list[Diagnostic] = []
        self.refused: set[NodePath] = set()
        self._doc, self._definitions = doc, definitions

    def walk(self, value: Any, schema: Schema, path: NodePath) -> None:
        schema = self._resolve(schema)
        if branches := self._branches(schema):
            self._union(value, branches, path)
            return
        types = _types(schema)
        if types and not fits(value, types):
            self._wrong_type(value, types, schema, path)
            return
        if "const" in schema and value != schema["const"]:
            self._not_allowed(value, [schema["const"]], path)
        if "enum" in schema and value not in schema["enum"]:
            self._not_allowed(value, schema["enum"], path)
        match json_type(value):
            case "integer" | "number":
                self._number(value, schema, path)
            case "string":
                self._string(value, schema, path)
            case "array":
                self._array(value, schema, path)
            case "object":
                self._object(value, schema, path)

    def _resolve(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            name = schema["$ref"]
            # The one file outside, vLLM's engine arguments, has its own check.
            schema = self._definitions[name.removeprefix("#/$defs/")] if name[0] == "#" else {"type": "object"}
        return schema

    def _branches(self, schema: Schema) -> list[Schema]:
        """The alternatives of a union of types or shapes; empty where ``oneOf`` only counts keys."""
        branches = [self._resolve(b) for b in schema.get("oneOf", ())]
        return branches if branches and all(_types(b) for b in branches) else []

    def _say(self, code: str, message: str, path: NodePath, span: Span, **more: Any) -> None:
        self.found.append(Diagnostic(code, message, span, **more))
        self.refused.add(path[:2])

    # Scalars

    def _wrong_type(self, value: Any, types: tuple[str, ...], schema: Schema, path: NodePath) -> None:
        if value is None and set(types) <= {"array", "object"}:
            minimum = schema.get("minItems", schema.get("minProperties", 0)) or schema.get("required")
            empty = "{}" if "object" in types else "[]"
            note = None if minimum else f"leave the key out, or write {empty}"
            self._say("VT107", f"{_name(path)} is empty", path, self._doc.key(*path), note=note)
            return
        note = type_note(value, types, self._written(path))
        if note is None and types == ("object",) and json_type(value) not in ("array", "null"):
            required = schema.get("required", ())
            if len(required) == 1:
                note = f"write {{{required[0]}: {self._written(path) or shown(value)}}}"
        message = f"{_name(path)}: expected {expected(types)}, found {found(value)}"
        self._say("VT103", message, path, self._doc.at(*path), note=note)

    def _not_allowed(self, value: Any, allowed: list[Any], path: NodePath) -> None:
        valid = tuple(a if isinstance(a, str) else shown(a) for a in allowed)
        near = close(value, valid) if isinstance(value, str) else None
        written = f"`{short(value)}`" if isinstance(value, str) else shown(value)
        message = f"{_name(path)}: {written} is not allowed here"
        self._say("VT104", message, path, self._doc.at(*path), valid=valid, nearest=near)

    def _number(self, value: float, schema: Schema, path: NodePath) -> None:
        fault = None
        if isinstance(value, int) and not -INT_LIMIT <= value < INT_LIMIT:
            fault = "does not fit in 64 bits"
        elif not math.isfinite(value):
            fault = "is not a finite number"
        elif "minimum" in schema and value < schema["minimum"]:
            fault = f"is less than {schema['minimum']}"
        elif "maximum" in schema and value > schema["maximum"]:
            fault = f"is more than {schema['maximum']}"
        elif "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
            fault = f"is not more than {schema['exclusiveMinimum']}"
        if fault:
            text = "pattern" in schema and matches(schema["pattern"], str(value))
            note = f"write `{value}`" if text else None
            self._say("VT104", f"{_name(path)}: {short(str(value))} {fault}", path, self._doc.at(*path), note=note)

    def _string(self, value: str, schema: Schema, path: NodePath) -> None:
        if len(value) < schema.get("minLength", 0):
            self._say("VT107", f"{_name(path)} is an empty text", path, self._doc.at(*path))
        elif "pattern" in schema and not matches(schema["pattern"], value):
            message = f"{_name(path)}: {shown(value)} is not of the form asked for"
            self._say("VT104", message, path, self._doc.at(*path), note=_like(schema))

    # Lists and mappings

    def _array(self, value: list[Any], schema: Schema, path: NodePath) -> None:
        size, least, most = len(value), schema.get("minItems", 0), schema.get("maxItems")
        if size == 0 and least:
            self._say("VT107", f"{_name(path)} is an empty list", path, self._doc.at(*path))
        elif size < least or (most is not None and size > most):
            wanted = str(least) if least == most else f"at least {least}" if size < least else f"at most {most}"
            self._say("VT104", f"{_name(path)}: expected {wanted} items, found {size}", path, self._doc.at(*path))
        for i, item in enumerate(value):
            if "items" in schema:
                self.walk(item, schema["items"], (*path, i))
            if schema.get("uniqueItems") and isinstance(item, str) and item in value[:i]:
                self._say("VT104", f"{_name(path)}: `{short(item)}` stands here twice", path, self._doc.at(*path, i))

    def _object(self, value: dict[str, Any], schema: Schema, path: NodePath) -> None:
        if len(value) < schema.get("minProperties", 0):
            self._say("VT107", f"{_name(path)} is an empty mapping", path, self._doc.key(*path))
        choices, optional = _choices(schema)
        chosen = [k for k in value if k in choices]
        skip = set(chosen) if len(chosen) > 1 else set()
        typos = self._keys(value, schema, path, skip)
        self._required(value, schema.get("required", ()), schema, path, typos)
        for key, needed in schema.get("dependentRequired", {}).items():
            for other in needed if key in value else ():
                if other not in value and other not in typos:
                    message = f"{_name(path)}: `{key}` needs `{other}` beside it"
                    self._say("VT102", message, path, self._doc.key(*path, key), note=_about(schema, other))
        if choices and (skip or not (chosen or optional or typos & set(choices))):
            self._exactly_one(value, schema, choices, chosen, path)
        if "if" in schema and self._holds(value, schema["if"], path):
            then = schema["then"]
            for key, rule in then["properties"].items():
                if rule is False and key in value:
                    message = f"`{key}` is not used in {_name(path)}"
                    self._say("VT101", message, path, self._doc.key(*path, key), note=then.get("description"))

    def _keys(self, value: dict[str, Any], schema: Schema, path: NodePath, skip: set[str]) -> set[str]:
        """Walk the entries; return the keys that unknown ones seem to have meant."""
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        missing = [k for k in (*schema.get("required", ()), *_choices(schema)[0]) if k not in value]
        typos: set[str] = set()
        for key, item in value.items():
            here = (*path, key)
            # The loader has spoken about a key that it left without a span.
            silent = bool(self._doc.keys) and here not in self._doc.keys
            if key in known:
                if key not in skip:
                    self.walk(item, known[key], here)
            elif other is False:
                # Past some findings, the nearest name helps nobody and costs the most.
                near = close(key, missing) or close(key, known) if len(self.found) < _MANY else None
                typos.update([near] if near else [])
                if not silent:
                    self._unknown(key, item, tuple(known), near, path)
            else:
                names = schema.get("propertyNames", {}).get("pattern")
                if names and not matches(names, key) and not silent:
                    note = "names are up to 100 letters, digits, `_` and `-`, and do not start with a digit"
                    self._say("VT104", f"`{short(key)}` cannot be a name", here, self._doc.key(*here), note=note)
                if isinstance(other, dict):
                    self.walk(item, other, here)
        return typos

    def _unknown(self, key: str, item: Any, valid: tuple[str, ...], near: str | None, path: NodePath) -> None:
        note = None
        if key == "<<":
            note = "YAML 1.2 has no merge key: write the keys out"
        elif item is None and ":" in key:
            note = "a space must follow the colon"
        message = f"unknown key `{short(key)}` {_inside(path)}"
        self._say("VT101", message, (*path, key), self._doc.key(*path, key), valid=valid, nearest=near, note=note)

    def _required(self, value: Any, required: Any, schema: Schema, path: NodePath, typos: set[str]) -> None:
        for key in required:
            if key not in value and key not in typos:
                message = f"`{key}` is missing {_inside(path)}"
                self._say("VT102", message, path, self._start(path), note=_about(schema, key))

    def _exactly_one(
        self, value: dict[str, Any], schema: Schema, choices: list[str], chosen: list[str], path: NodePath
    ) -> None:
        number = "at most one" if _choices(schema)[1] else "exactly one"
        has = any_of([f"`{k}`" for k in chosen], "and") if chosen else "none"
        span = self._doc.key(*path, chosen[1]) if len(chosen) > 1 else self._start(path)
        strange = [n for k in value if k not in schema["properties"] and (n := close(k, choices))]
        near = strange[0] if strange and not chosen else None
        message = f"{_name(path)} takes {number} of {any_of([f'`{c}`' for c in choices], 'and')}, and has {has}"
        self._say("VT105", message, path, span, valid=tuple(choices), nearest=near)

    def _union(self, value: Any, branches: list[Schema], path: NodePath) -> None:
        fitting = [b for b in branches if fits(value, _types(b))]
        if len(fitting) == 1:
            self.walk(value, fitting[0], path)
        elif not fitting:
            types = tuple(dict.fromkeys(t for b in branches for t in _types(b)))
            self._wrong_type(value, types, branches[-1], path)
        else:
            self._shapes(value, fitting, path)

    def _shapes(self, value: dict[str, Any], branches: list[Schema], path: NodePath) -> None:
        """Several shapes of a mapping, told apart by the required keys that not all of them have."""
        common = set.intersection(*(set(b["required"]) for b in branches))
        choices = [k for b in branches for k in b["required"] if k not in common]
        chosen = [k for k in value if k in choices]
        if len(chosen) == 1:
            self.walk(value, next(b for b in branches if chosen[0] in b["required"]), path)
            return
        # No shape or several: hold the mapping against all of them at once.
        merged = {
            "type": "object",
            "properties": {k: s for b in reversed(branches) for k, s in b["properties"].items()},
            "required": [k for k in branches[0]["required"] if k in common],
            "additionalProperties": branches[0]["additionalProperties"],
            "oneOf": [{"required": [k]} for k in choices],
        }
        self._object(value, merged, path)

    def _holds(self, value: Any, schema: Schema, path: NodePath) -> bool:
        trial = _Walker(self._doc, self._definitions)
        trial.walk(value, schema, path)
        return not trial.found

    def _start(self, path: NodePath) -> Span:
        """The key of the node, or the first character of one without a key."""
        span = self._doc.key(*path)
        if path in self._doc.keys:
            return span
        return Span(span.file, span.line, span.column, span.line, span.column + 1)

    @cached_property
    def _lines(self) -> list[str]:
        return re.split("\r\n|\r|\n", self._doc.text)

    def _written(self, path: NodePath) -> str | None:
        """The value's text in the file, where it stands on one line."""
        span = self._doc.values.get(path)
        if span is None or span.line != span.end_line:
            return None
        return self._lines[span.line - 1][span.column - 1 : span.end_column - 1]


def _types(schema: Schema) -> tuple[str, ...]:
    if "const" in schema:
        return (json_type(schema["const"]),)
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


def _choices(schema: Schema) -> tuple[list[str], bool]:
    """The keys of which ``oneOf`` takes one, and whether it may be none."""
    branches = schema.get("oneOf", ())
    return [b["required"][0] for b in branches if "required" in b], any("not" in b for b in branches)


def _about(schema: Schema, key: str) -> str | None:
    about = schema.get("properties", {}).get(key, {}).get("description")
    return f"{key}: {about}" if about else None


def _like(schema: Schema) -> str | None:
    examples = [shown(e) for e in schema.get("examples", ())]
    return f"such as {any_of(examples)}" if examples else None


def _name(path: NodePath) -> str:
    """``prompts.facts[0].text``"""
    out = ""
    for step in path:
        if isinstance(step, int):
            out += f"[{step}]"
        elif "." in step:
            out += f"[{shown(step)}]"
        else:
            out += f".{short(step)}" if out else short(step)
    return out or "the spec"


def _inside(path: NodePath) -> str:
    return f"in {_name(path)}" if path else "at the top level"

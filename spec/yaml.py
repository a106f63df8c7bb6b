"""YAML text → :class:`Document`: plain data with the place of every node and key.

PyYAML scans and parses; the nodes are composed here from its events, so that scalars follow the YAML 1.2 core
schema (``yes`` is text, ``1e-3`` a float, ``017`` is 17), nothing is ever constructed from a tag, and size, depth
and alias expansion are bounded before they cost anything.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from vtaps.spec.diagnostics import Diagnostic, Span, has_errors, in_order
from vtaps.spec.document import Document
from vtaps.spec.yaml_errors import explain, unquoted_bracket

try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # PyYAML without libyaml: the same events, some twenty times slower
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 64
MAX_ALIAS_NODES = 100_000
MAX_FINDINGS = 100
MAX_DIGITS = 1000
_MAX_REPAIRS = 20

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LINE_BREAK = re.compile("\r\n|\r|\n")
_INT = re.compile(r"[-+]?[0-9]+\Z")
_OCTAL = re.compile(r"0o[0-7]+\Z")
_HEX = re.compile(r"0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_INF = re.compile(r"[-+]?\.(inf|Inf|INF)\Z")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_CORE = "tag:yaml.org,2002:"
_SCALAR_TAGS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "null": (type(None),),
}
_KIND = {bool: "true/false", int: "a whole number", float: "a number", type(None): "empty (null)"}

_UNPLACED = Span("")
# A path while composing; a _Dropped in it hides a node that was refused but whose events must still be read.
_Path = tuple[Any, ...]


class _Dropped:
    pass


class _Refused(Exception):
    """Stops composing; carries the finding that says why."""

    def __init__(self, finding: Diagnostic) -> None:
        self.finding = finding


def load(path: str | Path) -> tuple[Document | None, list[Diagnostic]]:
    """Read and compose one file; relative paths in it start at its own folder.

    Never raises for what a file can hold: a file that cannot be read is VT007, one over ``MAX_BYTES`` VT006.
    """
    file, place = str(path), Path(path)
    unread = "cannot read the spec"
    try:
        place = place.expanduser()
        if place.is_dir():
            return None, [Diagnostic("VT007", f"{unread}: it is a directory", Span(file))]
        if place.exists() and not place.is_file():
            return None, [Diagnostic("VT007", f"{unread}: it is not a regular file", Span(file))]
        with place.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 4)
        text = raw.decode("utf-8-sig") if len(raw) <= MAX_BYTES else ""
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8", "replace")
        where = _Places(file, before).span(len(before), len(before) + 1)
        message = f"{unread}: not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start})"
        return None, [Diagnostic("VT007", message, where, note="save the file as UTF-8")]
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return None, [Diagnostic("VT007", f"{unread}: {reason}", Span(file))]
    if len(raw) > MAX_BYTES:
        return None, [_too_large(file)]
    return loads(text, file, place.parent)


def loads(text: str, file: str, folder: Path) -> tuple[Document | None, list[Diagnostic]]:
    """Compose ``text``.  The document is None only where no data could be made of it at all."""
    text = text.removeprefix("\ufeff")
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        return None, [_too_large(file)]
    places = _Places(file, text)
    if bad := _UNPRINTABLE.search(text):
        at = places.span(bad.start(), bad.end())
        note = 'in a double-quoted text, write it as an escape such as "\\0" or "\\x1b"'
        return None, [Diagnostic("VT001", f"the character U+{ord(bad[0]):04X} may not stand here", at, note=note)]

    found: list[Diagnostic] = []
    source, restore = _shield_breaks(text)
    repaired: dict[int, str] = {}
    while True:
        composer = _Composer(source, places, restore, repaired)
        try:
            data = composer.document()
        except yaml.MarkedYAMLError as error:
            bracket = unquoted_bracket(error, source)
            if bracket and len(repaired) < _MAX_REPAIRS:
                # Report it, then read on with the text as it would stand in quotes.
                start, end = bracket
                found.append(explain(error, text, places.span, bracket))
                repaired[start] = text[start:end]
                source = source[:start] + "_" * (end - start) + source[end:]
                continue
            found += [*composer.found, explain(error, text, places.span, None)]
            return None, in_order(found)
        except yaml.YAMLError as error:
            return None, in_order([*found, Diagnostic("VT001", str(error), Span(file))])
        except _Refused as refused:
            return None, in_order([*found, *composer.found, refused.finding])
        break
    found += composer.found
    if data is None and not has_errors(found):
        message = "the spec is empty"
        note = "a spec has at least `vtaps`, `model`, `prompts` and `arms`"
        found.append(Diagnostic("VT107", message, Span(file, 1, 1, 1, 1), note=note))
    if data is None:
        return None, in_order(found)
    return Document(file, text, data, Path(folder), composer.values(), composer.keys()), in_order(found)


def scalar(text: str) -> Any:
    """A plain scalar by the YAML 1.2 core schema: str, int, float, bool or None.

    Raises ValueError for a whole number of more than ``MAX_DIGITS`` digits.
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "-+.0123456789":
        return text
    if _INT.match(text):
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        return int(text)
    if _OCTAL.match(text) or _HEX.match(text):
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    if _INF.match(text):
        return float("-inf" if text[0] == "-" else "inf")
    return text


def _too_large(file: str) -> Diagnostic:
    note = "keep prompts in a JSONL file: prompts: {facts: {file: facts.jsonl, text: {column: text}}}"
    return Diagnostic("VT006", f"the spec is larger than {MAX_BYTES // 2**20} MiB", Span(file), note=note)


def _shield_breaks(text: str) -> tuple[str, dict[int, str]]:
    """Hide NEL, LS and PS, line breaks in YAML 1.1 but text in 1.2; also the table that restores them."""
    breaks = [c for c in "\x85\u2028\u2029" if c in text]
    spare = [chr(c) for c in range(0xF0000, 0xF0100) if chr(c) not in text][: len(breaks)] if breaks else []
    hide = {ord(b): s for b, s in zip(breaks, spare, strict=False)}
    return text.translate(hide) if hide else text, {ord(s): chr(b) for b, s in hide.items()}


class _Places:
    """Offsets in the text → spans; lines end where editors end them, whatever the YAML version thinks."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self._starts = [0, *(m.end() for m in _LINE_BREAK.finditer(text))]

    def span(self, start: int, end: int) -> Span:
        line, column = self._place(start)
        end_line, end_column = self._place(max(start, end))
        return Span(self.file, line, column, end_line, end_column)

    def _place(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1


def _start(event: Any) -> int:
    offset: int = event.start_mark.index
    return offset


def _stop(event: Any) -> int:
    offset: int = event.end_mark.index
    return offset


class _Anchor:
    """An anchored node: its path, its value once complete, and its stretch of the composer's log."""

    def __init__(self, path: _Path, start: int) -> None:
        self.path, self.start, self.end, self.value = path, start, -1, None


class _Composer:
    """Plain data from one stream of events.

    ``log`` holds (path, span of the value, span of the key) of every node, parents before children, so that the
    nodes below an anchor are one stretch of it.
    """

    def __init__(self, source: str, places: _Places, restore: dict[int, str], repaired: dict[int, str]) -> None:
        self.found: list[Diagnostic] = []
        self._source, self._places = source, places
        self._restore, self._repaired = restore, repaired
        self._events: Iterator[Any] = iter(yaml.parse(source, Loader=_Loader))
        self._log: list[tuple[_Path, Span, Span | None]] = []
        self._anchors: dict[str, _Anchor] = {}
        self._expanded = 0

    def values(self) -> dict[tuple[str | int, ...], Span]:
        return {path: span for path, span, _ in self._log if _Dropped not in path}

    def keys(self) -> dict[tuple[str | int, ...], Span]:
        return {path: key for path, _, key in self._log if key and _Dropped not in path}

    def document(self) -> Any:
        """The data of the first document, None for an empty stream; a second one is VT008."""
        next(self._events)
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return None
        data, _ = self._node(next(self._events), (), None)
        next(self._events)
        event = next(self._events)
        if isinstance(event, yaml.DocumentStartEvent):
            note = "one file holds one spec; keep the second in a file of its own"
            self._say("VT008", "a second YAML document starts here", self._span(event), note)
        return data

    def _span(self, event: Any, end: int | None = None) -> Span:
        return self._places.span(_start(event), _stop(event) if end is None else end)

    def _say(self, code: str, message: str, span: Span, note: str | None = None) -> None:
        if len(self.found) < MAX_FINDINGS:
            self.found.append(Diagnostic(code, message, span, note=note))

    def _node(self, event: Any, path: _Path, key: Span | None) -> tuple[Any, int]:
        """The value of the node that ``event`` opens, and the offset of its end."""
        if len(path) > MAX_DEPTH:
            message = f"nested deeper than {MAX_DEPTH} levels"
            raise _Refused(Diagnostic("VT006", message, self._span(event, _start(event) + 1)))
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path, key), _stop(event)
        index = len(self._log)
        anchor = _Anchor(path, index) if event.anchor else None
        if anchor:
            self._anchors[event.anchor] = anchor
        self._log.append((path, _UNPLACED, key))
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value, end = self._scalar(event), _stop(event)
            if event.style in ("|", ">"):
                start = _start(event)
                end = start + len(self._source[start:end].rstrip())
        else:
            self._refuse_tag(event, "seq" if isinstance(event, yaml.SequenceStartEvent) else "map")
            compose = self._list if isinstance(event, yaml.SequenceStartEvent) else self._mapping
            value, end = compose(event, path)
        self._log[index] = (path, self._span(event, end), key)
        if anchor:
            anchor.end, anchor.value = len(self._log), value
        return value, end

    def _list(self, event: Any, path: _Path) -> tuple[list[Any], int]:
        items: list[Any] = []
        end = _stop(event)
        item: Any
        while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
            value, end = self._node(item, (*path, len(items)), None)
            items.append(value)
        return items, _stop(item) if event.flow_style else end

    def _mapping(self, event: Any, path: _Path) -> tuple[dict[str, Any], int]:
        data: dict[str, Any] = {}
        lines: dict[str, int] = {}
        end = _stop(event)
        item: Any
        while not isinstance(item := next(self._events), yaml.MappingEndEvent):
            key, span, reported = self._key(item, path)
            dropped = key is None or key in lines
            if key is not None and dropped:
                message = f"the key `{key}` is already on line {lines[key]}"
                self._say("VT003", message, span, "only one of the two can hold; remove or rename one")
            below = (*path, _Dropped if dropped else key)
            # A key without a span tells later stages that the key itself has been reported.
            value, end = self._node(next(self._events), below, None if reported else span)
            if key is not None and not dropped:
                data[key], lines[key] = value, span.line
        return data, _stop(item) if event.flow_style else end

    def _key(self, event: Any, path: _Path) -> tuple[str | None, Span, bool]:
        """The key as text, its span, and whether it was reported; None where it is no scalar."""
        span = self._span(event)
        if not isinstance(event, yaml.ScalarEvent):
            what = "an alias" if isinstance(event, yaml.AliasEvent) else "a list or a mapping"
            self._say("VT004", f"a key must be text, not {what}", span)
            self._node(event, (*path, _Dropped), None)
            return None, span, True
        value = self._scalar(event)
        if isinstance(value, str):
            return value, span, False
        written = self._text(event) or "~"
        note = f'write "{written}" in quotes' if event.value else "write the key before the colon"
        self._say("VT004", f"the key `{written}` is {_KIND[type(value)]}, and keys must be text", span, note)
        return written, span, True

    def _text(self, event: Any) -> str:
        if _start(event) in self._repaired:
            return self._repaired[_start(event)]
        text: str = event.value
        return text.translate(self._restore) if self._restore else text

    def _scalar(self, event: Any) -> Any:
        text = self._text(event)
        try:
            if event.tag is None:
                return scalar(text) if event.implicit[0] else text
            if not self._refuse_tag(event, *_SCALAR_TAGS):
                return text
            name = event.tag.removeprefix(_CORE)
            value = text if name == "str" else scalar(text)
        except ValueError as error:
            self._say("VT001", f"{error} is more than a spec can mean", self._span(event))
            return 0
        exact = type(value) in _SCALAR_TAGS[name]
        if not exact:
            self._say("VT008", f"`{text}` does not read as !!{name}", self._span(event))
        return float(value) if exact and name == "float" else value

    def _refuse_tag(self, event: Any, *allowed: str) -> bool:
        """False, and VT008, where the node carries a tag other than ``allowed`` of the YAML core schema."""
        if event.tag is None or event.tag in {_CORE + name for name in allowed}:
            return True
        start = _start(event)
        written = self._source[start:].lstrip().split(None, 1)[0] if event.tag else ""
        written = re.split(r"[,\[\]{}]", written)[0] if written.startswith("!") else event.tag
        note = "a spec is plain data: tags build nothing and are refused; remove it"
        self._say("VT008", f"the tag `{written}` is not allowed", self._places.span(start, start + len(written)), note)
        return False

    def _alias(self, event: Any, path: _Path, key: Span | None) -> Any:
        """The anchored value, with the spans of its nodes repeated under ``path``."""
        span = self._span(event)
        anchor = self._anchors.get(event.anchor)
        if anchor is None:
            note = f'a value that starts with * is a YAML alias; if text is meant, write "*{event.anchor}" in quotes'
            self._say("VT001", f"no anchor `&{event.anchor}` stands before this alias", span, note)
            self._log.append((path, span, key))
            return None
        if anchor.end < 0:
            message = f"the alias `*{event.anchor}` stands inside what it names"
            raise _Refused(Diagnostic("VT005", message, span))
        self._expanded += anchor.end - anchor.start
        if self._expanded > MAX_ALIAS_NODES:
            message = f"aliases expand to more than {MAX_ALIAS_NODES:,} nodes"
            raise _Refused(Diagnostic("VT005", message, span))
        cut = len(anchor.path)
        for below, value_span, key_span in self._log[anchor.start : anchor.end]:
            if len(path) + len(below) - cut > MAX_DEPTH:
                raise _Refused(Diagnostic("VT006", f"aliases nest deeper than {MAX_DEPTH} levels", span))
            here = (value_span, key_span) if len(below) > cut else (span, key)
            self._log.append(((*path, *below[cut:]), *here))
        return anchor.value

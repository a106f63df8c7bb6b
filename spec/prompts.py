"""Prompt groups → token ids, with the columns beside them and what the text decides for selectors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vtaps.spec.chat import ChatError, Template
from vtaps.spec.diagnostics import Diagnostic, Span, nearest
from vtaps.spec.document import Document
from vtaps.spec.files import nearest_file, path_in, read_text
from vtaps.spec.rows import OPEN, Interval
from vtaps.spec.spec import Prompt, PromptFile, PromptGroup
from vtaps.spec.tokens import Encoded, Tokens


@dataclass(frozen=True)
class ReadyPrompt:
    """``ids`` [P] as the engine gets them.  ``encoded`` is None for prompts given as ids; ``turns`` are
    (role, first row, past the last row) for chat prompts."""

    group: str
    id: str
    ids: tuple[int, ...]
    text: str | None
    span: Span
    columns: Mapping[str, Any] = field(default_factory=dict)
    encoded: Encoded | None = None
    turns: tuple[tuple[str, int, int], ...] = ()

    def matches(self, text: str) -> list[Interval]:
        return self.encoded.occurrences(text) if self.encoded is not None else []


def load_group(group: PromptGroup, doc: Document, found: list[Diagnostic]) -> list[tuple[Prompt, Span]]:
    """The prompts of a group with the place each stands at; findings go to ``found``."""
    if group.file is None:
        out = [(p, doc.at(*p.where)) for p in group.items]
    else:
        out = list(_from_file(group, group.file, doc, found))
        if not out and not any(d.code == "VT312" for d in found):
            found.append(Diagnostic("VT107", f"{group.file.file} holds no prompts", doc.at(*group.where, "file")))
    seen: dict[str, Span] = {}
    for prompt, span in out:
        if prompt.id in seen:
            first = seen[prompt.id]
            found.append(
                Diagnostic(
                    "VT313",
                    f"prompt id {prompt.id!r} stands twice in group {group.name!r}",
                    span,
                    note=f"the first is at {first.file}:{first.line}",
                )
            )
        seen.setdefault(prompt.id, span)
    return out


def _from_file(
    group: PromptGroup, ref: PromptFile, doc: Document, found: list[Diagnostic]
) -> Iterator[tuple[Prompt, Span]]:
    where = doc.at(*group.where, "file")
    try:
        lines = read_text(path_in(doc.folder, ref.file)).split("\n")
    except OSError as error:
        near = nearest_file(doc.folder / ref.file)
        found.append(Diagnostic("VT312", f"{ref.file} cannot be read: {error.strerror}", where, nearest=near))
        return
    named = [ref.column] + ([ref.id_column] if ref.id_column is not None else [])
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        span = Span(ref.file, number, 1, number, len(line) + 1)
        try:
            row = json.loads(line)
            problem = None if isinstance(row, dict) else "a line must hold one JSON object"
        except (ValueError, RecursionError) as error:
            problem = f"not JSON: {error}"
        missing = [] if problem else [c for c in named if c not in row]
        if missing:
            problem = f"no column {missing[0]!r}"
        elif not problem:
            problem = _wrong(ref.kind, row[ref.column]) or _halved(line, row[ref.column])
        if problem:
            valid = tuple(row) if missing else ()
            close = nearest(missing[0], valid) if missing else None
            found.append(Diagnostic("VT312", f"{ref.file} line {number}: {problem}", span, valid, close))
            return
        ident = row[ref.id_column] if ref.id_column is not None else number - 1
        columns = {k: v for k, v in row.items() if k not in named}
        yield Prompt(str(ident), ref.kind, row[ref.column], group.where, columns, number), span


def _wrong(kind: str, content: Any) -> str | None:
    if kind == "text" and not isinstance(content, str):
        return f"a text must be a string, not {type(content).__name__}"
    if kind == "ids" and not (isinstance(content, list) and content and all(type(i) is int for i in content)):
        return "ids must be a non-empty list of integers"
    if kind == "chat":
        good = isinstance(content, list) and content
        if not good or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in content):
            return "a chat must be a non-empty list of {role, content}"
    return None


def _halved(line: str, content: Any) -> str | None:
    """JSON can spell half of a character, which no tokenizer takes."""
    if "\\ud" in line.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return f"the escape \\u{ord(error.object[error.start]):04x} is half of a character"
    return None


class Encoder:
    """Encodes prompts as the engine would, one tokenizer and one template for all of them."""

    def __init__(self, tokens: Tokens, vocab: int) -> None:
        self.tokens = tokens
        self.vocab = vocab
        self._template: Template | ChatError | None = None

    def template(self) -> Template:
        if self._template is None:
            try:
                self._template = Template(self.tokens.folder)
            except ChatError as error:
                self._template = error
        if isinstance(self._template, ChatError):
            raise self._template
        return self._template

    def encode(self, group: str, prompt: Prompt, span: Span, found: list[Diagnostic]) -> ReadyPrompt | None:
        if prompt.kind == "ids":
            over = [i for i in prompt.content if not 0 <= i < self.vocab]
            if over:
                found.append(
                    Diagnostic("VT316", f"token id {over[0]} is not in the vocabulary (0 … {self.vocab - 1})", span)
                )
                return None
            return ReadyPrompt(group, prompt.id, tuple(prompt.content), None, span, prompt.columns)
        if prompt.kind == "text":
            encoded = self.tokens.encode(prompt.content, special=True)
            turns: list[tuple[str, int, int | None]] = []
        else:
            try:
                text, turns = self._chat(prompt.content)
            except ChatError as error:
                found.append(Diagnostic("VT317", f"prompt {prompt.id!r}: {error}", span))
                return None
            encoded = self.tokens.encode(text, special=False)
        if not encoded.ids:
            found.append(Diagnostic("VT316", f"prompt {prompt.id!r} has no tokens", span))
            return None
        rows = tuple((role, *_rows(encoded, a, b)) for role, a, b in turns)
        return ReadyPrompt(group, prompt.id, encoded.ids, encoded.text, span, prompt.columns, encoded, rows)

    def _chat(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[str, int, int | None]]]:
        template = self.template()
        try:
            return template.turns(messages)
        except ChatError:
            return template.render(messages, generation_prompt=True), []


def _rows(encoded: Encoded, start: int, stop: int | None) -> Interval:
    first = next((i for i, (a, _) in enumerate(encoded.offsets) if a >= start), len(encoded.ids))
    if stop is None:
        return first, OPEN
    last = next((i for i, (a, _) in enumerate(encoded.offsets) if a >= stop), len(encoded.ids))
    return first, last

"""Chat messages → text by the model's own template, and the turns of the text.

The environment is the one that Hugging Face templates are written for (sandboxed Jinja2, trimmed blocks, loop
controls, ``raise_exception``, ``strftime_now``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

Messages = Sequence[dict[str, Any]]


class ChatError(Exception):
    """There is no template, or it refuses the messages."""


def template_of(folder: Path) -> str | None:
    """The chat template among a model's files, None where it has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = _config(folder)
    found = config.get("chat_template")
    if isinstance(found, list):  # named templates
        found = next((t["template"] for t in found if t.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    loaded = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return loaded if isinstance(loaded, dict) else {}


class Template:
    """Raises ChatError where the folder has no template."""

    def __init__(self, folder: Path) -> None:
        source = template_of(folder)
        if source is None:
            raise ChatError(f"{folder} has no chat template")
        from jinja2.exceptions import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        env.filters["tojson"] = tojson
        env.globals["raise_exception"] = raise_exception
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special = {
            k: v["content"] if isinstance(v, dict) else v
            for k, v in _config(folder).items()
            if k.endswith("_token") and isinstance(v, str | dict)
        }
        try:
            self._template = env.from_string(source)
        except TemplateError as error:
            raise ChatError(f"the chat template does not parse: {error}") from None

    def render(self, messages: Messages, *, generation_prompt: bool) -> str:
        """Raises ChatError."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=generation_prompt, tools=None, documents=None, **self._special
            )
        except Exception as error:  # a template can raise anything
            raise ChatError(f"the chat template refuses these messages: {error}") from None

    def turns(self, messages: Messages) -> tuple[str, list[tuple[str, int, int | None]]]:
        """The prompt text and its turns as (role, first character, past the last character; None for the turn
        being generated).  A turn holds its header; text that the template puts before the first message belongs
        to no turn's content but is counted with the first.

        Raises ChatError, also where the template does not build the text message by message.
        """
        text = self.render(messages, generation_prompt=True)
        turns: list[tuple[str, int, int | None]] = []
        start = 0
        for i, message in enumerate(messages):
            part = self.render(messages[: i + 1], generation_prompt=False)
            if not text.startswith(part) or len(part) < start:
                raise ChatError("the chat template does not build its text message by message: turns are not known")
            turns.append((str(message["role"]), start, len(part)))
            start = len(part)
        turns.append(("assistant", start, None))
        return text, turns

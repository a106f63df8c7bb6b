"""Chat messages → text by the model's own template, and the turns of the text.

The environment is the one that Hugging Face templates are written for (sandboxed Jinja2, trimmed blocks, loop
controls, ``raise_exception``), without a clock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    """Raises ChatError where the folder has no template, or one that cannot be read."""

    def __init__(self, folder: Path) -> None:
        try:
            source, config = template_of(folder), _config(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ChatError(f"the chat template in {folder} cannot be read: {error}") from None
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
        # No strftime_now: a prompt with today's date would be another prompt tomorrow.  Templates that ask whether
        # it is there fall back to a date of their own; the others are refused in `render`.
        self._special = {
            k: str(v.get("content", "")) if isinstance(v, dict) else v
            for k, v in config.items()
            if k.endswith("_token") and isinstance(v, str | dict)
        }
        try:
            self._template = env.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ChatError(f"the chat template does not parse: {error}") from None

    def render(self, messages: Messages, *, generation_prompt: bool) -> str:
        """Raises ChatError."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=generation_prompt, tools=None, documents=None, **self._special
            )
        except Exception as error:  # a template can raise anything
            if "strftime_now" in str(error):
                why = "it prints today's date, and the prompt would change every day: give the prompt as text"
                raise ChatError(f"the chat template cannot be used: {why}") from None
            raise ChatError(f"the chat template refuses these messages: {error}") from None

    def turns(self, messages: Messages) -> tuple[str, list[tuple[str, int, int | None]]]:
        """The prompt text and its turns as (role, first character, past the last character; None for the turn
        being generated).  A turn holds its header; a system message that the template adds by itself is a turn of
        the role ``system``, and a beginning-of-sequence token is in no turn.

        Raises ChatError, also where the template does not build the text message by message.
        """
        text = self.render(messages, generation_prompt=True)
        turns: list[tuple[str, int, int | None]] = []
        bos = self._special.get("bos_token") or ""
        start = len(bos) if bos and text.startswith(bos) else 0
        for i, message in enumerate(messages):
            part = self.render(messages[: i + 1], generation_prompt=False)
            if not text.startswith(part) or len(part) < start:
                raise ChatError("the chat template does not build its text message by message: turns are not known")
            if i == 0 and (own := self._first_turn(message, part)) > start:
                turns.append(("system", start, own))
                start = own
            turns.append((str(message["role"]), start, len(part)))
            start = len(part)
        turns.append(("assistant", start, None))
        if bos and any(text.startswith(bos, begin) for _, begin, _ in turns[1:]):
            # SmolLM2's is <|im_start|>: the header of every turn, not something in front of the first.
            turns[0] = (turns[0][0], 0, turns[0][2])
        return text, turns

    def _first_turn(self, message: dict[str, Any], part: str) -> int:
        """Where the first message's own turn begins in ``part``, its rendering alone: the message said once more
        after an answer shows what it looks like without what the template puts before a first one."""
        if message["role"] != "user":
            return 0
        said = [message, {"role": "assistant", "content": "x"}]
        try:
            before = self.render(said, generation_prompt=False)
            again = self.render([*said, message], generation_prompt=False)
        except ChatError:
            return 0
        own = again.removeprefix(before)
        return len(part) - len(own) if again.startswith(before) and own and part.endswith(own) else 0

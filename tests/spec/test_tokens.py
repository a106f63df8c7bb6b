"""Prompts become the token ids that vLLM would give them: held against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trees import DATA
from vtaps.spec.chat import ChatError, Template
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.prompts import Encoder
from vtaps.spec.rows import OPEN
from vtaps.spec.spec import Prompt
from vtaps.spec.tokens import TokenizerError, Tokens

FOLDER = DATA / "tokenizer"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The capital of Paris is"},
    {"role": "assistant", "content": " Paris."},
    {"role": "user", "content": "äöü 🙂"},
]
TEXTS = ["The capital of France is", "", " Paris Paris", "äöü 🙂\n\n x", "<|im_start|>user\nThe"]


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(FOLDER))


@pytest.fixture(scope="module")
def ours() -> Tokens:
    return Tokens.load(FOLDER)


@pytest.mark.parametrize("text", TEXTS)
def test_text(text: str, ours: Tokens, theirs: Any) -> None:
    assert list(ours.encode(text, special=True).ids) == theirs(text)["input_ids"]
    assert list(ours.ids(text)) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_chat(count: int, ours: Tokens, theirs: Any) -> None:
    found: list[Diagnostic] = []
    ready = Encoder(ours, 1000).encode("g", Prompt("a", "chat", CHAT[:count], ()), Span("s"), found)
    assert ready is not None and found == []
    wanted = theirs.apply_chat_template(CHAT[:count], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(ready.ids) == wanted
    text = theirs.apply_chat_template(CHAT[:count], add_generation_prompt=True, tokenize=False)
    assert ready.text == text


def test_turns(ours: Tokens) -> None:
    found: list[Diagnostic] = []
    ready = Encoder(ours, 1000).encode("g", Prompt("a", "chat", CHAT[:3], ()), Span("s"), found)
    assert ready is not None
    assert [t[0] for t in ready.turns] == ["system", "user", "assistant", "assistant"]
    pieces = ours.pieces(ready.ids)
    texts = ["".join(pieces[a : min(b, len(pieces))]) for _, a, b in ready.turns]
    assert texts[1] == "<|im_start|>user\nThe capital of Paris is<|im_end|>\n"
    assert texts[2] == "<|im_start|>assistant\n Paris.<|im_end|>\n"
    assert texts[3] == "<|im_start|>assistant\n"
    assert ready.turns[3][2] == OPEN
    assert [a for _, a, _ in ready.turns[1:]] == [b for _, _, b in ready.turns[:-1]]


OWN = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("first", [0, 1])
def test_a_system_message_of_the_templates_own_is_not_the_users(first: int, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(OWN)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    text, turns = Template(tmp_path).turns(CHAT[first:])
    said = [(role, text[a:b]) for role, a, b in turns]
    system = "You are kind." if first else "Be brief."
    assert said[0] == ("system", f"<|im_start|>system\n{system}<|im_end|>\n")
    assert said[1] == ("user", "<|im_start|>user\nThe capital of Paris is<|im_end|>\n")
    assert [role for role, _ in said] == ["system", "user", "assistant", "user", "assistant"]
    assert "".join(part for _, part in said) == text.removeprefix("<s>")


def test_a_template_has_no_clock(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024{% endif %}")
    assert Template(tmp_path).render(CHAT, generation_prompt=True) == "26 Jul 2024"
    file.write_text("{{ strftime_now('%Y') }}")
    with pytest.raises(ChatError, match="every day"):
        Template(tmp_path).render(CHAT, generation_prompt=True)


def test_match(ours: Tokens) -> None:
    encoded = ours.encode("The Paris is Paris", special=True)
    assert [ours.pieces(encoded.ids[a:b]) for a, b in encoded.occurrences(" Paris")] == [[" Paris"], [" Paris"]]
    # Half of a token counts as the token.
    assert [ours.pieces(encoded.ids[a:b]) for a, b in encoded.occurrences("ris is")] == [[" Paris", " is"]]
    assert encoded.occurrences("Rome") == []


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "does not parse"),
        ("{{ messages[9].content }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
    ],
)
def test_templates_that_fail(template: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ChatError, match=says):
        Template(tmp_path).render(CHAT, generation_prompt=True)


def test_no_template_and_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="no chat template"):
        Template(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="no tokenizer can be read"):
        Tokens.load(tmp_path)

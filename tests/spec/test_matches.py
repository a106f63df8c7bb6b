"""Selectors that look at a prompt's text, held against the bytes of its tokens: no offset of a tokenizer is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from examples.demo_model import cache_folder, is_complete
from tests.trees import DATA
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.prompts import Encoder, ReadyPrompt
from vtaps.spec.rows import Rows, compile_rows
from vtaps.spec.selectors import facts_of
from vtaps.spec.spec import Prompt
from vtaps.spec.tokens import Tokens

PIECES = (
    "a", "é", "e\u0301", "🙂", "👩‍👩‍👧", "漢", "字", " ", "  ", "\n", " Paris", "aa", "<|im_start|>", "<|im_end|>",
    "user", "|>", "ß", "\u00a0", "1", "23", "\t", "'s", "\r\n", "ﬁ", "𝔘",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
SPAN = Span("s")


def of_bytes() -> dict[str, int]:
    """How byte-level tokenizers spell a byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTES = of_bytes()


def characters(tokens: Tokens, ids: tuple[int, ...], text: str) -> list[set[int]]:
    """Of each token the characters of ``text`` that it has a byte of."""
    special = {token.content for token in tokens.fast.get_added_tokens_decoder().values()}
    owner = [i for i, letter in enumerate(text) for _ in letter.encode()]
    out, at = [], 0
    for number in ids:
        spelled = tokens.fast.id_to_token(number)
        size = len(spelled.encode()) if spelled in special else len(bytes(BYTES[c] for c in spelled))
        out.append(set(owner[at : at + size]))
        at += size
    assert at == len(owner)
    return out


@pytest.fixture(scope="module", params=["smollm2", "small"])
def tokens(request: pytest.FixtureRequest) -> Tokens:
    return load(request.param)


def load(name: str) -> Tokens:
    if name == "smollm2":
        assert is_complete(cache_folder()), "make model"
        return Tokens.load(cache_folder())
    return Tokens.load(DATA / "tokenizer")


@pytest.fixture(scope="module")
def smollm2() -> Tokens:
    return load("smollm2")


def prompt_of(tokens: Tokens, kind: Any, content: Any) -> ReadyPrompt:
    found: list[Diagnostic] = []
    ready = Encoder(tokens, 49152).encode("g", Prompt("a", kind, content, ()), SPAN, found)
    assert ready is not None and not found
    return ready


def selected(ready: ReadyPrompt, rows: Rows) -> list[int]:
    out: list[int] = compile_rows(rows, facts_of(ready, [rows], {})).select(0, np.array(ready.ids, np.int64)).tolist()
    return out


@given(text=TEXTS.filter(bool), data=st.data())
@settings(deadline=None)
def test_a_match_takes_every_token_with_a_byte_of_an_occurrence(tokens: Tokens, text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    wanted = data.draw(st.one_of(st.just(text[start : start + data.draw(st.integers(1, 5))]), TEXTS.filter(bool)))
    ready = prompt_of(tokens, "text", text)
    inside = {at + i for at in range(len(text)) if text.startswith(wanted, at) for i in range(len(wanted))}
    held = characters(tokens, ready.ids, text)
    expected = [i for i, own in enumerate(held) if own & inside]
    assert selected(ready, Rows(match=wanted)) == expected
    left_out = [i for i in range(len(ready.ids)) if i not in expected]
    assert selected(ready, Rows(exclude=Rows(match=wanted))) == left_out


@pytest.mark.parametrize(
    ("text", "match", "pieces"),
    [
        # A match that begins or ends inside a token takes the token.
        ("naïve café née", "é", [" café", "ée"]),
        ("The capital of Paris", "apital o", [" capital", " of"]),
        # An emoji of its own is two tokens, after a blank one.
        ("so 🙂🙂 so", "🙂", [" 🙂", "\ufffd", "\ufffd\ufffd"]),
        # Occurrences may overlap.
        ("23 232 3", "232", ["2", "3", "2"]),
        ("aXaXa Xa", "aXa", ["a", "X", "a", "X", "a"]),
        # One letter in Unicode's two spellings is two texts.
        ("cafe\u0301", "\u00e9", []),
        ("cafe\u0301", "e\u0301", ["afe", "\ufffd", "\ufffd"]),
        # A special token in a text is its spelling.
        ("<|im_start|>user\nhi<|im_end|>\n", "<|im_end|>", ["<|im_end|>"]),
        ("<|im_start|>user\nhi<|im_end|>\n", "|>user", ["<|im_start|>", "user"]),
    ],
)
def test_matches_over_the_edges_of_tokens(smollm2: Tokens, text: str, match: str, pieces: list[str]) -> None:
    ready = prompt_of(smollm2, "text", text)
    rows = selected(ready, Rows(match=match))
    assert smollm2.pieces(tuple(ready.ids[i] for i in rows)) == pieces


def test_a_tokenizer_that_takes_blanks_out_of_its_ranges(tmp_path: Path) -> None:
    fast = load("small").fast
    fast.post_processor = processors.ByteLevel(trim_offsets=True)
    fast.save(str(tmp_path / "tokenizer.json"))
    trimmed = Tokens.load(tmp_path)
    text = "The Paris is \n"
    encoded = trimmed.encode(text, special=True)
    assert trimmed.fast.encode(text).offsets[1] == (4, 9) and text[3:9] == " Paris"
    for wanted in (" ", " P", "e ", "s \n", "\n"):
        inside = {at + i for at in range(len(text)) if text.startswith(wanted, at) for i in range(len(wanted))}
        expected = {i for i, own in enumerate(characters(trimmed, encoded.ids, text)) if own & inside}
        assert {i for a, b in encoded.occurrences(wanted) for i in range(a, b)} == expected, wanted


def test_many_matches_in_a_long_prompt_are_quick(tokens: Tokens) -> None:
    encoded = tokens.encode("a Paris\n" * 20_000, special=True)
    assert len(encoded.occurrences(" Paris")) == 20_000 and len(encoded.occurrences("a")) == 40_000


CONTENT = st.lists(st.sampled_from([p for p in PIECES if p.strip()]), min_size=1, max_size=5).map("".join)


@given(
    said=st.lists(CONTENT, min_size=1, max_size=5),
    system=st.none() | CONTENT,
    role=st.sampled_from(["system", "user", "assistant"]),
    skip=st.integers(0, 7),
)
@settings(deadline=None)
def test_turns_of_many_chats(smollm2: Tokens, said: list[str], system: str | None, role: str, skip: int) -> None:
    """A turn goes from its header to the next one's, in the prompt too; the last is the one being generated."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(said)]
    own = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    written = [{"role": "system", "content": own if system is None else system}, *messages]
    ready = prompt_of(smollm2, "chat", messages if system is None else written)
    parts = [(m["role"], f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n") for m in written]
    parts.append(("assistant", "<|im_start|>assistant\n"))
    text = "".join(part for _, part in parts)
    assert ready.text == text
    owner = [i for i, (_, part) in enumerate(parts) for _ in part]
    turn_of = [owner[min(own)] for own in characters(smollm2, ready.ids, text)]
    seen: dict[int, int] = {}
    expected = []
    for row, turn in enumerate(turn_of):
        seen[turn] = seen.get(turn, 0) + 1
        if parts[turn][0] == role and seen[turn] > skip:
            expected.append(row)
    assert selected(ready, Rows(turn=role, skip=skip)) == expected
    held = set(selected(ready, Rows(turn=role, skip=skip, match="<|im_end|>")))
    assert held == {row for row in expected if ready.ids[row] == smollm2.ids("<|im_end|>")[0]}


def test_headers_of_the_demo_model(smollm2: Tokens) -> None:
    chat = [
        {"role": "user", "content": "What is the capital of Italy?"},
        {"role": "assistant", "content": "Rome."},
        {"role": "user", "content": "And of Japan?"},
    ]
    ready = prompt_of(smollm2, "chat", chat)

    def pieces(role: str, skip: int) -> str:
        rows = selected(ready, Rows(turn=role, skip=skip))
        return "·".join(smollm2.pieces(tuple(ready.ids[i] for i in rows)))

    assert pieces("user", 3) == "What· is· the· capital· of· Italy·?·<|im_end|>·\n·And· of· Japan·?·<|im_end|>·\n"
    # "assistant" is two tokens.
    assert pieces("assistant", 0).startswith("<|im_start|>·ass·istant·\n·R")
    assert pieces("assistant", 4).endswith(".·<|im_end|>·\n")

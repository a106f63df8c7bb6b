"""Texts and token ids, with the tokenizer's own files and no model.

A tokenizer is read from ``tokenizer.json`` in a few milliseconds.  Where a model has none, transformers builds the
fast tokenizer from what the folder holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from vtaps.spec.rows import Interval


class TokenizerError(Exception):
    """The folder holds no tokenizer that can be read; the message says what was looked at."""


@dataclass(frozen=True)
class Encoded:
    """``ids`` of a text and, beside each, the half-open range of characters it covers (empty for special tokens)."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[Interval, ...]

    def covering(self, start: int, stop: int) -> list[Interval]:
        """Half-open ranges of tokens that overlap the characters ``start … stop``."""
        hit = [i for i, (a, b) in enumerate(self.offsets) if a < stop and b > start]
        return [(hit[0], hit[-1] + 1)] if hit else []

    def occurrences(self, text: str) -> list[Interval]:
        """Half-open ranges of the tokens that overlap each occurrence of ``text``."""
        out: list[Interval] = []
        at = self.text.find(text)
        while at >= 0:
            out.extend(self.covering(at, at + len(text)))
            at = self.text.find(text, at + 1)
        return out


class Tokens:
    """A tokenizer and its chat template."""

    def __init__(self, fast: FastTokenizer, folder: Path) -> None:
        self.fast = fast
        self.folder = folder
        self.fast.no_truncation()
        self.fast.no_padding()

    @staticmethod
    def load(folder: Path) -> Tokens:
        """Raises TokenizerError."""
        file = folder / "tokenizer.json"
        try:
            if file.is_file():
                return Tokens(FastTokenizer.from_file(str(file)), folder)
            from transformers import AutoTokenizer

            return Tokens(AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer, folder)
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"no tokenizer can be read in {folder}: {str(error).splitlines()[0]}") from None

    def encode(self, text: str, *, special: bool) -> Encoded:
        """``special`` adds what the tokenizer puts around a prompt (a beginning-of-sequence token, say)."""
        found = self.fast.encode(text, add_special_tokens=special)
        return Encoded(text, tuple(found.ids), tuple(found.offsets))

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` as a piece of a longer text: nothing is added around it."""
        return self.encode(text, special=False).ids

    def pieces(self, ids: tuple[int, ...]) -> list[str]:
        return [self.fast.decode([i], skip_special_tokens=False) for i in ids]

    @property
    def size(self) -> int:
        return int(self.fast.get_vocab_size(with_added_tokens=True))

"""Texts and token ids, with the tokenizer's own files and no model.

A tokenizer is read from ``tokenizer.json`` in a few milliseconds.  Where a model has none, transformers builds the
fast tokenizer from what the folder holds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from vtaps.spec.rows import Interval


class TokenizerError(Exception):
    """The folder holds no tokenizer that can be read; the message says what was looked at."""


@dataclass(frozen=True)
class Encoded:
    """``ids`` of a text and, beside each, the half-open range of characters it covers: of a character that several
    tokens share, each has it; a token that the tokenizer puts around the text has none, and the range is empty."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[Interval, ...]

    def occurrences(self, text: str) -> list[Interval]:
        """Half-open ranges of the tokens that overlap each occurrence of ``text``; occurrences may overlap too."""
        out: list[Interval] = []
        covering, starts, ends = self._covering
        at = self.text.find(text)
        while at >= 0:
            first, last = bisect_right(ends, at), bisect_left(starts, at + len(text))
            if first < last:
                out.append((covering[first], covering[last - 1] + 1))
            at = self.text.find(text, at + 1)
        return out

    @cached_property
    def _covering(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens that cover characters, with the ends of their ranges, all in order."""
        covering = [i for i, (a, b) in enumerate(self.offsets) if a < b]
        return covering, [self.offsets[i][0] for i in covering], [self.offsets[i][1] for i in covering]


def _vocabulary(name: str) -> bool:
    """Whether a file of this name holds a vocabulary, as one of transformers' tokenizers writes it."""
    return name.startswith("vocab") or name.endswith((".model", ".tiktoken", "tekken.json", "merges.txt"))


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
            if not any(_vocabulary(p.name) for p in folder.iterdir()):
                # transformers makes an empty one of some models' name alone.
                raise TokenizerError("it has no vocabulary")
            from transformers import AutoTokenizer

            made = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
            return Tokens(made.backend_tokenizer, folder)
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"no tokenizer can be read in {folder}: {str(error).splitlines()[0]}") from None

    def encode(self, text: str, *, special: bool) -> Encoded:
        """``special`` adds what the tokenizer puts around a prompt (a beginning-of-sequence token, say)."""
        found = self.fast.encode(text, add_special_tokens=special)
        offsets = found.offsets
        if self._bare is not None:
            own = self._bare.encode(text, add_special_tokens=False)
            first = next((i for i, added in enumerate(found.special_tokens_mask) if not added), 0)
            rest = len(found.ids) - first - len(own.ids)
            offsets = [(0, 0)] * first + own.offsets + [(0, 0)] * rest
        return Encoded(text, tuple(found.ids), tuple(offsets))

    @cached_property
    def _bare(self) -> FastTokenizer | None:
        """The tokenizer without what it does behind the model, where that takes blanks out of the tokens' ranges."""
        after = self.fast.post_processor
        if after is None or b'"trim_offsets":true' not in after.__getstate__():
            return None
        bare = FastTokenizer.from_str(self.fast.to_str())
        bare.post_processor = None
        return bare

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` as a piece of a longer text: nothing is added around it."""
        return self.encode(text, special=False).ids

    def pieces(self, ids: tuple[int, ...]) -> list[str]:
        return [self.fast.decode([i], skip_special_tokens=False) for i in ids]

    @property
    def size(self) -> int:
        return int(self.fast.get_vocab_size(with_added_tokens=True))

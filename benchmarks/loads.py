"""What an engine is asked to serve at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FIRST_ID = 100
"""Token ids below are left out of drawn prompts: special tokens stand there."""


@dataclass(frozen=True)
class Load:
    """``requests`` at once, each ``prompt`` tokens long and ``generated`` tokens on: always to the end, greedy.

    ``same_prompt``: one prompt for all requests, as the points of a sweep have.
    """

    name: str
    requests: int
    prompt: int
    generated: int
    same_prompt: bool = False

    @property
    def tokens(self) -> int:
        return self.requests * self.generated

    @property
    def prompts(self) -> int:
        return 1 if self.same_prompt else self.requests

    @property
    def title(self) -> str:
        noun = "request" if self.requests == 1 else "requests"
        return f"{self.requests:,} {noun} × {self.generated} new tokens"


def draw_ids(seed: list[int], prompts: int, length: int, vocabulary: int) -> npt.NDArray[Any]:
    """Token ids ``[prompts, length]`` int64, drawn evenly."""
    return np.random.default_rng(seed).integers(FIRST_ID, vocabulary, (prompts, length))

"""The short form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engine.soak import ARMS, soak

pytestmark = pytest.mark.engine


def test_every_row_of_a_hundred_requests_is_its_own(tmp_path: Path) -> None:
    told = soak(tmp_path, "taps", 100, seed=7)
    assert told.wrong == [] and told.ok
    # A soak that met nothing proves nothing.
    assert told.completions > told.requests == 100 > len(ARMS)
    assert min(told.rows, told.cached, told.given_up, told.loads, told.preempted) > 0

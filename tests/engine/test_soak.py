"""The short form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engine.soak import ARMS, PIECES, Regime, soak

pytestmark = pytest.mark.engine


def test_every_row_of_a_hundred_requests_is_its_own(tmp_path: Path) -> None:
    told = soak(tmp_path, "taps", 100, seed=7)
    assert told.wrong == [] and told.ok
    # A soak that met nothing proves nothing.
    assert told.completions > told.requests == 100 > len(ARMS)
    assert min(told.rows, told.cached, told.given_up, told.loads, told.preempted) > 0


REGIMES = {
    # In three layers of four a row sees 16: what the window has passed is freed. A block is of one layer here.
    "sliding window": ("taps", Regime("gemma3", vllm={"num_gpu_blocks_override": 40}, pieces=PIECES, wave=10)),
}


@pytest.mark.parametrize("name", REGIMES)
def test_every_row_is_its_own_where_schedulers_do_their_worst(name: str, tmp_path: Path) -> None:
    mode, regime = REGIMES[name]
    told = soak(tmp_path, mode, 40, seed=3, regime=regime)
    assert told.wrong == [] and told.ok
    assert {1, 7} < set(told.pieces) and told.preempted

"""Taps on views of one tensor, and on what nobody goes on with, compiled as vLLM has Inductor do it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch._inductor.config as inductor  # noqa: E402

from vtaps.runtime import ops  # noqa: E402


@pytest.fixture
def seen() -> Iterator[dict[int, torch.Tensor]]:
    """Location → what its tap saw; location 1 is doubled."""
    found: dict[int, torch.Tensor] = {}

    def run(location: int, x: torch.Tensor, _: torch.Tensor | None) -> None:
        found[location] = x.clone()
        if location == 1:
            x.mul_(2.0)

    ops.serve(run)
    yield found
    ops.leave(run)


def test_the_parts_of_a_split(seen: dict[int, torch.Tensor]) -> None:
    def attention(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = torch.nn.functional.linear(x, weight).split([32, 16, 16], -1)
        for number, part in enumerate(parts):
            ops.apart(part, None, number)
        q, k, v = parts
        return q.view(-1, 2, 16).square().mean(-1), k + 1.0, v + 1.0

    torch.manual_seed(0)
    x, weight = torch.randn(7, 64), torch.randn(64, 64)
    q, k, v = torch.nn.functional.linear(x, weight).split([32, 16, 16], -1)
    with inductor.patch(enable_auto_functionalized_v2=False, force_disable_caches=True), torch.inference_mode():
        out = torch.compile(attention, fullgraph=True)(x, weight)
    for found, wanted in zip((*out, *(seen[n] for n in range(3))), (
        q.view(-1, 2, 16).square().mean(-1), k * 2.0 + 1.0, v + 1.0, q, k, v,
    ), strict=True):  # fmt: skip
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("op", [ops.tap, ops.tap_pair, ops.apart])
def test_a_value_that_nobody_goes_on_with_is_seen(op: Any, seen: dict[int, torch.Tensor]) -> None:
    """As what a norm puts out beside its output, after the last layer."""

    def last(x: torch.Tensor) -> torch.Tensor:
        normed, stream = x * 2.0, x + 1.0
        op(stream, None, 0)
        return normed

    x = torch.arange(28.0).view(7, 4)
    with inductor.patch(enable_auto_functionalized_v2=False, force_disable_caches=True), torch.inference_mode():
        out = torch.compile(last, fullgraph=True)(x)
    assert torch.equal(out, x * 2.0) and torch.equal(seen[0], x + 1.0)

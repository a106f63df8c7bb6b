"""Partial sums through operations, and layers of one kind: what the pass over several ranks rests on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vtaps.runtime.compat.abstract_pass import Call
from vtaps.runtime.compat.layer_kinds import layer_kinds
from vtaps.runtime.compat.partial_sums import PartialSums
from vtaps.spec.tree import Value

PAIR = (torch.ones(2, 3), torch.full((2, 3), 2.0))
OTHER = torch.full((2, 3), 5.0)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("view", lambda p: p.view(3, 2)),
        ("split", lambda p: p.split([1, 2], dim=-1)[1]),
        ("transposed and copied", lambda p: p.t().contiguous()),
        ("cast", lambda p: p.to(torch.float64)),
        ("scaled", lambda p: p * 0.5),
        ("scaled by a whole tensor", lambda p: OTHER * p),
        ("divided", lambda p: p / OTHER),
        ("both partial", lambda p: p + p),
        ("negated", lambda p: -p),
        ("rows", lambda p: p[torch.tensor([1])]),
        ("joined", lambda p: torch.cat([p, p])),
        ("summed", lambda p: p.sum(-1)),
        ("masked", lambda p: p.masked_fill(torch.eye(2, 3) > 0, 0)),
    ],
)
def test_what_is_linear_in_a_partial_sum_is_one(name: str, function: Any) -> None:
    assert held(function), name
    terms = [function(term) for term in PAIR]
    torch.testing.assert_close(terms[0] + terms[1], function(PAIR[0] + PAIR[1]))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("a number added", lambda p: p + 1),
        ("a whole tensor added", lambda p: p + OTHER),
        ("a whole tensor joined", lambda p: torch.cat([p, OTHER])),
        ("squared", lambda p: p * p),
        ("a divisor", lambda p: OTHER / p),
        ("activated", lambda p: torch.nn.functional.silu(p)),
    ],
)
def test_what_is_not_linear_is_none(name: str, function: Any) -> None:
    assert not held(function), name
    terms = [function(term) for term in PAIR]
    assert not torch.equal(terms[0] + terms[1], function(PAIR[0] + PAIR[1]))


def held(function: Any) -> bool:
    sums = PartialSums()
    with sums:
        term = sums.begins(torch.ones(2, 3))
        return sums.is_partial(sums.seen(function(term)))


def test_a_tensor_that_is_reduced_later_was_one_under_every_view_and_no_other_is() -> None:
    sums = PartialSums()
    with sums:
        tensor, other = torch.ones(4, 2), torch.ones(4, 2)
        early, apart = sums.seen(tensor.view(2, 4)), sums.seen(other)
        sums.reduced(tensor[:])
        late = sums.seen(tensor)
    assert sums.is_partial(early) and sums.is_partial(late) and not sums.is_partial(apart)


def test_a_stage_of_the_first_layers_is_built_and_run_and_all_of_them_again_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = pytest.importorskip("vtaps.runtime.compat.ranks")
    from vllm.distributed import parallel_state
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.models.utils import make_layers

    monkeypatch.setattr(parallel_state, "_PP", ranks.FakeGroup("pp", 1, print))
    made = torch.nn.Module()
    with ranks.first_layers(2):
        made.start_layer, made.end_layer, made.layers = make_layers(5, lambda prefix: Layer(4), "layers")
    assert get_pp_indices(5, 0, 1) == (0, 5)
    assert (made.start_layer, made.end_layer) == (0, 2)
    assert ranks.not_built(made) == {"layers.2", "layers.3", "layers.4"}
    with ranks.shortened(made, 1):
        assert made.end_layer == 1
    assert made.end_layer == 2


def test_collectives_have_the_shapes_of_the_real_ones_and_tell_what_they_reduce() -> None:
    ranks = pytest.importorskip("vtaps.runtime.compat.ranks")
    heard: list[Any] = []
    two, one = ranks.FakeGroup("tp", 2, heard.append), ranks.FakeGroup("tp", 1, heard.append)
    tensor = torch.ones(3, 8)
    assert two.all_reduce(tensor).shape == (3, 8) and two.all_reduce(tensor) is not tensor
    assert two.all_gather(tensor).shape == (3, 16) and two.all_gather(tensor, 0).shape == (6, 8)
    assert two.reduce_scatter(tensor).shape == (3, 4) and two.gather(tensor).shape == (3, 16)
    assert len(heard) == 3 and all(x is tensor for x in heard)
    assert one.all_reduce(tensor) is one.all_gather(tensor) is one.reduce_scatter(tensor) is tensor
    assert len(heard) == 3


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width, device="meta")


def model(*widths: int) -> tuple[torch.nn.Module, dict[str, Call]]:
    """A stack of such layers and a call of each."""
    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList(Layer(width) for width in widths)
    calls = {}
    for i, width in enumerate(widths):
        value = Value("tensor", "float32", (7, width))
        calls[f"layers.{i}"] = Call((("x", value),), value, 4 * i, 4 * i + 3, 1)
        calls[f"layers.{i}.inner"] = Call((), value, 4 * i + 1, 4 * i + 2, 1)
    return made, calls


def test_layers_alike_are_of_one_kind_and_the_last_one_run_stands_for_none() -> None:
    kinds = layer_kinds(*model(8, 16, 8, 16, 16, 8))
    assert kinds.count == 3
    assert kinds.of("layers.5.inner") == "layers.0.inner"
    assert kinds.of("layers.3") == "layers.1"
    assert kinds.of("layers.1") == "layers.1" and kinds.of("norm") == "norm"


def test_a_value_apart_makes_another_kind() -> None:
    made, calls = model(8, 8, 8, 8, 8)
    assert layer_kinds(made, calls).count == 2
    call = calls["layers.2.inner"]
    calls["layers.2.inner"] = replace(call, output=Value("none"))
    assert layer_kinds(made, calls).count == 4
    calls["layers.2.inner"] = replace(call, ops={"q_0": Value("none")})
    assert layer_kinds(made, calls).count == 4
    # Every layer is needed where the last is of its own kind.
    calls["layers.4.inner"] = replace(calls["layers.4.inner"], output=Value("none"))
    assert layer_kinds(made, calls).count is None
    assert layer_kinds(*model(8, 8)).count is None

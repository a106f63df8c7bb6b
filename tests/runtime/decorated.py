"""Small modules under vLLM's ``@support_torch_compile``, and taps in them that add what a table says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

from vtaps.runtime import ops
from vtaps.runtime.compat import forwards


@support_torch_compile(dynamic_arg_dims={"x": 0})
class Doubles(nn.Module):
    """``2 x + 1``"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.inner(x) * 2
        return doubled + 1


class Inherits(Doubles):
    """The same forward."""


@support_torch_compile(dynamic_arg_dims={"x": 0})
class Triples(Doubles):
    """``3 (2 x + 1)``, by way of its parent's forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


@support_torch_compile(dynamic_arg_dims={"x": 0})
class Holds(nn.Module):
    """``-(2 x + 1)``, compiled with a module in it that would be compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Doubles()

    def forward(self, x: Tensor) -> Tensor:
        held: Tensor = self.held(x)
        return -held


def config(mode: CompilationMode, structure: str = "", backend: str = "eager") -> VllmConfig:
    made = VllmConfig(
        compilation_config=CompilationConfig(mode=CompilationMode.DYNAMO_TRACE_ONCE, backend=backend),
        additional_config={"vtaps": structure},
    )
    # A CPU has vLLM's own backend turned off; what it does with the forward is the same there.
    made.compilation_config.mode = mode
    made.compilation_config.compile_sizes = []
    return made


def put(module: nn.Module, path: str, op: str, number: int) -> None:
    """A tap at ``op`` of the module's forward: location ``number``."""
    tapped = forwards.tapped(module, {op})
    assert tapped is not None

    def tap(names: str, value: Any) -> Any:
        assert names.split()[0] == op
        own = value.clone()
        ops.tap(own, None, number)
        return own

    tapped.put(module, path, lambda _: tap)


@contextmanager
def serve(added: Mapping[int, float]) -> Iterator[list[int]]:
    """Let the operations add ``added[number]``; the numbers that they are called with."""
    called: list[int] = []

    def run(number: int, x: Tensor, residual: Tensor | None) -> None:
        called.append(number)
        x += added[number]

    ops.serve(run)
    try:
        yield called
    finally:
        ops.leave(run)


def build(mode: CompilationMode = CompilationMode.DYNAMO_TRACE_ONCE, structure: str = "") -> nn.ModuleDict:
    """Several modules of one class beside ones of its subclasses, as a model might hold them."""
    backend = "inductor" if mode is CompilationMode.VLLM_COMPILE else "eager"
    with set_current_vllm_config(config(mode, structure, backend)):
        return nn.ModuleDict(
            {
                "first": Doubles(),
                "second": Doubles(),
                "plain": Doubles(),
                "inherits": Inherits(),
                "triples": Triples(),
                "holds": Holds(),
            }
        )


PLACES = {
    "first": "binop_mul_0",
    "second": "binop_add_0",
    "inherits": "binop_mul_0",
    "triples": "forward_0",
    "holds.held": "binop_mul_0",
}


def tap_all(model: nn.ModuleDict) -> None:
    """Each of them but ``plain`` gets a tap, with a number of its own."""
    for number, (path, op) in enumerate(PLACES.items()):
        put(model.get_submodule(path), path, op, number)


def expected(path: str, x: Tensor, added: Mapping[int, float]) -> Tensor:
    """What :func:`tap_all` makes of a module's output."""
    return {
        "first": x * 2 + added[0] + 1,
        "second": x * 2 + 1 + added[1],
        "plain": x * 2 + 1,
        "inherits": x * 2 + added[2] + 1,
        "triples": (x * 2 + 1 + added[3]) * 3,
        "holds": -(x * 2 + added[4] + 1),
    }[path]


def rows_of(count: int) -> Tensor:
    return torch.arange(count * 4, dtype=torch.float32).view(count, 4)


def outputs(model: nn.ModuleDict, x: Tensor) -> dict[str, Tensor]:
    """Each module's own, of ``x`` ``[rows, 4]``."""
    with torch.no_grad():
        return {path: module(x.clone()) for path, module in model.items()}

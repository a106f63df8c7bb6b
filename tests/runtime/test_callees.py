"""Functions that a forward calls: which can be called as copies with taps, and that each call has its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vtaps.codegen.instrument import InstrumentError
from vtaps.runtime.compat.forwards import TappedFunction, read_forwards, tap_ops, tapped


def doubled(x: Tensor) -> Tensor:
    y = x + x
    return y


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*args: Any) -> Any:
        return function(*args)

    return wrapped


@noted
def wrapped_up(x: Tensor) -> Tensor:
    return x + 1


@torch.compiler.disable
def left_out(x: Tensor) -> Tensor:
    return x + 1


def again(x: Tensor, times: int) -> Tensor:
    return again(x + 1, times - 1) if times else x


class Toy(nn.Module):
    scale = 3.0

    def forward(self, x: Tensor) -> Tensor:
        a = doubled(x)
        b = doubled(x=x)
        c = self.scaled(a) + self.scaled(b)
        d = self.fixed(c) + self.of_class(c)
        return torch.relu(d) + sum(self.parts(x)) + again(x, 1) + wrapped_up(x) + left_out(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    @staticmethod
    def fixed(x: Tensor) -> Tensor:
        return x - 1

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x * cls.scale

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        yield x * 0


class OwnScaled(Toy):
    def scaled(self, x: Tensor) -> Tensor:
        y = x * 2
        return y + x


# Functions that are not vLLM's own are not looked into.
for function in (
    doubled, wrapped_up, left_out, again, Toy.forward, Toy.scaled, Toy.fixed, Toy.of_class, Toy.parts, OwnScaled.scaled,
):  # fmt: skip
    inspect.unwrap(getattr(function, "__func__", function)).__module__ = "vllm.toy"


def test_what_is_called_and_why_not() -> None:
    forward, *inner = read_forwards(Toy())
    assert {op.name: (op.inside.rpartition(".")[2], op.sealed) for op in forward.ops if op.inside or op.sealed} == {
        "doubled_0": ("doubled", ""),
        "doubled_1": ("doubled", ""),
        "self_scaled_0": ("scaled", ""),
        "self_scaled_1": ("scaled", ""),
        "self_fixed_0": ("fixed", ""),
        "self_of_class_0": ("of_class", ""),
        "torch_relu_0": ("", "a C function"),
        "self_parts_0": ("parts", "a generator"),
        "again_0": ("again", "recursive"),
        "wrapped_up_0": ("wrapped_up", "decorated"),
        "left_out_0": ("left_out", "decorated"),
    }
    assert [one.where for one in inner][:2] == ["vllm.toy.doubled", "vllm.toy.Toy.scaled"]


def put(module: nn.Module, *values: str, change: Callable[[str, Any], Any] = lambda name, x: x) -> list[str]:
    heard: list[str] = []
    made = tapped(module, values)
    assert made is not None

    def tap_of(function: TappedFunction) -> Callable[[str, Any], Any]:
        head = f"{function.within}." if function.within else ""

        def tap(names: str, value: Any) -> Any:
            heard.append(head + names)
            return change(head + names, value)

        return tap

    made.put(module, "", tap_of)
    return heard


X = torch.arange(6.0).view(2, 3) - 2


def test_each_call_has_its_own_copy_and_others_are_left_alone() -> None:
    module, other = Toy(), Toy()
    plain = other(X)
    before = doubled, Toy.scaled
    heard = put(
        module, "doubled_1.source.y_0", "self_scaled_0.source.binop_mul_0.input[0]", "binop_add_0",
        change=lambda name, x: torch.zeros_like(x) if name == "doubled_1.y_0" else x,
    )  # fmt: skip
    c = 6 * X  # of the first alone
    expected = torch.relu(c - 1 + c * 3) + (X + 1) * 3
    assert torch.equal(module(X), expected) and not torch.equal(expected, plain)
    assert heard == ["doubled_1.y_0", "self_scaled_0.binop_mul_0.input[0]", "binop_add_0"]
    assert torch.equal(other(X), plain) and (doubled, Toy.scaled) == before
    assert torch.equal(doubled(X), 2 * X)


def test_methods_without_a_self_are_called_as_they_were() -> None:
    module = Toy()
    heard = put(module, "self_fixed_0.source.binop_sub_0", "self_of_class_0.source.binop_mul_0.input[1]")
    assert torch.equal(module(X), Toy()(X))
    assert heard == ["self_fixed_0.binop_sub_0", "self_of_class_0.binop_mul_0.input[1]"]


def test_a_compiler_goes_through_the_copies() -> None:
    class Plain(Toy):
        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(doubled(x)) + self.of_class(self.fixed(x))

    Plain.forward.__module__ = "vllm.toy"
    module = Plain()
    names = ("doubled_0.source.y_0", "self_scaled_0.source.binop_mul_0", "self_of_class_0.source.binop_mul_0",
             "self_fixed_0.source.binop_sub_0")  # fmt: skip
    made = tapped(module, names)
    assert made is not None
    made.put(module, "", lambda function: lambda names, value: value + 1)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    expected = ((2 * X + 1) * 3 + 1) + ((X - 1 + 1) * 3 + 1)
    assert torch.equal(compiled(X), expected) and torch.equal(module(X), expected)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("wrapped_up_0.source.binop_add_0", "wrapped_up is decorated"),
        ("again_0.source.binop_add_0", "again is recursive"),
        ("self_parts_0.source.binop_mul_0", "self.parts is a generator"),
        ("torch_relu_0.source.x_0", "calls no function whose text is known"),
        ("a_0.source.y_0", "calls no function whose text is known"),
        ("doubled_0.source.z_0", "no op z_0; there are binop_add_0, y_0"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_name(value: str, why: str) -> None:
    with pytest.raises(InstrumentError, match=why):
        tapped(Toy(), [value])


def test_a_module_with_another_function_of_that_name_is_refused() -> None:
    module: Any = Toy()
    module.scaled = lambda x: x
    with pytest.raises(InstrumentError, match=r"self_scaled_0: this module has a self\.scaled of its own"):
        tapped(module, ["self_scaled_0.source.binop_mul_0"])


def test_a_subclass_has_its_own_functions_inside() -> None:
    module = OwnScaled()
    heard = put(module, "self_scaled_1.source.y_0")
    assert torch.equal(module(X), OwnScaled()(X)) and heard == ["self_scaled_1.y_0"]


def test_every_value_is_heard_of_once_inside() -> None:
    seen: dict[str, Any] = {}
    module = Toy()
    restore = tap_ops(module, lambda path, name, value: seen.setdefault(name, value))
    plain = module(X)
    restore()
    assert torch.equal(plain, module(X)) and "forward" not in module.__dict__
    assert torch.equal(seen["doubled_1.source.y_0"], 2 * X)
    assert torch.equal(seen["doubled_1.input.x"], X)
    assert torch.equal(seen["self_of_class_0.source.binop_mul_0"], 3 * seen["c_0"])
    assert not any(name.startswith(("again_0.source", "self_parts_0.source", "wrapped_up_0.source")) for name in seen)

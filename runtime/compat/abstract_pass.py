"""One forward without data: which modules are called, in what order, with what shapes.

The pass runs twice under ``FakeTensorMode``, with two row counts; an axis that follows the count is the row
axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vtaps.runtime.compat.forwards import tap_ops
from vtaps.runtime.compat.stand_ins import autocast_off
from vtaps.spec.tree import ROWS, Value

ROW_COUNTS = (7, 13)
"""Coprime and unlike any size of a model, so that an axis of rows cannot be mistaken for another."""

TUPLE_LIMIT = 16


@dataclass(frozen=True)
class Call:
    """The first call of one module; ``calls`` counts all of one pass, ``ops`` are the first values in its forward."""

    inputs: tuple[tuple[str, Value | None], ...]
    output: Value | None
    enter: int
    leave: int
    calls: int
    ops: dict[str, Value] = field(default_factory=dict)


def record(model: Any, config: Any) -> tuple[dict[str, Call], str | None]:
    """``(path → call, None)``, or ``({}, why)`` where the architecture does not run on fake tensors."""
    stub_weights(model, config.model_config.dtype)
    try:
        try:
            one, other = (_pass(model, config, rows, ops=True) for rows in ROW_COUNTS)
        except Exception:  # a forward may look at itself: its modules' values are then of use alone
            one, other = (_pass(model, config, rows, ops=False) for rows in ROW_COUNTS)
    except Exception as fault:  # an architecture may do anything in its forward: the tree alone is still of use
        text = str(fault).strip().splitlines()
        return {}, f"{type(fault).__name__}: {text[0] if text else ''}"[:200]
    return {
        path: Call(
            inputs=tuple((name, _merge(value, dict(other[path].inputs).get(name))) for name, value in call.inputs),
            output=_merge(call.output, other[path].output),
            enter=call.enter,
            leave=call.leave,
            calls=call.calls,
            ops={
                name: merged
                for name, value in call.ops.items()
                if (merged := _merge(value, other[path].ops.get(name))) is not None
            },
        )
        for path, call in one.items()
        if path in other
    }, None


def parameter_binder(module: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """``(args, kwargs) → name → value`` by the parameter names of the module's own forward, in their order.

    ``CustomOp.forward(self, *args, **kwargs)`` dispatches to one body a platform: the names are those of
    ``forward_native``, which all bodies share.
    """
    # Bound to the module, `self` is gone whether the body is a method or a static one (SiluAndMul's is).
    signature = inspect.signature(module.forward)
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        native = getattr(module, "forward_native", None)
        signature = inspect.signature(native) if native is not None else signature

    def bind(args: Any, kwargs: Any) -> dict[str, Any]:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return {f"arg{i}": v for i, v in enumerate(args)} | dict(kwargs)
        bound.apply_defaults()
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                named.update({f"{name}{j}": v for j, v in enumerate(value)})
            else:
                named[name] = value
        return named

    return bind


def describe(value: Any, depth: int = 0) -> Value:
    """The :class:`Value` of what a module took or gave, sizes as they are in this pass."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return Value("tensor", dtype, tuple(int(n) for n in value.shape))
    if isinstance(value, (tuple, list)) and depth < 3 and len(value) <= TUPLE_LIMIT:
        return Value("tuple", items=tuple(describe(v, depth + 1) for v in value))
    return Value("none") if value is None else Value("other")


def _merge(one: Value | None, other: Value | None) -> Value | None:
    if one is None or other is None or one.kind != other.kind:
        return one
    if one.kind == "tuple" and len(one.items) == len(other.items):
        merged = tuple(_merge(a, b) or a for a, b in zip(one.items, other.items, strict=True))
        return Value("tuple", items=merged)
    if one.kind != "tensor" or len(one.shape) != len(other.shape):
        return one
    shape = tuple(_axis(int(a), int(b)) for a, b in zip(one.shape, other.shape, strict=True))
    return Value("tensor", one.dtype, shape)


def _axis(one: int, other: int) -> int | str:
    if one == other:
        return one
    times, rest = divmod(other - one, ROW_COUNTS[1] - ROW_COUNTS[0])
    offset = one - times * ROW_COUNTS[0]
    if rest:
        return f"?{one}"
    text = ROWS if times == 1 else f"{times}*{ROWS}"
    return text + (f"+{offset}" if offset > 0 else str(offset) if offset < 0 else "")


def _pass(model: Any, config: Any, rows: int, *, ops: bool) -> dict[str, Call]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    found: dict[str, Call] = {}
    values: dict[str, dict[str, Value]] = {}
    clock = 0

    def hook_pair(path: str, module: Any) -> list[Any]:
        bind, entered = parameter_binder(module), []

        def before(_: Any, args: Any, kwargs: Any) -> None:
            nonlocal clock
            # Described here: a fused norm donates its inputs, and what it leaves in them is not the input.
            entered.append((clock, tuple((k, describe(v)) for k, v in bind(args, kwargs).items())))
            clock += 1

        def after(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal clock
            enter, inputs = entered.pop()
            if path in found:
                known = found[path]
                found[path] = replace(known, calls=known.calls + 1)
            else:
                found[path] = Call(inputs, describe(output), enter, clock, 1, dict(values.get(path, {})))
            clock += 1

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def seen(path: str, name: str, value: Any) -> None:
        of = values.setdefault(path, {})
        if name not in of:
            of[name] = describe(value)

    handles = [h for path, module in model.named_modules() for h in hook_pair(path, module)]
    restore = tap_ops(model, seen) if ops else lambda: None
    try:
        with (
            set_current_vllm_config(config),
            set_forward_context(None, config, num_tokens=rows),
            torch.inference_mode(),
            autocast_off(),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            ids = torch.zeros(rows, dtype=torch.long, device="meta")
            positions = torch.zeros(rows, dtype=torch.long, device="meta")
            # As the model runner calls: some architectures have no defaults for the last two.
            model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
    finally:
        restore()
        for handle in handles:
            handle.remove()
    return found


def stub_weights(model: Any, dtype: Any) -> None:
    """Replace the kernels behind linear layers, embeddings and experts by their shapes.

    On the CPU these reach for weights packed after loading, which a model without weights does not have.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(module, "output_size") and hasattr(module, "input_size"):
            module.quant_method = _like(method, apply=_linear)
        elif method is not None and hasattr(module, "num_embeddings_per_partition"):
            module.quant_method = _like(method, apply=_unembed, embedding=_embedding(dtype))
        if hasattr(module, "_maybe_add_zero_expert_output"):
            module._maybe_add_zero_expert_output = lambda result: result  # its router, which is stubbed, computes it
        if hasattr(module, "_forward_entry"):
            from vllm.model_executor.layers.fused_moe.runner import moe_runner

            shared = getattr(module, "_shared_experts", None)
            module._forward_entry = (
                moe_runner._moe_forward_fake if shared is None else moe_runner._moe_forward_shared_fake
            )


def _like(method: Any, **replaced: Any) -> Any:
    """A copy of ``method`` of a subclass of its class (layers ask isinstance), some methods replaced."""
    made: Any = object.__new__(type(type(method).__name__, (type(method),), replaced))
    made.__dict__.update(method.__dict__)
    return made


def _linear(_: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    """``[..., in] → [..., out]`` of this rank."""
    size = getattr(layer, "output_size_per_partition", layer.output_size)
    return x.new_empty(*x.shape[:-1], size, dtype=getattr(layer, "params_dtype", x.dtype))


def _unembed(_: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    return x.new_empty(*x.shape[:-1], layer.num_embeddings_per_partition)


def _embedding(dtype: Any) -> Callable[..., Any]:
    def embedding(_: Any, layer: Any, ids: Any) -> Any:
        """``[rows] → [rows, hidden]``."""
        return torch.empty(*ids.shape, layer.embedding_dim, dtype=dtype, device=ids.device)

    return embedding

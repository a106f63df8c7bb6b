"""One forward without data: which modules are called, in what order, with what shapes.

The pass runs twice under ``FakeTensorMode``, with two row counts; an axis that follows the count is the row
axis.  The second one runs one layer of each kind.  The same pass on several ranks says what one of them holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import torch

from vtaps.runtime.compat.forwards import tap_ops
from vtaps.runtime.compat.layer_kinds import LayerKinds, layer_kinds
from vtaps.runtime.compat.partial_sums import PartialSums, begin_in
from vtaps.runtime.compat.ranks import not_built, shortened
from vtaps.runtime.compat.stand_ins import autocast_off
from vtaps.spec.source import is_argument
from vtaps.spec.tree import ROWS, Value

ROW_COUNTS = (7, 13)
"""Coprime and unlike any size of a model, so that an axis of rows cannot be mistaken for another."""

TUPLE_LIMIT = 16

Taps = Literal["inside", "ops", "none"]
"""Taps in forwards, the functions that they call and their arguments; in forwards alone; or none."""


@dataclass(frozen=True)
class Call:
    """The first call of one module; ``calls`` counts all of one pass, ``ops`` are the first values in its forward.

    A forward that ran past the module's hooks, as that of a compiled module does, has its ops alone.
    """

    inputs: tuple[tuple[str, Value | None], ...]
    output: Value | None
    enter: int | None
    leave: int | None
    calls: int
    ops: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """What the modules take and give, by path; ``unvalued`` says why nothing is known, where the architecture does not
    run on fake tensors; ``ops``: whether its forwards run with taps, and the functions that they call too; ``kinds``:
    which of its layers are alike."""

    calls: dict[str, Call]
    unvalued: str | None = None
    ops: Taps = "inside"
    kinds: LayerKinds = field(default_factory=LayerKinds)


def record(model: Any, config: Any) -> Recorded:
    """The passes over a model on one rank."""
    stub_weights(model, config.model_config.dtype)
    try:
        for ops in get_args(Taps)[:-1]:
            try:
                return _record(model, config, ops=ops)
            except Exception:  # a forward may look at itself: its modules' values are then of use alone
                continue
        return _record(model, config, ops="none")
    except Exception as fault:  # an architecture may do anything in its forward: the tree alone is still of use
        text = str(fault).strip().splitlines()
        return Recorded({}, f"{type(fault).__name__}: {text[0] if text else ''}"[:200])


def _record(model: Any, config: Any, *, ops: Taps) -> Recorded:
    one = _pass(model, config, ROW_COUNTS[0], ops=ops)
    kinds = layer_kinds(model, one)
    if kinds.count is not None:
        try:
            with shortened(model, kinds.count):
                other = _pass(model, config, ROW_COUNTS[1], ops=ops)
        except Exception:  # it may count on the layers that it was built with
            other = {}
        if all(_alike(call, other.get(kinds.of(path))) for path, call in one.items()):
            return Recorded(_merged(one, other, kinds), None, ops, kinds)
    other = _pass(model, config, ROW_COUNTS[1], ops=ops)
    return Recorded(_merged(one, other, LayerKinds()), None, ops, LayerKinds())


def record_ranks(model: Any, config: Any, sums: PartialSums, *, ops: Taps) -> dict[str, Call]:
    """The passes over rank 0 of a model on several; partial sums are marked.  Raises what the model raises."""
    stub_weights(model, config.model_config.dtype)
    begin_in(sums, model)
    one, other = (_pass(model, config, rows, ops=ops, sums=sums) for rows in ROW_COUNTS)
    if called := sorted(one.keys() & not_built(model)):
        raise RuntimeError(f"{called[0]} is called, and is not of this stage")
    return _merged(one, other, LayerKinds())


def _merged(one: dict[str, Call], other: dict[str, Call], kinds: LayerKinds) -> dict[str, Call]:
    return {
        path: Call(
            inputs=tuple((name, _merge(value, dict(twin.inputs).get(name))) for name, value in call.inputs),
            output=_merge(call.output, twin.output),
            enter=call.enter,
            leave=call.leave,
            calls=call.calls,
            ops={
                name: merged
                for name, value in call.ops.items()
                if (merged := _merge(value, twin.ops.get(name))) is not None
            },
        )
        for path, call in one.items()
        if (twin := other.get(kinds.of(path))) is not None
    }


def _alike(one: Call, other: Call | None) -> bool:
    """Whether two calls of one module differ in sizes alone."""
    if other is None:
        return False
    pairs = [(one.output, other.output), *zip(one.ops.values(), other.ops.values(), strict=False)]
    pairs += [(a, b) for (_, a), (_, b) in zip(one.inputs, other.inputs, strict=False)]
    return list(one.ops) == list(other.ops) and all(_form(a) == _form(b) for a, b in pairs)


def _form(value: Value | None) -> Any:
    return value and (value.kind, value.dtype, len(value.shape), tuple(map(_form, value.items)))


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


def describe(value: Any, sums: PartialSums | None = None, depth: int = 0) -> Value:
    """The :class:`Value` of what a module took or gave, sizes as they are in this pass.  With ``sums`` the mark of a
    tensor is what :meth:`PartialSums.is_partial` takes."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        made = Value("tensor", dtype, tuple(int(n) for n in value.shape))
        return made if sums is None else replace(made, mark=cast(Any, sums.seen(value)))
    if isinstance(value, (tuple, list)) and depth < 3 and len(value) <= TUPLE_LIMIT:
        return Value("tuple", items=tuple(describe(v, sums, depth + 1) for v in value))
    return Value("none") if value is None else Value("other")


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in value)
    )


def _merge(one: Value | None, other: Value | None) -> Value | None:
    if one is None or other is None or one.kind != other.kind:
        return one
    if one.kind == "tuple" and len(one.items) == len(other.items):
        merged = tuple(_merge(a, b) or a for a, b in zip(one.items, other.items, strict=True))
        return Value("tuple", items=merged)
    if one.kind != "tensor" or len(one.shape) != len(other.shape):
        return one
    shape = tuple(_axis(int(a), int(b)) for a, b in zip(one.shape, other.shape, strict=True))
    return replace(one, shape=shape)


def _axis(one: int, other: int) -> int | str:
    if one == other:
        return one
    times, rest = divmod(other - one, ROW_COUNTS[1] - ROW_COUNTS[0])
    offset = one - times * ROW_COUNTS[0]
    if rest:
        return f"?{one}"
    text = ROWS if times == 1 else f"{times}*{ROWS}"
    return text + (f"+{offset}" if offset > 0 else str(offset) if offset < 0 else "")


def _pass(model: Any, config: Any, rows: int, *, ops: Taps, sums: PartialSums | None = None) -> dict[str, Call]:
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
            entered.append((clock, tuple((k, describe(v, sums)) for k, v in bind(args, kwargs).items())))
            clock += 1

        def after(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal clock
            enter, inputs = entered.pop()
            if path in found:
                known = found[path]
                found[path] = replace(known, calls=known.calls + 1)
            else:
                found[path] = Call(inputs, describe(output, sums), enter, clock, 1, dict(values.get(path, {})))
            clock += 1

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def seen(path: str, name: str, value: Any) -> None:
        of = values.setdefault(path, {})
        # Of arguments the tensors alone: most are none.
        if name not in of and (not is_argument(name) or _holds_tensors(value)):
            of[name] = describe(value, sums)

    handles = [h for path, module in model.named_modules() for h in hook_pair(path, module)]
    restore = tap_ops(model, seen, inside=ops == "inside") if ops != "none" else lambda: None
    try:
        with (
            set_current_vllm_config(config),
            set_forward_context(None, config, num_tokens=rows),
            torch.inference_mode(),
            autocast_off(),
            FakeTensorMode(allow_non_fake_inputs=True),
            sums or nullcontext(),
        ):
            ids = torch.zeros(rows, dtype=torch.long, device="meta")
            positions = torch.zeros(rows, dtype=torch.long, device="meta")
            # As the model runner calls: some architectures have no defaults for the last two.
            model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
    finally:
        restore()
        for handle in handles:
            handle.remove()
    for path, of in values.items():
        found.setdefault(path, Call((), None, None, None, 0, of))
    return found if sums is None else {path: _marked(call, sums) for path, call in found.items()}


def _marked(call: Call, sums: PartialSums) -> Call:
    """The marks of :func:`describe` as those of :class:`Value`, now that all that is reduced is known."""

    def mark(value: Value | None) -> Value | None:
        if value is None or value.kind not in ("tensor", "tuple"):
            return value
        if value.kind == "tuple":
            return replace(value, items=tuple(mark(item) or item for item in value.items))
        return replace(value, mark="partial" if sums.is_partial(value.mark) else "")

    return replace(
        call,
        inputs=tuple((name, mark(value)) for name, value in call.inputs),
        output=mark(call.output),
        ops={name: mark(value) or value for name, value in call.ops.items()},
    )


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

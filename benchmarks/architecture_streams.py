"""How a decoder layer hands the residual stream on, read off a tree."""

from __future__ import annotations

import re

from vtaps.spec.tree import ROWS, ModelTree, Module, Value

PAIR = "pair"
"""``(hidden, residual)``, whose sum is the stream: the norm after the last layer is given both, or the model adds them
up before it."""
FULL = "full hidden"
"""A tuple whose first element is the whole stream; adding the second would be wrong."""
TENSOR = "tensor"
STREAMS = "several streams"
"""Hyper-connections and the like: several rows of the model's width for each token."""
UNKNOWN = "unknown"

_SUM = re.compile(r"hidden_states \+ residual|residual \+ hidden_states")
_NUMBERED = re.compile(r"(.+)\.\d+")


def layers(tree: ModelTree) -> list[Module]:
    """The decoder layers that a forward calls: the list of modules with most modules in it whose members put out rows
    of the model's width."""
    stacks: dict[str, list[Module]] = {}
    for path, module in tree.modules.items():
        found = _NUMBERED.fullmatch(path)
        if found and module.calls and _rows(tree, _first(module.output)):
            stacks.setdefault(found[1], []).append(module)
    size = {prefix: sum(path.startswith(prefix + ".") for path in tree.modules) for prefix in stacks}
    return max(stacks.items(), key=lambda item: size[item[0]], default=("", []))[1]


def convention(tree: ModelTree) -> str:
    """One of the conventions above; ``unknown`` too where the tree has no values."""
    found = {_of(tree, module) for module in layers(tree)}
    if STREAMS in found:
        return STREAMS  # the last layer may put them together
    return found.pop() if len(found) == 1 else UNKNOWN


def _of(tree: ModelTree, module: Module) -> str:
    output = module.output
    first = _first(output)
    if output is None or first is None:
        return UNKNOWN
    if any(_several(tree, value) for value in (output.items or (output,))):
        return STREAMS
    if output.kind == "tensor":
        return TENSOR
    rest = [item for item in output.items[1:] if item.kind != "none"]
    if not rest:
        return FULL
    if len(rest) != 1 or rest[0].shape != first.shape:
        return UNKNOWN
    last = layers(tree)[-1]
    if _added_by_hand(tree, last):
        return PAIR
    end = last.leave or 0
    after = [m for m in tree.modules.values() if m.enter is not None and m.enter > end]
    norm = min(after, key=lambda m: m.enter or 0, default=None)
    if norm is None:
        return UNKNOWN
    residual = dict(norm.inputs).get("residual")
    return PAIR if residual is not None and residual.kind == "tensor" else FULL


def _added_by_hand(tree: ModelTree, layer: Module) -> bool:
    """Whether the forward that runs the layers adds up two names, as a norm does elsewhere."""
    above = layer.path.rpartition(".")[0].rpartition(".")[0]
    forward = tree.forwards.get(tree.modules[above].forward or "")
    return forward is not None and any(op.kind == "binary" and _SUM.fullmatch(op.text) for op in forward.ops)


def _first(value: Value | None) -> Value | None:
    return value.items[0] if value is not None and value.kind == "tuple" and value.items else value


def _rows(tree: ModelTree, value: Value | None) -> bool:
    if value is None or value.kind != "tensor" or ROWS not in value.shape:
        return False
    width = value.shape[-1]
    return isinstance(width, int) and width % max(tree.dimensions.hidden, 1) == 0


def _several(tree: ModelTree, value: Value) -> bool:
    """``[rows, streams, hidden]``, those axes in any order, or one axis of ``streams * hidden``."""
    if not _rows(tree, value):
        return False
    return len(value.shape) > 2 or value.shape[-1] != tree.dimensions.hidden

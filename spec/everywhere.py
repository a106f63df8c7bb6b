"""``**``: every module output of a model that is a tensor with a row for each token."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from vtaps.spec import aliases
from vtaps.spec.places import Refused, columns_of, describe, lacks, resolve_place, tensors
from vtaps.spec.tree import ModelTree, Module, Site, Value

EVERYWHERE = "**"


@dataclass(frozen=True)
class Everywhere:
    """``sites`` in execution order; ``left_out``: the outputs of called modules that are none of them, with why, those
    of many layers together: ``model.layers.*.input_layernorm.output[1], 29 times: …``."""

    sites: tuple[Site, ...]
    left_out: tuple[str, ...]


def everywhere(tree: ModelTree) -> Everywhere:
    """Each output once, under the name of its alias where it has one.

    Of a tuple whose two tensors are halves of the stream (:mod:`vtaps.spec.alias_tables` says so) their sum, of any
    other each tensor; the stream that a fused norm hands on beside its own output is none of its making and left out.
    """
    found: dict[Site, None] = {}
    left_out: list[tuple[str, str]] = []
    for path, module in tree.modules.items():
        # The model's own output is that of its last norm; what is never called puts nothing out.
        if not path or module.enter is None or module.output is None:
            continue
        if module.calls > 1:
            left_out.append((f"{path}.output", f"one {module.cls} for {module.calls} places"))
            continue
        pair = _pair(tree, module)
        if pair is not None:
            found[pair] = None
            continue
        for element, value in _values(module):
            where = f"{path}.output" if element is None else f"{path}.output[{element}]"
            if (reason := _unfit(tree, module, element, value)) is not None:
                left_out.append((where, reason))
                continue
            try:
                found[resolve_place(tree, path, "output", element)] = None
            except Refused as refused:
                left_out.append((where, refused.message))
    return Everywhere(tuple(sorted(found, key=lambda s: (s.order, s.name))), tuple(_together(left_out)))


def _together(left_out: list[tuple[str, str]]) -> list[str]:
    def alike(where: str) -> str:
        return re.sub(r"\.\d+(?=\.)", ".*", where)

    counts = Counter((alike(where), reason) for where, reason in left_out)
    told = {(alike(where), reason): where for where, reason in left_out}
    return [
        f"{told[pattern, reason]}: {reason}" if count == 1 else f"{pattern}, {count} times: {reason}"
        for (pattern, reason), count in counts.items()
    ]


def _values(module: Module) -> list[tuple[int | None, Value]]:
    """The tensors of an output with the element that a spec names each by."""
    output = module.output
    assert output is not None
    if output.kind == "tuple":
        one = tensors(output) == 1
        return [(None if one else i, item) for i, item in enumerate(output.items) if item.kind == "tensor"]
    return [(None, output)] if output.kind == "tensor" else []


def _pair(tree: ModelTree, module: Module) -> Site | None:
    """The stream, where the output's first two tensors are its halves."""
    if tensors(module.output) < 2:
        return None
    for name in aliases.at_place(tree, module.path, "output", None):
        alias, _, layer = name.partition("[")
        site = aliases.site_or_none(tree, alias, int(layer[:-1]) if layer else None)
        if site is not None and site.value == "pair":
            return site
    return None


def _unfit(tree: ModelTree, module: Module, element: int | None, value: Value) -> str | None:
    if columns_of(value) is None:
        return f"{describe(value)} {lacks(value)}"
    if value.dtype != tree.dtype:
        return f"{describe(value)}, not the model's {tree.dtype}"
    carried = dict(module.inputs).get("residual")
    leaf = not any(path.startswith(f"{module.path}.") for path in tree.modules)
    if element and leaf and carried is not None and carried.kind == "tensor":
        return "the stream, which it hands on"
    return None

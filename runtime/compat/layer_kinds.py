"""Which layers of a model are alike, so that one of a kind is enough for all that one pass does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class LayerKinds:
    """``first``: the path of a module → that of the same module in the first layer of its kind; ``count``: so many
    layers from the start show every kind, None where that is all of them."""

    first: Mapping[str, str] = field(default_factory=dict)
    count: int | None = None

    def of(self, path: str) -> str:
        return self.first.get(path, path)


def layer_kinds(model: Any, calls: Mapping[str, Any]) -> LayerKinds:
    """Layers of one kind hold modules of the same classes with parameters of the same shapes, and ``calls``, one pass
    over all of them, found the same values in each, at every op."""
    modules = dict(model.named_modules())
    below: dict[str, list[str]] = {}
    lists = list(_stacks(modules))
    for path in modules:
        for stack in lists:
            if path.startswith(stack + "."):
                below.setdefault(f"{stack}.{path[len(stack) + 1 :].partition('.')[0]}", []).append(path)
    first: dict[str, str] = {}
    shown, longest = 0, 0
    for stack in lists:
        known: dict[Any, str] = {}
        for i in range(len(modules[stack])):
            layer = f"{stack}.{i}"
            paths = below.get(layer, [])
            kind = tuple((path[len(layer) :], *_content(modules[path], calls.get(path))) for path in paths)
            same = known.setdefault(kind, layer)
            if same == layer:
                # One more than shows it: the last one run may be special for being the last.
                shown = max(shown, i + 2)
            else:
                first.update((path, same + path[len(layer) :]) for path in paths)
        longest = max(longest, len(modules[stack]))
    return LayerKinds(first, shown) if shown < longest else LayerKinds()


def _stacks(modules: Mapping[str, Any]) -> Iterator[str]:
    """The lists of modules that are in no other list."""
    last = None
    for path, module in modules.items():
        if isinstance(module, torch.nn.ModuleList) and (last is None or not path.startswith(last + ".")):
            last = path
            yield path


def _content(module: Any, call: Any) -> tuple[Any, ...]:
    parameters = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters(recurse=False))
    if call is None:
        return type(module), parameters, None
    # A module that layers share is called by all of them, and stands in the first.
    took = None if call.enter is None else call.leave - call.enter
    return type(module), parameters, call.inputs, call.output, took, tuple(call.ops.items())

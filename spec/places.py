"""One side of one module → :class:`Site`, or the reason why it cannot be tapped."""

from __future__ import annotations

import math
import re

from vtaps.spec import aliases
from vtaps.spec.behind import LOGITS, behind, head
from vtaps.spec.shards import axes
from vtaps.spec.snapshot import value_text
from vtaps.spec.tree import ROWS, ModelTree, Module, Site, Value


class Refused(Exception):
    def __init__(
        self, code: str, message: str, valid: tuple[str, ...] = (), note: str | None = None, near: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.valid, self.note, self.near = code, message, valid, note, near


def resolve_place(tree: ModelTree, path: str, side: str, element: int | str | None) -> Site:
    """The site of ``path.side`` (``element`` as written, None where left out); raises :class:`Refused`.

    The place of an alias gives the alias's own site, so that one tensor is one site however it is spelled.
    """
    module = tree.modules[path]
    if side == "input" and module.enter is not None:
        element = _parameter(tree, module, element)
    known = aliases.alias_of(tree, path, side, element)
    if known is not None and (side == "input" or _names_first(module.output, element)):
        site = aliases.site_or_none(tree, *known)
        if site is not None:
            return site
    if side == "output" and element is None and path == head(tree) and (logits := behind(tree, LOGITS)) is not None:
        return logits
    if module.enter is None:
        raise never_called(tree, module)
    if module.calls > 1:
        raise shared(tree, module)
    return _input(module, str(element)) if side == "input" else _output(tree, module, element)


def describe(value: Value | None, *, labels: bool = False) -> str:
    """``[T, 576]`` for a tensor, with its dtype where that is not a float's; else what it is instead.  ``labels``: and
    what one rank of several has of it, ``[T, 960/tp]``, ``[T, 576] partial``."""
    if value is None or value.kind in ("none", "other"):
        return "None" if value is not None and value.kind == "none" else "no tensor"
    if value.kind == "tuple":
        return f"({', '.join(describe(v, labels=labels) for v in value.items)})"
    shape = f"[{', '.join(axes(value) if labels else map(str, value.shape))}]"
    if labels and value.mark:
        shape += " partial" if value.mark == "partial" else " tp 1 only"
    return shape if is_float(value) else f"{value.dtype}{shape}"


def columns_of(value: Value | None) -> int | None:
    """The width of ``[T, …]``, further axes side by side; None for anything else."""
    if value is None or value.kind != "tensor" or len(value.shape) < 2 or value.shape[0] != ROWS:
        return None
    sizes = [n for n in value.shape[1:] if isinstance(n, int)]
    return math.prod(sizes) if len(sizes) == len(value.shape) - 1 else None


def heads_of(value: Value) -> int | None:
    """The middle axis of ``[T, heads, dims]``."""
    return int(value.shape[1]) if len(value.shape) == 3 else None


def lacks(value: Value) -> str:
    """Why a tensor has no :func:`columns_of`."""
    if value.shape == (ROWS,):
        return "has no columns"
    return "is not [rows, columns]" if ROWS in value.shape else "has no row axis"


def spelled(module: Module) -> tuple[str, ...]:
    """Every place of the module that a spec can name, in raw spelling."""
    found = [f"{module.path}.input.{name}" for name, value in module.inputs if columns_of(value)]
    output = module.output
    if columns_of(output):
        found.append(f"{module.path}.output")
    elif output is not None and output.kind == "tuple":
        served = [i for i, value in enumerate(output.items) if columns_of(value)]
        if tensors(output) == 1 and served:
            found.append(f"{module.path}.output")
        else:
            found.extend(f"{module.path}.output[{i}]" for i in served)
    return tuple(found)


def is_float(value: Value) -> bool:
    return bool(value.dtype) and ("float" in str(value.dtype))


def _names_first(output: Value | None, element: int | str | None) -> bool:
    """Whether ``element`` as written says the output's tensor, or the first of a tuple's."""
    if output is None or output.kind != "tuple":
        return element is None
    return element == 0 or (element is None and tensors(output) == 1)


def tensors(value: Value | None) -> int:
    """How many tensors a tuple holds; 0 for anything else."""
    if value is None or value.kind != "tuple":
        return 0
    return sum(item.kind == "tensor" for item in value.items)


def _parameter(tree: ModelTree, module: Module, name: int | str | None) -> str:
    inputs = dict(module.inputs)
    if name is not None:
        if str(name) not in inputs:
            raise Refused(
                "VT208",
                f"{module.path} takes no `{name}`: {module.cls}.forward takes {', '.join(inputs) or 'nothing'}",
                spelled(module),
            )
        return str(name)
    if not inputs:
        raise Refused("VT208", f"{module.cls}.forward at {module.path} takes nothing", spelled(module))
    first = next(iter(inputs))
    other = inputs.get("residual")
    if first != "residual" and other is not None and other.kind == "tensor" and columns_of(inputs[first]):
        pairs = [n for n in aliases.at_place(tree, module.path, "input", first) if _is_pair(tree, n)]
        raise Refused(
            "VT207",
            f"{module.path}.input is one half of the stream: {module.cls} adds `{first}` and `residual` up",
            (*pairs, f"{module.path}.input.{first}", f"{module.path}.input.residual"),
            note=f"`{pairs[0]}` is the stream, the sum of the two" if pairs else None,
        )
    return first


def _is_pair(tree: ModelTree, name: str) -> bool:
    return name.startswith(("resid_mid", "resid_post"))


def _input(module: Module, name: str) -> Site:
    value = dict(module.inputs)[name]
    where = f"{module.path}.input.{name}"
    return _site(module, "input", name, where, _served(module, value, where))


def _output(tree: ModelTree, module: Module, element: int | str | None) -> Site:
    value, where = module.output, f"{module.path}.output"
    if value is None or value.kind != "tuple":
        if element is not None:
            what = "a tensor" if value is not None and value.kind == "tensor" else "no tuple"
            raise Refused("VT208", f"{where} is {what} {describe(value)}: it has no element {element}", spelled(module))
        return _site(module, "output", None, where, _served(module, value, where))
    held = [i for i, item in enumerate(value.items) if item.kind == "tensor"]
    if element is None:
        if len(held) > 1:
            raise _pair(tree, module, held)
        if not held:
            raise Refused("VT208", f"{where} is {describe(value)}: it holds no tensor", spelled(module))
        chosen = held[0]
    else:
        chosen = int(element)
    if chosen >= len(value.items):
        raise Refused(
            "VT208",
            f"{where} is a tuple of {len(value.items)}, {describe(value)}: it has no element {chosen}",
            spelled(module),
        )
    # A linear layer's (tensor, None) has one name, with or without [0].
    name = where if held == [chosen] else f"{where}[{chosen}]"
    return _site(module, "output", chosen, name, _served(module, value.items[chosen], f"{where}[{chosen}]"))


def _pair(tree: ModelTree, module: Module, held: list[int]) -> Refused:
    where = f"{module.path}.output"
    named = aliases.at_place(tree, module.path, "output", None)
    halves = tuple(f"{where}[{i}]" for i in held)
    if named and _is_pair(tree, named[0]):
        note = f"`{named[0]}` is the stream, the sum of the two"
    elif named:
        note = f"`{named[0]}` is the first of them"
    else:
        note = "whether they add up to the stream depends on the architecture: name the one that is meant"
    return Refused(
        "VT207",
        f"{where} is a tuple of {len(held)} tensors, {describe(module.output)}",
        named + halves,
        note,
    )


def _served(module: Module, value: Value | None, where: str) -> Value:
    if value is None or value.kind != "tensor":
        raise Refused("VT208", f"{where} is {describe(value)} there, not a tensor", spelled(module))
    if columns_of(value) is None:
        raise Refused("VT208", f"{where} is {value_text(value)}: it {lacks(value)}", spelled(module))
    return value


def _site(module: Module, side: str, element: int | str | None, name: str, value: Value) -> Site:
    layer = re.search(r"\.(\d+)(?:\.|$)", module.path)
    return Site(
        name=name,
        module=module.path,
        side="input" if side == "input" else "output",
        element=element,
        value="tensor",
        order=(module.enter if side == "input" else module.leave) or 0,
        layer=int(layer[1]) if layer else None,
        width=columns_of(value),
        heads=heads_of(value),
        editable=is_float(value),
    )


def never_called(tree: ModelTree, module: Module) -> Refused:
    if tree.unvalued:
        return Refused(
            "VT208",
            f"the values of {module.path} are not known: {tree.architecture} does not run without data",
            note=tree.unvalued,
        )
    if module.same_as is not None:
        first = tree.modules[module.same_as]
        if first.calls > 1:
            return shared(tree, module)
        return Refused(
            "VT208",
            f"{module.path} is the same module as {first.path}",
            spelled(first),
            note=f"write {first.path}",
        )
    below = [m for p, m in tree.modules.items() if p.startswith(module.path + ".") and m.calls == 1]
    note = None
    if module.cls == "ParallelLMHead":
        note = "vLLM multiplies by its weight after the forward, for sampled rows only"
    elif module.cls in ("ModuleList", "ModuleDict"):
        note = "it is a container: name what it holds"
    elif below:
        note = "vLLM runs its forward without calling the module: name what it holds"
    return Refused("VT208", f"{module.path} is never called as a module during a forward", (), note)


def shared(tree: ModelTree, module: Module) -> Refused:
    first = tree.modules[module.same_as] if module.same_as else module
    parent = module.path.rpartition(".")[0]
    valid: tuple[str, ...] = ()
    for path, other in tree.modules.items():
        inside = path.startswith(parent + ".") and path.rpartition(".")[0] == parent
        if inside and other.calls == 1 and any(name in ("query", "key") for name, _ in other.inputs):
            for name in ("query", "key"):
                valid += aliases.at_place(tree, path, "input", name)
            valid += tuple(s for s in spelled(other) if s.endswith((".query", ".key")))
    return Refused(
        "VT208",
        f"{module.path} is one {module.cls} for all layers, called {first.calls} times in a step",
        valid,
        note="a place of one layer's own is needed; the rotated q and k are what its attention takes in"
        if valid
        else None,
    )

"""A value inside a module's forward → :class:`Site`, or the reason why it cannot be tapped."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass

from vtaps.spec import aliases
from vtaps.spec.diagnostics import nearest
from vtaps.spec.places import (
    Refused,
    columns_of,
    describe,
    heads_of,
    lacks,
    never_called,
    resolve_place,
    shared,
    spelled,
    tensors,
)
from vtaps.spec.snapshot import value_text
from vtaps.spec.source import Forward, Op
from vtaps.spec.tree import ModelTree, Module, Site, Value

SHOWN = 12
"""How many ops a finding lists."""


@dataclass(frozen=True)
class OpPlace:
    """What follows a module's path: ``.source.NAME``, and which element of its value, where it is a tuple."""

    name: str
    element: int | None = None


def resolve_op(tree: ModelTree, path: str, place: OpPlace) -> Site:
    """The site of an op of the forward at ``path``; raises :class:`Refused` (VT203, VT208, VT216).

    A value that a module puts out, or that an alias names, is that module's or alias's site, and a name that a value
    is bound to is the value's, so that one tensor is one site however it is spelled.
    """
    module = tree.modules[path]
    if module.enter is None and not module.ops:
        raise never_called(tree, module)
    if module.calls > 1:
        raise shared(tree, module)
    forward = tree.forwards.get(module.forward or "")
    if forward is None or not forward.ops:
        why = "it only holds others" if forward is None else forward.reason or "it computes nothing"
        raise Refused("VT203", f"the forward of {path} ({module.cls}) has no ops: {why}")
    by_name = {op.name: op for op in forward.ops}
    asked = by_name[_named(forward, module, place.name)]
    source, element = _source_of(asked, by_name, place.element)
    value = dict(module.ops).get(source.name)
    _check(tree, module, forward, source, value)
    assert value is not None
    if _is_name(source):
        return _named_again(tree, module, forward, source, element)
    child = _child(tree, path, source)
    if child is not None:
        return resolve_place(tree, child, "output", element)
    if value.kind == "tuple":
        element = _element(value, element, f"{path}.source.{source.name}", forward, source)
        value, where = value.items[element], f"{path}.source.{source.name}.output[{element}]"
    elif element is not None:
        raise Refused("VT208", f"{path}.source.{source.name} is {describe(value)}: it has no element {element}")
    else:
        where = f"{path}.source.{source.name}.output"
    known = aliases.alias_of_op(tree, path, where)
    site = aliases.site_or_none(tree, *known) if known is not None else None
    if site is not None:
        return site
    width = columns_of(value)
    if width is None:
        raise Refused("VT208", f"{where} is {value_text(value)}: it {lacks(value)}", note=_ROWS_NOTE)
    if value.dtype != tree.dtype:
        shape = ", ".join(map(str, value.shape))
        raise Refused("VT208", f"{where} is {value.dtype}[{shape}]: tables hold the model's dtype, {tree.dtype}")
    layer = re.search(r"\.(\d+)(?:\.|$)", path)
    return Site(
        name=where,
        module=path,
        side="output",
        # A name that is unpacked from what is no op: the tap is around all of it.
        element=source.item if source.kind == "element" else element,
        value="tensor",
        order=_order(tree, module, forward, source),
        layer=int(layer[1]) if layer else None,
        width=width,
        heads=heads_of(value),
        op=source.name,
        forward=forward.where,
    )


_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

_ROWS_NOTE = "a location is a tensor with a row for each token of the step in front"


def _named(forward: Forward, module: Module, name: str) -> str:
    """The op's full name; the number may be left out where there is one of that name."""
    names = [op.name for op in forward.ops]
    if name in names:
        return name
    alike = [n for n in names if _base(n) == name]
    if len(alike) == 1:
        return alike[0]
    title = forward.where.rsplit(".", 2)
    said = ".".join(title[1:]) if len(title) == 3 else forward.where
    if alike:
        values = (f"{op.name} is {_said(op)} (line {op.line})" for op in forward.ops if op.name in alike[:SHOWN])
        note = "; ".join(values)
        raise Refused("VT203", f"`{name}` could be any of {len(alike)} ops in {said}", tuple(alike[:SHOWN]), note)
    shown = tuple(n for n in names if not n.startswith("binop_") or name.startswith("binop"))[:SHOWN]
    raise Refused(
        "VT203",
        f"no op named `{name}` in {said}",
        shown,
        note=f"`vtaps tree MODEL --at {module.path}` shows them in its source",
        near=nearest(name, names),
    )


def _said(op: Op) -> str:
    """What it is the value of."""
    return f"element {op.item} of {op.of or op.text}" if op.kind == "element" else op.of or f"`{op.text}`"


def _source_of(op: Op, by_name: Mapping[str, Op], element: int | None) -> tuple[Op, int | None]:
    """The op whose value it is, and the element of it."""
    while op.of and op.of in by_name:
        if op.kind == "element":
            if element is not None:
                raise Refused("VT208", f"`{op.name}` is element {op.item} of {op.of}: it has no element of its own")
            element = op.item
        elif op.kind != "bind":
            break
        op = by_name[op.of]
    return op, element


def _base(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _is_name(op: Op) -> bool:
    """Whether it is bound to nothing but another name."""
    return op.kind == "bind" and not op.of and op.text.isidentifier() and not keyword.iskeyword(op.text)


def _named_again(tree: ModelTree, module: Module, forward: Forward, op: Op, element: int | None) -> Site:
    """The site of the tensor that ``op`` gives a second name: what was bound to its first name before, or the
    parameter of that name.  Refused (VT216) where a call in between may have changed it in place."""
    known = dict(module.ops)
    before = [other for other in forward.ops[: forward.ops.index(op)] if other.name in known]
    bound = [other for other in before if other.kind not in ("call", "binary") and _base(other.name) == op.text]
    since = before[before.index(bound[-1]) + 1 :] if bound else before
    quiet = all(other.kind in ("bind", "element") for other in since)
    if quiet and bound and bound[-1].line != op.line:
        return resolve_op(tree, module.path, OpPlace(bound[-1].name, element))
    if quiet and not bound and op.text in dict(module.inputs) and element is None:
        return resolve_place(tree, module.path, "input", op.text)
    first = f"source.{bound[-1].name}" if bound else f"input.{op.text}"
    there = bool(bound) or op.text in dict(module.inputs)
    raise Refused(
        "VT216",
        f"{module.path}.source.{op.name} is another name of `{op.text}`, not a value of its own",
        (f"{module.path}.{first}",) if there else (),
    )


def _child(tree: ModelTree, path: str, op: Op) -> str | None:
    """The module that an op calls, where what it computes is that module's output and nothing else."""
    if op.kind != "call" or not op.text.startswith("self.") or op.repeats:
        return None
    child = f"{path}.{op.text[5:]}" if path else op.text[5:]
    found = tree.modules.get(child)
    return child if found is not None and found.calls == 1 and found.same_as is None else None


def _check(tree: ModelTree, module: Module, forward: Forward, op: Op, value: Value | None) -> None:
    where = f"{module.path}.source.{op.name}"
    if op.repeats:
        raise _in_loop(tree, module, where, value)
    if op.fixed:
        raise Refused("VT216", f"nothing can be put around {where}: it is {op.fixed}")
    if tree.unvalued:
        raise Refused(
            "VT208", f"the values of {module.path} are not known: {tree.architecture} does not run without data",
            note=tree.unvalued,
        )  # fmt: skip
    if op.kind == "call" and op.text.rpartition(".")[2] in _EMPTY:
        raise Refused("VT216", f"nothing is in {where} yet: {op.text} makes it, and what fills it comes later")
    if not module.ops:
        raise Refused(
            "VT216", f"{where} has no known value: {module.cls} does not run that body here, or not with taps"
        )
    if value is None:
        known = dict(module.ops)
        ran = tuple(o.name for o in forward.ops if o.name in known)[:SHOWN]
        raise Refused("VT216", f"{where} is not computed here: its branch is not taken in {module.path}", ran)


def _in_loop(tree: ModelTree, module: Module, where: str, value: Value | None) -> Refused:
    """With the places of the modules that the loop may run over instead, where a tensor is computed there."""
    message = f"{where} is in a loop: it is computed more than once a step"
    head = module.path + "." if module.path else ""
    lists = [p for p, m in tree.modules.items() if m.cls == "ModuleList" and p.rpartition(".")[0] == module.path]
    valid: list[str] = []
    for path in lists if value is not None and tensors(Value("tuple", items=(value, *value.items))) else ():
        first = tree.modules.get(f"{path}.0")
        if first is None:
            continue
        named = aliases.at_place(tree, first.path, "output", None)
        valid += [re.sub(r"\[0\]$", "[*]", name) for name in named]
        valid += [f"{path}.*{place.removeprefix(first.path)}" for place in spelled(first) if ".output" in place]
    names = " and ".join(f"`{path.removeprefix(head)}`" for path in lists)
    note = f"each module in {names} has a value of its own: name one, or `*` for all" if valid else None
    return Refused("VT216", message, tuple(valid), note)


def _element(value: Value, element: int | None, where: str, forward: Forward, op: Op) -> int:
    bound = {o.item: o.name for o in forward.ops if o.kind == "element" and o.of == op.name}
    valid = tuple(f"{where}.output[{i}]" for i, item in enumerate(value.items) if item.kind == "tensor")
    if element is None:
        if tensors(value) != 1:
            named = ", ".join(f"{name} is [{i}]" for i, name in sorted(bound.items()) if i is not None)
            note = f"or by the names that they are bound to: {named}" if named else None
            raise Refused("VT208", f"{where} is a tuple, {describe(value)}: name one of it", valid, note)
        return next(i for i, item in enumerate(value.items) if item.kind == "tensor")
    if element >= len(value.items):
        raise Refused(
            "VT208", f"{where} is a tuple of {len(value.items)}, {describe(value)}: it has no element {element}", valid
        )
    if value.items[element].kind != "tensor":
        raise Refused("VT208", f"{where}.output[{element}] is {describe(value.items[element])}, not a tensor", valid)
    return element


def _order(tree: ModelTree, module: Module, forward: Forward, op: Op) -> float:
    """When it is computed, on the clock of the abstract pass: after the last module that was called before it."""
    at = forward.ops.index(op)
    left = [
        float(tree.modules[child].leave or 0)
        for other in forward.ops[:at]
        if (child := _child(tree, module.path, other)) is not None
    ]
    # A compiled module has no time of its own: it begins before what it holds.
    head = module.path + "." if module.path else ""
    held = (m.enter for path, m in tree.modules.items() if path.startswith(head) and m.enter is not None)
    begins = float(module.enter if module.enter is not None else min(held, default=0) - 1)
    return max([begins, *left]) + (at + 1) / (len(forward.ops) + 2)

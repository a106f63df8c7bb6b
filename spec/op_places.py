"""A value inside a module's forward → :class:`Site`, or the reason why it cannot be tapped."""

from __future__ import annotations

import re
from typing import Literal

from vtaps.spec import aliases
from vtaps.spec.diagnostics import nearest
from vtaps.spec.op_grammar import OpPlace
from vtaps.spec.op_scope import Scope, base, bound_before, bound_elsewhere, is_name, quiet
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
from vtaps.spec.source import Arg, Op
from vtaps.spec.tree import ModelTree, Module, Site, Value

SHOWN = 12
"""How many ops a finding lists."""


def resolve_op(tree: ModelTree, path: str, place: OpPlace) -> Site:
    """The site of an op of the forward at ``path``, or of an argument of it; raises :class:`Refused` (VT203, VT208,
    VT216).

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
    scope = Scope(tree, module, forward)
    if place.inner is not None:
        scope = _inside(scope, scope.op(_named(scope, place.name)))
    asked = scope.op(_named(scope, place.inner or place.name))
    if place.side == "input":
        return _argument(scope, asked, place.element)
    assert place.element is None or isinstance(place.element, int)
    return _value(scope, asked, place.element)


def _inside(scope: Scope, op: Op) -> Scope:
    """The function that ``op`` calls."""
    where = scope.where(op.name)
    if op.kind != "call":
        of = (f"{scope.where(op.of)}.source",) if op.of else ()
        raise Refused("VT216", f"{where} calls nothing: it has no ops inside", of)
    _check(scope, op, scope.values.get(op.name))
    child = scope.child(op)
    if child is not None:
        raise Refused("VT216", f"{where} calls the module {child}: its ops are its own", (f"{child}.source",))
    inner = scope.tree.forwards.get(op.inside)
    if op.sealed or inner is None:
        why = f"{op.text} is {op.sealed}" if op.sealed else f"which function {op.text} is shows at run time alone"
        raise Refused(
            "VT216", f"no spec can use the ops of what {where} calls: {why}",
            (where,) if scope.values.get(op.name) is not None else (),
        )  # fmt: skip
    made = Scope(scope.tree, scope.module, inner, op, scope.forward)
    if not made.values:
        raise Refused("VT216", f"{op.text} does not run with taps, or computes nothing here: {where} has no ops inside")
    return made


def _value(scope: Scope, asked: Op, element: int | None) -> Site:
    """What an op computes."""
    source, element = _source_of(scope, asked, element)
    value = scope.values.get(source.name)
    _check(scope, source, value)
    assert value is not None
    if is_name(source):
        return _named_again(scope, source, element)
    child = scope.child(source)
    if child is not None:
        return resolve_place(scope.tree, child, "output", element)
    where = scope.where(source.name)
    if value.kind == "tuple":
        element = _element(value, element, scope, source)
        value, where = value.items[element], f"{where}.output[{element}]"
    elif element is not None:
        raise Refused("VT208", f"{where} is {describe(value)}: it has no element {element}")
    else:
        where = f"{where}.output"
    known = aliases.alias_of_op(scope.tree, scope.module.path, where)
    site = aliases.site_or_none(scope.tree, *known) if known is not None else None
    if site is not None:
        return site
    # A name that is unpacked from what is no op: the tap is around all of it.
    item = source.item if source.kind == "element" else element
    return _site(scope, source, value, where, "output", item)


def _argument(scope: Scope, op: Op, key: int | str | None) -> Site:
    """What an op takes in."""
    where = scope.where(op.name)
    if op.kind not in ("call", "binary"):
        of = (scope.where(op.of),) if op.of else ()
        raise Refused("VT208", f"{where} takes nothing in: `{op.text}` is assigned there", of)
    _check(scope, op, scope.values.get(op.name))
    child = scope.child(op)
    arg = _chosen(scope, op, key, child)
    if (taken := scope.parameter(op, arg)) is not None:
        return resolve_place(scope.tree, taken[0], "input", taken[1])
    if arg.of and arg.item is None:
        return _value(scope, scope.op(arg.of), None)
    if arg.of and (value := scope.values.get(arg.of)) is not None and value.kind == "tuple":
        return _value(scope, scope.op(arg.of), arg.item)
    same = _same(scope, op, arg.name) if arg.name else None
    if same is not None:
        return same
    place = f"{where}.{arg.place}"
    found = scope.values.get(f"{op.name}.{arg.place}")
    if found is None or found.kind != "tensor":
        what = "no tensor" if found is None else describe(found)
        raise Refused("VT208", f"{place} is {what}", _arguments(scope, op))
    return _site(scope, op, found, place, "input", arg.key)


def _chosen(scope: Scope, op: Op, key: int | str | None, child: str | None) -> Arg:
    where, valid = scope.where(op.name), _arguments(scope, op)
    if key is None:
        held = [arg for arg in op.args if (value := scope.argument(op, arg)) is not None and value.kind == "tensor"]
        if len(held) == 1:
            return held[0]
        many = f"{len(op.args)} values: say which" if op.args else "nothing"
        raise Refused("VT208", f"{where} takes in {many}", valid)
    found = next((arg for arg in op.args if arg.key == key), None)
    if found is None and child is not None and isinstance(key, str):
        names = [name for name, _ in scope.tree.modules[child].inputs]
        found = next(
            (arg for arg in op.args if isinstance(arg.key, int) and names[arg.key : arg.key + 1] == [key]), None
        )
    if found is None:
        what = f"argument {key}" if isinstance(key, int) else f"keyword `{key}`"
        starred = any(arg.key == "" for arg in op.args)
        note = "what stands behind a star has no number" if starred else None
        raise Refused("VT208", f"{where} is written without {what}", valid, note)
    return found


def _arguments(scope: Scope, op: Op) -> tuple[str, ...]:
    """The places of those that are tensors, or what an op computes."""
    return tuple(
        f"{scope.where(op.name)}.{arg.place}"
        for arg in op.args
        if (found := scope.argument(op, arg)) is not None and found.kind == "tensor"
    )


def _same(scope: Scope, op: Op, name: str) -> Site | None:
    """The site of the tensor that ``name`` stands for where ``op`` takes it in; None where a call since it got that
    name may have changed the tensor in place, a branch may have given the name to another, or it has no site of its
    own."""
    bound, since = bound_before(scope, op, name)
    if not quiet(since) or bound_elsewhere(scope, op, name, bound):
        return None
    if bound is not None and not bound.repeats:
        source, element = _source_of(scope, bound, None)
        try:
            return _value(scope, source, element)
        except Refused:
            if is_name(source):
                return None  # of a tensor that may have changed before it got this name
            raise
    if bound is None and scope.call is None and name in dict(scope.module.inputs):
        return resolve_place(scope.tree, scope.module.path, "input", name)
    return None


def _site(
    scope: Scope, op: Op, value: Value, where: str, side: Literal["output", "input"], element: int | str | None
) -> Site:
    tree, path = scope.tree, scope.module.path
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
        side=side,
        element=element,
        value="tensor",
        order=scope.order(op, side),
        layer=int(layer[1]) if layer else None,
        width=width,
        heads=heads_of(value),
        op=scope.prefix + op.name,
        forward=(scope.outer or scope.forward).where,
        inside=None if scope.call is None else scope.forward.where,
    )


_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

_ROWS_NOTE = "a location is a tensor with a row for each token of the step in front"


def _named(scope: Scope, name: str) -> str:
    """The op's full name; the number may be left out where there is one of that name."""
    forward = scope.forward
    names = [op.name for op in forward.ops]
    if name in names:
        return name
    alike = [n for n in names if base(n) == name]
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
        note=f"`vtaps tree MODEL --at {scope.module.path}` shows them in its source",
        near=nearest(name, names),
    )


def _said(op: Op) -> str:
    """What it is the value of."""
    return f"element {op.item} of {op.of or op.text}" if op.kind == "element" else op.of or f"`{op.text}`"


def _source_of(scope: Scope, op: Op, element: int | None) -> tuple[Op, int | None]:
    """The op whose value it is, and the element of it."""
    while op.of and op.of in scope.ops:
        if op.kind == "element":
            if element is not None:
                raise Refused("VT208", f"`{op.name}` is element {op.item} of {op.of}: it has no element of its own")
            element = op.item
        elif op.item is not None:
            held = scope.values.get(op.of)
            if held is None or held.kind != "tuple":
                break  # a row of a tensor is another value
            if element is not None:
                raise Refused("VT208", f"`{op.name}` is element {op.item} of {op.of}: it has no element of its own")
            element = op.item
        elif op.kind not in ("bind", "item"):
            break
        op = scope.op(op.of)
    return op, element


def _named_again(scope: Scope, op: Op, element: int | None) -> Site:
    """The site of the tensor that ``op`` gives a second name: what was bound to its first name before, or the
    parameter of that name.  Refused (VT216) where a call in between may have changed it in place, or a branch may have
    bound that name to another."""
    module = scope.module
    bound, since = bound_before(scope, op, op.text)
    there = bound is not None or (scope.call is None and op.text in dict(module.inputs))
    same = quiet(since) and not bound_elsewhere(scope, op, op.text, bound)
    if same and bound is not None and bound.line != op.line:
        return _value(scope, bound, element)
    if same and bound is None and there and element is None:
        return resolve_place(scope.tree, module.path, "input", op.text)
    first = scope.where(bound.name) if bound is not None else f"{module.path}.input.{op.text}"
    raise Refused(
        "VT216",
        f"{scope.where(op.name)} is another name of `{op.text}`, not a value of its own",
        (first,) if there else (),
    )


def _check(scope: Scope, op: Op, value: Value | None) -> None:
    tree, module, where = scope.tree, scope.module, scope.where(op.name)
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
        ran = tuple(o.name for o in scope.forward.ops if o.name in scope.values)[:SHOWN]
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


def _element(value: Value, element: int | None, scope: Scope, op: Op) -> int:
    where = scope.where(op.name)
    bound = {o.item: o.name for o in scope.forward.ops if o.kind == "element" and o.of == op.name}
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

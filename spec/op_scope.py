"""The function that ops are resolved in: a module's forward, or one that an op of it calls."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from vtaps.spec.source import Arg, Forward, Op, within, without
from vtaps.spec.tree import ModelTree, Module, Value


@dataclass(frozen=True)
class Scope:
    """``forward`` as ``module`` runs it; ``call``: the op that calls it, in ``outer``, where it is not the module's
    own."""

    tree: ModelTree
    module: Module
    forward: Forward
    call: Op | None = None
    outer: Forward | None = None

    @cached_property
    def prefix(self) -> str:
        return "" if self.call is None else within(self.call.name, "")

    @cached_property
    def ops(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.forward.ops}

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """What ops, and arguments of them, were in the abstract pass."""
        size = len(self.prefix)
        return {name[size:]: value for name, value in self.module.ops if name.startswith(self.prefix)}

    def op(self, name: str) -> Op:
        return self.ops[name]

    def where(self, name: str) -> str:
        return f"{self.module.path}.source.{self.prefix}{name}"

    def child(self, op: Op) -> str | None:
        """The module that an op calls, where what it computes is that module's output and nothing else."""
        if op.kind != "call" or not op.text.startswith("self.") or op.repeats:
            return None
        if self.call is not None and not self.call.text.startswith("self."):
            return None  # that `self` is another
        path = f"{self.module.path}.{op.text[5:]}" if self.module.path else op.text[5:]
        found = self.tree.modules.get(path)
        return path if found is not None and found.calls == 1 and found.same_as is None else None

    def parameter(self, op: Op, arg: Arg) -> tuple[str, str] | None:
        """The module that ``op`` calls, and the name under which that takes ``arg`` in."""
        child = self.child(op)
        inputs = [name for name, _ in self.tree.modules[child].inputs] if child is not None else []
        if child is None or arg.key == "" or (isinstance(arg.key, int) and arg.key >= len(inputs)):
            return None
        name = arg.key if isinstance(arg.key, str) else inputs[arg.key]
        return (child, name) if name in inputs else None

    def argument(self, op: Op, arg: Arg) -> Value | None:
        """What it was in the abstract pass, where that was a tensor or a tuple."""
        taken = self.parameter(op, arg)
        if taken is not None:
            return dict(self.tree.modules[taken[0]].inputs)[taken[1]]
        return self.values.get(arg.of if arg.of and arg.item is None else f"{op.name}.{arg.place}")

    def order(self, op: Op, side: str) -> float:
        """When it is computed, on the clock of the abstract pass: after the last module that was called before it.
        Between two ops: the arguments of the second, what the function that it calls computes, its value."""
        at = self.forward.ops.index(op)
        left = [float(self.tree.modules[path].leave or 0) for path in self._called(self.forward.ops[:at])]
        if self.call is None:
            begins, place, size = self._begins(), 0.0, 1 / (len(self.forward.ops) + 2)
        else:
            assert self.outer is not None
            above = Scope(self.tree, self.module, self.outer)
            step = 1 / (len(self.outer.ops) + 2)
            begins = above.order(self.call, "input") // 1
            place = self.outer.ops.index(self.call) * step + step / 4
            size = step * 3 / 4 / (len(self.forward.ops) + 2)
        return max([begins, *left]) + place + (at + (0.125 if side == "input" else 1)) * size

    def _begins(self) -> float:
        # A compiled module has no time of its own: it begins before what it holds.
        head = self.module.path + "." if self.module.path else ""
        held = (m.enter for path, m in self.tree.modules.items() if path.startswith(head) and m.enter is not None)
        return float(self.module.enter if self.module.enter is not None else min(held, default=0) - 1)

    def _called(self, ops: Iterable[Op]) -> Iterator[str]:
        """The modules that ``ops`` call, or the functions that they call."""
        for op in ops:
            child = self.child(op)
            inner = self.tree.forwards.get(op.inside) if self.call is None and not op.sealed else None
            if child is not None:
                yield child
            elif inner is not None and op.name in self.values:
                yield from Scope(self.tree, self.module, inner, op, self.forward)._called(inner.ops)


def base(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def is_name(op: Op) -> bool:
    """Whether it is bound to nothing but another name."""
    return op.kind == "bind" and not op.of and op.text.isidentifier() and not keyword.iskeyword(op.text)


def bound_before(scope: Scope, op: Op, name: str) -> tuple[Op | None, list[Op]]:
    """The op that bound ``name`` last before ``op`` is evaluated, and those that were computed since."""
    earlier = scope.forward.ops[: scope.forward.ops.index(op)]
    before = [other for other in earlier if other.name in scope.values or other.fixed]
    names = ("bind", "element", "augmented")
    bound = [other for other in before if other.kind in names and not other.fixed and base(other.name) == name]
    return (bound[-1], before[before.index(bound[-1]) + 1 :]) if bound else (None, before)


def bound_elsewhere(scope: Scope, op: Op, name: str, bound: Op | None) -> bool:
    """Whether ``name`` is bound anew between ``bound`` and ``op`` where no value is known: to what has no op, or on a
    branch that the abstract pass did not take, which a worker may take."""
    ops = scope.forward.ops
    between = ops[0 if bound is None else ops.index(bound) + 1 : ops.index(op)]
    names = ("bind", "element", "augmented")
    return any(o.kind in names and base(o.name) == name and o.name not in scope.values for o in between)


def quiet(ops: Iterable[Op]) -> bool:
    """Whether no op of these can have changed a tensor in place."""
    return all(op.kind in ("bind", "element", "binary") or op.fixed == "in an f-string" for op in ops)


def lean(tree: ModelTree) -> ModelTree:
    """The tree without the values of arguments that a module takes in, which it has as that module's inputs."""
    modules = {path: replace(module, ops=tuple(_lean(tree, module))) for path, module in tree.modules.items()}
    return replace(tree, modules=modules)


def _lean(tree: ModelTree, module: Module) -> Iterator[tuple[str, Value]]:
    forward = tree.forwards.get(module.forward or "")
    scopes: dict[str, Scope] = {}
    if forward is not None:
        scopes[""] = Scope(tree, module, forward)
        for op in forward.ops:
            if op.inside in tree.forwards:
                scopes[op.name] = Scope(tree, module, tree.forwards[op.inside], op, forward)
    for name, value in module.ops:
        call, own = without(name)
        op_name, _, place = own.partition(".")
        of = scopes[call].ops.get(op_name) if call in scopes and place else None
        if of is None or not any(arg.place == place and scopes[call].parameter(of, arg) for arg in of.args):
            yield name, value

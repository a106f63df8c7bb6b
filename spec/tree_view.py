"""A tree for reading: ``vtaps tree MODEL`` and ``vtaps tree MODEL --at PATH``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from vtaps.spec import aliases, shards
from vtaps.spec.behind import LOGITS, head
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.layers import render_layers
from vtaps.spec.locations import locate, paths_of
from vtaps.spec.module_paths import children
from vtaps.spec.op_scope import Scope
from vtaps.spec.places import describe, spelled
from vtaps.spec.snapshot import stacks
from vtaps.spec.source import Forward, Op
from vtaps.spec.tree import ModelTree, Module, Value

GAP = "  "
INDENT = 2


def render(tree: ModelTree, width: int = 100) -> str:
    """The whole tree, one line a module, repeated layers once: name, class, output, and the aliases there.

    ``T`` is the row axis. An alias of an input names the parameter after it, ``z[i] (input_)``. An output that is not
    whole on every rank says so, ``[T, 960/tp]``.
    """
    rows = list(_rows(tree))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    head = sum(widths) + 3 * len(GAP)
    lines = [_title(tree), _sizes(tree), ""]
    for row in rows:
        left = GAP.join(text.ljust(size) for text, size in zip(row[:3], widths, strict=True))
        rest = textwrap.wrap(row[3], max(width - head, 20)) or [""]
        lines.append((left + GAP + rest[0]).rstrip())
        lines.extend(" " * head + line for line in rest[1:])
    if table := aliases.table_of(tree):
        zero = "embed" if table.embed_is_stream else f"{table.rules['resid_pre'].at.format(i=0)}"
        lines += ["", f"resid_pre[i] is resid_post[i-1], and resid_pre[0] is {zero}"]
    if tree.unvalued:
        lines += ["", f"without shapes: {tree.unvalued}"]
    else:
        lines += ["", _ranks(tree)]
    if aliases.table_of(tree) is None:
        lines += ["", f"{tree.architecture} has no alias table: its places are spelled as module paths"]
    return "\n".join(lines) + "\n"


def _title(tree: ModelTree) -> str:
    return f"{tree.architecture} ({tree.model_type}), {tree.dtype}, vLLM {tree.vllm}, tree {tree.digest[:12]}"


def _ranks(tree: ModelTree) -> str:
    if tree.unsharded:
        return f"without shard labels, it does not run on {shards.RANKS} ranks: {tree.unsharded}"
    return "at tensor_parallel_size > 1 a rank has its part of an axis N/tp, its term of a partial sum, all of the rest"


def _sizes(tree: ModelTree) -> str:
    size = tree.dimensions
    parts = [
        f"{size.layers} layers",
        f"hidden {size.hidden}",
        f"{size.heads} heads of {size.head_dim}",
        f"{size.kv_heads} KV heads",
        f"intermediate {size.intermediate}" if size.intermediate else "",
        f"vocabulary {size.vocab}",
    ]
    return ", ".join(p for p in parts if p)


def _rows(tree: ModelTree) -> Iterator[tuple[str, str, str, str]]:
    paths = list(tree.modules)
    found = stacks(paths)
    at = 0
    while at < len(paths):
        if at not in found:
            if paths[at]:
                yield _row(tree, tree.modules[paths[at]], paths[at].count("."), paths[at].rpartition(".")[2])
            at += 1
            continue
        prefix, layers, at = found[at]
        alike: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for i, group in enumerate(layers):
            key = tuple((p[len(f"{prefix}.{i}") :], tree.modules[p].cls) for p in group)
            alike.setdefault(key, []).append(i)
        for numbers in alike.values():
            # The last of them: the first layer has no residual yet and is the exception, not the rule.
            for path in layers[numbers[-1]]:
                module = tree.modules[path]
                own = path == f"{prefix}.{numbers[-1]}"
                name = f"[{render_layers(numbers)}]" if own else path.rpartition(".")[2]
                yield _row(tree, module, path.count("."), name, "i")


def _row(tree: ModelTree, module: Module, depth: int, name: str, layer: str | None = None) -> tuple[str, str, str, str]:
    named = []
    for alias, where in _primary(tree, module):
        text = f"{alias.partition('[')[0]}[{layer}]" if layer and "[" in alias else alias
        named.append(f"{text} ({where})" if where else text)
    first = tree.modules[module.same_as] if module.same_as else module
    shape = describe(first.output, labels=True) if first.output is not None else ""
    if first.calls > 1:
        shape += f" ×{first.calls}, shared"
    return " " * (INDENT * depth) + name, module.cls, shape.strip(), ", ".join(named)


def _primary(tree: ModelTree, module: Module) -> Iterator[tuple[str, str]]:
    """``(alias, parameter)`` of the aliases whose own place is here; an output has no parameter."""
    for name, _ in module.inputs:
        for alias in aliases.at_place(tree, module.path, "input", name, primary=True):
            yield alias, name
    for alias in aliases.at_place(tree, module.path, "output", None, primary=True):
        yield alias, ""
    if module.path == head(tree):
        yield LOGITS, ""


def render_at(tree: ModelTree, path: str, span: Span | None = None) -> tuple[str | None, list[Diagnostic]]:
    """One module: what it takes and gives, how a spec spells each place, and what it holds. ``path`` takes the
    layer grammar; of several modules the first is shown. VT201, VT202, VT204 where it names none."""
    span = span or Span(path)
    paths, problems = paths_of(tree, path, span)
    if not paths:
        return None, problems
    module = tree.modules[paths[0]]
    lines = [f"{module.path or 'the root'}: {module.cls}"]
    if len(paths) > 1:
        lines.append(f"(the first of {len(paths)}: {path})")
    if module.same_as is not None:
        lines.append(f"the same module as {module.same_as}")
    calls = tree.modules[module.same_as].calls if module.same_as else module.calls
    if calls != 1:
        lines.append("never called as a module" if not calls else f"called {calls} times a step")
    for name, shape in module.parameters:
        lines.append(f"  weight {name} {list(shape)}")
    lines += _places(tree, module, span)
    if tree.unsharded and module.inputs:
        lines.append(_ranks(tree))
    below = children(tree, module.path)
    if below:
        lines.append("holds")
        numbers = [int(name) for name in below if name.isdecimal()]
        if numbers:
            first = tree.modules[f"{module.path}.{numbers[0]}"]
            lines.append(f"  [{render_layers(numbers)}]  {first.cls}")
        head = module.path + "." if module.path else ""
        lines += [f"  {name}  {tree.modules[head + name].cls}" for name in below if not name.isdecimal()]
    return "\n".join(lines) + "\n", []


def forwards_of(tree: ModelTree, path: str) -> list[tuple[Forward, Mapping[str, Value]]]:
    """The function of the module that :func:`render_at` shows with what its ops computed, then those that it calls and
    that have ops, with what these computed where it calls them first."""
    paths, _ = paths_of(tree, path, Span(path))
    if not paths:
        return []
    module = tree.modules[paths[0]]
    first = tree.modules[module.same_as] if module.same_as else module
    own = tree.forwards.get(first.forward or "")
    if own is None:
        return []
    found = [(own, _own_values(Scope(tree, first, own)))]
    shown: dict[str, Mapping[str, Value]] = {}
    for op in own.ops:
        if op.inside and not shown.get(op.inside):
            shown[op.inside] = _own_values(Scope(tree, first, tree.forwards[op.inside], op, own))
    return [*found, *((tree.forwards[where], values) for where, values in shown.items())]


def _own_values(scope: Scope) -> Mapping[str, Value]:
    return {name: value for name, value in scope.values.items() if "." not in name}


def render_forward(forward: Forward, values: Mapping[str, Value], source: Sequence[str] | None) -> str:
    """A forward's own text with the names of its ops and what they computed in the margin; without ``source`` the ops
    alone."""
    title = f"{forward.where.rpartition('.')[2]}  {forward.file}:{forward.line}" if forward.file else forward.where
    lines = [title]
    if forward.reason:
        return "\n".join([*lines, f"  without ops: {forward.reason}"]) + "\n"
    names = [_margin(op) for op in forward.ops]
    width = max(map(len, names), default=0)
    by_line: dict[int, list[str]] = {}
    for op, name in zip(forward.ops, names, strict=True):
        value = describe(values[op.name], labels=True) if op.name in values else ""
        by_line.setdefault(op.line, []).append(f"{name.ljust(width)}  {value}".rstrip())
    if source is None:
        lines.append("  its source is not installed here, or is another version's")
        lines += [f"  {forward.line + n - 1:5}  {name}" for n, found in sorted(by_line.items()) for name in found]
        return "\n".join(lines) + "\n"
    # What is left of the definition is in a string: it stays where it is.
    depth = len(source[0]) - len(source[0].lstrip())
    width = max((len(name) for found in by_line.values() for name in found), default=0)
    for number, text in enumerate(source, 1):
        first, *more = by_line.get(number, [""])
        kept = text[depth:] if not text[:depth].strip() else text
        lines.append(f"  {first.ljust(width)}  {forward.line + number - 1:5}  {kept}".rstrip())
        lines += [f"  {name.ljust(width)}      +" for name in more]
    return "\n".join(lines) + "\n"


def _margin(op: Op) -> str:
    """``*``: in a loop; ``>``: it calls a function with ops of its own, and why no spec can use those."""
    text = op.name + "*" * op.repeats + " >" * bool(op.inside)
    why = op.fixed or (op.sealed if op.inside else "")
    return f"{text} ({why})" if why else text


def _places(tree: ModelTree, module: Module, span: Span) -> list[str]:
    rows: list[tuple[str, str, str, str]] = []
    served = set(spelled(module))
    for name, value in module.inputs:
        where = f"{module.path}.input.{name}"
        spelt = _spell(tree, module, "input", name, where, served, span)
        rows.append((f"input {name}", describe(value, labels=True), _held(tree, value), spelt))
    output = module.output
    if output is not None:
        parts: list[tuple[str, Value]] = [(f"{module.path}.output", output)]
        if output.kind == "tuple" and f"{module.path}.output" not in served:
            parts = [(f"{module.path}.output[{i}]", value) for i, value in enumerate(output.items)]
        for where, value in parts:
            label = where.removeprefix(module.path + ".")
            element = None if label in ("output", "output[0]") else 1
            spelt = _spell(tree, module, "output", element, where, served, span)
            rows.append((label, describe(value, labels=True), _held(tree, value), spelt))
    widths = [max((len(r[c]) for r in rows), default=0) for c in range(3)]
    lines = []
    for *left, names in rows:
        cells = [text.ljust(width) for text, width in zip(left, widths, strict=True) if width]
        lines.append(f"  {GAP.join([*cells, names])}".rstrip())
    return lines


def _held(tree: ModelTree, value: Value | None) -> str:
    return "" if tree.unsharded else shards.words(value)


def _spell(
    tree: ModelTree,
    module: Module,
    side: str,
    element: int | str | None,
    where: str,
    served: set[str],
    span: Span,
) -> str:
    names = list(aliases.at_place(tree, module.path, side, element)) if element != 1 else []
    if where in served and locate(tree, where, span)[0]:
        names.append(where)
    return ", ".join(names)

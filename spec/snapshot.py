"""A :class:`ModelTree` as JSON (``schemas/tree-v4.schema.json``) and back, without loss.

Repeated layers are written once: ``model.layers.[0..29]`` holds the modules of a run of equal layers, and for
a layer that differs only the modules that do. A value is one word, ``bfloat16[T,960/tp]`` or a tuple of such.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from vtaps.spec import shards
from vtaps.spec.files import write_text
from vtaps.spec.source import Forward, op_text, parse_op
from vtaps.spec.tree import Dimensions, ModelTree, Module, Value

VERSION = 4
"""The version of the format; a cached snapshot of another version is rebuilt."""

_LAYER = re.compile(r"(.+?)\.(0|[1-9]\d*)(?:\.(.+))?")
_TENSOR = re.compile(r"(\w+)\[([^\[\]]*)\](?::(partial|alone)\b)?")
_STACK = re.compile(r"(.+)\.\[0\.\.(\d+)\]")


class SnapshotError(ValueError):
    """The text is not a snapshot of this version."""


# Values -----------------------------------------------------------------------------------------------------


def value_text(value: Value | None) -> str | None:
    """``bfloat16[T,960/tp]``, ``bfloat16[T,576]:partial``, ``(A, B)``, ``None``, ``other``; None stays None."""
    if value is None:
        return None
    if value.kind == "tensor":
        return f"{value.dtype}[{','.join(shards.axes(value))}]{value.mark and ':' + value.mark}"
    if value.kind == "tuple":
        return f"({', '.join(str(value_text(v)) for v in value.items)})"
    return "None" if value.kind == "none" else "other"


@lru_cache(maxsize=4096)
def parse_value(text: str) -> Value:
    """The inverse of :func:`value_text`; raises :class:`SnapshotError`."""
    value, end = _value_at(text, 0)
    if end != len(text):
        raise SnapshotError(f"not a value: {text!r}")
    return value


def _value_at(text: str, at: int) -> tuple[Value, int]:
    if text.startswith("(", at):
        items: list[Value] = []
        at += 1
        while not text.startswith(")", at):
            item, at = _value_at(text, at)
            items.append(item)
            if text.startswith(", ", at):
                at += 2
            elif not text.startswith(")", at):
                raise SnapshotError(f"not a value: {text!r}")
        return Value("tuple", items=tuple(items)), at + 1
    if found := _TENSOR.match(text, at):
        axes = [shards.parse_axis(n) for n in found[2].split(",")] if found[2] else []
        parts = tuple((i, part) for i, (_, sharded, part) in enumerate(axes) if sharded)
        mark = cast(Literal["", "partial", "alone"], found[3] or "")
        return Value("tensor", found[1], tuple(whole for whole, _, _ in axes), (), parts, mark), found.end()
    if text.startswith("None", at):
        return Value("none"), at + 4
    if text.startswith("other", at):
        return Value("other"), at + 5
    raise SnapshotError(f"not a value: {text!r}")


# Modules ----------------------------------------------------------------------------------------------------


def _module_json(module: Module, clock: int, prefix: str, usual: Mapping[str, str]) -> dict[str, Any]:
    """One module, its calls counted from ``clock``, paths below ``prefix`` as ``./…``."""
    made: dict[str, Any] = {"class": module.cls}
    if module.parameters:
        made["weights"] = {name: list(shape) for name, shape in module.parameters}
    if module.inputs:
        made["inputs"] = {name: value_text(value) for name, value in module.inputs}
    if module.output is not None:
        made["output"] = value_text(module.output)
    if module.enter is not None:
        made["enter"] = module.enter - clock
    if module.leave is not None:
        made["leave"] = module.leave - clock
    if module.calls:
        made["calls"] = module.calls
    if module.same_as is not None:
        inside = prefix and module.same_as.startswith(prefix + ".")
        made["same_as"] = "./" + module.same_as[len(prefix) + 1 :] if inside else module.same_as
    if module.forward != (None if module.same_as else usual.get(module.cls)):
        made["forward"] = module.forward
    if module.ops:
        made["ops"] = {name: value_text(value) for name, value in module.ops}
    return made


def _usual(forwards: Iterable[str]) -> dict[str, str]:
    """Class → the forward that is written for no module of it: the first that is the class's own."""
    found: dict[str, str] = {}
    for where in forwards:
        found.setdefault(where.rpartition(".")[0].rpartition(".")[2], where)
    return found


def _forward_json(forward: Forward) -> dict[str, Any]:
    if not forward.file:
        return {"reason": forward.reason}
    place = f"{forward.file}:{forward.line}+{forward.lines}"
    made: dict[str, Any] = {"at": place, "sha256": forward.digest}
    if forward.reason:
        made["reason"] = forward.reason
    return made | {"ops": [op_text(op) for op in forward.ops]}


def _forward(where: str, data: dict[str, Any]) -> Forward:
    reason = data.get("reason", "")
    if "at" not in data:
        return Forward(where, reason=reason)
    file, _, place = data["at"].rpartition(":")
    line, _, lines = place.partition("+")
    ops = tuple(parse_op(text) for text in data["ops"])
    return Forward(where, file, int(line), int(lines), data["sha256"], ops, reason)


def _module(path: str, data: dict[str, Any], clock: int, prefix: str, usual: Mapping[str, str]) -> Module:
    same_as = data.get("same_as")
    if same_as is not None and same_as.startswith("./"):
        same_as = f"{prefix}.{same_as[2:]}"
    enter, leave = data.get("enter"), data.get("leave")
    return Module(
        path=path,
        cls=data["class"],
        parameters=tuple((name, tuple(shape)) for name, shape in data.get("weights", {}).items()),
        inputs=tuple(
            (name, None if text is None else parse_value(text)) for name, text in data.get("inputs", {}).items()
        ),
        output=parse_value(data["output"]) if "output" in data else None,
        enter=None if enter is None else enter + clock,
        leave=None if leave is None else leave + clock,
        same_as=same_as,
        calls=data.get("calls", 0),
        forward=data.get("forward", None if same_as else usual.get(data["class"])),
        ops=tuple((name, parse_value(text)) for name, text in data.get("ops", {}).items()),
    )


# Layers -----------------------------------------------------------------------------------------------------


def ranges(numbers: list[int]) -> str:
    """``0..3,5`` for ``[0, 1, 2, 3, 5]`` (ascending)."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def stacks(paths: list[str]) -> dict[int, tuple[str, list[list[str]], int]]:
    """``start → (prefix, the paths of each layer, end)`` for every run of paths that is a stack of layers."""
    found: dict[int, tuple[str, list[list[str]], int]] = {}
    at = 0
    while at < len(paths):
        head = _LAYER.fullmatch(paths[at])
        start, layers = at, list[list[str]]()
        while head and at < len(paths) and (here := _LAYER.fullmatch(paths[at])) and here[1] == head[1]:
            if here[3] is None and int(here[2]) == len(layers):
                layers.append([])
            elif not layers or int(here[2]) != len(layers) - 1:
                break
            layers[-1].append(paths[at])
            at += 1
        if head and len(layers) > 1:
            found[start] = (head[1], layers, at)
        at = max(at, start + 1)
    return found


def _stack_json(tree: ModelTree, prefix: str, layers: list[list[str]], usual: Mapping[str, str]) -> dict[str, Any]:
    first = [tree.modules[paths[0]].enter for paths in layers]
    clocks = [n or 0 for n in first]
    step = clocks[1] - clocks[0]
    even = all(b - a == step for a, b in pairwise(clocks))
    contents: list[dict[str, Any]] = []
    for i, paths in enumerate(layers):
        own = f"{prefix}.{i}"
        contents.append(
            {path[len(own) + 1 :] or ".": _module_json(tree.modules[path], clocks[i], own, usual) for path in paths}
        )
    groups: dict[str, list[int]] = {}
    for i, content in enumerate(contents):
        groups.setdefault(json.dumps(content), []).append(i)
    blocks: list[dict[str, Any]] = []
    for numbers in sorted(groups.values(), key=lambda n: (-len(n), n)):
        content = contents[numbers[0]]
        like = next((b for b in blocks if "like" not in b and list(b["modules"]) == list(content)), None)
        if like is None:
            blocks.append({"layers": ranges(numbers), "modules": content})
        else:
            other = like["modules"]
            differs = {k: v for k, v in content.items() if json.dumps(v) != json.dumps(other[k])}
            blocks.append({"layers": ranges(numbers), "like": like["layers"], "modules": differs})
    return {"clock": {"first": clocks[0], "step": step} if even else clocks, "blocks": blocks}


def _stack(prefix: str, count: int, data: dict[str, Any], usual: Mapping[str, str]) -> Iterator[Module]:
    clock = data["clock"]
    contents: dict[int, dict[str, Any]] = {}
    full = {block["layers"]: block["modules"] for block in data["blocks"] if "like" not in block}
    for block in data["blocks"]:
        content = full[block["like"]] | block["modules"] if "like" in block else block["modules"]
        for i in _numbers(block["layers"]):
            contents[i] = content
    for i in range(count):
        own = f"{prefix}.{i}"
        start = clock[i] if isinstance(clock, list) else clock["first"] + i * clock["step"]
        for name, record in contents[i].items():
            yield _module(own if name == "." else f"{own}.{name}", record, start, own, usual)


# Trees ------------------------------------------------------------------------------------------------------


def to_json(tree: ModelTree) -> dict[str, Any]:
    """The snapshot as plain data, ``digest`` included."""
    paths = list(tree.modules)
    found = stacks(paths)
    usual = _usual(tree.forwards)
    modules: dict[str, Any] = {}
    at = 0
    while at < len(paths):
        if at in found:
            prefix, layers, at = found[at]
            modules[f"{prefix}.[0..{len(layers) - 1}]"] = _stack_json(tree, prefix, layers, usual)
        else:
            modules[paths[at]] = _module_json(tree.modules[paths[at]], 0, "", usual)
            at += 1
    size = tree.dimensions
    made: dict[str, Any] = {
        "vtaps_tree": VERSION,
        "architecture": tree.architecture,
        "model_type": tree.model_type,
        "dtype": tree.dtype,
        "vllm": tree.vllm,
        "dimensions": {name: getattr(size, name) for name in Dimensions.__dataclass_fields__},
        "modules": modules,
        "forwards": {where: _forward_json(forward) for where, forward in tree.forwards.items()},
    }
    if tree.unvalued is not None:
        made["unvalued"] = tree.unvalued
    if tree.unsharded is not None:
        made["unsharded"] = tree.unsharded
    made["digest"] = digest(made)
    return made


def digest(data: dict[str, Any]) -> str:
    """sha256 of the snapshot's content; the layout of the file and the machine do not enter it."""
    content = {key: value for key, value in data.items() if key != "digest"}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def from_json(data: Any) -> ModelTree:
    """The tree of a snapshot; raises :class:`SnapshotError` where it is not one, or its digest is another."""
    if not isinstance(data, dict) or data.get("vtaps_tree") != VERSION:
        raise SnapshotError(f"not a tree snapshot of version {VERSION}")
    if digest(data) != data.get("digest"):
        raise SnapshotError("the content does not have the digest it states")
    try:
        modules: dict[str, Module] = {}
        forwards = {where: _forward(where, record) for where, record in data["forwards"].items()}
        usual = _usual(forwards)
        for path, record in data["modules"].items():
            if found := _STACK.fullmatch(path):
                modules.update((m.path, m) for m in _stack(found[1], int(found[2]) + 1, record, usual))
            else:
                modules[path] = _module(path, record, 0, "", usual)
        return ModelTree(
            architecture=data["architecture"],
            model_type=data["model_type"],
            dtype=data["dtype"],
            vllm=data["vllm"],
            dimensions=Dimensions(**data["dimensions"]),
            modules=modules,
            digest=data["digest"],
            unvalued=data.get("unvalued"),
            unsharded=data.get("unsharded"),
            forwards=forwards,
        )
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as fault:
        raise SnapshotError(f"the snapshot lacks something: {fault!r}") from fault


def dumps(tree: ModelTree) -> str:
    """The snapshot as text: one line a module, so that a diff reads."""
    data = to_json(tree)
    lines: list[str] = []
    for key, value in data.items():
        if key == "modules":
            lines.append(f'"modules": {{\n{_join(_module_lines(value))}\n}}')
        elif key == "forwards":
            lines.append(f'"forwards": {{\n{_join(_forward_lines(value))}\n}}')
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _join(lines: Iterable[str]) -> str:
    return ",\n".join(lines)


def _module_lines(modules: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for path, record in modules.items():
        if "blocks" not in record:
            lines.append(f"  {json.dumps(path)}: {json.dumps(record)}")
            continue
        blocks: list[str] = []
        for block in record["blocks"]:
            head = {k: v for k, v in block.items() if k != "modules"}
            body = _join([f"      {json.dumps(n)}: {json.dumps(m)}" for n, m in block["modules"].items()])
            blocks.append(f'    {json.dumps(head)[:-1]}, "modules": {{\n{body}\n    }}}}')
        clock = json.dumps(record["clock"])
        lines.append(f'  {json.dumps(path)}: {{"clock": {clock}, "blocks": [\n{_join(blocks)}\n  ]}}')
    return lines


def _forward_lines(forwards: dict[str, Any]) -> Iterator[str]:
    for where, record in forwards.items():
        head = {key: value for key, value in record.items() if key != "ops"}
        if not record.get("ops"):
            yield f"  {json.dumps(where)}: {json.dumps(record)}"
            continue
        ops = _join([f"    {json.dumps(op, ensure_ascii=False)}" for op in record["ops"]])
        yield f'  {json.dumps(where)}: {json.dumps(head)[:-1]}, "ops": [\n{ops}\n  ]}}'


def loads(text: str) -> ModelTree:
    """Raises :class:`SnapshotError`."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as fault:
        raise SnapshotError(f"not JSON: {fault}") from fault
    return from_json(data)


def with_digest(tree: ModelTree) -> ModelTree:
    """The tree with the digest of its own content."""
    return replace(tree, digest=to_json(tree)["digest"])


def write_tree(tree: ModelTree, file: Path) -> None:
    """Atomically: a reader sees the old file or the whole new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, dumps(tree))


def read_tree(file: Path) -> ModelTree:
    """Raises :class:`SnapshotError` and ``OSError``."""
    try:
        return loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as fault:
        raise SnapshotError("not UTF-8") from fault

"""Module paths: the segments of a location → the modules of a tree that they name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vtaps.spec.diagnostics import Diagnostic, Span, nearest
from vtaps.spec.layers import LayerRangeError, Layers, LayerSyntaxError
from vtaps.spec.tree import ModelTree


@dataclass(frozen=True)
class Segment:
    """``text`` as written; ``name`` None is ``*``, a layer number stands in ``layers`` with an empty name."""

    text: str
    name: str | None
    layers: Layers | None = None


class Trouble(Exception):
    """One finding, its span still open."""

    def __init__(
        self,
        code: str,
        message: str,
        valid: Iterable[str] = (),
        near: str | None = None,
        note: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.valid, self.near, self.note = code, message, tuple(valid), near, note

    def at(self, span: Span) -> Diagnostic:
        return Diagnostic(self.code, self.message, span, self.valid, self.near, self.note)


def select(layers: Layers, count: int, text: str) -> tuple[int, ...]:
    """Those of ``count`` layers; raises :class:`Trouble` (VT201, VT204)."""
    try:
        return layers.select(count)
    except LayerRangeError as fault:
        raise Trouble("VT204", f"{text}: {fault}") from None
    except LayerSyntaxError as fault:
        raise Trouble("VT201", f"{text}: {fault.message}") from None


def module_paths(tree: ModelTree, path: tuple[Segment, ...]) -> list[str]:
    """The modules that a path names, in the model's order, under the root that it implies; raises
    :class:`Trouble` (VT202, VT204)."""
    text = ".".join(s.text for s in path)
    tries: list[tuple[str, tuple[Segment, ...]]] = [("", path)]
    if path[0].text == "model" and len(path) > 1:
        tries.append(("", path[1:]))  # nnsight's own root is called `model`
    failures: list[_NoMatch] = []
    for root, segments in tries:
        try:
            return _walk(tree, root, segments, text)
        except _NoMatch as fault:
            failures.append(fault)
    rooted: dict[str, list[str]] = {}
    for root in _implied_roots(tree, path[0]):
        try:
            rooted[root] = _walk(tree, root, path, text)
        except _NoMatch as fault:
            failures.append(fault)
    if len(rooted) == 1:
        return next(iter(rooted.values()))
    if rooted:
        several = [paths[0] for paths in rooted.values()]
        note = "name the layer or `*`: `layers.3`, `layers.*`, `layers[3..5]`"
        raise Trouble("VT202", f"`{text}` could be any of {len(several)} places", several[:8], note=note)
    raise max(failures, key=lambda f: f.depth).trouble(text)


def _implied_roots(tree: ModelTree, first: Segment) -> list[str]:
    if not first.name:
        return []
    tail = "." + first.name
    return [p.removesuffix(tail) for p in tree.modules if p.endswith(tail)]


@dataclass(frozen=True)
class _NoMatch(Exception):
    depth: int
    parent: str
    segment: Segment
    children: tuple[str, ...]

    def trouble(self, text: str) -> Trouble:
        where = f"in {self.parent}" if self.parent else "at the root"
        name = self.segment.name or self.segment.text
        numbers = [c for c in self.children if c.isdecimal()]
        shown = [c for c in self.children if not c.isdecimal()]
        if len(numbers) == 1:
            shown.append(numbers[0])
        elif numbers:
            shown.append(f"{numbers[0]}..{numbers[-1]}")
        what = f"nothing is named `{self.segment.text}` {where}" if shown else f"{self.parent} holds no modules"
        return Trouble("VT202", f"`{text}` names nothing: {what}", shown, nearest(name, shown))


def children(tree: ModelTree, parent: str) -> tuple[str, ...]:
    """The names directly below a module, in the model's order."""
    head = parent + "." if parent else ""
    return tuple(p[len(head) :] for p in tree.modules if p and p.startswith(head) and "." not in p[len(head) :])


def _walk(tree: ModelTree, root: str, path: tuple[Segment, ...], text: str) -> list[str]:
    here = [root]
    for depth, segment in enumerate(path):
        steps = {parent: _step(tree, parent, segment, text) for parent in here}
        lacking = [parent for parent, found in steps.items() if not found]
        if len(lacking) == len(here):
            raise _NoMatch(depth, here[0], segment, children(tree, here[0]))
        if lacking and all(s.name is not None and (s.layers is None or s.layers.explicit) for s in path):
            # Layers that were named one by one must all have it; a `*` takes those that do.
            raise _NoMatch(depth, lacking[0], segment, children(tree, lacking[0])).trouble(text)
        here = [path for found in steps.values() for path in found]
    return here


def _step(tree: ModelTree, parent: str, segment: Segment, text: str) -> list[str]:
    below = children(tree, parent) if segment.name is None or segment.layers is not None else ()
    head = parent + "." if parent else ""
    if segment.name is None:
        return [head + name for name in below]
    if segment.layers is None:
        named = head + segment.name
        return [named] if named in tree.modules else []
    if segment.name:
        parent = head + segment.name
        if parent not in tree.modules:
            return []
        below, head = children(tree, parent), parent + "."
    count = sum(name.isdecimal() for name in below)
    if count == 0:
        return []
    return [f"{head}{i}" for i in select(segment.layers, count, f"`{text}`")]

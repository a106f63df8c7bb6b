"""Locations: text → :class:`Site`\\ s of a tree, or what is wrong with it.

    alias | alias[layers]
    module.path.output | module.path.output[i] | module.path.input | module.path.input.NAME
    module.path.source.OP | module.path.source.OP.output | module.path.source.OP.output[i]
    module.path.source.OP.input[i] | module.path.source.OP.input.KEYWORD
    module.path.source.OP.source.INNER…, where OP calls a function, and of that
    **

A segment of a module path may be ``*``, a layer (``-1`` too), or carry ``[layers]`` after its name. The root
prefix is implied: ``model.layers.3``, ``model.model.layers.3`` and ``layers.3`` are one place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vtaps.spec import aliases
from vtaps.spec.alias_tables import ALIASES, TABLES
from vtaps.spec.behind import BEHIND, behind
from vtaps.spec.diagnostics import Diagnostic, Span, nearest
from vtaps.spec.everywhere import EVERYWHERE, everywhere
from vtaps.spec.layers import Layers, LayerSyntaxError, collapsed, parse_layers
from vtaps.spec.module_paths import Segment, Trouble, module_paths, select
from vtaps.spec.op_grammar import OpPlace, parse_op_place
from vtaps.spec.op_places import resolve_op
from vtaps.spec.places import Refused, resolve_place
from vtaps.spec.tree import ModelTree, Site

MAX_LENGTH = 500

_SEGMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[(?P<layers>[^\[\]]*)\])?")
_ELEMENT = re.compile(r"\s*(\d{1,4})\s*")


@dataclass(frozen=True)
class RawLocation:
    """A module path, its side, and which element (of an output) or parameter (of an input) of it; ``op``: a place in
    its forward instead."""

    path: tuple[Segment, ...]
    side: str
    element: int | str | None
    op: OpPlace | None = None


@dataclass(frozen=True)
class AliasLocation:
    alias: str
    layers: Layers | None


def locate(tree: ModelTree, text: str, span: Span) -> tuple[tuple[Site, ...], list[Diagnostic]]:
    """The sites of one location in execution order, each once; none where findings refuse it.

    Codes: VT201 to VT208, VT216.
    """
    if text.strip() == EVERYWHERE:
        every = everywhere(tree).sites
        message = f"no output of {tree.architecture} is known to be rows"
        return every, [] if every else [Trouble("VT208", message, note=tree.unvalued).at(span)]
    try:
        location = parse_location(text)
        found = _alias_sites(tree, location) if isinstance(location, AliasLocation) else _raw(tree, location)
    except Trouble as trouble:
        return (), [trouble.at(span)]
    except ExceptionGroup as group:
        return (), [t.at(span) for t in group.exceptions if isinstance(t, Trouble)]
    unique = {site: None for site in found}
    return tuple(sorted(unique, key=lambda s: (s.order, s.columns or (0, 0), s.name))), []


# Text → location --------------------------------------------------------------------------------------------


def parse_location(text: str) -> AliasLocation | RawLocation:
    """Raises :class:`Trouble` (VT201)."""
    text = text.strip()
    if not text or len(text) > MAX_LENGTH:
        raise Trouble("VT201", "the location is empty" if not text else "the location is too long")
    parts = _split(text)
    if EVERYWHERE in parts:
        note = "`*` is one name: `layers.*.mlp.output`"
        raise Trouble("VT201", f"{text!r}: `{EVERYWHERE}` stands alone, for every module output", note=note)
    if len(parts) == 1:
        segment = _segment(text, parts[0])
        if not segment.name:
            raise Trouble("VT201", f"{text!r} is neither an alias nor a module path", note=_FORMS)
        return AliasLocation(segment.name, segment.layers)
    if "source" in parts[1:]:
        return _op_location(text, parts)
    path, side, element = _side(text, parts)
    return RawLocation(tuple(_segment(text, p) for p in path), side, element)


def _op_location(text: str, parts: list[str]) -> RawLocation:
    at = parts.index("source", 1)
    try:
        place = parse_op_place(text, parts[at + 1 :])
    except Refused as fault:
        raise _trouble(fault) from None
    return RawLocation(tuple(_segment(text, p) for p in parts[:at]), place.side, place.element, place)


def _trouble(fault: Refused) -> Trouble:
    return Trouble(fault.code, fault.message, fault.valid, fault.near, fault.note)


_FORMS = "a location is an alias (`resid_post[3]`) or a module path that ends in `.output` or `.input`"


def _split(text: str) -> list[str]:
    """At the dots outside brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        if letter in "[]":
            depth += 1 if letter == "[" else -1
            if depth not in (0, 1):
                raise Trouble("VT201", f"{text!r}: a bracket too many at column {i + 1}")
        elif letter == "." and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise Trouble("VT201", f"{text!r}: a bracket is not closed")
    parts.append(text[start:])
    return parts


def _side(text: str, parts: list[str]) -> tuple[list[str], str, int | str | None]:
    last = parts[-1]
    if last == "output":
        return parts[:-1], "output", None
    if last.startswith("output["):
        found = _ELEMENT.fullmatch(last[7:-1]) if last.endswith("]") else None
        if found is None:
            raise Trouble("VT201", f"{text!r}: `{last}` selects one element of a tuple by its number, from 0")
        return parts[:-1], "output", int(found[1])
    if last == "input":
        return parts[:-1], "input", None
    if parts[-2] == "input" and len(parts) > 2:
        if not last.isidentifier():
            raise Trouble("VT201", f"{text!r}: `{last}` is no parameter's name", note="as `.input.hidden_states`")
        return parts[:-2], "input", last
    raise Trouble(
        "VT201",
        f"{text!r} does not say which side of the module",
        near=nearest(last, ("input", "output")),
        note=_FORMS,
    )


def _segment(text: str, part: str) -> Segment:
    if part == "*":
        return Segment(part, None)
    if re.fullmatch(r"-?\d{1,9}", part):
        return Segment(part, "", parse_layers(part))
    found = _SEGMENT.fullmatch(part)
    if found is None:
        what = f"`{part}` is no name of a module" if part else "there is nothing between two dots"
        note = "a range of layers stands in brackets: `layers[8..12]`" if ".." in text and not part else None
        raise Trouble(
            "VT201",
            f"{text!r}: {what} (column {text.find(part) + 1 if part else text.find('..') + 1})",
            note=note,
        )
    if found["layers"] is None:
        return Segment(part, found["name"])
    try:
        return Segment(part, found["name"], parse_layers(found["layers"]))
    except LayerSyntaxError as fault:
        column = text.find(part) + found.start("layers") + fault.offset + 1
        raise Trouble(
            "VT201",
            f"{text!r}: {fault.message} (column {column})",
            note="layers are `i`, `-i`, `a..b`, `*`, or a comma list",
        ) from None


# Aliases ----------------------------------------------------------------------------------------------------


def _alias_sites(tree: ModelTree, location: AliasLocation) -> list[Site]:
    name = location.alias
    if name in BEHIND:
        return [_behind(tree, location)]
    served = aliases.names(tree)
    if name == "pattern":
        raise Trouble("VT346", "`pattern` can be read, not edited, and not by a read that has other locations")
    if name not in served:
        raise _unknown_alias(tree, name, served)
    takes = aliases.layered(tree, name)
    if takes and location.layers is None:
        raise Trouble("VT201", f"`{name}` is a place in every layer: `{name}[3]`, `{name}[*]`")
    if not takes and location.layers is not None:
        raise Trouble("VT201", f"`{name}` is one place of the model: it takes no layers")
    chosen: tuple[int | None, ...] = (None,)
    if location.layers is not None:
        chosen = select(location.layers, aliases.layer_count(tree), f"`{name}`")
    every = location.layers is not None and not location.layers.explicit
    found: list[Site] = []
    missing: list[aliases.NotInTree] = []
    for layer in chosen:
        try:
            found.append(aliases.site(tree, name, layer))
        except aliases.NotInTree as fault:
            missing.append(fault)
    # `*` is every layer that has the place: in some models a few layers have an MLP, the others experts.
    if missing and not (every and found):
        there = (aliases.site_or_none(tree, name, n) for n in range(aliases.layer_count(tree)) if takes)
        raise Trouble("VT202", str(missing[0]), [collapsed(s.name for s in there if s is not None)] if takes else ())
    return found


def _behind(tree: ModelTree, location: AliasLocation) -> Site:
    name = location.alias
    if location.layers is not None:
        raise Trouble("VT201", f"`{name}` is one place of the model: it takes no layers")
    found = behind(tree, name)
    if found is None:
        raise Trouble("VT202", f"{tree.architecture} has no module that is known to put its logits out")
    return found


def _unknown_alias(tree: ModelTree, name: str, served: tuple[str, ...]) -> Trouble:
    if not served and name in ALIASES:
        return Trouble(
            "VT206",
            f"{tree.architecture} has no alias table, so `{name}` has no proved meaning here",
            tuple(TABLES),
            note="module paths work: `vtaps tree MODEL` lists them",
        )
    if name in tree.modules:
        return Trouble("VT201", f"`{name}` is a module; say `{name}.output` or `{name}.input`")
    note = None
    if name in ALIASES:
        note = f"{tree.architecture} has no such place"
    elif not served:
        note = f"{tree.architecture} has no alias table: use module paths, `vtaps tree MODEL` lists them"
    there = (*served, *BEHIND)
    return Trouble("VT205", f"no alias is named `{name}`", there, nearest(name, there), note)


# Module paths -----------------------------------------------------------------------------------------------


def _raw(tree: ModelTree, location: RawLocation) -> list[Site]:
    paths = module_paths(tree, location.path)
    found: list[Site] = []
    refused: dict[tuple[str, str], list[Refused]] = {}
    for path in paths:
        try:
            if location.op is None:
                found.append(resolve_place(tree, path, location.side, location.element))
            else:
                found.append(resolve_op(tree, path, location.op))
        except Refused as fault:
            refused.setdefault((fault.code, re.sub(r"\.\d+(?=\.|$)", ".*", path)), []).append(fault)
    if refused:
        # One finding a cause: thirty layers refused alike are one.
        raise ExceptionGroup("refused", [_together(faults) for faults in refused.values()])
    return found


def _together(faults: list[Refused]) -> Trouble:
    made = _trouble(faults[0])
    if len(faults) > 1:
        made.message += f" (and {len(faults) - 1} more alike)"
    return made


def paths_of(tree: ModelTree, text: str, span: Span) -> tuple[list[str], list[Diagnostic]]:
    """The modules that a path without a side names, or why it names none (VT201, VT202, VT204)."""
    try:
        path = tuple(_segment(text, part) for part in _split(text.strip()))
        return module_paths(tree, path), []
    except Trouble as trouble:
        return [], [trouble.at(span)]

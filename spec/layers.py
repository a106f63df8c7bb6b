"""The layer grammar: a comma list of ``i``, ``-i``, ``a..b`` (inclusive) and ``*``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vtaps.spec.snapshot import ranges

_ITEM = re.compile(r"(?:(?P<all>\*)|(?P<first>-?\d{1,9})(?:\s*\.\.\s*(?P<last>-?\d{1,9}))?)")


@dataclass(frozen=True)
class LayerSyntaxError(Exception):
    """``offset`` is where in the text it stops making sense."""

    message: str
    offset: int


@dataclass(frozen=True)
class LayerRangeError(Exception):
    """``layer`` is none of ``count`` layers."""

    layer: int
    count: int

    def __str__(self) -> str:
        if self.count == 0:
            return f"layer {self.layer}: there are no layers"
        return f"layer {self.layer} of {self.count}: layers are 0..{self.count - 1}, or -{self.count}..-1 from the end"


@dataclass(frozen=True)
class Layers:
    """The items as written, ``(first, last)``; None is ``*``."""

    items: tuple[tuple[int, int] | None, ...]

    @property
    def explicit(self) -> bool:
        """Whether every layer is named; ``*`` takes what there is."""
        return None not in self.items

    def select(self, count: int) -> tuple[int, ...]:
        """Ascending, each once; raises :class:`LayerRangeError`, and :class:`LayerSyntaxError` where a range
        runs backwards."""
        found: set[int] = set()
        for item in self.items:
            if item is None:
                found.update(range(count))
                continue
            for layer in item:
                if not -count <= layer < count:
                    raise LayerRangeError(layer, count)
            first, last = (n + count if n < 0 else n for n in item)
            if first > last:
                raise LayerSyntaxError(f"{item[0]}..{item[1]} runs backwards", 0)
            found.update(range(first, last + 1))
        return tuple(sorted(found))


def parse_layers(text: str) -> Layers:
    """What stands between the brackets; raises :class:`LayerSyntaxError`."""
    items: list[tuple[int, int] | None] = []
    at = 0
    for part in text.split(","):
        found = _ITEM.fullmatch(part.strip())
        if found is None:
            what = f"`{part.strip()}` is no layer" if part.strip() else "a layer is missing"
            raise LayerSyntaxError(what, at)
        if found["all"]:
            items.append(None)
        else:
            first = int(found["first"])
            items.append((first, int(found["last"]) if found["last"] else first))
        at += len(part) + 1
    return Layers(tuple(items))


def render_layers(layers: Iterable[int]) -> str:
    """The shortest text that selects these layers: ``0..3,5``."""
    return ranges(sorted(set(layers)))


def collapsed(names: Iterable[str]) -> str:
    """Names of sites with the layers of one alias together: ``resid_post[24..26], z[3]``."""
    layers: dict[str, list[int]] = {}
    for name in names:
        head, _, rest = name.partition("[")
        number = rest.removesuffix("]")
        numbered = number.isdecimal()
        layers.setdefault(head if numbered else name, []).extend([int(number)] if numbered else [])
    return ", ".join(f"{head}[{render_layers(found)}]" if found else head for head, found in layers.items())

"""A YAML text as plain data plus the place of every node."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtaps.spec.diagnostics import Span

NodePath = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """``data`` holds only dict[str, …], list, str, int, float, bool and None.

    ``values[path]`` and ``keys[path]`` are the spans of a node and of the key that leads to it; a path is the
    keys and indices from the root.  ``file`` is the name as the user gave it, ``folder`` where relative paths
    in the text start.
    """

    file: str
    text: str
    data: Any
    folder: Path
    values: dict[NodePath, Span] = field(default_factory=dict)
    keys: dict[NodePath, Span] = field(default_factory=dict)

    def at(self, *path: str | int) -> Span:
        """The span of the value at ``path``, or of its nearest ancestor that stands in the text."""
        for cut in range(len(path), -1, -1):
            if path[:cut] in self.values:
                return self.values[path[:cut]]
        return Span(self.file)

    def key(self, *path: str | int) -> Span:
        """The span of the key at ``path``; of the value where the node has no key."""
        return self.keys.get(path) or self.at(*path)

    def line(self, *path: str | int) -> int:
        return self.key(*path).line

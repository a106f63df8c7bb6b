"""How a location is served: recorded inside the compiled model, at a break of it, by a hook after it, or by the eager
engine."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from vtaps.spec import engine_args
from vtaps.spec.alias_tables import TABLES
from vtaps.spec.aliases import table_of
from vtaps.spec.document import NodePath
from vtaps.spec.plan import EngineMode, LocationPlan, SiteMode
from vtaps.spec.spec import EngineRef
from vtaps.spec.tree import ModelTree, Site

ASKED = "asked for in the spec"
KEPT = "vLLM's compile and CUDA graphs stay as configured"
NOT_TAPS = "which only the eager engine serves"
_CONTAINERS = ("ModuleList", "ModuleDict")


@dataclass(frozen=True)
class Compiled:
    """What vLLM compiles of a model.

    ``root``: the path of the compiled module (``model`` of a Llama), None where vLLM compiles none.  ``ends``: when
    the last module inside it has been left, on the clock of the abstract pass.
    """

    architecture: str
    root: str | None
    ends: int

    def tap(self, site: Site) -> Literal["recorded", "hook"] | None:
        """How the taps engine serves a site; None where it cannot."""
        if self.root is None:
            return None
        if site.sampled:
            return "hook"
        if site.module == self.root and site.op is not None:
            return "recorded"
        if self._holds_root(site):
            return None
        if not self.root or site.module.startswith(self.root + "."):
            return "recorded"
        return "hook" if site.order > self.ends else None

    def why_not(self, site: Site) -> str:
        """The reason why the taps engine cannot serve a site."""
        if self.root is None:
            return f"vLLM does not compile {self.architecture}, so there is no compiled model to record it in"
        if site.module == self.root:
            return f"it is the compiled model, `{self.root}`: what its forward computes has taps, itself has none"
        if self._holds_root(site):
            return f"`{site.module}` runs outside the compiled model, `{self.root}`"
        return f"`{site.module}` runs before the compiled model, `{self.root}`"

    def _holds_root(self, site: Site) -> bool:
        """Whether the site's module is the compiled one or around it."""
        root, module = self.root or "", site.module
        return module == root or not module or root.startswith(module + ".")


def compiled_part(tree: ModelTree) -> Compiled:
    """The compiled part of a model, from which modules its abstract pass saw called.

    vLLM's ``@support_torch_compile`` gives a class a ``__call__`` of its own, which runs the forward past
    ``nn.Module``'s hooks.  The abstract pass listens through hooks, so of the modules around the decoder layers the
    compiled one is the outermost that has no call, though what it holds was called.  Where all of them were called,
    the architecture carries no such decorator and vLLM does not compile it.
    """
    layers = _decoder_layers(tree)
    if layers is None:
        return Compiled(tree.architecture, None, 0)
    parents = layers.split(".")[:-1]
    if tree.unvalued:  # nothing was called: take the parent of the layers
        return Compiled(tree.architecture, ".".join(parents), 0)
    around = [".".join(parents[:n]) for n in range(len(parents) + 1)]
    root = next((path for path in around if tree.modules[path].enter is None), None)
    head = f"{root}." if root else ""
    ends = max((m.leave or 0 for path, m in tree.modules.items() if path.startswith(head)), default=0)
    return Compiled(tree.architecture, root, ends)


def _decoder_layers(tree: ModelTree) -> str | None:
    """The path of the list of decoder layers: the alias table's, else the list, in no other list, under which most was
    called; None where there is none."""
    table = table_of(tree)
    if table is not None:
        return table.layers
    called: dict[str, int] = {}
    for path, module in tree.modules.items():
        if module.cls in _CONTAINERS and not re.search(r"\.\d+(\.|$)", path):
            called[path] = sum(m.calls for p, m in tree.modules.items() if p.startswith(path + "."))
    return max(called, key=lambda path: called[path], default=None)


def choose(
    engine: EngineRef,
    compiled: Compiled,
    locations: Iterable[LocationPlan],
    functions: Collection[tuple[str, str]],
    eager: Mapping[NodePath, str],
) -> tuple[EngineMode, str, tuple[LocationPlan, ...]]:
    """(engine mode, why, the locations with how each is served); ``functions``: the (kind, name) of what runs Python;
    ``eager``: what only the eager engine serves, ``("reads", "probe")`` → what that is."""
    places = tuple(locations)
    mode, reason = _mode(engine, compiled, places, functions, eager)
    if mode == "eager":
        return mode, reason, tuple(replace(p, mode="eager") for p in places)
    return mode, reason, tuple(replace(p, mode=_served(p, compiled, functions)) for p in places)


def _served(place: LocationPlan, compiled: Compiled, functions: Collection[tuple[str, str]]) -> SiteMode:
    tap = compiled.tap(place.site)
    python = any((s.kind, s.name) in functions for s in place.statements)
    return "break" if tap == "recorded" and python else tap or "eager"


def _mode(
    engine: EngineRef,
    compiled: Compiled,
    places: tuple[LocationPlan, ...],
    functions: Collection[tuple[str, str]],
    eager: Mapping[NodePath, str],
) -> tuple[EngineMode, str]:
    if engine.mode != "auto":
        return cast(EngineMode, engine.mode), ASKED
    listed = {(f"{s.kind}s", s.name) for p in places for s in p.statements}
    asked = next((where for where in eager if where in listed), None)
    if asked is not None:
        return "eager", f"auto: {asked[0]}.{asked[1]} {eager[asked]}, {NOT_TAPS}"
    blocked = engine_args.against_taps(engine.vllm)
    if blocked is not None:
        return "eager", f"auto: engine.vllm.{'.'.join(blocked[0])} does not go with taps: {blocked[1]}"
    if not places:
        return "taps", f"auto: there is no location to serve; {KEPT}"
    served = {p.site.name: compiled.tap(p.site) for p in places}
    missing = next((p.site for p in places if served[p.site.name] is None), None)
    if missing is not None:
        return "eager", f"auto: {missing.name} is not a tap: {compiled.why_not(missing)}"
    where = "inside the compiled model" + (" or after it" if "hook" in served.values() else "")
    if broken := [p for p in places if _served(p, compiled, functions) == "break"]:
        where += f", {len(broken)} at a break for Python"
    return "taps", f"auto: every location is {where}; {KEPT}"


def between_all_reduce_and_norm(architecture: str, site: Site) -> bool:
    """Whether an edit here parts an all-reduce from the RMSNorm that adds it to the stream, which vLLM fuses at
    tensor parallel > 1.  Gemma norms what comes out of the all-reduce before it is added, so there it does not."""
    table = TABLES.get(architecture)
    if table is None or site.value != "pair" or site.alias not in ("resid_mid", "resid_post"):
        return False
    return not table.rules["mlp_out"].at.endswith("norm.output")

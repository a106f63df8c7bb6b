"""The places behind the model's forward, with a row a sampled token instead of one a token: ``logits``, ``samples``."""

from __future__ import annotations

from vtaps.spec.tree import ModelTree, Site

LOGITS, SAMPLES = "logits", "samples"
SAMPLER = "sampler"
"""What ``samples`` are of: vLLM's sampler, which is no module of the model."""
BEHIND = (LOGITS, SAMPLES)
"""Their names, in the order in which a step comes by; no architecture needs an alias table for them."""


def head(tree: ModelTree) -> str | None:
    """The path of the module whose output are the logits; None where there is none, or more than one."""
    found = [path for path, module in tree.modules.items() if module.cls == "LogitsProcessor"]
    return found[0] if len(found) == 1 else None


def behind(tree: ModelTree, name: str) -> Site | None:
    """The site of ``logits``, ``[sampled rows, vocabulary]``, or of ``samples``, one token id a row."""
    path = head(tree)
    if path is None:
        return None
    last = max((module.leave or 0 for module in tree.modules.values()), default=0)
    logits = name == LOGITS
    return Site(
        name=name,
        module=path if logits else SAMPLER,
        side="output",
        element=None,
        value="tensor",
        order=last + 1 + BEHIND.index(name),
        alias=name,
        width=tree.dimensions.vocab if logits else 1,
        editable=logits,
        sampled=True,
    )

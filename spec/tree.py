"""The model's module tree as data: what there is to tap, before any weight is loaded.

Built by ``vtaps.runtime.compat.meta_tree`` from a bare configuration, kept as a JSON snapshot
(``schemas/tree-v4.schema.json``), read by everything left of ``run``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vtaps.spec.source import Forward, value_name

ROWS = "T"
"""The row axis in a shape: one row for each token scheduled in the step."""


@dataclass(frozen=True)
class Value:
    """What a module takes or gives, from one abstract pass.

    ``shape`` holds ints and :data:`ROWS`, of the model on one rank; ``items`` the elements of a tuple; ``kind``
    ``other`` is anything that is neither tensor, tuple nor None.

    What a rank of several has of a tensor (:mod:`vtaps.spec.shards`): ``shards`` are the axes of which it has a part,
    each with that part's size on one of two ranks where it is not half; ``mark`` is ``partial`` where the ranks' values
    sum to the value, ``alone`` where only a model on one rank computes it. Neither: every rank has the whole, in a tree
    that has labels (:attr:`ModelTree.unsharded`).
    """

    kind: Literal["tensor", "tuple", "none", "other"]
    dtype: str | None = None
    shape: tuple[int | str, ...] = ()
    items: tuple[Value, ...] = ()
    shards: tuple[tuple[int, int | str | None], ...] = ()
    mark: Literal["", "partial", "alone"] = ""


@dataclass(frozen=True)
class Module:
    """One module. ``inputs`` follow the forward's own parameter names and order (``self`` left out);
    ``enter``/``leave`` number the calls of the abstract pass (None: never called there), ``calls`` counts them: a
    module called more than once (a rotary embedding shared by all layers) keeps the values of its first call.
    ``same_as`` is the path under which the same module object stands first; ``forward`` names the function that it
    runs, in :attr:`ModelTree.forwards`, ``ops`` what its ops computed in the first call (one on a branch that was not
    taken is not there)."""

    path: str
    cls: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    inputs: tuple[tuple[str, Value | None], ...] = ()
    output: Value | None = None
    enter: int | None = None
    leave: int | None = None
    same_as: str | None = None
    calls: int = 0
    forward: str | None = None
    ops: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True)
class Dimensions:
    """Sizes from the configuration of the text tower (whole model, not one shard)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int | None
    vocab: int


@dataclass(frozen=True)
class ModelTree:
    """``digest`` is the sha256 of the snapshot's content, ``modules`` are in the model's own order by path.

    ``unvalued`` says why the modules carry no values, where the abstract pass did not work for the architecture;
    ``unsharded`` why the values carry no shard labels, where the model does not run on two ranks.
    ``forwards``: name → the function that modules run, with its ops.
    """

    architecture: str
    model_type: str
    dtype: str
    vllm: str
    dimensions: Dimensions
    modules: dict[str, Module]
    digest: str
    unvalued: str | None = None
    forwards: dict[str, Forward] = field(default_factory=dict)
    unsharded: str | None = None


@dataclass(frozen=True)
class Site:
    """One place at which a block acts: a location resolved against a tree.

    ``name`` is canonical (two spellings of one tensor give equal sites). ``element`` selects an element of a tuple
    output (int) or an input parameter (name). ``value`` ``pair``: the stream is the sum of ``element`` and
    ``residual`` (an output index or input parameter name; the residual may be None at run time).
    ``columns`` is a slice of the last axis (q, k, v inside the fused projection). ``width`` counts columns after
    the slice; ``heads`` divide it. ``hf_index`` is the index into Hugging Face's ``hidden_states``. ``op``: it is
    what this op of the module's forward computes (``element`` then counts in the op's tuple), or takes in (its
    number or keyword), and ``forward`` the function, in :attr:`ModelTree.forwards`; ``inside``: the function that this
    one calls, of which it is an op (``op`` is ``OUTER.source.INNER``).  ``sampled``: it is behind the forward and has a
    row a sampled token (:mod:`vtaps.spec.behind`).
    """

    name: str
    module: str
    side: Literal["input", "output"]
    element: int | str | None
    value: Literal["tensor", "pair"]
    order: float
    alias: str | None = None
    layer: int | None = None
    residual: int | str | None = None
    columns: tuple[int, int] | None = None
    width: int | None = None
    heads: int | None = None
    editable: bool = True
    hf_index: int | None = None
    op: str | None = None
    forward: str | None = None
    inside: str | None = None
    sampled: bool = False

    @property
    def value_name(self) -> str:
        """Of one in a forward: ``q_0``, ``f_0.input[1]``, ``f_0.source.q_0``."""
        return value_name(str(self.op), self.element if self.side == "input" else None)

    @property
    def functions(self) -> tuple[str, ...]:
        """Those that get taps for it."""
        return tuple(name for name in (self.forward, self.inside) if name is not None)

"""Aliases against a tree: an alias and a layer become a :class:`Site`, a raw place finds its alias."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from vtaps.spec.alias_tables import ALIASES as ALIASES
from vtaps.spec.alias_tables import TABLES, Rule, Table
from vtaps.spec.tree import ROWS, ModelTree, Module, Site, Value


class NotInTree(LookupError):
    """The table names a place that this tree does not have (a variant of the architecture)."""


def table_of(tree: ModelTree) -> Table | None:
    return TABLES.get(tree.architecture)


def names(tree: ModelTree) -> tuple[str, ...]:
    """The aliases that this architecture has, in the order of a forward; none without a table."""
    table = table_of(tree)
    return tuple(n for n in ALIASES if n in table.rules or n == "resid_pre") if table else ()


def layered(tree: ModelTree, alias: str) -> bool:
    """Whether the alias takes layers."""
    table = table_of(tree)
    return alias == "resid_pre" or (table is not None and table.rules[alias].layered)


def final_norm(tree: ModelTree) -> str | None:
    """The path of the norm before the unembedding; None without a table."""
    table = table_of(tree)
    return table.rules["final_norm"].at.removesuffix(".output") if table else None


def layer_count(tree: ModelTree) -> int:
    """How many decoder layers the tree holds (not what the configuration says: the tree is what runs)."""
    table = table_of(tree)
    if table is None:
        return 0
    count = 0
    while f"{table.layers}.{count}" in tree.modules:
        count += 1
    return count


def site(tree: ModelTree, alias: str, layer: int | None) -> Site:
    """The canonical site of ``alias[layer]``; ``layer`` is not negative, None for an alias without layers.

    Raises :class:`NotInTree`.
    """
    table = TABLES[tree.architecture]
    if alias == "resid_pre" and layer is not None and layer > 0:
        return site(tree, "resid_post", layer - 1)
    if alias == "resid_pre" and table.embed_is_stream:
        return site(tree, "embed", None)
    rule = table.rules[alias]
    if not rule.layered and alias != "resid_pre":
        layer = None
    module, side, element = split(rule.at.format(i=layer))
    value: Value | None
    known = tree.modules.get(module)
    if known is not None and known.enter is None and rule.runs_in is not None:
        known = _unseen(tree, known, rule.runs_in.format(i=layer))
    if known is None or (known.enter is None and not tree.unvalued):
        raise NotInTree(f"{tree.architecture} here has no {module} that is called")
    if side == "input":
        value = dict(known.inputs).get(str(element))
    else:
        value = known.output
        if value is not None and value.kind == "tuple":
            element, value = 0, value.items[0]
    if value is None or value.kind != "tensor" or not value.shape or not isinstance(value.shape[-1], int):
        raise NotInTree(f"{rule.at.format(i=layer)} is no tensor of rows here")
    if value.dtype != tree.dtype:
        raise NotInTree(f"{rule.at.format(i=layer)} is {value.dtype}, and the model's rows are {tree.dtype}")
    columns = _columns(tree, rule, value.shape[-1])
    width = columns[1] - columns[0] if columns else value.shape[-1]
    return Site(
        name=alias if layer is None else f"{alias}[{layer}]",
        module=module,
        side="input" if side == "input" else "output",
        element=element,
        value="tensor" if rule.residual is None else "pair",
        order=(known.enter if side == "input" else known.leave) or 0,
        alias=alias,
        layer=layer,
        residual=rule.residual,
        columns=columns,
        width=width,
        heads=getattr(tree.dimensions, rule.heads) if rule.heads else None,
        hf_index=_hf_index(tree, table, alias, layer),
    )


def _unseen(tree: ModelTree, module: Module, outer: str) -> Module:
    """``module`` as the module ``outer`` calls it where the abstract pass does not see it: vLLM hands the router's gate
    to the experts' runner in some families, which calls it in a custom op."""
    runner, weight = tree.modules.get(outer), dict(module.parameters).get("weight")
    if runner is None or runner.enter is None or weight is None or f"{outer}.gate" not in tree.modules:
        return module
    rows = Value("tensor", tree.dtype, (ROWS, weight[0]))
    return replace(
        module, output=Value("tuple", items=(rows, Value("none"))), enter=runner.enter, leave=runner.enter, calls=1
    )


def split(text: str) -> tuple[str, str, int | str | None]:
    """``(module, side, parameter)`` of a location as tables write it."""
    if text.endswith(".output"):
        return text.removesuffix(".output"), "output", None
    module, _, parameter = text.rpartition(".input.")
    return module, "input", parameter


def _columns(tree: ModelTree, rule: Rule, width: int) -> tuple[int, int] | None:
    if rule.part is None:
        return None
    size = tree.dimensions
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    if q + 2 * kv != width:
        raise NotInTree(f"{rule.at}: {width} columns are not q, k and v of {q}, {kv} and {kv}")
    return {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}[rule.part]


def _hf_index(tree: ModelTree, table: Table, alias: str, layer: int | None) -> int | None:
    """Hugging Face keeps the stream before each layer, and after the last one only its norm."""
    if alias == "resid_post" and layer is not None:
        return layer + 1 if layer + 1 < tree.dimensions.layers else None
    return 0 if alias == ("embed" if table.embed_is_stream else "resid_pre") else None


@lru_cache(maxsize=16)
def _spellings(architecture: str) -> dict[str, str]:
    """``location as tables write it → alias``. A pair's own place is left out: it names half of the stream."""
    found: dict[str, str] = {}
    for alias, rule in TABLES[architecture].rules.items():
        for text in (rule.at, *rule.same) if rule.residual is None and rule.part is None else rule.same:
            found[text] = alias
    return found


def alias_of(tree: ModelTree, module: str, side: str, element: int | str | None) -> tuple[str, int | None] | None:
    """``(alias, layer)`` where the raw place is the tensor of an alias. ``element`` of an output is None or 0
    for its tensor or first tensor, of an input the parameter's name."""
    if side == "output" and element not in (None, 0):
        return None
    return alias_of_text(tree, f"{module}.output" if side == "output" else f"{module}.input.{element}")


def alias_of_text(tree: ModelTree, text: str) -> tuple[str, int | None] | None:
    """:func:`alias_of` for a location as tables write it."""
    table = table_of(tree)
    if table is None:
        return None
    spellings = _spellings(tree.architecture)
    if text in spellings:
        return spellings[text], 0 if spellings[text] == "resid_pre" else None
    head = table.layers + "."
    if not text.startswith(head):
        return None
    number, _, rest = text[len(head) :].partition(".")
    alias = spellings.get(f"{head}{{i}}.{rest}")
    return (alias, int(number)) if alias is not None and number.isdecimal() else None


def alias_of_op(tree: ModelTree, module: str, text: str) -> tuple[str, int | None] | None:
    """:func:`alias_of_text` for what an op of ``module``'s forward computes."""
    known = alias_of_text(tree, text)
    rather = TABLES[tree.architecture].rules[known[0]].rather if known is not None else None
    if rather is None:
        return known
    computed = rather in dict(tree.modules[module].ops)
    return known if computed == (text == f"{module}.source.{rather}.output") else None


def at_place(
    tree: ModelTree, module: str, side: str, element: int | str | None, primary: bool = False
) -> tuple[str, ...]:
    """Every alias read at a place, pairs and column slices included, spelled as in a spec; ``primary``: only
    those whose own place it is, not another spelling of the same tensor."""
    table = table_of(tree)
    if table is None:
        return ()
    text = f"{module}.output" if side == "output" else f"{module}.input.{element}"
    head, layer = table.layers + ".", None
    if text.startswith(head):
        number, _, rest = text[len(head) :].partition(".")
        layer = int(number) if number.isdecimal() else None
        general = f"{head}{{i}}.{rest}"
    else:
        general = text
    found: list[str] = []
    for alias, rule in table.rules.items():
        if primary and alias == "resid_pre":
            continue  # another name for the stream after the layer before
        places = (rule.at,) if primary else (rule.at, *rule.same)
        if text in places or general in places:
            known = site_or_none(tree, alias, layer if alias == "resid_pre" or rule.layered else None)
            found.extend([known.name] if known and known.name not in found else [])
    return tuple(found)


def site_or_none(tree: ModelTree, alias: str, layer: int | None) -> Site | None:
    try:
        return site(tree, alias, layer)
    except NotInTree:
        return None

"""`pattern[i]`, read only: attention probabilities, which vLLM never has as a tensor.

A read there becomes two of rows: the queries of the rows that are asked for, and the keys of all rows.  The
probabilities are made of them, by request, when it has finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vtaps.spec import aliases
from vtaps.spec.alias_tables import TABLES
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.layers import LayerRangeError, LayerSyntaxError, parse_layers
from vtaps.spec.plan import ArmPlan, Attention, ReadPlan
from vtaps.spec.rows import Rows
from vtaps.spec.spec import At, Read, Spec
from vtaps.spec.tree import ModelTree, Site

PATTERN = "pattern"
QUERIES, KEYS = ".q", ".k"
"""What the names of the two reads end in; a name in a spec has no dot."""


def is_pattern(text: str) -> bool:
    return text.strip().partition("[")[0].rstrip() == PATTERN


def part_of(name: str) -> str:
    """The read of the spec that a read of a plan belongs to."""
    return name.removesuffix(QUERIES).removesuffix(KEYS)


def queries_and_keys(tree: ModelTree) -> tuple[str, str, str] | None:
    """The aliases of what attention multiplies, and the path of its module with ``{i}`` for the layer; None where
    that is not known."""
    table = TABLES.get(tree.architecture)
    for query, key in (("rot_q", "rot_k"), ("q", "k")):
        rule = table.rules.get(query) if table is not None else None
        for text in (rule.at, *rule.same) if rule is not None else ():
            module, _, parameter = text.rpartition(".input.")
            if parameter == "query":
                return query, key, module
    return None


def plan_pattern(read: Read, spec: Spec, tree: ModelTree, doc: Document, found: list[Diagnostic]) -> ReadPlan | None:
    """The plan of a read whose location is `pattern`; findings of VT201, VT204, VT302 and VT346."""
    at, before = doc.at(*read.where, "at"), len(found)

    def refuse(code: str, message: str, note: str | None = None) -> None:
        found.append(Diagnostic(code, message, at, note=note))

    known = queries_and_keys(tree)
    if known is None:
        refuse("VT346", f"`{PATTERN}` is not known here: nothing says what attention multiplies in {tree.architecture}")
        return None
    if not all(is_pattern(text) for text in spec.texts(read.at)):
        refuse("VT346", f"a read of `{PATTERN}` has no other locations", "write a read of its own for each")
    if read.kind != "rows" or read.store is not None:
        refuse("VT346", f"`{PATTERN}` is kept as it is: no reduction and no `store`")
    if read.sees == "before_edits":
        refuse(
            "VT346", f"`{PATTERN}` is what attention made of the edited queries and keys: it has no state before them"
        )
    cache = spec.engine.vllm.get("kv_cache_dtype")
    if cache not in (None, "auto"):
        message = f"`{PATTERN}` is not known with kv_cache_dtype {cache!r}: attention multiplies other keys"
        once = Diagnostic("VT346", message, doc.at("engine", "vllm", "kv_cache_dtype"))
        if once in found:
            return None
        found.append(once)
    layers: set[int] = set()
    for text in spec.texts(read.at):
        if is_pattern(text):
            try:
                layers |= _layers(text, aliases.layer_count(tree))
            except (LayerSyntaxError, ValueError) as fault:
                refuse("VT201", f"`{text}`: {fault}")
            except LayerRangeError as fault:
                refuse("VT204", f"`{PATTERN}`: {fault}")
    heads = _heads(read, tree.dimensions.heads, doc, found)
    if len(found) > before:
        return None
    query, key, module = known
    sites = []
    attention = []
    for layer in sorted(layers):
        q, k = aliases.site(tree, query, layer), aliases.site(tree, key, layer)
        sites.append(
            Site(f"{PATTERN}[{layer}]", module.format(i=layer), "output", None, "tensor", k.order, layer=layer)
        )
        attention.append(Attention(module.format(i=layer), q, k))
    kept = replace(read, kind="pattern")
    return ReadPlan(kept, tuple(sites), heads=heads, attention=tuple(attention))


def _layers(text: str, count: int) -> set[int]:
    """Raises LayerSyntaxError, LayerRangeError, ValueError."""
    _, bracket, rest = text.strip().partition("[")
    if not bracket or not rest.endswith("]"):
        raise ValueError("a pattern is of a layer: `pattern[3]`, `pattern[*]`")
    return set(parse_layers(rest[:-1]).select(count))


def _heads(read: Read, count: int, doc: Document, found: list[Diagnostic]) -> tuple[int, ...]:
    if read.heads is None:
        return tuple(range(count))
    out: set[int] = set()
    for number, (first, last) in enumerate(read.heads):
        a, b = (n + count if n < 0 else n for n in (first, last))
        if not 0 <= a <= b < count:
            where = doc.at(*read.where, "heads", number)
            found.append(Diagnostic("VT302", f"attention has heads 0 … {count - 1}", where))
        else:
            out.update(range(a, b + 1))
    return tuple(sorted(out))


def _keys(rows: Rows) -> Rows:
    """The rows that rows may attend to: none of what is generated, where all of them are the prompt's."""
    of_prompt = rows.word == "prompt" or rows.positions is not None or rows.match is not None
    return Rows(word="prompt" if of_prompt else "all")


def with_parts(reads: Mapping[str, ReadPlan]) -> dict[str, ReadPlan]:
    """The reads, those of `pattern` with the two that they are made of behind them."""
    out: dict[str, ReadPlan] = {}
    for name, plan in reads.items():
        out[name] = plan
        if plan.attention:
            for end, rows, sites in (
                (QUERIES, plan.read.tokens, tuple(a.query for a in plan.attention)),
                (KEYS, _keys(plan.read.tokens), tuple(a.key for a in plan.attention)),
            ):
                at = At(tuple(s.name for s in sites), tuple(plan.read.where for _ in sites))
                part = Read(name + end, plan.read.where, at, rows, sees="after_edits")
                out[name + end] = ReadPlan(part, sites)
    return out


def arms_with_parts(arms: Mapping[str, ArmPlan], reads: Mapping[str, ReadPlan]) -> dict[str, ArmPlan]:
    """The arms, each with the parts of its reads in its list."""
    out = {}
    for name, plan in arms.items():
        listed = [n for r in plan.arm.reads for n in (r, r + QUERIES, r + KEYS) if n == r or n in reads]
        out[name] = replace(plan, arm=replace(plan.arm, reads=tuple(listed)))
    return out

"""docs/architectures.md: one line an architecture, totals, and the reason of every miss."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.architecture_configs import LAYERS
from benchmarks.architecture_streams import UNKNOWN

if TYPE_CHECKING:
    from benchmarks.architectures import Row

VLLM = "0.32.0"

HEAD = f"""# Every architecture

The tree of each text-generation architecture in vLLM {VLLM}'s registry, built on a CPU by vLLM's own class from a
small configuration ({LAYERS} layers), without weights. `python -m benchmarks.architectures --out docs/architectures.md`
writes this page; with `--check` in the place of `--out` everything is built again and compared.

A tree says what a model is, not what this machine can serve: where the CPU has no kernel for a layer the layer is
built all the same, and in the forward a shape stands for what a kernel would compute. For a few architectures vLLM
has a class for each platform: on a GPU their trees are those of other classes.
"""

COLUMNS = """
| column | says |
|---|---|
| modules | in the tree; in brackets those that a forward calls (experts and the head, for instance, it does not) |
| forwards | distinct functions that modules run, or that those call, with a list of their ops |
| without | functions without a list; the reasons are below |
| shapes | whether the abstract pass ran: what every called module takes and gives, and what the ops compute |
| stream | how a decoder layer hands the residual stream on: `pair` (hidden + residual), `full hidden` (a tuple whose \
first element is the stream), `tensor`, `several streams` (hyper-connections and the like), `unknown` |
| aliases | `resid_post`, `q`, … have a table ([locations](locations.md)); without one a place is spelled by its path |
"""


def line(row: Row) -> str:
    """One architecture, for a terminal."""
    if row.unbuilt is not None:
        return f"{row.architecture}: no tree: {row.unbuilt} ({row.seconds:.1f} s)"
    shapes = "shapes" if row.unvalued is None else f"no shapes: {row.unvalued}"
    lacking = f", without {', '.join(row.lacking)}" if row.lacking else ""
    return (
        f"{row.architecture}: {row.modules} modules, {row.with_ops} forwards with ops, {len(row.without)} without, "
        f"{shapes}, {row.stream}{lacking} ({row.seconds:.1f} s)"
    )


def page(rows: Sequence[Row]) -> str:
    parts = [HEAD, *_totals(rows), COLUMNS, *_table(rows), *_misses(rows)]
    return "\n".join(part.rstrip("\n") for part in parts) + "\n"


def differing(rows: Iterable[Row], text: str) -> list[str]:
    """The lines of the table that are due for ``rows`` and are not in a page."""
    there = set(text.splitlines())
    return [made for row in rows if (made := _row(row)) not in there]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "none"


def _totals(rows: Sequence[Row]) -> Iterator[str]:
    trees = [row for row in rows if row.unbuilt is None]
    lacking = [row for row in trees if row.lacking]
    shapes = [row for row in trees if row.unvalued is None]
    with_ops = sum(row.with_ops for row in trees)
    without = sum(len(row.without) for row in trees)
    streams = Counter(row.stream for row in trees)
    yield ""
    yield "| of the architectures | |"
    yield "|---|---|"
    yield f"| a tree | {_share(len(trees), len(rows))} |"
    if lacking:
        yield f"| a tree, nothing that vLLM requires missing | {_share(len(trees) - len(lacking), len(rows))} |"
    yield f"| forwards with a list of ops | {_share(with_ops, with_ops + without)} |"
    yield f"| shapes of modules | {_share(len(shapes), len(rows))} |"
    yield f"| shapes of ops | {_share(sum(row.op_shapes for row in trees), len(rows))} |"
    yield f"| the stream's convention | {', '.join(f'{name} {count}' for name, count in streams.most_common())} |"
    yield f"| an alias table | {_share(sum(row.aliases for row in rows), len(rows))} |"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    yield "| architecture | vLLM's class | modules | forwards | without | shapes | stream | aliases |"
    yield "|---|---|---:|---:|---:|---|---|---|"
    yield from map(_row, rows)
    yield ""
    yield "¹ Its class of configuration comes with the checkpoint: the fields that vLLM reads are stated here."
    if any(row.lacking for row in rows):
        names = ", ".join(sorted({name for row in rows for name in row.lacking}))
        yield ""
        yield (
            f"² vLLM's file imports {names}, which vLLM requires for images and the CPU's requirements leave out; a "
            "placeholder is imported in its place, and the text model is built. This machine could not serve it."
        )


def _row(row: Row) -> str:
    model = row.model.removeprefix("vllm.model_executor.models.").removeprefix("vllm.models.")
    name = row.architecture + "¹" * row.own_configuration + "²" * bool(row.lacking)
    if row.unbuilt is not None:
        return f"| {name} | {model} | no tree | | | | | {_yes(row.aliases)} |"
    shapes = _yes(row.unvalued is None) + " (modules)" * (row.unvalued is None and not row.op_shapes)
    return (
        f"| {name} | {model} | {row.modules} ({row.called}) | {row.with_ops} | {len(row.without) or ''} | "
        f"{shapes} | {row.stream} | {_yes(row.aliases)} |"
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _misses(rows: Sequence[Row]) -> Iterator[str]:
    yield from _reasons("Without a tree", ((row.architecture, row.unbuilt) for row in rows))
    yield from _reasons("Without shapes", ((row.architecture, row.unvalued) for row in rows))
    unknown = [(row.architecture, row.puts_out or None) for row in rows if row.stream == UNKNOWN]
    yield from _reasons("Streams that are not known", unknown, "a decoder layer puts out")
    forwards: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        for where, why in row.without:
            forwards[where, why].append(row.architecture)
    if forwards:
        yield "\n## Forwards without a list of ops\n"
        yield "| function | architectures | reason |"
        yield "|---|---|---|"
        for (where, why), names in sorted(forwards.items()):
            short = ", ".join(names) if len(names) < 4 else f"{len(names)} of them"
            yield f"| `{where}` | {short} | {why} |"


def _reasons(title: str, found: Iterable[tuple[str, str | None]], column: str = "reason") -> Iterator[str]:
    rows = [(name, why) for name, why in found if why is not None]
    if rows:
        yield f"\n## {title}\n"
        yield f"| architecture | {column} |"
        yield "|---|---|"
        yield from (f"| {name} | {why} |" for name, why in rows)

"""What there is to see in a run, as numbers: which figures, and what stands in each.

Nothing here draws; :mod:`vtaps.drawing` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.results.array import ReadArray
from vtaps.runtime.results.load import RunResult
from vtaps.spec.diagnostics import nearest

Floats = npt.NDArray[np.float64]

PANELS = 6
"""Prompts that get a figure of their own; the caption counts the others."""
POSITIONS = 64
"""Columns of a heat map over positions; the caption says which."""
BARS = 40
"""Requests that get a bar of their own."""


@dataclass(frozen=True)
class Heat:
    """``values`` ``[rows, columns]``, NaN where there is none; ``texts``: what stands in a cell; ``centred``: zero is
    the middle of the colours."""

    title: str
    caption: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Floats
    row_label: str
    column_label: str
    value_label: str
    texts: tuple[tuple[str, ...], ...] | None = None
    centred: bool = False


@dataclass(frozen=True)
class Curves:
    """Lines over one axis: numbers, or as many names.  A line is NaN where it has no value."""

    title: str
    caption: str
    x: tuple[float, ...] | tuple[str, ...]
    lines: tuple[tuple[str, Floats], ...]
    x_label: str
    value_label: str


@dataclass(frozen=True)
class Bars:
    """A bar for each name."""

    title: str
    caption: str
    names: tuple[str, ...]
    values: Floats
    value_label: str


Figure = Heat | Curves | Bars
Texts = Callable[[int], str]
"""A token id → its text."""


class NothingToPlot(Exception):
    """The run has no such thing, or nothing that can be drawn; the message says what there is."""


def figures(run: RunResult, texts: Texts, wanted: Sequence[str] = ()) -> list[Figure]:
    """The figures of a run, metrics first; ``wanted``: names of metrics and reads (default: all that can be drawn).

    Raises NothingToPlot.
    """
    metrics = list(dict.fromkeys(run.metrics["metric"].to_pylist())) if run.metrics.num_rows else []
    reads = [name for name in run.reads if run.info["reads"][name]["kind"] in _READS]
    known = [*metrics, *reads]
    for name in wanted:
        if name not in known:
            near = nearest(name, known)
            hint = f"; nearest is {near!r}" if near else ""
            raise NothingToPlot(f"nothing to plot is named {name!r}{hint}; there are {', '.join(known) or 'none'}")
    out: list[Figure] = []
    for name in wanted or known:
        if name in metrics:
            out += _metric(run, name)
        else:
            out += _READS[run.info["reads"][name]["kind"]](run[name], texts)
    if not out:
        raise NothingToPlot("the run has no metric, lens, projection or norm to plot")
    return out


# Metrics


def _metric(run: RunResult, name: str) -> Iterator[Figure]:
    """One figure an arm that sweeps, over its axes; arms without a sweep stand beside each other."""
    kind = run.lock["metrics"][name]["kind"].replace("_", " ")
    of = " − ".join(repr(t) for t in run.lock["metrics"][name]["texts"])
    label = f"{kind} of {of}"
    rows = [r for r in run.metrics.to_pylist() if r["metric"] == name]
    if run.lock["metrics"][name].get("normalize"):
        label = f"{kind}, normalized"
        rows = [{**r, "value": r["normalized"]} for r in rows if r["normalized"] is not None]
    sweeps = tuple(run.info["columns"]["sweep"].values())
    plain: dict[tuple[str, str], list[float]] = {}
    for arm in dict.fromkeys(r["arm"] for r in rows):
        own = [r for r in rows if r["arm"] == arm]
        axes = [s for s in sweeps if len({r[s] for r in own}) > 1]
        if len(axes) == 2:
            yield _grid(own, name, label, arm, *axes)
        elif len(axes) == 1:
            yield _swept(own, name, label, arm, axes[0])
        elif axes:
            yield from _slices(own, name, label, arm, axes)
        else:
            for r in own:
                plain.setdefault((r["prompt"], arm), []).append(r["value"])
    if plain:
        yield _bars(plain, name, label)


def _bars(found: dict[tuple[str, str], list[float]], name: str, label: str) -> Figure:
    arms = tuple(dict.fromkeys(arm for _, arm in found))
    prompts = tuple(dict.fromkeys(prompt for prompt, _ in found))
    if len(found) <= BARS:
        names = tuple(f"{p}, {a}" if len(arms) > 1 else p for p in prompts for a in arms if (p, a) in found)
        values = [np.mean(found[p, a]) for p in prompts for a in arms if (p, a) in found]
        return Bars(name, _over("", found.values()), names, np.array(values), label)
    means = [np.mean([np.mean(v) for (_, a), v in found.items() if a == arm]) for arm in arms]
    return Bars(name, f"mean over {len(prompts)} prompts", arms, np.array(means), label)


def _over(caption: str, groups: Any) -> str:
    return caption or ("mean over the rows of a request" if any(len(g) > 1 for g in groups) else "")


def _values(rows: list[dict[str, Any]], axis: str) -> list[Any]:
    """The axis in its order: numbers by size, names as they come."""
    found = list(dict.fromkeys(r[axis] for r in rows))
    return sorted(found) if all(isinstance(v, int | float) for v in found) else found


def _mean(rows: list[dict[str, Any]], **at: Any) -> float:
    chosen = [r["value"] for r in rows if all(r[k] == v for k, v in at.items())]
    return float(np.mean(chosen)) if chosen else float("nan")


def _swept(rows: list[dict[str, Any]], name: str, label: str, arm: str, axis: str) -> Figure:
    x = _values(rows, axis)
    prompts = list(dict.fromkeys(r["prompt"] for r in rows))
    lines = []
    if len(prompts) <= PANELS:
        lines = [(p, np.array([_mean(rows, prompt=p, **{axis: v}) for v in x])) for p in prompts]
    if len(prompts) > 1:
        lines.append((f"mean of {len(prompts)} prompts", np.array([_mean(rows, **{axis: v}) for v in x])))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in x)
    return Curves(f"{name}, {arm}", "", tuple(x if numbers else map(str, x)), tuple(lines), axis, label)


def _grid(rows: list[dict[str, Any]], name: str, label: str, arm: str, first: str, second: str) -> Figure:
    """Two axes of a sweep; the one with more values, or with locations, goes up."""
    up, across = (first, second) if first.endswith(".at") or not second.endswith(".at") else (second, first)
    y, x = _values(rows, up), _values(rows, across)
    values = np.array([[_mean(rows, **{up: b, across: a}) for a in x] for b in y])
    prompts = len({r["prompt"] for r in rows})
    caption = f"mean over {prompts} prompts" if prompts > 1 else next(r["prompt"] for r in rows)
    centred = _about_zero(values)
    return Heat(
        f"{name}, {arm}", caption, tuple(map(str, y)), tuple(map(str, x)), values, up, across, label, centred=centred
    )  # fmt: skip


def _slices(rows: list[dict[str, Any]], name: str, label: str, arm: str, axes: list[str]) -> Iterator[Figure]:
    """More than two axes: a grid of the two last for each point of the others, as many as have room."""
    rest, last = axes[:-2], axes[-2:]
    points = list(dict.fromkeys(tuple(r[a] for a in rest) for r in rows))
    for point in points[:PANELS]:
        own = [r for r in rows if tuple(r[a] for a in rest) == point]
        said = ", ".join(f"{a} = {v}" for a, v in zip(rest, point, strict=True))
        yield _grid(own, name, label, f"{arm}, {said}", last[0], last[1])


def _about_zero(values: Floats) -> bool:
    """Whether numbers go either way from zero, and not by little alone."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return low < 0 < high and min(-low, high) > 0.1 * max(-low, high)


# Reads


def _panels(read: ReadArray) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Title and rows of each request that gets a figure, in the order of the run."""
    swept = [name for name in read._run.info["columns"]["sweep"].values() if name in read.rows.column_names]
    rows = read.rows.select(["request", "completion", "prompt", "arm", *swept]).to_pylist()
    found: dict[tuple[str, int], list[int]] = {}
    for i, r in enumerate(rows):
        found.setdefault((r["request"], r["completion"]), []).append(i)
    for (_, completion), own in list(found.items())[:PANELS]:
        first = rows[own[0]]
        said = [first["prompt"], first["arm"], *(f"{s} = {first[s]}" for s in swept if first[s] is not None)]
        yield ", ".join(said + ([f"completion {completion}"] if completion else [])), np.array(own)


def _more(read: ReadArray) -> str:
    count = len(set(zip(read.rows["request"].to_pylist(), read.rows["completion"].to_pylist(), strict=True)))
    return f"the first {PANELS} of {count} requests" if count > PANELS else ""


def _sites(read: ReadArray) -> tuple[str, ...]:
    return tuple(str(layer) if layer is not None else site for site, layer in zip(read.sites, read.layers, strict=True))


def _lens(read: ReadArray, texts: Texts) -> Iterator[Figure]:
    """Chosen tokens as curves over depth; the likeliest tokens as a heat map with their texts."""
    ids, logits = read.numpy("ids"), read.numpy("logits").astype(np.float64)
    logprobs = logits - read.numpy("logsumexp").astype(np.float64)[..., None]
    positions = read.rows["position"].to_pylist()
    chosen = read._run.lock["reads"][read.name].get("ids") is not None
    single = len(set(read.rows["request"].to_pylist())) == len(read)
    if chosen:
        for title, own in _panels(read):
            lines = tuple(
                (repr(texts(int(ids[own[-1], 0, k]))), logprobs[own, :, k].mean(0)) for k in range(ids.shape[-1])
            )
            over = f"mean over {len(own)} rows" if len(own) > 1 else f"position {positions[own[0]]}"
            caption = "; ".join(filter(None, [over, _more(read)]))
            yield Curves(f"{read.name}, {title}", caption, _sites(read), lines, "layer", "log probability")
        return
    words = np.vectorize(texts, otypes=[object])(ids[..., 0])
    probability = np.exp(logprobs[..., 0])
    if single:
        titles, own_rows = [], []
        for title, own in _panels(read):
            titles.append(title)
            own_rows.append(int(own[0]))
        yield _stack(
            read, f"{read.name}: the likeliest token", _more(read), titles, probability[own_rows], words[own_rows]
        )
        return
    for title, own in _panels(read):
        shown = own[:POSITIONS]
        caption = f"the first {POSITIONS} of {len(own)} rows" if len(own) > POSITIONS else ""
        columns = [str(positions[i]) for i in shown]
        title = f"{read.name}, {title}: the likeliest token"
        yield _stack(
            read, title, "; ".join(filter(None, [caption, _more(read)])), columns, probability[shown], words[shown]
        )


def _stack(read: ReadArray, title: str, caption: str, columns: list[str], values: Any, words: Any) -> Figure:
    """Sites from below upwards, ``values`` and ``words`` ``[columns, sites]``."""
    across = "position" if all(c.lstrip("-").isdigit() for c in columns) else "request"
    return Heat(
        title, caption, _sites(read), tuple(columns), np.asarray(values).T, "layer", across, "probability",
        texts=tuple(tuple(map(str, row)) for row in np.asarray(words).T),
    )  # fmt: skip


def _numbers(read: ReadArray, texts: Texts) -> Iterator[Figure]:
    """One number a row and vector (or the norm): curves over positions where there are some, else over depth."""
    values = read.numpy().astype(np.float64)
    names = read._run.lock["reads"][read.name]["vectors"] or [read.kind]
    values = values.reshape(*values.shape[:2], -1)
    label = "norm" if read.kind == "norm" else "projection"
    positions = read.rows["position"].to_pylist()
    for title, own in _panels(read):
        for k, vector in enumerate(names):
            head = f"{read.name}, {title}" + (f", {vector}" if len(names) > 1 else "")
            if len(own) == 1:
                caption = "; ".join(filter(None, [f"position {positions[own[0]]}", _more(read)]))
                yield Curves(head, caption, _sites(read), ((vector, values[own[0], :, k]),), "layer", label)
            elif len(read.sites) <= PANELS:
                lines = tuple((site, values[own, i, k]) for i, site in enumerate(read.sites))
                yield Curves(head, _more(read), tuple(float(positions[i]) for i in own), lines, "position", label)
            else:
                shown = own[:POSITIONS]
                cut = values[shown, :, k].T
                caption = f"the first {POSITIONS} of {len(own)} rows" if len(own) > POSITIONS else ""
                yield Heat(
                    head, "; ".join(filter(None, [caption, _more(read)])), _sites(read),
                    tuple(str(positions[i]) for i in shown), cut, "layer", "position", label,
                    centred=_about_zero(cut),
                )  # fmt: skip


_READS: dict[str, Callable[[ReadArray, Texts], Iterator[Figure]]] = {
    "lens": _lens,
    "project": _numbers,
    "norm": _numbers,
}

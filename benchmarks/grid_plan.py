"""Which engines a call of the grid starts, in which order, and the files that each of them reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.grid_rows import COLUMNS, ROWS, Row, groups, spec_text, uses_sae
from benchmarks.grid_shapes import Shape
from vtaps.check import check_file
from vtaps.codegen import lock as locks
from vtaps.compiling import compile_plan
from vtaps.spec.diagnostics import has_errors

SPEC = "spec.yaml"


class SpecError(Exception):
    """A spec of the grid that vtaps does not take; the message is one line."""


@dataclass(frozen=True)
class Start:
    """One engine to start: ``cells`` are rows, or the loads of plain vLLM; ``mode`` is empty for plain and peers."""

    column: str
    number: int
    group: str
    cells: tuple[str, ...]
    mode: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        return f"start {self.number}, {self.column}" + ("" if self.group == "plain" else f", {self.group}")


def starts(
    columns: Sequence[str], rows: Sequence[str], install: str, number: int, share: Sequence[str] = ()
) -> list[list[Start]]:
    """Every engine of a call: ``number`` rounds of all columns, every other round backwards."""
    out: list[list[Start]] = []
    wanted = [ROWS[name] for name in ROWS if name in rows]
    for at in range(number):
        one: list[Start] = []
        for column in (c for c in COLUMNS.values() if c.name in columns):
            if column.kind == "plain":
                loads = tuple(dict.fromkeys(row.load for row in wanted))
                one.append(Start(column.name, at, "plain", loads, "", (ROWS["generate"],)))
                continue
            peer = column.kind == "peer"
            for name, members in groups(wanted, "each" if peer else install, () if peer else share):
                one.append(Start(column.name, at, name, tuple(r.name for r in members), column.mode, tuple(members)))
        out.append(one if at % 2 == 0 else one[::-1])
    return out


def compiled(
    start: Start, shape: Shape, model: Path, work: Path, vllm: Mapping[str, Any], seed: int
) -> tuple[Path, str, str]:
    """Check and compile the engine's spec; returns its folder and the names of lock and block in it.

    Plain vLLM takes its engine arguments from the lock of a spec that asks for nothing.  Raises SpecError.
    """
    folder = work / f"{start.mode or 'plain'}-{start.group}"
    folder.mkdir(parents=True, exist_ok=True)
    text, files = spec_text(start.rows, shape, model, start.mode or "eager", dict(vllm), seed)
    for name, content in {SPEC: text, **files}.items():
        (folder / name).write_text(content, encoding="utf-8")
    if any(uses_sae(row) for row in start.rows):
        from benchmarks.grid_sae import write_sae

        write_sae(folder, shape, seed)
    result = check_file(folder / SPEC)
    if result.plan is None:
        raise SpecError("; ".join(f"{d.code}: {d.message}" for d in result.diagnostics if has_errors([d])))
    made, wrong = compile_plan(result.plan)
    if made is None:
        raise SpecError("; ".join(f"{d.code}: {d.message}" for d in wrong))
    for name, content in made.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    block, lock = locks.names(SPEC)
    return folder, lock, block

"""The measured grid: what vtaps costs beside plain vLLM, row by row, on one machine.

usage: python -m benchmarks.grid --shape llama-8b --out FILE.json [--rows …] [--columns …] [--budget SECONDS]
       python -m benchmarks.grid report FILE.json… --out FILE.md

Every engine is a process of its own.  See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks import about, grid_peer, grid_report
from benchmarks.grid_engines import EngineProcess, measure
from benchmarks.grid_plan import SpecError, Start, compiled, starts
from benchmarks.grid_rows import COLUMNS, DEFAULT_COLUMNS, ROWS
from benchmarks.grid_shapes import SHAPES, loads_of, work_folder, write_model

GRACE = 15
"""Seconds past the budget after which an engine at work is stopped."""


def names(known: Mapping[str, Any]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        wanted = tuple(dict.fromkeys(filter(None, text.split(","))))
        unknown = [name for name in wanted if name not in known]
        if unknown or not wanted:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}: one or more of {', '.join(known)}")
        return wanted

    return parse


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grid", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--rows", type=names(ROWS), default=tuple(ROWS), help="a,b,c (default: all)")
    parser.add_argument("--columns", type=names(COLUMNS), default=DEFAULT_COLUMNS, help="a,b,c")
    parser.add_argument(
        "--install", choices=("each", "block", "together"), default="each",
        help="an engine a row, one for rows with the same block, or one for all rows (default: each)",
    )  # fmt: skip
    parser.add_argument("--share", type=names(ROWS), default=(), help="a,b,c: rows that share one engine in any case")
    parser.add_argument(
        "--side-by-side", action="store_true",
        help="all engines of a round alive at once, their batches taking turns (default: one engine after another);"
        " in the first round they start one by one",
    )  # fmt: skip
    parser.add_argument("--process", choices=("in", "child"), default="in", help="where vLLM's engine core runs")
    parser.add_argument("--starts", type=int, default=3, help="engine starts a column (default: 3)")
    parser.add_argument("--warmup", type=int, default=2, help="runs of each row before the clock (default: 2)")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each row a start (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", type=json.loads, default={}, help="further engine arguments of all columns, as JSON")
    parser.add_argument("--budget", type=float, help="seconds; no engine is started that would end later")
    parser.add_argument("--out", type=Path, required=True, help="FILE.json, written after every engine")
    args = parser.parse_args(argv)
    if not isinstance(args.vllm, dict):
        parser.error("--vllm: a JSON object is expected")
    if min(args.starts, args.repeats) < 1 or args.warmup < 0:
        parser.error("--starts and --repeats are at least 1")
    return args


@dataclass
class Result:
    """What a call writes: all that was measured, and what is still open or was left out."""

    about: dict[str, Any]
    children: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)


class Grid:
    """One call at work."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        self.args = args
        self.began = time.monotonic()
        self.shape = SHAPES[args.shape]
        self.work = work_folder(self.shape)
        self.model = write_model(self.shape, self.work / "model")
        self.vllm = {**self.shape.vllm, **args.vllm}
        self.result = Result(describe(args, argv))
        self.took: dict[str, float] = {}

    def run(self) -> int:
        columns = [c for c in self.args.columns if COLUMNS[c].kind != "peer" or grid_peer.installed()]
        absent = [f"{c} (not installed)" for c in self.args.columns if c not in columns]
        rounds = starts(columns, self.args.rows, self.args.install, self.args.starts, self.args.share)
        order = rounds if self.args.side_by_side else [[start] for one in rounds for start in one]
        for number, sitting in enumerate(order):
            open_ones = [s for later in order[number:] for s in later]
            # What is open stands in the file too: a call that is killed here has said what it did not do.
            self.result.left_out = absent + [f"{s.title} ({', '.join(s.cells)})" for s in open_ones]
            self.result.write(self.args.out)
            if self._too_late(sitting):
                say(f"the budget of {self.args.budget:g} s is used up: {len(open_ones)} engines are left out")
                break
            for start in sitting:
                say(f"[{number + 1}/{len(order)}] {start.title} …")
            for told in self._sit(sitting, together=number > 0):
                self.result.children.append(told)
                say(f"    {told['column']}, {told['group']}: {told.get('failed') or 'ok'}, {told['seconds']:.1f} s")
            self.result.left_out = (
                self.result.left_out[: len(absent)] + self.result.left_out[len(absent) + len(sitting) :]
            )
            self.result.write(self.args.out)
        print(grid_report.markdown([asdict(self.result)]))
        return 1 if any(c.get("failed") for c in self.result.children) else 0

    def _too_late(self, sitting: Sequence[Start]) -> bool:
        if self.args.budget is None:
            return False
        expected = self.took.get(_columns(sitting), max(self.took.values(), default=0.0))
        left: float = self.began + self.args.budget - time.monotonic()
        return left < expected

    def _sit(self, sitting: Sequence[Start], *, together: bool) -> list[dict[str, Any]]:
        """Engines that are alive together, measured in turns; what each of them told.

        Not ``together``: each starts once the one before has.  An engine that compiles chooses its kernels by their
        times on the GPU, and what it chooses stays in its cache.
        """
        began = time.monotonic()
        engines: list[EngineProcess] = []
        failed: list[dict[str, Any]] = []
        try:
            for start in sitting:
                told = {
                    "column": start.column, "start": start.number, "install": self.args.install, "group": start.group,
                }  # fmt: skip
                try:
                    job = self._job(start)
                except SpecError as error:
                    failed.append({**told, "failed": str(error), "seconds": 0.0})
                    continue
                deadline = None if self.args.budget is None else self.began + self.args.budget + GRACE
                engines.append(EngineProcess(start, told, job, deadline))
                if not together:
                    engines[-1].ready()
            for engine in engines if together else ():
                engine.ready()
            measure(engines, self.args.warmup, self.args.repeats)
        finally:
            for engine in engines:
                engine.close()
        if all(engine.alive for engine in engines):
            self.took[_columns(sitting)] = time.monotonic() - began
        return [*failed, *(engine.told for engine in engines)]

    def _job(self, start: Start) -> dict[str, Any]:
        args = self.args
        folder, lock, block = compiled(start, self.shape, self.model, self.work, self.vllm, args.seed)
        # Two engines that compile the same model at the same time do not share a cache.
        own = {"VLLM_CACHE_ROOT": str(self.work / "caches" / f"{start.column}-{start.group}")}
        return {
            "column": start.column, "start": start.number, "install": args.install, "cells": start.cells,
            "shape": args.shape, "model": str(self.model), "folder": str(folder), "lock": lock, "block": block,
            "settings": self.vllm, "in_process": args.process == "in", "seed": args.seed,
            "environment": own if args.side_by_side else {},
        }  # fmt: skip


def _columns(sitting: Sequence[Start]) -> str:
    return ",".join(start.column for start in sitting)


def describe(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """What a reader needs to repeat the call; nothing that names the machine."""
    shape = SHAPES[args.shape]
    words = list(argv)
    at = next(i for i, word in enumerate(words) if word == "--out" or word.startswith("--out="))
    del words[at : at + (2 if words[at] == "--out" else 1)]
    config = sha256(json.dumps(dict(shape.config), sort_keys=True).encode()).hexdigest()
    return {
        "benchmark": "grid",
        "command": shlex.join(["python", "-m", "benchmarks.grid", *words]),
        "date": datetime.now(UTC).date().isoformat(),
        "shape": {"name": shape.name, "title": shape.title, "dtype": shape.dtype, "config": f"sha256:{config}"},
        "versions": about.versions(),
        "commit": about.commit(),
        "gpus": about.gpus(),
        "processor": about.processor(),
        "cores": about.cores(),
        "settings": about.settings(),
        "vllm": {**shape.vllm, **args.vllm},
        "process": args.process,
        "install": args.install,
        "side_by_side": args.side_by_side,
        "starts": args.starts,
        "warmup": args.warmup,
        "repeats": args.repeats,
        "seed": args.seed,
        "loads": [asdict(load) for load in loads_of(shape).values()],
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["child"]:
        from benchmarks import grid_child

        grid_child.main(Path(words[1]), int(words[2]))
        return 0
    if words[:1] == ["report"]:
        return grid_report.main(words[1:])
    return Grid(parse(words), words).run()


if __name__ == "__main__":
    raise SystemExit(main())

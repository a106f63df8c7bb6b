"""The measured grid: what vtaps costs beside plain vLLM, row by row, on one machine.

usage: python -m benchmarks.grid --shape llama-8b --out FILE.json [--rows …] [--columns …] [--budget SECONDS]
       python -m benchmarks.grid report FILE.json… --out FILE.md

Every engine is a process of its own, one after another.  See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks import about, grid_peer, grid_report
from benchmarks.grid_plan import SpecError, Start, compiled, starts
from benchmarks.grid_rows import COLUMNS, DEFAULT_COLUMNS, ROWS
from benchmarks.grid_shapes import SHAPES, loads_of, work_folder, write_model

GRACE = 15
"""Seconds past the budget after which an engine at work is stopped."""

LOG_CHARACTERS = 4000


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
        order = starts(columns, self.args.rows, self.args.install, self.args.starts)
        for number, start in enumerate(order):
            if self._too_late(start):
                say(f"the budget of {self.args.budget:g} s is used up: {len(order) - number} engines are left out")
                break
            say(f"[{number + 1}/{len(order)}] {start.title} …")
            # What is open stands in the file too: a call that is killed here has said what it did not do.
            self.result.left_out = absent + [f"{s.title} ({', '.join(s.cells)})" for s in order[number:]]
            self.result.write(self.args.out)
            told = self._start(start)
            self.result.children.append(told)
            del self.result.left_out[len(absent)]
            self.result.write(self.args.out)
            say(f"    {told.get('failed') or 'ok'}, {told['seconds']:.1f} s")
        print(grid_report.markdown([asdict(self.result)]))
        return 1 if any(c.get("failed") for c in self.result.children) else 0

    def _left(self) -> float | None:
        return None if self.args.budget is None else self.began + self.args.budget - time.monotonic()

    def _too_late(self, start: Start) -> bool:
        left = self._left()
        expected = self.took.get(start.column, max(self.took.values(), default=0.0))
        return left is not None and left < expected

    def _start(self, start: Start) -> dict[str, Any]:
        args = self.args
        told: dict[str, Any] = {
            "column": start.column, "start": start.number, "install": args.install, "group": start.group,
        }  # fmt: skip
        began = time.monotonic()
        try:
            folder, lock, block = compiled(start, self.shape, self.model, self.work, self.vllm, args.seed)
        except SpecError as error:
            return {**told, "failed": str(error), "seconds": round(time.monotonic() - began, 2)}
        job = {
            "column": start.column, "start": start.number, "install": args.install, "cells": start.cells,
            "shape": args.shape, "model": str(self.model), "folder": str(folder), "lock": lock, "block": block,
            "settings": self.vllm, "in_process": args.process == "in", "warmup": args.warmup,
            "repeats": args.repeats, "seed": args.seed,
        }  # fmt: skip
        left = self._left()
        answer = child(job, folder, None if left is None else max(left, 0.0) + GRACE)
        seconds = round(time.monotonic() - began, 2)
        if "failed" not in answer:
            self.took[start.column] = seconds
        return {**told, **answer, "seconds": seconds}


def child(job: Mapping[str, Any], folder: Path, timeout: float | None) -> dict[str, Any]:
    """Run one engine in a process that ends with it; ``failed`` and ``log`` are in the answer where it does not."""
    job_file, answer, log = (folder / name for name in ("job.json", "answer.json", "child.log"))
    job_file.write_text(json.dumps(job), encoding="utf-8")
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.grid", "child", str(job_file), str(answer)]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            cwd=about.ROOT,
            env={**os.environ, **about.ENVIRONMENT},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
            reason = f"exit code {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            reason = "stopped at the end of the budget"
        finally:
            # The engine core may be a process of the child's: the whole group ends here.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if reason is None and answer.is_file():
        told: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return told
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    last = text.splitlines()[-1].strip() if text else "no word"
    return {"failed": f"{reason or 'no answer'}: {last}"[:400], "log": text[-LOG_CHARACTERS:]}


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

        grid_child.main(Path(words[1]), Path(words[2]))
        return 0
    if words[:1] == ["report"]:
        return grid_report.main(words[1:])
    return Grid(parse(words), words).run()


if __name__ == "__main__":
    raise SystemExit(main())

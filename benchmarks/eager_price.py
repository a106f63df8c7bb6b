"""The price of the block on an eager engine: plain vLLM against the same engine with a block, in one call.

usage: python -m benchmarks.eager_price [--quick] [--starts N] [--repeats N] [--model DIR] [--out FILE.json]

Plain runs twice a round: how far plain is from plain is what the run can tell apart.  See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.about import ENVIRONMENT, ROOT, processor, versions
from benchmarks.eager_columns import AGAIN, COLUMNS, LOADS, PLAIN, spec_text
from benchmarks.eager_report import agreement, as_json, cells, markdown, resolution, tables


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eager_price", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one start a column, three repeats")
    parser.add_argument("--starts", type=int, help="engine starts a column (default: 2)")
    parser.add_argument("--repeats", type=int, help="measured repeats of every load a start (default: 7)")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct", help="a model folder")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, help="of the model's arithmetic (default: vLLM's choice, all cores)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and the steering vector")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "eager-price.json")
    parser.add_argument(
        "--profile", metavar="COLUMN", choices=COLUMNS, help="serve this column alone, under cProfile; writes OUT.prof"
    )
    args = parser.parse_args(argv)
    args.starts = args.starts or (1 if args.quick else 2)
    args.repeats = args.repeats or (3 if args.quick else 7)
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} holds no config.json (`make model` builds the demo model)")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with TemporaryDirectory() as scratch:
        specs = write_specs(args, Path(scratch))
        if args.profile:
            start(args.profile, specs[args.profile], args, profile=args.out.with_suffix(".prof"))
            print_profile(args.out.with_suffix(".prof"))
            return 0
        order = list(rounds(args.starts))
        told = []
        bar = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*bar, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=len(order))
            for name in order:
                progress.update(task, description=COLUMNS[name].title)
                told.append(start(name, specs[name], args))
                progress.advance(task)
    report(describe(args, told), told, args.out)
    return 0


def report(about: dict[str, Any], told: Sequence[dict[str, Any]], out: Path) -> None:
    """Print the tables; write them to ``out`` (JSON, every repeat) and beside it as Markdown."""
    found = cells(told)
    same = agreement(told)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in tables(found):
        console.print(table)
    console.print(f"tokens as plain's: {', '.join(name for name, yes in same.items() if yes)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    limits = {name: round(value, 5) for name, value in resolution(found).items()}
    data = {**about, "resolution": limits, "tokens_as_plain": same, "cells": as_json(found), "engines": list(told)}
    out.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(markdown(found, about), encoding="utf-8")


def rounds(starts: int) -> Iterator[str]:
    """The order of the engines: plain at both ends of a round, every other round backwards."""
    between = [name for name in COLUMNS if name not in (PLAIN, AGAIN)]
    for number in range(starts):
        one = [PLAIN, *between, AGAIN]
        yield from one if number % 2 == 0 else reversed(one)


def write_specs(args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    out = {}
    for name, column in COLUMNS.items():
        out[name] = folder / name / "spec.yaml"
        out[name].parent.mkdir()
        out[name].write_text(spec_text(column, args.model.resolve(), args.dtype, args.seed), encoding="utf-8")
    return out


def start(name: str, spec: Path, args: argparse.Namespace, profile: Path | None = None) -> dict[str, Any]:
    """Serve every load with one engine, in a process that ends with it."""
    answer = spec.with_suffix(".json")
    command = [sys.executable, "-m", "benchmarks.eager_engine", name, str(spec), str(answer)]
    command += ["--repeats", str(args.repeats)]
    if profile:
        command += ["--profile", str(profile.resolve())]
    env = {**os.environ, **ENVIRONMENT}
    if args.threads:
        env["OMP_NUM_THREADS"] = str(args.threads)
    log = spec.with_suffix(".log")
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=out, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: the engine failed\n{log.read_text(encoding='utf-8')[-4000:]}")
    told: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return told


def describe(args: argparse.Namespace, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a reader needs to repeat the run; nothing that names the machine."""
    command = ["python -m benchmarks.eager_price", f"--starts {args.starts}", f"--repeats {args.repeats}"]
    if args.threads:
        command.append(f"--threads {args.threads}")
    if args.dtype != "float32":
        command.append(f"--dtype {args.dtype}")
    if args.seed:
        command.append(f"--seed {args.seed}")
    config = sha256((args.model / "config.json").read_bytes()).hexdigest()
    return {
        "benchmark": "eager_price",
        "command": " ".join(command),
        "date": datetime.now(UTC).date().isoformat(),
        "model": {"name": args.model.name, "dtype": args.dtype, "config": f"sha256:{config}"},
        "versions": versions(),
        "machine": {"processor": processor(), "system": platform.system()},
        "cores": told[0]["cores"],
        "threads": told[0]["threads"],
        "starts": args.starts,
        "repeats": args.repeats,
        "seed": args.seed,
        "loads": [
            {"name": x.name, "requests": x.requests, "prompt": x.prompt, "generated": x.generated} for x in LOADS
        ],
    }


def print_profile(path: Path) -> None:
    import pstats

    stats = pstats.Stats(str(path))
    stats.strip_dirs().sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    raise SystemExit(main())

"""``vtaps run SPEC``"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vtaps.cli.common import add_format, report


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "run",
        help="serve a spec's arms with vLLM and keep the results",
        description="Check and compile a spec, start vLLM with the block in its workers, serve every prompt × arm × "
        "sweep point, write a run folder. An interrupted run goes on where it stopped.",
        epilog="example: vtaps run examples/paris.yaml --out runs/paris",
    )
    verb.add_argument("spec", metavar="SPEC", help="a spec file")
    verb.add_argument("--out", metavar="DIR", help="the run folder (default: runs/NAME of the spec)")
    verb.add_argument("--overwrite", action="store_true", help="replace a finished run")
    verb.add_argument("--fail-fast", action="store_true", help="end the run at the first request that fails")
    verb.add_argument("--processes", action="store_true", help="run vLLM's engine core in a process of its own")
    verb.add_argument("--quiet", action="store_true", help="no progress, no table")
    verb.add_argument("--verbose", action="store_true", help="let vLLM and torch print their own warnings")
    add_format(verb)


def run(args: argparse.Namespace) -> int:
    from vtaps.check import check_file
    from vtaps.running import run_checked

    if not args.verbose:
        hush()
    result = check_file(args.spec)
    if result.plan is None:
        report(result.diagnostics, args.format, result.documents)
        return 1
    report(result.diagnostics, "text", result.documents)
    out = Path(args.out) if args.out else Path("runs") / Path(args.spec).stem
    try:
        with _Bars(quiet=args.quiet) as bars:
            outcome = run_checked(
                result, out, overwrite=args.overwrite, in_process=not args.processes, fail_fast=args.fail_fast,
                watch=bars.watch(),
            )  # fmt: skip
    except KeyboardInterrupt:
        if not (out / "partial").is_dir():
            raise
        print(
            f"interrupted: what is finished is kept in {out}; the same command goes on with the rest", file=sys.stderr
        )
        return 130
    report(outcome.findings, args.format, result.documents)
    if outcome.path is None:
        early = {d.code for d in outcome.findings} <= {"VT401", "VT402", "VT403", "VT404", "VT405", "VT605"}
        return 1 if early or outcome.failed else 3
    if not args.quiet and args.format == "text":
        from rich.console import Console

        from vtaps.runtime.results.load import load
        from vtaps.show import summary

        if outcome.resumed:
            print(f"{outcome.resumed} requests were there already, {outcome.served} served now", file=sys.stderr)
        if outcome.not_run:
            print(f"{outcome.not_run} requests were not run: the budget of their reads was kept", file=sys.stderr)
        Console().print(summary(load(outcome.path)))
    if outcome.failed and args.format == "text":
        again = f"the same command tries {'it' if outcome.failed == 1 else 'them'} again"
        print(f"{outcome.failed} of {outcome.served + outcome.failed} requests failed; {again}", file=sys.stderr)
    return 0 if outcome.ok else 1 if outcome.of_requests else 3


def hush() -> None:
    """vLLM and torch warn about settings that this engine chose; errors still show."""
    import logging
    import os
    import warnings

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


class _Bars:
    """Progress on stderr: a line a phase, then a bar over the requests."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        screen = Console(stderr=True)
        self._progress = Progress(TextColumn("{task.description}"), *columns, console=screen, disable=quiet)
        self._phase = self._progress.add_task("checking", total=1)
        self._requests: Any = None

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._progress.update(self._phase, completed=1)
        self._progress.stop()

    def watch(self) -> Any:
        from vtaps.running import Watch

        def tell(text: str) -> None:
            self._progress.update(self._phase, completed=1)
            self._phase = self._progress.add_task(text, total=1)

        def total(count: int, done: int) -> None:
            self._requests = (count, done)

        def step(_: object) -> None:
            if isinstance(self._requests, tuple):
                self._progress.update(self._phase, completed=1)
                count, done = self._requests
                self._requests = self._progress.add_task("requests", total=count, completed=done)
            self._progress.advance(self._requests)

        return Watch(tell, total, step)

"""``vtaps verify SPEC``"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from vtaps.cli.common import report


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "verify",
        help="run a spec and hold it against an independent reference",
        description="Run a spec on its own engine, and hold every read, edit, metric and token against the Hugging "
        "Face forward of the same weights in float32 (or the eager engine); rows fired against rows selected; unedited "
        "requests against a batch with nobody edited; prompts in one step against prompts in pieces.",
        epilog="example: vtaps verify examples/paris.yaml --limit 8",
    )
    verb.add_argument("spec", metavar="SPEC", help="a spec file")
    verb.add_argument("--limit", metavar="N", type=_count, help="serve at most N requests (default: 64)")
    verb.add_argument("--bound", metavar="X", type=_bound, help="largest error, of a row's largest value")
    verb.add_argument("--against", choices=("huggingface", "eager"), help="the reference (default: what fits)")
    verb.add_argument("--format", choices=("text", "json"), default="text", help="how it is printed (default: text)")
    verb.add_argument("--processes", action="store_true", help="run vLLM's engine core in a process of its own")
    verb.add_argument("--quiet", action="store_true", help="no progress")
    verb.add_argument("--verbose", action="store_true", help="let vLLM and torch print their own warnings")


def run(args: argparse.Namespace) -> int:
    from vtaps.cli.run import hush

    if not args.verbose:
        hush()  # before torch is imported
    from vtaps.verifying import LIMIT, verify

    def tell(text: str) -> None:
        if not args.quiet:
            print(f"{text} …", file=sys.stderr)

    found = verify(
        args.spec, limit=args.limit or LIMIT, bound=args.bound, against=args.against,
        in_process=not args.processes, tell=tell,
    )  # fmt: skip
    if args.format == "json":
        print(json.dumps(found.to_json(), indent=1, ensure_ascii=False))
    elif found.engine is not None and found.dtype is not None:
        from rich.console import Console

        from vtaps.verdict import verdict

        Console().print(verdict(found))
    report(list(found.findings), "text", found.documents)
    return found.exit_code


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of requests (1, 2, …)")
    return value


def _bound(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value

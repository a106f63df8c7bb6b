"""``vtaps show RUN``"""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "show",
        help="what a run gave: texts side by side, rows fired, metrics, what was saved",
        description="Print a finished run: prompts × arms with the texts, rows fired against rows expected, metrics, "
        "and what was saved where.",
        epilog="example: vtaps show runs/paris --tokens france",
    )
    verb.add_argument("run", metavar="RUN", help="a run folder")
    verb.add_argument("--tokens", metavar="PROMPT", help="the token table of one prompt, with what fired where")
    verb.add_argument("--width", type=int, metavar="COLUMNS", help="width of the tables (default: the terminal's)")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from vtaps.runtime.results.load import RunError
    from vtaps.show import show

    try:
        shown = show(args.run, tokens=args.tokens, width=args.width)
    except RunError as error:
        print(f"vtaps show: {error}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"vtaps show: {error.args[0]}", file=sys.stderr)
        return 2
    Console(width=args.width).print(shown)
    return 0

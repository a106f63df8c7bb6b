"""``vtaps explain CODE``"""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "explain",
        help="the page of a diagnostic code",
        description="Print what a diagnostic code means, an example, and what to write instead.",
        epilog="example: vtaps explain VT301",
    )
    verb.add_argument("code", metavar="CODE", nargs="?", help="a code such as VT301; none: list them all")


def run(args: argparse.Namespace) -> int:
    from vtaps.spec.codes import CODES
    from vtaps.spec.explain import UnknownCode, page

    if args.code is None:
        for code, entry in CODES.items():
            print(f"{code}  {entry.severity:7}  {entry.title}")
        return 0
    try:
        text = page(args.code)
    except UnknownCode as error:
        print(f"vtaps explain: {error}", file=sys.stderr)
        return 2
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(text, end="")
    return 0

"""``vtaps diff A B``"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from vtaps.cli.common import report
from vtaps.diff_views import DIFF_FORMATS


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "diff",
        help="what a change of a spec means, in words",
        description="Say what differs between two specs or locks, what that means for a run, and show the blocks' "
        "diff. Names, comments and the order of keys are no change. Exit code 0: they mean the same, 1: they differ, "
        "2: a side is not there or does not check.",
        epilog="example: vtaps diff HEAD:examples/paris.yaml examples/paris.yaml --format markdown",
    )
    for name, which in (("A", "old"), ("B", "new")):
        verb.add_argument(which, metavar=name, help=f"the {which} side: a spec, a NAME.lock.json, or REV:path in git")
    verb.add_argument("--format", choices=DIFF_FORMATS, default="text", help="how it is printed (default: text)")


def run(args: argparse.Namespace) -> int:
    from vtaps.diff_views import render
    from vtaps.diffing import difference
    from vtaps.sides import SideError, side

    sides = []
    wrong = False
    for text in (args.old, args.new):
        try:
            found = side(text)
        except SideError as error:
            print(f"vtaps diff: {error}", file=sys.stderr)
            wrong = True
            continue
        if found.lock is None:
            report(list(found.findings), "text" if args.format == "markdown" else args.format, found.documents)
            wrong = True
        sides.append(found)
    if wrong:
        return 2
    told = difference(*sides)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(render(told, args.format, sides[1].doc, color=color), end="")
    return 0 if told.same else 1

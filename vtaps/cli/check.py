"""``vtaps check SPEC…``"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vtaps.cli.common import add_format, report
from vtaps.spec.diagnostics import Diagnostic


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "check",
        help="hold specs against their model's tree, before any GPU time",
        description="Hold specs against the language and their model's module tree. No GPU, no weights.",
        epilog="example: vtaps check examples/paris.yaml --expand",
    )
    verb.add_argument("specs", nargs="+", metavar="SPEC", help="a spec file")
    verb.add_argument("--expand", action="store_true", help="print the spec with every default written out")
    add_format(verb)


def run(args: argparse.Namespace) -> int:
    from vtaps.check import check_file
    from vtaps.summary import describe

    if args.expand and args.format != "text":
        print("vtaps check: --expand prints YAML; it does not go with --format", file=sys.stderr)
        return 2
    found: list[Diagnostic] = []
    documents: dict[str, str] = {}
    failed = False
    for path in args.specs:
        result = check_file(path)
        found += result.diagnostics
        documents |= result.documents
        failed |= not result.ok
        if result.plan is None or args.format != "text":
            continue
        if args.expand:
            from vtaps.spec.expand import expand, to_yaml

            print(to_yaml(expand(result.plan.spec)), end="")
        else:
            print(describe(result.plan))
    report(found, args.format, documents)
    return 1 if failed else 0

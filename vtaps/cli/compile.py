"""``vtaps compile SPEC…``"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vtaps.cli.common import add_format, report
from vtaps.spec.diagnostics import Diagnostic, has_errors


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "compile",
        help="write the block and the lock beside a spec",
        description="Write NAME.block.py (the reviewed code) and NAME.lock.json (the resolved program) beside a spec.",
        epilog="example: vtaps compile --check examples/*.yaml",
    )
    verb.add_argument("specs", nargs="+", metavar="SPEC", help="a spec file")
    verb.add_argument("--check", action="store_true", help="write nothing; fail where the files are out of date")
    verb.add_argument("--stdout", action="store_true", help="print the block instead of writing")
    add_format(verb)


def run(args: argparse.Namespace) -> int:
    from vtaps.check import check_file
    from vtaps.codegen.drift import drift
    from vtaps.compiling import compile_plan, write_files

    found: list[Diagnostic] = []
    documents: dict[str, str] = {}
    for path in args.specs:
        result = check_file(path)
        found += result.diagnostics
        documents |= result.documents
        if result.plan is None or result.doc is None:
            continue
        compiled, problems = compile_plan(result.plan)
        found += problems
        if compiled is None:
            continue
        if args.stdout:
            print(compiled.block.source, end="")
        elif args.check:
            problems = drift(compiled.files, result.doc.folder, path)
            found += problems
            if not problems and args.format == "text":
                print(f"{path}: up to date")
        else:
            written, problems = write_files(compiled.files, result.doc.folder, path)
            found += problems
            for name in compiled.files if not problems else ():
                print(f"{'wrote' if name in written else 'unchanged'} {result.doc.folder / name}", file=sys.stderr)
    report(found, args.format, documents)
    return 1 if has_errors(found) else 0

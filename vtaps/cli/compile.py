"""``vtaps compile SPEC…``"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from vtaps.cli.common import add_format, report
from vtaps.codegen.instrument import copy_name
from vtaps.spec.diagnostics import Diagnostic, has_errors
from vtaps.spec.plan import Plan
from vtaps.spec.source import without


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "compile",
        help="write the block and the lock beside a spec",
        description="Write NAME.block.py (the reviewed code) and NAME.lock.json (the resolved program) beside a spec.",
        epilog="example: vtaps compile --check examples/*.yaml",
    )
    verb.add_argument(
        "specs",
        nargs="+",
        metavar="SPEC",
        help="a spec file; with --check also its block or lock",
    )
    verb.add_argument("--check", action="store_true", help="write nothing; fail where the files are out of date")
    verb.add_argument("--stdout", action="store_true", help="print the block instead of writing")
    verb.add_argument(
        "--show-forward", action="store_true", help="print the forwards that get taps, as diffs, instead of writing"
    )
    add_format(verb)


def run(args: argparse.Namespace) -> int:
    from vtaps.check import check_file
    from vtaps.codegen.drift import drift
    from vtaps.compiling import compile_plan, write_files

    found: list[Diagnostic] = []
    documents: dict[str, str] = {}
    for path in dict.fromkeys(spec_of(path) for path in args.specs) if args.check else args.specs:
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
        elif args.show_forward:
            show_forwards(result.plan)
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


def spec_of(path: str) -> str:
    """The spec beside a block or a lock, which a commit may change alone; any other path as it is."""
    for suffix in (".block.py", ".lock.json"):
        if path.endswith(suffix):
            stem = path.removesuffix(suffix)
            return next((spec for spec in (f"{stem}.yaml", f"{stem}.yml") if os.path.isfile(spec)), f"{stem}.yaml")
    return path


def show_forwards(plan: Plan) -> None:
    """Each function with a location inside, as a diff of vLLM's own file; one that a forward calls is shown for each
    call that has a copy of its own."""
    from vtaps.runtime.forward_text import tapped_diff

    if not plan.forwards:
        print("no location is inside a forward: each is an input or an output of a module")
    shown: dict[tuple[str, str], set[str]] = {}
    calls: dict[str, set[str]] = {}
    for site in (p.site for p in plan.locations):
        if site.op is None or site.forward is None:
            continue
        call, value = without(site.value_name)
        shown.setdefault((site.forward, ""), set())
        shown.setdefault((site.inside or site.forward, call), set()).add(value)
        if call:
            calls.setdefault(site.forward, set()).add(call)
    for (where, call), values in sorted(shown.items(), key=lambda item: (item[0][1], item[0][0])):
        diff = tapped_diff(plan.forwards[where], values, () if call else sorted(calls.get(where, ())))
        if call:
            print(f"what {call} calls, {copy_name(call)}:")
        print("\n".join(diff) if diff is not None else f"{where}: its text is not installed here, or is another's")

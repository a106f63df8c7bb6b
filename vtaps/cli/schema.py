"""``vtaps schema [NAME]``"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from vtaps.cli.common import add_format, report
from vtaps.schemas import FILES, load, text


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "schema",
        help="print the JSON Schema of a spec, or of a file that vtaps writes",
        description="Print a JSON Schema (2020-12) that ships with vtaps, in one piece: for editors, and for "
        "programs that write specs or read what vtaps writes.",
        epilog="example: vtaps schema --out spec-v1.schema.json",
    )
    verb.add_argument("of", nargs="?", choices=tuple(FILES), default="spec", help="what it is of (default: spec)")
    verb.add_argument("--out", metavar="FILE", help="write it to a file; one that is another's is left alone")
    add_format(verb)


def run(args: argparse.Namespace) -> int:
    from vtaps.spec.diagnostics import Diagnostic, Span
    from vtaps.spec.files import create_text, write_text

    schema = text(args.of)
    if args.out is None:
        print(schema, end="")
        return 0
    out = Path(args.out)
    try:
        if _ours(out):
            write_text(out, schema)
        else:
            create_text(out, schema)
    except (OSError, ValueError) as error:  # ValueError: a NUL in a path
        there = isinstance(error, FileExistsError)
        why = getattr(error, "strerror", None) or str(error)
        why = "what is there is no schema that vtaps wrote, and is left as it is" if there else why
        report([Diagnostic("VT404", f"cannot write {out}: {why}", Span(str(out)))], args.format, {})
        return 1
    report([], args.format, {})
    print(f"wrote {out}", file=sys.stderr)
    return 0


def _ours(path: Path) -> bool:
    """Whether a schema of vtaps stands there, this version's or another's."""
    from vtaps.spec.files import read_text

    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and _kind(found) in {_kind(load(file)) for file in FILES.values()}


def _kind(schema: dict[str, Any]) -> str:
    """Its title without the version: ``vtaps spec``."""
    return re.sub(r"(, version)? [\d.]+$", "", str(schema.get("title")))

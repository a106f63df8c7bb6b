"""``vtaps init [MODEL]``"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vtaps.cli.common import add_format, report


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "init",
        help="write a first spec for a model",
        description="Write a commented spec for a model: a directory, a bare config.json, or a hub id in the local "
        "cache. It checks as it is. A file that is there is never written over.",
        epilog="example: vtaps init models/smollm2-135m-instruct --out first.yaml",
    )
    verb.add_argument("model", nargs="?", metavar="MODEL", help="default: the one model in this folder or in models/")
    verb.add_argument("--out", metavar="FILE", help="the spec to write (default: NAME.yaml, after the model)")
    add_format(verb)


def run(args: argparse.Namespace) -> int:
    from vtaps.scaffold import first_spec, models_here
    from vtaps.spec.diagnostics import Diagnostic, Span
    from vtaps.spec.files import create_text

    def refused(*found: Diagnostic) -> int:
        report(list(found), args.format, {})
        return 1

    model = args.model
    if model is None:
        here = models_here(Path.cwd())
        if len(here) != 1:
            message = "several models are here: name one" if here else "no model is here or in models/: name one"
            return refused(Diagnostic("VT213", message, Span("models"), tuple(here)))
        model = here[0]
    out = Path(args.out if args.out is not None else f"{name_of(model)}.yaml")

    def unwritable(why: str, note: str | None = None) -> int:
        return refused(Diagnostic("VT404", f"cannot write {out}: {why}", Span(str(out)), note=note))

    there = ("it is there, and is left as it is", "name another file with --out")
    try:
        if out.is_symlink() or out.exists():
            return unwritable(*there)
        if not out.parent.is_dir():
            return unwritable(f"there is no folder {out.parent}")
        text, found = first_spec(model, out)
        if text is None:
            return refused(*found)
        create_text(out, text)
    except FileExistsError:
        return unwritable(*there)
    except (OSError, ValueError) as error:  # ValueError: a NUL in a path
        return unwritable(getattr(error, "strerror", None) or str(error))
    report(found, args.format, {})
    if args.format == "text":
        print(f"wrote {out}\nnext: vtaps check {out}")
    return 0


def name_of(model: str) -> str:
    """A file's name for a model: its folder's, or the last part of its hub id."""
    path = Path(model)
    path = path.parent if path.name == "config.json" else path
    return path.name if path.name not in ("", "..") else path.resolve().name or "first"

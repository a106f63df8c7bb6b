"""What the verbs share: arguments, and findings on their way to the screen."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from vtaps.spec.diagnostics import Diagnostic, in_order
from vtaps.spec.reporters import FORMATS, Format, render


def add_format(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--format", choices=FORMATS, default="text", help="how findings are printed (default: text)")


def report(diagnostics: list[Diagnostic], format: Format, documents: Mapping[str, str], *, quiet: bool = False) -> None:
    """Print findings: text to stderr, the machine-readable formats to stdout (also when there are none)."""
    if format == "text":
        if diagnostics and not quiet:
            color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
            print(render(in_order(diagnostics), "text", documents, color=color), file=sys.stderr)
    else:
        print(render(in_order(diagnostics), format, documents))

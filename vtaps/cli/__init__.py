"""The command line: one file a verb in this folder, each with ``add(subparsers)`` and ``run(args) -> exit code``.

Exit codes: 0 ok, 1 findings, 2 usage, 3 the run failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from vtaps import __version__

VERBS = ("init", "check", "compile", "diff", "tree", "run", "verify", "show", "plot", "explain", "schema", "doctor")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="vtaps",
        description="Intervention specs for vLLM: check them, compile them to a block you can review, run them.",
        epilog="example: vtaps check examples/paris.yaml && vtaps run examples/paris.yaml --out runs/paris",
    )
    top.add_argument("--version", action="version", version=f"vtaps {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        importlib.import_module(f"vtaps.cli.{verb}").add(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    module = importlib.import_module(f"vtaps.cli.{args.verb}")
    try:
        code = module.run(args)
        sys.stdout.flush()
        return int(code)
    except BrokenPipeError:  # the reader went away: `vtaps tree … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130

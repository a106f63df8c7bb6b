"""``vtaps plot RUN``"""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "plot",
        help="a run as pictures: metrics over sweeps, lens, projections",
        description="Draw a finished run: metrics as bars, curves or grids over their sweeps, the logit lens over "
        "depth, projections and norms over tokens. One HTML page that needs nothing beside it, or PNG files.",
        epilog="example: vtaps plot runs/lens --out lens.html",
    )
    verb.add_argument("run", metavar="RUN", help="a run folder")
    verb.add_argument("names", metavar="NAME", nargs="*", help="metrics and reads (default: all that can be drawn)")
    verb.add_argument("--out", metavar="FILE", help="FILE.html or FILE.png (default: plot.html in the run folder)")
    verb.add_argument("--tokenizer", metavar="DIR", help="where token ids get their texts (default: the model's)")


def run(args: argparse.Namespace) -> int:
    from vtaps.pictures import PlotError, plot
    from vtaps.runtime.results.load import RunError

    try:
        files = plot(args.run, args.out, names=args.names, tokenizer=args.tokenizer)
    except (PlotError, RunError) as error:
        print(f"vtaps plot: {error}", file=sys.stderr)
        return 1
    for file in files:
        print(file)
    return 0

"""``vtaps tree MODEL``"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from vtaps.cli.common import add_format, report


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "tree",
        help="a model's modules, shapes and aliases, without weights",
        description="Print vLLM's own module tree of a model: a directory, a bare config.json, or a hub id in the "
        "local cache. No GPU, no weights.",
        epilog="example: vtaps tree models/smollm2-135m-instruct --at model.layers.10.self_attn",
    )
    verb.add_argument("model", metavar="MODEL")
    verb.add_argument(
        "--at",
        metavar="PATH",
        help="one module: its inputs, output, children, aliases, and its forward with the names of its ops",
    )
    verb.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    verb.add_argument("--json", metavar="FILE", help="write the snapshot to a file")
    add_format(verb)


def run(args: argparse.Namespace) -> int:
    from vtaps.runtime.forward_text import source_of
    from vtaps.runtime.trees import tree_for
    from vtaps.spec.diagnostics import Diagnostic, Span
    from vtaps.spec.models import find_config
    from vtaps.spec.snapshot import write_tree
    from vtaps.spec.tree_view import forwards_of, render, render_at, render_forward

    span = Span(args.model)
    folder, found = find_config(args.model, Path.cwd(), span)
    tree = None
    if folder is not None:
        tree, problems = tree_for(folder, args.dtype, span)
        found += problems
    if tree is None:
        report(found, args.format, {})
        return 1
    if args.json is not None:
        target = Path(args.json)
        try:
            write_tree(tree, target)
        except OSError as error:
            report([Diagnostic("VT404", f"cannot write {target}: {error.strerror}", Span(args.json))], args.format, {})
            return 1
        print(f"wrote {target}", file=sys.stderr)
        return 0
    width = shutil.get_terminal_size((120, 24)).columns
    if args.at is None:
        print(render(tree, width))
        return 0
    text, problems = render_at(tree, args.at, Span(args.at))
    if text is None:
        report(problems, args.format, {})
        return 1
    print(text)
    for forward, values in forwards_of(tree, args.at):
        print(render_forward(forward, values, source_of(forward)))
    return 0

"""``vtaps doctor``"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "doctor",
        help="what is installed, what works, and the fix for what does not",
        description="Look at this environment: Python, vLLM, torch, the plug-in, the cache, and every place in vLLM "
        "that vtaps touches. Exit code 1 where something is wrong.",
        epilog="example: vtaps doctor",
    )
    verb.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    from vtaps.runtime.doctor import examine

    found = []
    marks = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}
    for finding in examine():
        found.append(finding)
        if args.format == "text":
            print(f"{marks[finding.status]}  {finding.what:13} {finding.says}", flush=True)
            if finding.fix is not None:
                print(f"{'':9}{'':13} fix: {finding.fix}")
    if args.format == "json":
        print(json.dumps([asdict(f) for f in found], indent=1))
    return 1 if any(f.status == "error" for f in found) else 0

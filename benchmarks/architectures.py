"""The tree of every text-generation architecture that vLLM registers, built from a small configuration.

usage: python -m benchmarks.architectures [NAME …] [--check PAGE.md] [--timeout SECONDS]
       python -m benchmarks.architectures --out PAGE.md

Each architecture is built in a fork of one process that has imported vLLM: what one build leaves behind cannot reach
the next, and no build waits for the imports.  ``--out`` writes docs/architectures.md; ``--check`` fails where the page
says something else, of the architectures that are named or of all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.architecture_configs import TABLE, Entry, config_of
from benchmarks.architecture_streams import convention, layers

TIMEOUT_S = 120
"""Seconds after which the build of one architecture is given up."""


@dataclass(frozen=True)
class Row:
    """What came of one architecture.  ``without`` are its forwards that have no ops, with the reason; ``unbuilt`` says
    why there is no tree, ``unvalued`` why its modules have no shapes; ``puts_out`` is what a decoder layer puts out;
    ``lacking`` names what vLLM requires and this
    machine does not have, so that a placeholder was imported."""

    architecture: str
    model: str
    modules: int = 0
    called: int = 0
    with_ops: int = 0
    without: tuple[tuple[str, str], ...] = ()
    stream: str = ""
    puts_out: str = ""
    aliases: bool = False
    op_shapes: bool = False
    own_configuration: bool = False
    lacking: tuple[str, ...] = ()
    unbuilt: str | None = None
    unvalued: str | None = None
    seconds: float = field(default=0.0, compare=False)


def warm() -> dict[str, str]:
    """Import what every build needs; the architectures and their models."""
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="CRITICAL", VLLM_PLUGINS="",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", TRANSFORMERS_VERBOSITY="critical",
    )  # fmt: skip
    from vtaps.runtime.compat import meta_tree
    from vtaps.runtime.compat.registry import text_generation

    meta_tree.warm()
    return text_generation()


def build(architecture: str, model: str, folder: Path) -> Row:
    """The row of one architecture, in a process that ends with it."""
    from vtaps.runtime.compat import meta_tree, registry, stand_ins
    from vtaps.spec.aliases import table_of
    from vtaps.spec.snapshot import value_text

    entry = TABLE.get(architecture, Entry())
    model_type = entry.model_type or registry.model_type(architecture)
    if model_type is None:
        raise LookupError("no configuration of this architecture is known here")
    known = registry.configuration_fields(model_type)
    if known is None:
        registry.register_configuration(model_type, nested=("block_configs",))
    config = config_of(architecture, model_type, known)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tree = meta_tree.build(folder, "bfloat16")
    forwards = tree.forwards.values()
    return Row(
        architecture,
        model,
        modules=len(tree.modules),
        called=sum(module.calls > 0 for module in tree.modules.values()),
        with_ops=sum(bool(forward.ops) for forward in forwards),
        without=tuple(sorted((f.where, f.reason or "it computes nothing") for f in forwards if not f.ops)),
        stream=convention(tree),
        puts_out=value_text(found[-1].output) or "" if (found := layers(tree)) else "",
        aliases=table_of(tree) is not None,
        op_shapes=any(module.ops for module in tree.modules.values()),
        own_configuration=known is None,
        lacking=stand_ins.placeholders(),
        unvalued=None if tree.unvalued is None else _plain(tree.unvalued),
    )


def _plain(text: str) -> str:
    """A reason without this machine's folders and addresses."""
    for folder in sorted({*sys.path, sys.prefix, os.getcwd(), tempfile.gettempdir()} - {""}, key=len, reverse=True):
        text = text.replace(folder, "…")
    return " ".join(text.split())[:160].replace("|", "\\|")


def in_fork(work: Callable[[], Row], failed: Callable[[str], Row], seconds: int) -> Row:
    """What ``work`` makes, in a fork of this process, or ``failed`` with the reason."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _silence()
        try:
            made = work()
        except BaseException as fault:  # whatever vLLM raises is the row's reason
            made = failed(_reason(fault))
        with os.fdopen(writer, "w", encoding="utf-8") as pipe:
            json.dump(asdict(made), pipe)
        os._exit(0)
    os.close(writer)
    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(seconds)
    try:
        with os.fdopen(reader, encoding="utf-8") as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    if not text:
        code = os.waitstatus_to_exitcode(status)
        return failed(f"not done after {seconds} s" if code == -signal.SIGKILL else f"the process ended with {code}")
    return from_json(json.loads(text))


def from_json(data: dict[str, Any]) -> Row:
    without = tuple((where, why) for where, why in data.pop("without"))
    return Row(**data | {"without": without, "lacking": tuple(data["lacking"])})


def _silence() -> None:
    """vLLM logs a fault that it passes on; the row has it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _reason(fault: BaseException) -> str:
    from vtaps.runtime.compat.meta_tree import reason

    return _plain(f"{type(fault).__name__}: {reason(fault)}")


def rows(names: Sequence[str], seconds: int, tell: Callable[[Row], None]) -> list[Row]:
    """One row for each architecture in ``names``, all of vLLM's without names; LookupError for one that is unknown."""
    known = warm()
    if unknown := [name for name in names if name not in known]:
        raise LookupError(f"vLLM registers no {', '.join(unknown)}")
    made: list[Row] = []
    for name in sorted(names or known, key=str.lower):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="vtaps-architecture-") as folder:
            row = in_fork(
                lambda: build(name, known[name], Path(folder)),  # noqa: B023 - it is done before the next
                lambda why: Row(name, known[name], unbuilt=why),  # noqa: B023
                seconds,
            )
        row = Row(**row.__dict__ | {"seconds": time.perf_counter() - start})
        tell(row)
        made.append(row)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.architecture_page import differing, line, page

    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures")
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures (default: all that vLLM registers)")
    parser.add_argument("--out", type=Path, help="PAGE.md to write")
    parser.add_argument("--check", type=Path, help="PAGE.md to compare with")
    parser.add_argument("--timeout", type=int, default=TIMEOUT_S, help=f"seconds each (default: {TIMEOUT_S})")
    args = parser.parse_args(argv)
    if args.out and args.names:
        parser.error("the page is of all architectures")
    try:
        made = rows(args.names, args.timeout, lambda row: print(line(row), flush=True))
    except LookupError as fault:
        parser.error(str(fault))
    if args.out:
        args.out.write_text(page(made), encoding="utf-8")
    if args.check:
        text = args.check.read_text(encoding="utf-8")
        other = differing(made, text) if args.names else sorted({*page(made).splitlines()} ^ {*text.splitlines()})
        if other:
            print("\n".join([f"{args.check} says something else:", *other]), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

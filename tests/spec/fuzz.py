"""Hostile specs: whole ones drawn from the language, some bent, and slips in every spec of the checkout.

    python -m tests.spec.fuzz [--drawn 10000] [--mutated 1000] [--seed 0] [--keep FOLDER]

Each goes through ``check_file`` and, where it is accepted, through ``compile_plan``, which holds the block against
the plan.  A traceback, more than two seconds, a finding that points outside the file, an accepted spec that
does not compile, a file opened to be written, a process started, or code of the spec's folder that was run ends in
exit code 1, with the spec kept in ``--keep``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.spec.fuzz_grammar import lay_out, whole
from tests.spec.fuzz_oddities import bent, dressed, slipped, text_of
from tests.trees import DATA, VLLM, seed_cache
from vtaps.check import CheckResult, check_file
from vtaps.compiling import compile_plan
from vtaps.runtime import trees
from vtaps.spec import snapshot
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.reporters import render

ROOT = DATA.parents[1]
LIMIT_S, WALL_S = 2.0, 20.0
ENDS = "\r\n", "\r", "\n"


class Hang(BaseException):
    """No answer in time; no ``except Exception`` may swallow it."""


@dataclass
class Told:
    """``faults``: what is wrong, in words that are the same for the same cause → a spec that shows it, and how often.
    ``refused``: code → specs that it was found in."""

    specs: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest: bytes = b""
    faults: dict[str, bytes] = field(default_factory=dict)
    often: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        return self.accepted / max(self.specs, 1)


class Watch:
    """What Python was asked to do while a spec was checked, by an audit hook, which nothing goes round."""

    STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")
    CHANGES = (
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "shutil.rmtree",
    )

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.seen.append(f"opens {args[0]!r} to write")
        elif event in self.STARTS or event in self.CHANGES:
            self.seen.append(f"{event} {args[0]!r}")

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        self.seen, self.on = [], True
        try:
            yield self.seen
        finally:
            self.on = False


WATCH = Watch()


@contextmanager
def within(seconds: float, wall: float = 20.0) -> Iterator[None]:
    """Raises Hang in this thread when it has taken ``seconds`` of this process's own time, or ``wall`` of everybody's:
    a busy machine is no hang, and what waits for another takes no time of its own."""

    def over(number: int, frame: FrameType | None) -> None:
        raise Hang(frame.f_code.co_qualname if frame is not None else "")

    clocks = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, wall))
    before = [signal.signal(sent, over) for _, sent, _ in clocks]
    for clock, _, limit in clocks:
        signal.setitimer(clock, limit, 0.2)  # again where a callback swallows it
    try:
        yield
    finally:
        for (clock, sent, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(sent, handler)


class Folder:
    """Where specs are put to be checked: ``data`` is a link to the small models, beside it is what specs name, and what
    nobody should: FIFOs, a device, a folder with the name of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        (path / "data").symlink_to(DATA)
        lay_out(path)
        for name in ("fifo.npy", "fifo.safetensors", "fifo.jsonl", "fifo.py"):
            os.mkfifo(path / name)
        (path / "folder.jsonl").mkdir()
        (path / "zero.npy").symlink_to("/dev/zero")
        (path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
        # A memo of 2^31 places, asked for by five bytes; an array of 2^40 numbers, by its header alone.
        with zipfile.ZipFile(path / "bomb.pt", "w") as file:
            file.writestr("x/data.pkl", b"\x80\x02]r\xff\xff\xff\x7f.")
        words = b"GGUF", struct.pack("<IQQ", 3, 0, 1), struct.pack("<Q", 1), b"x", struct.pack("<IIQ", 9, 4, 2**40)
        (path / "claims.gguf").write_bytes(b"".join(words))
        (path / "fifos").mkdir()
        os.mkfifo(path / "fifos" / "cfg.json")
        (path / "strange").mkdir()
        (path / "strange" / "run.json").write_text(
            '{"run": 1, "status": "complete", "files": {}, "lock": {"file": "run.json"}}'
        )

    def others(self) -> list[tuple[Path, bytes]]:
        """Every spec of ``examples/`` and of the golden cases, each in a folder with a copy of the files beside it, its
        model where this folder has it."""
        out = []
        for top in ("examples", "tests/golden"):
            kept = self.path / Path(top).name
            shutil.copytree(ROOT / top, kept, ignore=shutil.ignore_patterns("__pycache__", ".*", "runs"))
            for spec in sorted(kept.rglob("*.yaml")):
                up = "../" * (len(spec.relative_to(self.path).parts) - 1)
                text = spec.read_bytes().replace(b"../../../data", f"{up}data".encode())
                small = f"{{path: {up}data/configs/smollm2, tokenizer: {up}data/tokenizer".encode()
                out.append((spec.parent, text.replace(b"{path: ../models/smollm2-135m-instruct", small)))
        return out


@contextmanager
def ready(folder: Path) -> Iterator[Folder]:
    """A :class:`Folder` in ``folder``, which is the working folder; trees come from the committed snapshots alone."""
    with pytest.MonkeyPatch.context() as patch:
        seed_cache(folder / "cache", patch)
        _seed_halves()
        patch.setattr(trees, "_build", _not_built)
        patch.setenv("HOME", str(folder))
        made = Folder(folder / "here")
        patch.chdir(made.path)
        yield made


def _seed_halves() -> None:
    """Trees in half precision too: those of float32 in other words."""
    for dtype in ("bfloat16", "float16"):
        for file in (DATA / "trees").glob("*.json"):
            config = json.loads((DATA / "configs" / file.stem / "config.json").read_text(encoding="utf-8"))
            tree = json.loads(file.read_text(encoding="utf-8").replace("float32", dtype))
            tree["digest"] = snapshot.digest(tree)
            trees.cache_file(config, VLLM, dtype).write_text(json.dumps(tree), encoding="utf-8")


def _not_built(config: Path, dtype: str, cached: Path, span: Span) -> tuple[None, list[Diagnostic]]:
    """vLLM takes seconds to build a tree, which is not what is drawn here."""
    return None, [Diagnostic("VT214", f"{config} is none of the snapshots", span)]


def put_through(raw: bytes, folder: Path, told: Told) -> None:
    """Check one spec in ``folder``, compile it if it is accepted, and note what came of it."""
    file = folder / "fuzz.yaml"
    file.write_bytes(raw)
    told.specs += 1
    fault, spent = _tried(file, told)
    if spent > told.seconds:
        told.seconds, told.slowest = spent, raw
    if fault is not None:
        told.faults.setdefault(fault, raw)
        told.often[fault] += 1


def _tried(file: Path, told: Told) -> tuple[str | None, float]:
    start = time.process_time()
    try:
        with WATCH.watching() as seen, within(LIMIT_S, WALL_S):
            result = check_file(file)
            fault = _misplaced(result, file)
            for format_ in ("text", "json"):
                render(result.diagnostics, format_, result.documents)
            if result.plan is not None:
                told.accepted += 1
                fault = _compiled(result) or fault
            elif result.ok:
                fault = "neither a plan nor an error"
            else:
                told.refused.update({d.code for d in result.diagnostics if d.severity == "error"})
    except Hang as hang:
        return f"hang in {hang}", time.process_time() - start
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if f.filename.startswith(str(ROOT / "vtaps"))] or frames
        return f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].lineno}", 0.0
    spent = time.process_time() - start
    ran = [p.name for p in Path.cwd().glob("*.ran")]
    if seen or ran:
        return f"{(seen or ran)[0]}", spent
    return fault, spent


def _compiled(result: CheckResult) -> str | None:
    assert result.plan is not None
    compiled, wrong = compile_plan(result.plan)
    if compiled is None or wrong:
        return f"accepted and not compiled: {wrong[0].message[:80]}"
    outside = [name for name in compiled.files if Path(name).name != name]
    return f"compiles to {outside[0]}" if outside else None


def _misplaced(result: CheckResult, file: Path) -> str | None:
    """A finding whose place is not in the file that it names."""
    for d in result.diagnostics:
        text = result.documents.get(d.span.file)
        if text is None:
            text = file.read_bytes().decode("utf-8-sig", "replace") if d.span.file == str(file) else None
        if text is None:
            continue
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line, column in ((d.span.line, d.span.column), (d.span.end_line, d.span.end_column)):
            if not (1 <= line <= len(lines) and 1 <= column <= len(lines[line - 1]) + 2):
                return f"{d.code} points outside the file"
        if (d.span.line, d.span.column) > (d.span.end_line, d.span.end_column):
            return f"{d.code} ends before it starts"
    return None


def drawn(r: Random) -> bytes:
    """A whole spec: as it is, or with odd values, or odd YAML, or both."""
    data = whole(r)
    bends = r.choice([0, 0, 0, 0, 0, 1, 1, 2, 3])
    for _ in range(bends):
        data = bent(r, data)
    text = text_of(r, data)
    return dressed(r, text) if r.random() < 0.15 else text.encode("utf-8", "surrogatepass")


def draw_all(folder: Folder, count: int, number: int | None, told: Told) -> None:
    """``count`` whole specs; ``number``: hypothesis's seed, None: the same specs at every call."""

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=number is None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.randoms(use_true_random=True))
    def each(r: Random) -> None:
        put_through(drawn(r), folder.path, told)

    (each if number is None else seed(number)(each))()


def mutate_all(folder: Folder, count: int, number: int, told: Told) -> None:
    """``count`` files with slips, the files of the checkout in turn."""
    others = folder.others()
    texts = [raw for _, raw in others]
    for i in range(count):
        place, raw = others[i % len(others)]
        put_through(slipped(Random(f"{number}-{i}"), raw, texts), place, told)


def say(what: str, told: Told, print_: Callable[[str], None] = print) -> None:
    accepted = f"{told.accepted:,} accepted and compiled ({told.share:.0%})"
    print_(f"{what}: {told.specs:,} specs, {accepted}, slowest {told.seconds:.2f} s")
    print_("  refused: " + ", ".join(f"{code} {n}" for code, n in sorted(told.refused.items())))
    for fault, n in told.often.most_common():
        print_(f"  FAULT ({n} ×) {fault}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spec.fuzz")
    parser.add_argument("--drawn", type=int, default=10_000)
    parser.add_argument("--mutated", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "fuzz", help="where specs with a fault are kept")
    asked = parser.parse_args(argv)
    keep = asked.keep.resolve()
    faults: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="vtaps-fuzz-") as temporary, ready(Path(temporary)) as folder:
        for what, one in (("drawn", draw_all), ("mutated", mutate_all)):
            told = Told()
            one(folder, getattr(asked, what), asked.seed, told)
            say(what, told)
            faults |= told.faults
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"slowest-{what}.yaml").write_bytes(told.slowest)
    for i, (fault, raw) in enumerate(faults.items()):
        (keep / f"{i}.yaml").write_bytes(raw)
        print(f"{keep / f'{i}.yaml'}: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

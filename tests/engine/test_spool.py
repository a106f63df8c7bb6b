"""Where rows wait changes no result and leaves nothing behind: in memory, in shared memory, on disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engine.case import LAYERS, arm, by_key, request, tiny_llama, write_case  # noqa: E402
from tests.models import tiny  # noqa: E402
from vtaps.runtime import spool as spools  # noqa: E402
from vtaps.runtime import transport  # noqa: E402
from vtaps.runtime.engine import Engine, EngineError, RequestError  # noqa: E402
from vtaps.runtime.records import Record, Request  # noqa: E402

pytestmark = pytest.mark.engine

STREAMS = [f"resid_post[{i}]" for i in range(LAYERS)]
PROMPTS = [np.random.default_rng(n).integers(4, 260, size).tolist() for n, size in enumerate((3, 90, 17, 200, 1, 60))]
NEW = 5


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("case")
    everywhere = {"sites": STREAMS, "tokens": {"rows": "all"}}
    return write_case(
        folder,
        tiny_llama(folder / "model"),
        reads={
            "stream": {"kind": "rows", **everywhere},
            "lens": {"kind": "lens", "sites": STREAMS, "tokens": {"rows": "sampling"}, "top": 10},
            "norm": {"kind": "norm", **everywhere},
            "mean": {"kind": "mean", **everywhere},
        },
        arms={"look": arm(reads=["stream", "lens", "norm", "mean"])},
    )


def asked() -> list[Request]:
    return [request(f"r{n}", "look", ids) for n, ids in enumerate(PROMPTS)]


def records(engine: Engine, requests: Sequence[Request] | None = None) -> dict[str, Record]:
    finished = engine.run(requests or asked(), lambda _: {"temperature": 0, "max_tokens": NEW, "ignore_eos": True})
    return {key: f.completions[0].record for key, f in by_key(list(finished)).items()}


@pytest.fixture(scope="module")
def in_memory(case: tuple[dict[str, Any], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """What there is without a bound."""
    lock, block = case
    folder = tmp_path_factory.mktemp("memory")
    with Engine(lock, block.parent, block, folder) as engine:
        found = records(engine)
        assert engine._folders.shared is None
        assert not list(folder.glob("spool*")), "below the bound there are no files"
    return found


def same(found: dict[str, Record], expected: dict[str, Record]) -> None:
    assert found.keys() == expected.keys()
    for key, record in expected.items():
        assert found[key].reads.keys() == record.reads.keys() and len(record.reads) == 4 * LAYERS
        for where, read in record.reads.items():
            other = found[key].reads[where]
            assert other.dtype == read.dtype and other.positions.tobytes() == read.positions.tobytes()
            assert other.values.keys() == read.values.keys()
            for name, value in read.values.items():
                array = other.values[name]
                assert (array.dtype, array.shape, array.tobytes()) == (value.dtype, value.shape, value.tobytes())


def files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]


@pytest.mark.parametrize("memory", [0, 100_000])
def test_on_disk_in_this_process(
    memory: int,
    case: tuple[dict[str, Any], Path],
    in_memory: dict[str, Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spools, "SMALL", 1 if memory == 0 else 10_000)
    opened: list[str] = []
    original = spools.opened
    monkeypatch.setattr(transport.record_of, "__defaults__", (lambda f: opened.append(f.path) or original(f),))
    lock, block = case
    spool = tmp_path / "deep" / "spool"
    with Engine(lock, block.parent, block, tmp_path / "manifest", spool=spool, host_memory=memory) as engine:
        same(records(engine), in_memory)
        assert opened and {Path(p).parent.parent for p in opened} == {spool}
        assert not files(spool), "what is collected has no name any more"
    assert not list(spool.iterdir())


def adjust(worker: Any, name: str, value: int) -> int:
    from vtaps.runtime import spool

    setattr(spool, name, value)
    return os.getpid()


@pytest.fixture
def apart(
    case: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Path]]:
    """An engine in a process of its own, with its shared memory in a folder."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    lock, block = case
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(transport, "SHARED_MEMORY", shared)
    spool = tmp_path / "spool"
    with Engine(
        lock, block.parent, block, tmp_path / "manifest", in_process=False, spool=spool, host_memory=1 << 30
    ) as engine:
        yield engine, tmp_path
    assert not list(spool.glob("*")) and not list(shared.iterdir())


def test_from_another_process(apart: tuple[Engine, Path]) -> None:
    engine, folder = apart
    call = engine._frontend.llm.collective_rpc
    # All in the message.  Another number of threads rounds otherwise: each process is its own measure.
    in_memory = records(engine)
    first = engine._folders.held  # the longest prompt's rows are many enough as it is
    assert not files(folder / "shared")
    # In shared memory.
    call(adjust, args=("MESSAGE", 1))
    found = records(engine)
    same(found, in_memory)
    size = sum(a.nbytes for r in found.values() for w, read in r.reads.items() if w[0] == "stream"
               for a in read.values.values())  # fmt: skip
    assert engine._folders.held > first + size and not files(folder / "shared")
    # What the driver holds fills the memory: the rest goes to disk.
    engine._folders._held += 1 << 30
    call(adjust, args=("SMALL", 1))
    records(engine, [request("full", "look", PROMPTS[0])])  # tells the worker
    held = engine._folders.held
    same(records(engine), in_memory)
    assert engine._folders.held == held and (folder / "spool").exists()
    assert not files(folder / "shared") and not files(folder / "spool")
    del found
    assert engine._folders.held == first + (1 << 30)
    # What is given up is not kept either, once others have taken its place.
    started = engine.run(asked(), lambda r: {"max_tokens": 40 if r.key == "r0" else 150, "ignore_eos": True})
    assert next(started).request.key == "r0" and files(folder / "spool")
    started.close()
    same(records(engine), in_memory)
    assert not files(folder / "spool") and not files(folder / "shared")


def test_a_worker_that_is_killed_leaves_nothing(apart: tuple[Engine, Path]) -> None:
    engine, folder = apart
    [worker] = engine._frontend.llm.collective_rpc(adjust, args=("MESSAGE", 1))
    started = engine.run(asked(), lambda r: {"max_tokens": 40 if r.key == "r0" else 150, "ignore_eos": True})
    assert next(started).request.key == "r0" and files(folder / "shared")
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(EngineError):
        list(started)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_full_disk_fails_whose_rows_it_cannot_take(
    in_process: bool,
    case: tuple[dict[str, Any], Path],
    in_memory: dict[str, Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    lock, block = case
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root can mount")
    try:
        with Engine(
            lock, block.parent, block, tmp_path / "manifest", in_process=in_process, spool=disk / "s", host_memory=0
        ) as engine:
            if in_process:
                monkeypatch.setattr(spools, "SMALL", 1)
            else:
                engine._frontend.llm.collective_rpc(adjust, args=("SMALL", 1))
            failed: list[RequestError] = []
            sampling = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
            whole = list(engine.run(asked(), lambda _: sampling, failed=failed.append))
            assert len(whole) + len(failed) == len(PROMPTS) and {e.code for e in failed} == {"VT622"}
            told = re.escape(f"rows of a read cannot be kept in {disk}/s/spool-") + "[0-9a-f]+: the disk is full"
            assert all(re.search(told, error.message) for error in failed)
            # The longest prompt alone is more than the disk holds.
            assert "r3" in {e.key for e in failed}
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            same(records(engine), in_memory) if in_process else records(engine)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


SPEC = """vtaps: 1
model: {path: MODEL, dtype: float32}
engine: {mode: eager, vllm: {max_model_len: 256, max_num_seqs: 4, kv_cache_memory_bytes: 67108864}}
reads:
  stream: {at: "resid_post[*]", tokens: all}
  mean: {at: "resid_mid[1]", tokens: prompt, mean_over: request}
prompts:
  many: {file: prompts.jsonl, text: {column: text}}
arms:
  base: {reads: [stream, mean]}
sampling: {temperature: 0, max_tokens: 60, ignore_eos: true}
"""
ON_DISK = """
import os, signal, sys
from pathlib import Path
from vtaps.cli import main
from vtaps.runtime import engine, spool
spool.SMALL, engine.machine_memory = 1, lambda: 0
append = spool._File.append

def append_and_die(self, rows):
    append(self, rows)
    if len(list(Path("cut/partial").glob("0*.safetensors"))) >= 8:
        os.kill(os.getpid(), signal.SIGKILL)

if "DIE" in os.environ:
    spool._File.append = append_and_die
sys.exit(main(sys.argv[1:]))
"""
"""``vtaps`` with every row on disk; with ``DIE`` it is gone while rows are there and eight requests are stored."""


def test_a_run_on_disk_that_is_killed_resumes_to_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("MODEL", str(tiny("llama"))))
    lines = [f'{{"text": "prompt number {i} is {"long " * (i % 5)}"}}\n' for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))

    def run(out: str, *how: str, **more: str) -> int:
        asked = [sys.executable, *how, "run", "spec.yaml", "--out", out, "--quiet"]
        return subprocess.run(
            asked, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1", **more}, timeout=200
        ).returncode

    def content(out: str) -> dict[str, bytes]:
        folder = tmp_path / out
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    assert run("whole", "-m", "vtaps") == 0
    assert run("cut", "-c", ON_DISK, DIE="1") == -signal.SIGKILL
    assert files(tmp_path / "cut" / "partial" / ".tmp-spool") and not (tmp_path / "cut" / "run.json").exists()
    assert run("cut", "-c", ON_DISK) == 0
    whole, cut = content("whole"), content("cut")
    assert whole.keys() == cut.keys()
    for name in whole.keys() - {"run.json"}:  # it holds times
        assert cut[name] == whole[name], name

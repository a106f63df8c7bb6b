"""``vtaps run`` and ``vtaps show`` as a person uses them: whole processes, a real engine, a small random model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import vtaps
from tests.models import tiny

pytestmark = pytest.mark.engine

SPEC = """vtaps: 1
model: {path: MODEL, dtype: float32}
engine: {mode: MODE, vllm: {max_model_len: 256, max_num_seqs: 4, max_num_batched_tokens: 256}}
vectors:
  push: {random: {seed: 1, norm: 4}}
reads:
  stream: {at: "resid_post[*]", tokens: sampling, sees: after_edits}
  mean: {at: "resid_mid[1]", tokens: prompt, mean_over: request}
edits:
  steer: {at: "resid_post[1]", tokens: sampling, add: {vector: push}}
metrics:
  first: {logprob: "e", tokens: {steps: [0]}}
prompts:
  many: {file: prompts.jsonl, text: {column: text}}
arms:
  base: {reads: [stream], metrics: [first]}
  steered: {edits: [steer], reads: [stream, mean], metrics: [first], sweep: {steer.add.scale: [0, 1, 2]}}
sampling: {temperature: 0, max_tokens: 24, ignore_eos: true}
"""
PROMPTS = 14


@pytest.fixture
def mode() -> str:
    return "eager"


@pytest.fixture
def folder(mode: str, tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("MODEL", str(tiny("llama"))).replace("MODE", mode))
    lines = [f'{{"text": "prompt number {i} is {"long " * (i % 5)}", "level": {i}}}\n' for i in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    return tmp_path


def command(folder: Path, *args: str, last: bool = False) -> subprocess.Popen[str]:
    """``last``: whatever else wants the processor goes first."""
    # What an engine in this process has set for itself is none of a person's environment.
    own = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_") or "CACHE" in name}
    env = {**own, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "COLUMNS": "120"}
    return subprocess.Popen(
        [*(["nice", "-n", "19"] if last else []), sys.executable, "-m", "vtaps", *args], cwd=folder, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def done(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err[-3000:]
    assert "Traceback" not in err + out
    return out, err


def content(run: Path) -> dict[str, object]:
    """Everything a reader gets; run.json holds times and is compared by its parts."""
    tables = {p.name: pq.read_table(p).to_pylist() for p in run.glob("*.parquet")}
    reads = {str(p.relative_to(run)): p.read_bytes() for p in run.glob("reads/*/*.safetensors")}
    return tables | reads | {"lock.json": (run / "lock.json").read_bytes()}


def whole(partial: Path) -> list[Path]:
    """The requests of a journal; a file that was being written when the process died is not among them."""
    return [p for p in partial.glob("*.safetensors") if not p.name.startswith(".")]


def test_run_show_refuse_overwrite(folder: Path) -> None:
    out, err = done(command(folder, "run", "spec.yaml", "--out", "run"))
    assert "Saved in run" in " ".join(out.split())
    assert "WARNING" not in err and "requests" in err
    run = vtaps.load(folder / "run")
    assert run.requests.num_rows == PROMPTS * 4
    table = run.requests.to_pydict()
    fired = [
        (f, e)
        for f, e, arm in zip(table["fired.steer"], table["expected.steer"], table["arm"], strict=True)
        if arm == "steered"
    ]
    assert all(f == e for f, e in fired) and {f for f, _ in fired} == {0, 24}
    assert set(table["level"]) == set(range(PROMPTS))
    before = content(folder / "run")

    _, err = done(command(folder, "run", "spec.yaml", "--out", "run"), 1)
    assert "VT605" in err and "--overwrite" in err
    assert content(folder / "run") == before

    out, _ = done(command(folder, "show", "run"))
    assert "steered scale=2" in out.replace("\n", " ") or "scale=2" in out
    out, _ = done(command(folder, "show", "run", "--tokens", "3"))
    assert '"prompt"' in out or '"p"' in out
    _, err = done(command(folder, "show", "run", "--tokens", "nobody"), 2)
    assert "nobody" in err

    done(command(folder, "run", "spec.yaml", "--out", "run", "--overwrite", "--quiet"))
    assert content(folder / "run") == before


@pytest.mark.parametrize(("how", "mode"), [(signal.SIGKILL, "taps"), (signal.SIGINT, "eager")])
def test_an_interrupted_run_resumes_to_the_same_files(how: signal.Signals, folder: Path) -> None:
    done(command(folder, "run", "spec.yaml", "--out", "whole", "--quiet"))
    process = command(folder, "run", "spec.yaml", "--out", "cut", "--quiet", last=True)
    deadline = time.monotonic() + 240
    partial = folder / "cut" / "partial"
    while len(whole(partial)) < 8 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    kept = len(whole(partial))
    assert 8 <= kept < PROMPTS * 4, "it was cut in the middle"
    assert process.returncode != 0 and "Traceback" not in err
    assert not (folder / "cut" / "run.json").exists()
    with pytest.raises(vtaps.RunError):
        vtaps.load(folder / "cut")

    # A second process beside a live one is refused; after the first is dead the folder is free.
    _, err = done(command(folder, "run", "spec.yaml", "--out", "cut"))
    assert f"{kept} requests were there already" in err
    assert content(folder / "cut") == content(folder / "whole")
    assert not partial.exists()


def test_the_same_run_twice_at_once_is_refused(folder: Path) -> None:
    first = command(folder, "run", "spec.yaml", "--out", "run", "--quiet")
    deadline = time.monotonic() + 120
    while not (folder / "run").exists():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    _, err = done(command(folder, "run", "spec.yaml", "--out", "run"), 1)
    assert "VT605" in err and f"process {first.pid} is writing the run in run" in err
    done(first)
    assert vtaps.load(folder / "run").requests.num_rows == PROMPTS * 4

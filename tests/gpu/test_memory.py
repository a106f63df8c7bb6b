"""The memory that a block takes on a GPU: what is said before the start, and what the device then holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.engine.case import LAYERS, arm, by_key, request, tiny_llama, use, write_case  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

VLLM = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 512}


def child(folder: Path, plain: bool) -> dict[str, Any]:
    """Bytes of all tensors on the device once the engine is ready, and once it has served."""
    from vtaps.runtime.engine import Engine, plain_engine

    streams = [f"resid_post[{i}]" for i in range(LAYERS)]
    lock, block = write_case(
        folder / "case",
        tiny_llama(folder / "model"),
        edits={"push": {"verb": "add", "sites": ["resid_post[1]"], "tokens": {"rows": "all"}}},
        reads={
            "stream": {"kind": "rows", "sites": streams, "tokens": {"rows": "all"}},
            "mean": {"kind": "mean", "sites": streams, "tokens": {"rows": "all"}},
        },
        vectors={"v": {"random": {"seed": 1, "norm": 6.0}}},
        arms={"push": arm(use("push", "resid_post[1]", coefficient=1.0, vector="v"), reads=["stream", "mean"])},
        vllm=VLLM,
        mode="taps",
    )
    if plain:
        frontend = plain_engine(lock, folder / "case", eager=False)
        ready = torch.cuda.memory_allocated()
        frontend.close()
        return {"ready": ready}
    with Engine(lock, folder / "case", block, folder / "manifest") as engine:
        ready = torch.cuda.memory_allocated()
        requests = [request(f"r{i}", "push", [5 + i] * 100) for i in range(200)]
        sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
        assert len(by_key(list(engine.run(requests, lambda _: sampling)))) == 200
        told = {name: engine.report[name] for name in ("tap_bytes", "predicted_bytes")}
        return {"ready": ready, "served": torch.cuda.memory_allocated(), **told}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = {}
    for name in ("plain", "taps"):
        own = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-m", "tests.gpu.test_memory", str(own), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert answers, done.stderr[-4000:]
        out[name] = json.loads(answers[-1].removeprefix("ANSWER "))
    return out


def test_what_is_said_is_taken(told: dict[str, dict[str, Any]]) -> None:
    taken = told["taps"]["ready"] - told["plain"]["ready"]
    assert taken > 10 << 20, "too little for a test of five per cent"
    assert told["taps"]["predicted_bytes"] == pytest.approx(taken, rel=0.05)
    assert told["taps"]["tap_bytes"] == pytest.approx(taken, rel=0.05)


def test_serving_takes_no_more(told: dict[str, dict[str, Any]]) -> None:
    assert told["taps"]["served"] - told["taps"]["ready"] < 0.05 * told["taps"]["tap_bytes"]


if __name__ == "__main__":
    print("ANSWER " + json.dumps(child(Path(sys.argv[1]), sys.argv[2] == "plain")))

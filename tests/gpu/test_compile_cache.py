"""What is compiled and captured on CUDA, and what comes back from the compile cache at another address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.engine.case import (  # noqa: E402
    SITES,
    arm,
    by_key,
    hugging_face,
    reference,
    request,
    tiny_llama,
    use,
    write_case,
)
from vtaps.spec.vectors import draw  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PROMPT = [5, 60, 71, 82, 93, 104, 115, 126, 137, 148, 159, 170, 181, 192, 203, 214, 225, 236, 247, 258]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
BASE = {"site": "resid_post[1]", "seed": 1, "scales": [1.5], "structure": "1", "padding": 0}
CHANGES: dict[str, dict[str, Any]] = {
    "first": BASE,
    "again": {**BASE, "padding": 1 << 24},
    "other numbers": {**BASE, "seed": 7, "scales": [0.5, 2.0, 3.0], "padding": 1 << 22},
    "other location": {**BASE, "site": "resid_post[2]", "structure": "2"},
}


def child(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Start the taps engine, serve every point twice; what was compiled before and after, and the largest error."""
    from tests.engine import case
    from vtaps.runtime.engine import Engine

    model = tiny_llama(folder / "model")
    case.STRUCTURE = "sha256:" + asked["structure"] * 64
    site = asked["site"]
    streams = [s for s in SITES if s.startswith("resid_post")]
    points = [{"values": {}, "edits": [use("push", site, coefficient=c, vector="v")]} for c in asked["scales"]]
    lock, block = write_case(
        folder / "case",
        model,
        edits={"push": {"verb": "add", "sites": [site], "tokens": {"rows": "all"}}},
        reads={"stream": {"kind": "rows", "sites": streams, "tokens": {"rows": "all"}}},
        vectors={"v": {"random": {"seed": asked["seed"], "norm": 6.0}}},
        arms={"plain": arm(reads=["stream"]), "pushed": {**arm(reads=["stream"]), "points": points}},
        mode="taps",
    )
    moved = torch.empty(asked["padding"], device="cuda")
    twin = hugging_face(model)
    layer = SITES[site]["layer"]
    vector = torch.from_numpy(draw(asked["seed"], 6.0, layer, 128))
    worst = 0.0
    with Engine(lock, folder / "case", block, folder / "manifest") as engine:
        before = engine.compiled()
        for turn in range(2):
            requests = [request(f"{turn}/{i}", "pushed", PROMPT, i) for i in range(len(points))]
            finished = by_key(list(engine.run([*requests, request("p", "plain", PROMPT)], lambda _: GREEDY)))
            for i, scale in enumerate(asked["scales"]):
                (completion,) = finished[f"{turn}/{i}"].completions
                ids = [*PROMPT, *completion.token_ids][:-1]
                _, seen = reference(twin, ids, {site: lambda x, scale=scale: x + scale * vector})
                for s in streams:
                    worst = max(
                        worst, float(np.abs(completion.record.reads["stream", s].values["rows"] - seen[s]).max())
                    )
        return {"before": before, "after": engine.compiled(), "worst": worst, "moved": moved.numel()}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cache")
    out = {}
    for number, (name, asked) in enumerate(CHANGES.items()):
        own = folder / str(number)
        own.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.test_compile_cache", str(own), json.dumps(asked)],
            env={**os.environ, "VLLM_CACHE_ROOT": str(folder / "vllm")}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert answers, done.stderr[-4000:]
        said = [line[-300:] for line in done.stderr.splitlines() + done.stdout.splitlines() if "AOT" in line]
        out[name] = {**json.loads(answers[-1].removeprefix("ANSWER ")), "said": said}
    return out


def test_numbers_are_data_and_locations_are_not(told: dict[str, dict[str, Any]]) -> None:
    assert told["first"]["before"]["compiled"] > 0 and told["first"]["before"]["loaded"] == 0, told
    for name in ("again", "other numbers"):
        assert told[name]["before"]["loaded"] > 0 and told[name]["before"]["compiled"] == 0, told
    assert told["other location"]["before"]["loaded"] == 0 and told["other location"]["before"]["compiled"] > 0, told


@pytest.mark.parametrize("name", CHANGES)
def test_serving_compiles_and_captures_nothing(name: str, told: dict[str, dict[str, Any]]) -> None:
    assert told[name]["before"]["captured"] > 0
    assert told[name]["after"] == told[name]["before"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_from_the_cache_finds_its_tables(name: str, told: dict[str, dict[str, Any]]) -> None:
    # vLLM's attention multiplies float32 in TF32.
    assert told[name]["worst"] < 4e-3


if __name__ == "__main__":
    print("ANSWER " + json.dumps(child(Path(sys.argv[1]), json.loads(sys.argv[2]))))

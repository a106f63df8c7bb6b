"""Both engines where vLLM makes it hard: chunked prefill, preemption, another process, faults, bad starts."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engine.case import (  # noqa: E402
    LAYERS,
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
from vtaps.runtime.engine import Engine, EngineError  # noqa: E402
from vtaps.spec.vectors import draw  # noqa: E402

pytestmark = pytest.mark.engine

MODES = ("eager", "taps")
STREAMS = [f"resid_post[{i}]" for i in range(LAYERS)]
MID = "resid_post[1]"
# On CUDA vLLM's attention multiplies float32 in TF32.
TOLERANCE = 4e-3 if torch.cuda.is_available() else 2e-5
# A block of the KV cache holds 16 tokens on CUDA and 128 on a CPU; one of them is vLLM's own.
BLOCKS = 49 if torch.cuda.is_available() else 8
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def small_case(folder: Path, model: Path, **more: Any) -> tuple[dict[str, Any], Path]:
    return write_case(
        folder,
        model,
        edits={"add": {"verb": "add", "sites": [MID], "tokens": {"rows": "sampling"}}},
        reads={
            "stream": {"kind": "rows", "sites": STREAMS, "tokens": {"rows": "all"}},
            "mean": {"kind": "mean", "sites": [MID], "tokens": {"rows": "all"}},
        },
        vectors={"r": {"random": {"seed": 1, "norm": 6.0}}},
        overrides={"say": {"ids": [40, 41]}},
        metrics={"p": {"kind": "logprob", "ids": [7], "tokens": {"rows": "sampling"}}},
        arms={
            "look": arm(reads=["stream", "mean"], metrics=["p"]),
            "add": arm(use("add", MID, coefficient=1.5, vector="r"), reads=["stream", "mean"], metrics=["p"]),
            "forced": arm(overrides=[{"override": "say", "start": 3}], reads=["stream"]),
        },
        **more,
    )


def hold_against_hugging_face(finished: Any, twin: Any) -> None:
    r = torch.from_numpy(draw(1, 6.0, 1, 128))
    for key, f in finished.items():
        (completion,) = f.completions
        ids = [*f.request.prompt_token_ids, *completion.token_ids][:-1]
        first = len(f.request.prompt_token_ids) - 1

        def push(x: Any, first: int = first) -> Any:
            x[first:] += 1.5 * r
            return x

        logits, seen = reference(twin, ids, {MID: push} if f.request.arm == "add" else None)
        chosen = logits[first:].argmax(-1).tolist()
        if f.request.arm == "forced":
            chosen[3:5] = [40, 41]
            assert completion.record.overridden == (3, 4)
        assert list(completion.token_ids) == chosen, key
        for site in STREAMS:
            read = completion.record.reads["stream", site]
            assert read.positions.tolist() == list(range(len(ids))), key
            np.testing.assert_allclose(read.values["rows"], seen[site], atol=TOLERANCE, err_msg=f"{key} {site}")
        if f.request.arm != "forced":
            mean = completion.record.reads["mean", MID]
            assert mean.values["count"].tolist() == [len(ids)]
            np.testing.assert_allclose(mean.values["mean"][0], seen[MID].mean(0), atol=TOLERANCE)
            positions, values = completion.record.metrics["p"]
            logprob = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
            assert positions.tolist() == list(range(first, len(ids)))
            np.testing.assert_allclose(values, logprob[first:, 7], atol=TOLERANCE)
        assert completion.record.fired == ({"add": ((first, len(ids)),)} if f.request.arm == "add" else {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("vllm", "prompts", "new"),
    [
        # 16 tokens a step: every prompt but the shortest is prefilled in pieces, beside decoding neighbours.
        ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, (5, 40, 23, 70, 1), 7),
        # Six requests that need two blocks each, in a cache of seven: some are preempted and computed again.
        ({"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 6}, (120, 121, 122, 123, 124, 125), 20),
    ],
    ids=["chunked prefill", "preemption"],
)
def test_regimes(
    vllm: dict[str, Any], prompts: tuple[int, ...], new: int, mode: str, model: Path, tmp_path: Path
) -> None:
    lock, block = small_case(tmp_path, model, vllm=vllm, mode=mode)
    rng = np.random.default_rng(0)
    arms = ["look", "add", "forced"]
    requests = [request(f"r{i}", arms[i % 3], rng.integers(4, 260, size).tolist()) for i, size in enumerate(prompts)]
    with Engine(lock, tmp_path, block, tmp_path / "manifest") as engine:
        repeated: list[int] = []

        def watch(worker: Any) -> None:
            table = worker.vtaps_session.table
            original = table.step

            def step(batch: Any) -> Any:
                repeated.extend(batch.starts.tolist())
                return original(batch)

            table.step = step

        engine._frontend.llm.collective_rpc(watch)
        finished = by_key(list(engine.run(requests, lambda _: {
            "temperature": 0, "max_tokens": new, "ignore_eos": True,
        })))  # fmt: skip
    assert set(finished) == {r.key for r in requests}
    if "num_gpu_blocks_override" in vllm:
        assert repeated.count(0) > len(requests), "nothing was preempted: the test proves nothing"
    else:
        assert max(repeated) > 0 and any(0 < start < 70 and start % 16 == 0 for start in repeated)
    hold_against_hugging_face(finished, hugging_face(model))


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is not installed, child processes find its entry point beside a checkout."""
    paths = [str(ROOT)]
    if not any(e.name == "vtaps" for e in metadata.entry_points(group="vllm.general_plugins")):
        info = tmp_path / "path" / "vtaps_checkout-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vtaps-checkout\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvtaps = vtaps.runtime.plugin:register\n")
        paths.append(str(info.parent))
        monkeypatch.syspath_prepend(str(info.parent))  # a spawned process takes the path over
    if known := os.environ.get("PYTHONPATH"):
        paths.append(known)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.parametrize("mode", MODES)
def test_in_a_process_of_its_own(mode: str, model: Path, tmp_path: Path, plugin: None) -> None:
    lock, block = small_case(tmp_path, model, mode=mode)
    requests = [request(a, a, [9, 8, 7, 6]) for a in ("look", "add", "forced")]
    with Engine(lock, tmp_path, block, tmp_path / "manifest", in_process=False) as engine:
        assert engine.report["in_process"] is False and engine.report["mode"] == mode
        finished = by_key(list(engine.run(requests, lambda _: {
            "temperature": 0, "max_tokens": 6, "ignore_eos": True,
        })))  # fmt: skip
        n2 = list(engine.run([request("n2", "look", [9, 8])], lambda _: {
            "temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 4, "ignore_eos": True,
        }))  # fmt: skip
        # A stop string is seen where text is put together, a process away here: the engine computes on till then.
        ends = [request(f"s{i}", "forced", [9, 8, 7, 6 + i]) for i in range(4)]
        stopped = list(engine.run(ends, lambda _: {
            "temperature": 0, "max_tokens": 60, "ignore_eos": True, "stop": ["EF"],
        }))  # fmt: skip
    hold_against_hugging_face(finished, hugging_face(model))
    assert [c.index for c in n2[0].completions] == [0, 1]
    assert {f.completions[0].finish_reason for f in stopped} == {"stop"}
    for f in stopped:
        assert f.completions[0].token_ids[3:] == (40, 41), "E and F, and none behind them"
    hold_against_hugging_face(by_key(stopped), hugging_face(model))


@pytest.mark.parametrize(("in_process", "mode"), [(True, "eager"), (True, "taps"), (False, "taps")])
def test_a_fault_in_the_block_names_both_lines(
    in_process: bool, mode: str, model: Path, tmp_path: Path, plugin: None
) -> None:
    """What the block's statements are is asked once, when it is put into the model: nothing is served."""
    lock, block = small_case(tmp_path, model, broken=MID, mode=mode)
    source = block.read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "t.nothing()" in text)
    with pytest.raises(EngineError) as caught:
        Engine(lock, tmp_path, block, tmp_path / "manifest", in_process=in_process)
    assert caught.value.code == "VT607"
    assert f"case.block.py:{line} (case.yaml reads.broken), at {MID}: AttributeError" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        ("model", "VT607", "nowhere"),
        ("parallel", "VT503", "data_parallel_size"),
        ("length", "VT607", "max_model_len"),
        ("digest", "VT607", "is not the block that was locked"),
        ("structure", "VT607", "two compilations"),
        ("module", "VT607", "resid_post[1]: the model has no module model.layers.9"),
        ("input", "VT607", "z[1]: model.layers.1.self_attn.o_proj has no input x; it has input_"),
        ("width", "VT607", "vectors.r: r.npy is 3 wide; 128 is needed here (used at resid_post[1])"),
        ("memory", "VT607", "bytes for 8 requests and 512 tokens a step, and 1048576 are allowed"),
    ],
)
def test_a_bad_start_says_why(spoil: str, code: str, says: str, model: Path, tmp_path: Path) -> None:
    lock, block = small_case(tmp_path, model)
    if spoil == "model":
        lock["model"]["path"] = str(tmp_path / "nowhere")
    elif spoil == "parallel":
        lock["engine"]["vllm"]["data_parallel_size"] = 2
    elif spoil == "length":
        lock["engine"]["vllm"]["max_model_len"] = 100_000
    elif spoil == "digest":
        block.write_text(block.read_text() + "# changed\n")
    elif spoil == "structure":
        lock["block"]["structure"] = "sha256:other"
    elif spoil == "memory":
        lock, block = small_case(tmp_path, model, mode="taps", vllm={"max_num_batched_tokens": 512})
        lock["engine"]["tap_memory"] = 1 << 20
    elif spoil == "width":
        np.save(tmp_path / "r.npy", np.ones(3, np.float32))
        lock["vectors"]["r"] = {"file": "r.npy"}
    else:
        sites = dict(SITES)
        try:
            if spoil == "module":
                SITES[MID] = {**SITES[MID], "module": "model.layers.9"}
                lock, block = small_case(tmp_path / "b", model)
            else:
                SITES["z[1]"] = {**SITES["z[1]"], "input": "x"}
                reads = {"z": {"kind": "rows", "sites": ["z[1]"], "tokens": {"rows": "all"}}}
                lock, block = write_case(tmp_path / "b", model, reads=reads, arms={"a": arm(reads=["z"])})
        finally:
            SITES.update(sites)
    with pytest.raises(EngineError) as caught:
        Engine(lock, tmp_path, block, tmp_path / "manifest")
    assert caught.value.code == code
    assert says in caught.value.message and "\n" not in caught.value.message

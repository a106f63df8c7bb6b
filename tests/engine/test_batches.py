"""Who shares a batch with whom changes nothing: alone, in chunks, beside edited neighbours, beside NaN."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from examples.demo_model import CONTINUATION, PROMPT
from tests.engine.runs import CONTINUED, Run, demo_model, largest, python, requests_of, rounding, run_spec, serve
from tests.models import tiny

pytestmark = pytest.mark.engine

SITES = ("resid_post[0]", "resid_post[11]", "resid_post[20]", "resid_post[29]")
ARMS = ("base", "steered", "ablated", "patched")

SPEC = """
vtaps: 1
model: {path: MODEL, dtype: float32}
engine: {vllm: {max_model_len: 256, SCHEDULER}}
vectors:
  push: {file: push.safetensors, tensor: "layer_{layer}"}
reads:
  stream: {at: "resid_post[0, 11, 20, 29]", tokens: all}
  heads: {at: "z[15]", tokens: all, sees: after_edits}
  top: {at: "resid_post[20]", tokens: sampling, lens: {top: 5}}
  mean: {at: "resid_post[20]", tokens: all, mean_over: request}
edits:
  steer: {at: "resid_post[10, 14]", tokens: sampling, add: {vector: push, scale: 30.0}}
  ablate: {at: "z[15]", tokens: all, zero: {heads: [0, 4]}}
  patch: {at: "resid_mid[20]", tokens: {positions: [1, -1]}, set: {vector: push, scale: 50.0}}
prompts:
  sixteen: PROMPTS
arms:
  base: {reads: [stream, heads, top, mean]}
  steered: {edits: [steer], reads: [stream, heads, top, mean]}
  ablated: {edits: [ablate], reads: [stream, heads, top, mean]}
  patched: {edits: [patch], reads: [stream, heads, top, mean]}
sampling: {temperature: 0, max_tokens: 4, ignore_eos: true, logprobs: 1}
"""

PROMPTS = [
    "The capital of France is",
    "The capital of Japan is",
    "Water boils at a temperature of",
    "Paris, the capital of France, lies on the Seine. Berlin lies on the",
    "Once upon a time, in a village at the foot of a tall mountain, there lived an old clockmaker who had lost the key",
    "The opposite of hot is",
    "One, two, three, four, five, six,",
    "The three primary colours are red, yellow and",
    "def add(a, b):\n    return",
    "The author of Romeo and Juliet is",
    "A year has twelve months, and a week has seven",
    "The sun rises in the east and sets in the",
    "Dear Sir or Madam,",
    "The largest planet in our solar system, by far, both in mass and in diameter, is the gas giant",
    "She opened the door and saw",
    "In mathematics, the square root of a number x is a number y such that",
]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    def run(name: str, scheduler: str = "max_num_seqs: 64") -> Run:
        folder = tmp_path_factory.mktemp(name)
        push = np.random.default_rng(1).standard_normal((30, 576)).astype(np.float32)
        push /= np.linalg.norm(push, axis=1, keepdims=True)
        save_file({f"layer_{i}": push[i] for i in range(30)}, folder / "push.safetensors")
        prompts = json.dumps([{"id": str(i), "text": text} for i, text in enumerate(PROMPTS)])
        text = SPEC.replace("MODEL", str(demo_model())).replace("SCHEDULER", scheduler).replace("PROMPTS", prompts)
        return run_spec(text, folder)

    return run


@pytest.fixture(scope="module")
def batch(serving: Callable[..., Run]) -> Run:
    """Sixteen prompts × four arms, all alive at once."""
    run = serving("batch")
    assert len(run.rows) == 64
    return run


def assert_same(run: Run, other: Run) -> None:
    """The same tokens, and the same reads up to float32's rounding."""
    for arm in ARMS:
        theirs = other.cases(arm)
        for prompt, case in run.cases(arm).items():
            assert theirs[prompt].ids == case.ids, (arm, prompt)
            reached = np.zeros(case.rows, np.float32)
            for site in SITES:
                positions, rows = run.read("stream", case, site)
                assert positions == list(range(case.rows)) == other.read("stream", theirs[prompt], site)[0]
                reached = np.maximum(reached, np.abs(rows).max(-1))
                off = np.abs(rows - other.read("stream", theirs[prompt], site)[1]).max(-1)
                assert (off < rounding(reached)).all(), (arm, prompt, site, off.max())
            heads = [r.read("heads", c, "z[15]")[1] for r, c in ((run, case), (other, theirs[prompt]))]
            assert largest(*heads) < 1e-3
            sums = [r.read("top", c, SITES[2], "logsumexp")[1] for r, c in ((run, case), (other, theirs[prompt]))]
            assert largest(*sums) < 1e-3
            means = [r.read("mean", c, SITES[2], "mean")[1] for r, c in ((run, case), (other, theirs[prompt]))]
            assert largest(*means) < rounding(reached).max()


def test_one_at_a_time(serving: Callable[..., Run], batch: Run) -> None:
    assert_same(batch, serving("alone", "max_num_seqs: 1"))


def test_chunked_prefill(serving: Callable[..., Run], batch: Run) -> None:
    """Prompts of up to 25 tokens arrive sixteen rows a step, beside rows that are generated."""
    assert max(case.prompt for case in batch.cases("base").values()) > 16
    chunked = "max_num_batched_tokens: 16, max_num_seqs: 16, enable_chunked_prefill: true"
    assert_same(batch, serving("chunked", chunked))


@pytest.fixture(scope="module")
def others(batch: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The same batch on plain vLLM, and on the same block with nobody edited: two answers, and the latter's reads.
    Plain vLLM then continues the demo's prompt."""
    folder = tmp_path_factory.mktemp("others")
    plain = {"lock": batch.lock, "base": str(batch.result.path.parent), "requests": requests_of(batch.rows, batch.lock)}
    lock = json.loads(json.dumps(batch.lock))
    for arm in lock["arms"].values():
        for point in arm["points"]:
            point["edits"] = []
    block = {**plain, "lock": lock, "block": str(batch.result.path / lock["block"]["file"])}
    ids = batch.cases("base")["0"]
    demo = {"key": "demo", "ids": ids.ids[: ids.prompt], "sampling": {"temperature": 0, "max_tokens": 16}}
    answers = serve(folder, {**plain, "then": [demo]}, block)
    return answers[0], answers[1], np.load(folder / "reads-1.npz")


def test_plain_vllm_continues_the_demo_s_prompt_as_vtaps_does(others: tuple[Any, Any, Any]) -> None:
    """The other side of test_smollm2.py's first test."""
    assert PROMPTS[0] == PROMPT
    assert others[0]["demo"]["text"] == CONTINUATION and others[0]["demo"]["token_ids"] == list(CONTINUED)


def test_unedited_requests_are_bit_identical_to_plain_vllm(batch: Run, others: tuple[Any, Any, Any]) -> None:
    plain, unedited, _ = others
    changed = 0
    for row in batch.rows:
        case, told = batch.case(row), plain[row["request"]]
        if row["arm"] == "base":
            assert list(case.generated) == told["token_ids"] and case.text == told["text"]
            assert bits(case.logprobs) == bits(told["logprobs"])
        else:
            changed += bits(case.logprobs) != bits(told["logprobs"])
        # With nobody edited every request is plain vLLM's, whatever is read of it.
        assert unedited[row["request"]]["token_ids"] == told["token_ids"]
        assert bits(unedited[row["request"]]["logprobs"]) == bits(told["logprobs"])
    assert changed == 48, "an edited request went out as plain vLLM would have served it"


def test_reads_do_not_depend_on_edited_neighbours(batch: Run, others: tuple[Any, Any, Any]) -> None:
    reads = others[2]
    for prompt, case in batch.cases("base").items():
        for read, site in (*(("stream", site) for site in SITES), ("heads", "z[15]")):
            kept = reads[f"{case.request} {read} {site}"]
            assert bits(batch.read(read, case, site)[1]) == bits(kept), (prompt, site)


def bits(values: Any) -> bytes:
    return np.asarray(values, np.float32).tobytes()


# Rows that are not selected, on a model small enough for two engines in a moment

GATED = """
vtaps: 1
model: {path: MODEL, dtype: float32}
engine: {vllm: {max_model_len: 128}}
vectors:
  bad: {random: {seed: 1}}
reads:
  stream: {at: "resid_post[*]", tokens: all, sees: after_edits}
edits:
  first: {at: "resid_post[1]", tokens: {positions: [0]}, add: {vector: bad}}
  never: {at: ["resid_post[1]", "mlp_out[2]"], tokens: {steps: [6]}, set: {vector: bad}}
  nothing: {at: "resid_post[2]", tokens: all, add: {vector: bad}}
  unlisted: {at: "resid_post[0]", tokens: all, zero: {}}
prompts:
  four: [{id: a, ids: [40, 75, 222]}, {id: b, ids: [17, 98, 113, 201, 9]}, {id: c, ids: [60]}, {id: d, ids: [33, 71]}]
arms:
  base: {reads: [stream]}
  poisoned: {edits: [first], reads: [stream]}
  late: {edits: [never], reads: [stream]}
  off: {edits: [nothing], reads: [stream], sweep: {nothing.add.scale: [0, 1]}}
sampling: {temperature: 0, max_tokens: 8, ignore_eos: true, logprobs: 1}
"""


def test_a_row_that_is_not_selected_is_not_computed(tmp_path: Path) -> None:
    """NaN in the vectors of a poisoned neighbour, of an edit whose rows never come, and of one scaled by zero."""
    (tmp_path / "gated.yaml").write_text(GATED.replace("MODEL", str(tiny("llama"))), encoding="utf-8")
    python("-m", "vtaps", "compile", str(tmp_path / "gated.yaml"))
    lock = json.loads((tmp_path / "gated.lock.json").read_text(encoding="utf-8"))
    lock["edits"]["never"]["tokens"] = {"rows": "all", "steps": [[500, 500]]}  # `check` refuses a selector of no rows
    requests = [
        {"key": f"{arm} {number}", "arm": arm, "point": 0, "ids": ids, "sampling": lock["arms"][arm]["sampling"]}
        for number, ids in enumerate([[40, 75, 222], [17, 98, 113, 201, 9], [60], [33, 71]])
        for arm in ("base", "poisoned", "late", "off")
    ]
    block = str(tmp_path / "gated.block.py")
    job = {"lock": lock, "base": str(tmp_path), "block": block, "requests": requests}
    finite, nan = serve(tmp_path, job, {**job, "nan": ["bad"]})
    reads = [np.load(tmp_path / f"reads-{number}.npz") for number in (0, 1)]
    for request in requests:
        key = request["key"]
        one, other = finite[key], nan[key]
        streams = [[bits(r[f"{key} stream resid_post[{i}]"]) for i in range(4)] for r in reads]
        if request["arm"] == "poisoned":
            assert np.isnan(reads[1][f"{key} stream resid_post[3]"]).any(), (
                "the vector was not NaN: this proves nothing"
            )
            assert other["fired"] == {"first": [[0, 1]]}
            continue
        assert other["fired"] == {}
        assert streams[0] == streams[1]
        assert one["token_ids"] == other["token_ids"]
        assert bits(one["logprobs"]) == bits(other["logprobs"])

"""Who shares a batch with whom changes nothing: alone, in chunks, beside edited neighbours, beside NaN."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from examples.demo_model import CONTINUATION, PROMPT
from tests.engine.runs import CONTINUED, demo_model, largest, python, rounding, serve
from tests.models import tiny

pytestmark = pytest.mark.engine

SITES = ("resid_post[0]", "resid_post[11]", "resid_post[20]", "resid_post[29]")
ARMS = ("base", "steered", "ablated", "patched")
COMPILED = 1e-4
"""Largest difference of a log probability between vLLM without compilation and the taps engine with nobody edited."""

SPEC = """
vtaps: 1
model: {path: MODEL, dtype: float32}
engine: {mode: MODE, vllm: {max_model_len: 256, SCHEDULER}}
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


SHARED = "max_num_seqs: 64, max_num_batched_tokens: 512"
CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "enable_chunked_prefill": True}

FIELDS = {"stream": "rows", "heads": "rows", "top": "logsumexp", "mean": "mean"}


@dataclass(frozen=True)
class Served:
    """What the engines of one mode gave.

    Keys are ``STAGE/ARM/PROMPT``. The stages: ``batch``, sixteen prompts × four arms, all alive at once; ``nobody``,
    the same batch with every request on the arm without edits; ``alone``, those of four prompts one after another;
    ``chunked``, the batch at sixteen tokens a step, on the eager engine. ``plain`` is vLLM without vtaps and without
    compilation, serving the batch, beside the eager engine.
    """

    mode: str
    answers: dict[str, Any]
    plain: dict[str, Any]
    reads: dict[str, Any]

    def read(self, stage: str, arm: str, prompt: str, read: str, site: str) -> tuple[list[int], Any]:
        key = f"{stage}/{arm}/{prompt} {read} {site}"
        return self.reads[f"{key} positions"].tolist(), self.reads[f"{key} {FIELDS[read]}"]


ALONE = (0, 3, 4, 8)
"""Four of the prompts, the longest among them."""


def requests(stage: str, prompts: Sequence[Sequence[int]], lock: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "key": f"{stage}/{arm}/{number}",
            "arm": "base" if stage == "nobody" else arm,
            "point": 0,
            "ids": ids,
            "sampling": lock["arms"][arm]["sampling"],
        }
        for arm in ARMS
        for number, ids in enumerate(prompts)
        if stage != "alone" or number in ALONE
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


@pytest.fixture(scope="module")
def modes(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """The engines of a mode are started once, when they are asked for."""

    @functools.cache
    def serving(mode: str) -> Served:
        folder = tmp_path_factory.mktemp(mode)
        push = np.random.default_rng(1).standard_normal((30, 576)).astype(np.float32)
        push /= np.linalg.norm(push, axis=1, keepdims=True)
        save_file({f"layer_{i}": push[i] for i in range(30)}, folder / "push.safetensors")
        texts = json.dumps([{"id": str(i), "text": text} for i, text in enumerate(PROMPTS)])
        spec = SPEC.replace("MODEL", str(demo_model())).replace("MODE", mode).replace("SCHEDULER", SHARED)
        (folder / "spec.yaml").write_text(spec.replace("PROMPTS", texts), encoding="utf-8")
        python("-m", "vtaps", "compile", str(folder / "spec.yaml"))
        lock = json.loads((folder / "spec.lock.json").read_text(encoding="utf-8"))
        small = json.loads(json.dumps(lock))
        small["engine"]["vllm"].update(CHUNKED)
        of = {stage: requests(stage, prompts, lock) for stage in ("batch", "nobody", "alone", "chunked")}
        base = {"lock": lock, "base": str(folder), "block": str(folder / "spec.block.py")}
        demo = {"key": "demo", "ids": prompts[0], "sampling": {"temperature": 0, "max_tokens": 16}}
        jobs: list[dict[str, Any]] = [{**base, "requests": of["batch"], "then": of["nobody"], "alone": of["alone"]}]
        if mode == "eager":  # a start of the taps engine takes minutes: test_regimes.py has its chunks, of a tiny model
            jobs.append({**base, "lock": small, "requests": of["chunked"]})
            jobs.append({"lock": lock, "base": str(folder), "requests": of["batch"], "then": [demo]})
        shared, *more = serve(folder, *jobs)
        assert json.loads((folder / "engine-0.json").read_text(encoding="utf-8"))["report"]["mode"] == mode
        reads = dict(np.load(folder / "reads-0.npz"))
        if not more:
            return Served(mode, shared, {}, reads)
        return Served(mode, {**shared, **more[0]}, more[1], {**reads, **np.load(folder / "reads-1.npz")})

    return serving


@pytest.fixture(scope="module", params=["eager", "taps"])
def served(request: pytest.FixtureRequest, modes: Callable[[str], Served]) -> Served:
    return modes(request.param)


def assert_same(
    one: Served, stage: str, other: Served, other_stage: str, prompts: list[list[int]], some: Sequence[int] = ()
) -> None:
    """The same tokens, and the same reads up to float32's rounding, of all prompts or of some."""
    for arm in ARMS:
        for number in some or range(len(prompts)):
            ids, prompt = prompts[number], str(number)
            found, wanted = one.answers[f"{stage}/{arm}/{prompt}"], other.answers[f"{other_stage}/{arm}/{prompt}"]
            assert found["token_ids"] == wanted["token_ids"], (arm, prompt)
            assert found["fired"] == wanted["fired"], (arm, prompt)
            rows = list(range(len(ids) + len(found["token_ids"]) - 1))
            reached = np.zeros(len(rows), np.float32)

            def both(read: str, site: str, arm: str = arm, prompt: str = prompt) -> tuple[Any, Any]:
                positions, values = one.read(stage, arm, prompt, read, site)
                other_positions, other_values = other.read(other_stage, arm, prompt, read, site)
                assert positions == other_positions
                return values, other_values

            for site in SITES:
                values, others = both("stream", site)
                assert one.read(stage, arm, prompt, "stream", site)[0] == rows
                reached = np.maximum(reached, np.abs(values).max(-1))
                off = np.abs(values - others).max(-1)
                assert (off < rounding(reached)).all(), (arm, prompt, site, off.max())
            assert largest(*both("heads", "z[15]")) < 1e-3
            assert largest(*both("top", SITES[2])) < 1e-3
            assert largest(*both("mean", SITES[2])) < rounding(reached).max()


def test_one_at_a_time(served: Served, prompts: list[list[int]]) -> None:
    assert max(map(len, prompts)) == len(prompts[ALONE[2]])
    assert_same(served, "batch", served, "alone", prompts, ALONE)


def test_chunked_prefill(modes: Callable[[str], Served], prompts: list[list[int]]) -> None:
    """Prompts of up to 27 tokens arrive sixteen rows a step, beside rows that are generated."""
    assert max(map(len, prompts)) > 16
    assert_same(modes("eager"), "batch", modes("eager"), "chunked", prompts)


def test_taps_equal_eager(modes: Callable[[str], Served], prompts: list[list[int]]) -> None:
    """The same requests through both engines: the same tokens, streams apart by rounding."""
    assert_same(modes("taps"), "batch", modes("eager"), "batch", prompts)


def test_plain_vllm_continues_the_demo_s_prompt_as_vtaps_does(modes: Callable[[str], Served]) -> None:
    """The other side of test_smollm2.py's first test."""
    told = modes("eager").plain["demo"]
    assert PROMPTS[0] == PROMPT
    assert told["text"] == CONTINUATION and told["token_ids"] == list(CONTINUED)


def test_unedited_requests_are_those_of_plain_vllm(served: Served, modes: Callable[[str], Served]) -> None:
    """On one schedule, against vLLM without compilation. The eager engine's are the same bits; the taps engine's have
    the same tokens, and log probabilities apart by rounding. Compiled vLLM is in test_runtime.py."""
    changed = 0
    for key, wanted in modes("eager").plain.items():
        if key == "demo":
            continue
        arm, nobody = key.split("/")[1], served.answers[key.replace("batch", "nobody")]
        found = [nobody, served.answers[key]] if arm == "base" else [nobody]
        for told in found:
            assert told["token_ids"] == wanted["token_ids"] and told["text"] == wanted["text"]
            if served.mode == "eager":
                assert bits(told["logprobs"]) == bits(wanted["logprobs"])
            else:
                assert largest(told["logprobs"], wanted["logprobs"]) < COMPILED
        if arm != "base":
            assert nobody["fired"] == {} and served.answers[key]["fired"] != {}
            changed += largest(served.answers[key]["logprobs"][:1], wanted["logprobs"][:1]) > COMPILED
    assert changed == 48, "an edited request went out as plain vLLM would have served it"


def test_edited_neighbours_change_no_bit(served: Served, prompts: list[list[int]]) -> None:
    """Requests without edits, on one schedule: their tokens, log probabilities and reads are those of the batch in
    which nobody is edited."""
    for number in range(len(prompts)):
        found, wanted = (served.answers[f"{stage}/base/{number}"] for stage in ("batch", "nobody"))
        assert found["token_ids"] == wanted["token_ids"]
        assert bits(found["logprobs"]) == bits(wanted["logprobs"])
        for read, site in (*(("stream", site) for site in SITES), ("heads", "z[15]")):
            kept = [served.read(stage, "base", str(number), read, site)[1] for stage in ("batch", "nobody")]
            assert bits(kept[0]) == bits(kept[1]), (number, site)


def bits(values: Any) -> bytes:
    return np.asarray(values, np.float32).tobytes()


# Rows that are not selected, on a model small enough for two engines in a moment

GATED = """
vtaps: 1
model: {path: MODEL, dtype: float32}
engine: {mode: MODE, vllm: {max_model_len: 128, max_num_batched_tokens: 256}}
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


@pytest.mark.parametrize("mode", ["eager", "taps"])
def test_a_row_that_is_not_selected_is_not_computed(mode: str, tmp_path: Path) -> None:
    """NaN in the vectors of a poisoned neighbour, of an edit whose rows never come, and of one scaled by zero."""
    spec = GATED.replace("MODEL", str(tiny("llama"))).replace("MODE", mode)
    (tmp_path / "gated.yaml").write_text(spec, encoding="utf-8")
    python("-m", "vtaps", "compile", str(tmp_path / "gated.yaml"))
    lock = json.loads((tmp_path / "gated.lock.json").read_text(encoding="utf-8"))
    lock["edits"]["never"]["tokens"] = {"rows": "all", "steps": [[500, 500]]}  # `check` refuses a selector of no rows
    asked = [
        {"key": f"{arm} {number}", "arm": arm, "point": 0, "ids": ids, "sampling": lock["arms"][arm]["sampling"]}
        for number, ids in enumerate([[40, 75, 222], [17, 98, 113, 201, 9], [60], [33, 71]])
        for arm in ("base", "poisoned", "late", "off")
    ]
    block = str(tmp_path / "gated.block.py")
    job = {"lock": lock, "base": str(tmp_path), "block": block, "requests": asked}
    finite, nan = serve(tmp_path, job, {**job, "nan": ["bad"]})
    reads = [np.load(tmp_path / f"reads-{number}.npz") for number in (0, 1)]
    for request in asked:
        key = request["key"]
        one, other = finite[key], nan[key]
        streams = [[bits(r[f"{key} stream resid_post[{i}] rows"]) for i in range(4)] for r in reads]
        if request["arm"] == "poisoned":
            assert np.isnan(reads[1][f"{key} stream resid_post[3] rows"]).any(), (
                "the vector was not NaN: this proves nothing"
            )
            assert other["fired"] == {"first": [[0, 1]]}
            continue
        assert other["fired"] == {}
        assert streams[0] == streams[1]
        assert one["token_ids"] == other["token_ids"]
        assert bits(one["logprobs"]) == bits(other["logprobs"])

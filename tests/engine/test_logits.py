"""Edits and reads at ``logits`` and reads of ``samples``, from a spec's text to the files of its run, on both engines.

All arms share batches with plain requests, and prompts come in pieces.

The reference is Hugging Face's logits of the same tokens, edited here in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engine.case import ON_GPU_YAML, VOCAB, hugging_face, reference, tiny_llama  # noqa: E402
from tests.engine.runs import Case, Run, run_spec  # noqa: E402
from vtaps.spec.vectors import draw  # noqa: E402

pytestmark = pytest.mark.engine

# On CUDA vLLM's attention multiplies float32 in TF32.
TOLERANCE = 4e-3 if torch.cuda.is_available() else 4e-5
LENGTHS = {"five": 5, "chunks": 37, "one": 1, "some": 18}
SPEC = """vtaps: 1
model: {{path: {model}, dtype: float32}}
engine:
  mode: {mode}
  vllm: {{max_model_len: 128, max_num_seqs: 8, max_num_batched_tokens: 24, kv_cache_memory_bytes: 67108864{on_gpu}}}
vectors:
  tilt: {{random: {{seed: 7, norm: 30.0}}}}
reads:
  own: {{at: logits, tokens: sampling, sees: before_edits}}
  made: {{at: logits, tokens: sampling, sees: after_edits}}
  top: {{at: ["resid_post[-1]", logits], tokens: sampling, sees: after_edits, lens: {{top: 5}}}}
  some: {{at: logits, tokens: {{steps: [0..2]}}, sees: after_edits, lens: {{ids: ["a", 17]}}}}
  said: {{at: samples, tokens: sampling}}
edits:
  sharp: {{at: logits, tokens: sampling, scale: {{by: 2}}}}
  more: {{at: logits, tokens: sampling, add: {{value: 2.5, ids: ["a", 200]}}}}
  late: {{at: logits, tokens: {{steps: [2..3]}}, add: {{value: 9, ids: ["b"]}}}}
  tilted: {{at: logits, tokens: generated, add: {{vector: tilt, scale: 1.5, dims: [4..259]}}}}
  low: {{at: logits, tokens: sampling, set: {{value: -inf, dims: [0..159]}}}}
  few: {{at: logits, tokens: sampling, set: {{value: -inf, dims: [0..99, 103..319]}}}}
overrides:
  say: {{start: 1, ids: [50, 60]}}
metrics:
  a: {{logprob: "a", tokens: sampling}}
  two: {{logit_diff: ["b", 200], tokens: sampling}}
  place: {{rank: 200, tokens: {{steps: [1..4]}}}}
prompts:
  all: {prompts}
arms:
  plain: {{}}
  base: {{reads: [own, top, some, said], metrics: [a, two, place]}}
  more:
    edits: [more]
    reads: [own, made, top, some, said]
    metrics: [a, two, place]
    sweep: {{more.add.value: [0, 2.5, -3]}}
  low: {{edits: [low], reads: [made, top, some, said], metrics: [a, two, place]}}
  all: {{edits: [sharp, more, late, tilted, low], reads: [own, made, top, some, said], metrics: [a, two, place]}}
  few: {{edits: [tilted, few], reads: [top], metrics: [a], sweep: {{few.on: [true, false]}}}}
  forced: {{edits: [low], reads: [made, said], overrides: [say], metrics: [a]}}
  warm: {{edits: [sharp], reads: [said], sampling: {{temperature: 1.0, n: 3}}}}
  hot: {{edits: [low], reads: [made, said], metrics: [a], sampling: {{temperature: 2.0, n: 2}}}}
sampling: {{temperature: 0, max_tokens: 6, ignore_eos: true, logprobs: 0}}
"""
A, B = 68, 69
"""The tokens of "a" and "b"."""
SAID = {1: 50, 2: 60}
LOW, FEW = slice(0, 160), (100, 101, 102)
Floats = np.ndarray[Any, Any]


def edited(case: Case, row: dict[str, Any], own: Floats) -> Floats:
    """``own`` ``[steps, vocabulary]``, Hugging Face's logits of the sampled rows, after the edits of the arm."""
    x = own.astype(np.float64)
    steps = np.arange(len(x))
    arm = row["arm"]
    if arm in ("all", "warm"):
        x = x * 2
    if arm in ("more", "all"):
        by = row["more.add.value"] if arm == "more" else 2.5
        x[:, [A, 200]] += by
    if arm == "all":
        x[(steps >= 2) & (steps <= 3), B] += 9
    if arm in ("all", "few"):
        x[1:, 4:260] += 1.5 * draw(7, 30.0, None, VOCAB).astype(np.float64)[4:260]
    if arm in ("low", "all", "forced", "hot"):
        x[:, LOW] = -np.inf
    if arm == "few" and row["few.on"]:
        x[:, np.setdiff1d(np.arange(VOCAB), FEW)] = -np.inf
    return x


def log_softmax(x: Floats) -> Floats:
    top = x.max(-1, keepdims=True)
    out: Floats = x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["eager", "taps"])
def run(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = np.random.default_rng(3)
    said = ", ".join(f"{{id: {name}, ids: {rng.integers(4, 260, size).tolist()}}}" for name, size in LENGTHS.items())
    text = SPEC.format(on_gpu=ON_GPU_YAML, model=model, mode=request.param, prompts=f"[{said}]")
    done = run_spec(text, tmp_path_factory.mktemp(f"logits-{request.param}"))
    modes = {name: site["mode"] for name, site in done.lock["sites"].items()}
    assert modes["logits"] == ("hook" if request.param == "taps" else "eager")
    assert modes["resid_post[3]"] == ("recorded" if request.param == "taps" else "eager")
    return done


@pytest.fixture(scope="module")
def own(model: Path) -> Callable[[Case], Floats]:
    twin = hugging_face(model)
    known: dict[tuple[int, ...], Floats] = {}

    def of(case: Case) -> Floats:
        if case.fed not in known:
            known[case.fed] = reference(twin, case.fed)[0][case.prompt - 1 :]
        return known[case.fed]

    return of


def completions(run: Run) -> Iterator[tuple[dict[str, Any], Case]]:
    for row in run.rows:
        yield row, run.case(row)


def test_what_is_sampled_is_what_the_edited_logits_say(run: Run, own: Callable[[Case], Floats]) -> None:
    """Tokens, vLLM's logprobs and metrics of every completion, in batches shared by all arms."""
    changed = set()
    for row, case in completions(run):
        x = edited(case, row, own(case))
        sampling = run.lock["arms"][row["arm"]]["sampling"]
        forced = SAID if row["arm"] == "forced" else {}
        assert [case.generated[s] for s in forced] == list(forced.values())
        where = (row["arm"], row["prompt"], row["completion"])
        if sampling["temperature"] == 0:
            best = x.argmax(-1)
            assert [t for s, t in enumerate(case.generated) if s not in forced] == [
                t for s, t in enumerate(best.tolist()) if s not in forced
            ], where
            changed |= {row["arm"]} if (best != own(case).argmax(-1)).any() else set()
        logprobs = log_softmax(x)
        wanted = logprobs[np.arange(len(x)), case.generated]
        np.testing.assert_allclose(case.logprobs, wanted, atol=20 * TOLERANCE, err_msg=str(where))
        if row["arm"] not in ("plain", "warm"):
            positions, found = run.metric("a", case)
            assert positions == list(range(case.prompt - 1, case.rows))
            np.testing.assert_allclose(found, logprobs[:, A], atol=20 * TOLERANCE, err_msg=str(where))
        if row["arm"] in ("base", "more"):
            np.testing.assert_allclose(run.metric("two", case)[1], x[:, B] - x[:, 200], atol=20 * TOLERANCE)
            # Logits that are as near as the engine's are to Hugging Face's may stand either way.
            place, logit = np.array(run.metric("place", case)[1]), x[1:5, 200:201]
            assert ((x[1:5] > logit + 10 * TOLERANCE).sum(-1) <= place).all()
            assert (place < (x[1:5] > logit - 10 * TOLERANCE).sum(-1)).all()
    # A check that could not fail would pass on edits that do nothing.
    assert changed == {"more", "low", "all", "few", "forced"}


def test_a_banned_token_is_never_sampled(run: Run) -> None:
    seen = {arm: {t for row, case in completions(run) if row["arm"] == arm for t in case.generated} for arm in
            ("low", "all", "hot", "base")}  # fmt: skip
    assert all(min(seen[arm]) >= LOW.stop for arm in ("low", "all", "hot")) and min(seen["base"]) < LOW.stop
    few = {t for row, case in completions(run) if row["arm"] == "few" and row["few.on"] for t in case.generated}
    assert few <= set(FEW)
    # An override puts what it says: it replaces what was sampled.
    assert all(token < LOW.stop for token in SAID.values())


def test_reads_of_logits(run: Run, own: Callable[[Case], Floats]) -> None:
    for row, case in completions(run):
        reads = run.lock["arms"][row["arm"]]["reads"]
        before, after = own(case), edited(case, row, own(case))
        rows = list(range(case.prompt - 1, case.rows))
        for name, wanted in (("own", before), ("made", after)):
            if name in reads:
                positions, found = run.read(name, case, "logits")
                assert positions == rows
                np.testing.assert_allclose(found, wanted, atol=TOLERANCE * 10)
        if "top" in reads:
            positions, ids = run.read("top", case, "logits", "ids")
            logits, total = (run.read("top", case, "logits", f)[1] for f in ("logits", "logsumexp"))
            assert positions == rows
            np.testing.assert_allclose(logits, -np.sort(-after, axis=-1)[:, :5], atol=TOLERANCE * 10)
            np.testing.assert_allclose(logits, np.take_along_axis(after, ids.astype(int), 1), atol=TOLERANCE * 10)
            likely = np.take_along_axis(log_softmax(after), ids.astype(int), 1)
            np.testing.assert_allclose(logits - total[:, None], likely, atol=20 * TOLERANCE)
            # The lens of the last layer is the model's own answer, before the edits.
            lens = run.read("top", case, "resid_post[3]", "logits")[1]
            np.testing.assert_allclose(lens, -np.sort(-before, axis=-1)[:, :5], atol=TOLERANCE * 10)
        if "some" in reads:
            positions, found = run.read("some", case, "logits", "logits")
            assert positions == rows[:3] and (run.read("some", case, "logits", "ids")[1] == [A, 17]).all()
            np.testing.assert_allclose(found, after[:3, [A, 17]], atol=TOLERANCE * 10)


def test_reads_of_samples_are_the_tokens_that_went_out(run: Run) -> None:
    looked = 0
    for row, case in completions(run):
        if "said" in run.lock["arms"][row["arm"]]["reads"]:
            positions, found = run.read("said", case, "samples")
            assert positions == list(range(case.prompt - 1, case.rows))
            assert found.dtype == np.int32 and found[:, 0].tolist() == list(case.generated)
            looked += 1
    assert looked == len(LENGTHS) * (1 + 3 + 1 + 1 + 1 + 3 + 2)


def test_neighbours_are_left_alone(run: Run) -> None:
    tokens: dict[str, dict[Any, Any]] = {}
    for row, case in completions(run):
        key = row["prompt"], row["completion"]
        if row.get("more.add.value") in (None, 0):
            tokens.setdefault(row["arm"], {})[key] = case.generated
    assert len(set(tokens["warm"].values())) > len(LENGTHS)
    assert tokens["plain"] == tokens["base"] == tokens["more"]


def test_every_edit_fires_where_it_should(run: Run) -> None:
    fired = 0
    for row in run.rows:
        for name in run.lock["edits"]:
            if row.get(f"expected.{name}") is not None:
                assert row[f"fired.{name}"] == row[f"expected.{name}"], (row["arm"], name)
                fired += row[f"fired.{name}"]
    assert fired
    assert not run.result.info.get("findings")

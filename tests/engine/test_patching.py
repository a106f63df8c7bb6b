"""Rows of one arm set in another, on both engines, against a Hugging Face forward with the same rows set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engine.case import HEAD_DIM, LAYERS, VOCAB, tiny_llama  # noqa: E402
from tests.engine.runs import Run, run_spec  # noqa: E402
from tests.engine.twin import Change, Edit, Seen, Twin  # noqa: E402

pytestmark = pytest.mark.engine

RNG = np.random.default_rng(3)
LENGTHS = {"a": 9, "b": 4, "c": 1}
IDS = {
    group: {name: RNG.integers(4, 260, size).tolist() for name, size in LENGTHS.items()}
    for group in ("clean", "corrupted")
}
NEW = 4
HEADS = (1, 2)
ONE, OTHER = 7, 12

# Fewer tokens a step than a prompt has: a prompt comes in chunks, one of them of a single row.
SPEC = """
vtaps: 1
model: {{path: {model}, dtype: float32}}
engine: {{mode: {mode}, vllm: {{max_model_len: 64, max_num_seqs: 4, max_num_batched_tokens: 8}}}}
reads:
  stream: {{at: "resid_post[*]", tokens: all, sees: after_edits}}
  heads:  {{at: ["z[1]", "resid_post[2]"], tokens: prompt, sees: after_edits}}
edits:
  cell:   {{at: "resid_post[*]", tokens: prompt, set: {{rows: clean.stream}}}}
  swap:   {{at: "z[1]", tokens: {{rows: prompt, positions: [1..3, -1]}}, set: {{rows: clean.heads, heads: [1, 2]}}}}
  both:   {{at: ["z[1]", "resid_post[2]"], tokens: {{positions: [-1]}}, set: {{rows: swapped.heads}}}}
metrics:
  diff: {{logit_diff: [{one}, {other}], tokens: {{steps: [0]}}}}
prompts:
{prompts}
arms:
  again:   {{prompts: [corrupted], edits: [both], reads: [stream], metrics: [diff]}}
  grid:    {{prompts: [corrupted], edits: [cell], metrics: [diff], sweep: {{cell.at: each, cell.tokens: each}}, sampling: {{max_tokens: 1}}}}
  swapped: {{prompts: [corrupted], edits: [swap], reads: [stream, heads], metrics: [diff]}}
  clean:   {{prompts: [clean], reads: [stream, heads], metrics: [diff]}}
  base:    {{prompts: [corrupted], reads: [stream], metrics: [diff]}}
sampling: {{max_tokens: {new}, ignore_eos: true, logprobs: 0}}
"""  # noqa: E501
TOLERANCE = 2e-3 if torch.cuda.is_available() else 2e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def twin(model: Path) -> Twin:
    return Twin(model)


@pytest.fixture(scope="module", params=["eager", "taps"])
def run(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    prompts = "\n".join(
        f"  {group}: [{', '.join(f'{{id: {name}, ids: {ids}}}' for name, ids in items.items())}]"
        for group, items in IDS.items()
    )
    text = SPEC.format(model=model, mode=request.param, prompts=prompts, one=ONE, other=OTHER, new=NEW)
    return run_spec(text, tmp_path_factory.mktemp("patching"))


def put(rows: np.ndarray, heads: Sequence[int] | None = None) -> Change:
    """Set rows, or some heads of them."""

    def change(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for h in heads if heads is not None else [None]:
            cut = slice(None) if h is None else slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
            out[:, cut] = torch.from_numpy(rows)[:, cut]
        return out

    return change


def swap_of(prompt: int) -> list[int]:
    return sorted({p for p in (1, 2, 3, prompt - 1) if 0 <= p < prompt})


def edits_of(arm: str, name: str, clean: Seen, swapped: Seen | None) -> list[Edit]:
    size = LENGTHS[name]
    if arm == "swapped":
        rows = swap_of(size)
        return [Edit("z[1]", rows, put(clean.values["z[1]"][rows], HEADS))]
    if arm == "again":
        assert swapped is not None
        last = [size - 1]
        return [Edit(at, last, put(swapped.values[at][last])) for at in ("z[1]", "resid_post[2]")]
    return []


def test_rows_fire_as_expected(run: Run) -> None:
    for row in run.rows:
        for edit in ("cell", "swap", "both"):
            assert row[f"fired.{edit}"] == row[f"expected.{edit}"], row["request"]
    assert {r["fired.cell"] for r in run.rows if r["arm"] == "grid"} == {1}


def test_every_layer_and_position_of_the_grid(run: Run, twin: Twin) -> None:
    rows = [r for r in run.rows if r["arm"] == "grid"]
    assert len(rows) == LAYERS * sum(LENGTHS.values())
    moved = 0.0
    for row in rows:
        name, at, position = row["prompt"], row["cell.at"], row["cell.tokens"]
        clean = twin.forward(IDS["clean"][name])
        seen = twin.forward(IDS["corrupted"][name], [Edit(at, [position], put(clean.values[at][[position]]))])
        wanted = float(seen.logits[-1, ONE] - seen.logits[-1, OTHER])
        [_], [found] = run.metric("diff", run.case(row))
        assert abs(found - wanted) < TOLERANCE * VOCAB**0.5, (name, at, position)
        base = twin.forward(IDS["corrupted"][name]).logits[-1]
        moved = max(moved, abs(wanted - float(base[ONE] - base[OTHER])))
    assert moved > 0.1, "the rows make no difference"


@pytest.mark.parametrize("arm", ["clean", "base", "swapped", "again"])
def test_streams_and_tokens(run: Run, twin: Twin, arm: str) -> None:
    """``again`` sets what ``swapped`` kept, which set what ``clean`` kept; all of them go on for a few tokens."""
    for name, case in run.cases(arm).items():
        clean = twin.forward(IDS["clean"][name])
        swapped = twin.forward(IDS["corrupted"][name], edits_of("swapped", name, clean, None))
        seen = twin.forward(case.fed, edits_of(arm, name, clean, swapped))
        assert case.generated == seen.greedy(case.prompt)
        for layer in range(LAYERS):
            positions, found = run.read("stream", case, f"resid_post[{layer}]")
            assert positions == list(range(case.rows))
            np.testing.assert_allclose(found, seen.values[f"resid_post[{layer}]"], atol=TOLERANCE)


def test_what_was_set_is_what_was_kept_to_the_bit(run: Run) -> None:
    for name, case in run.cases("again").items():
        _, put_there = run.read("stream", case, "resid_post[2]")
        _, kept = run.read("heads", run.cases("swapped")[name], "resid_post[2]")
        np.testing.assert_array_equal(put_there[case.prompt - 1], kept[-1])

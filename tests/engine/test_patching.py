"""Rows of one arm set in another, on both engines, against a Hugging Face forward with the same rows set by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from safetensors.numpy import load_file  # noqa: E402

from tests.engine.case import HEAD_DIM, LAYERS, ON_GPU_YAML, VOCAB, WIDTH, tiny_llama  # noqa: E402
from tests.engine.runs import Run, run_spec  # noqa: E402
from tests.engine.twin import Change, Edit, Seen, Twin  # noqa: E402
from vtaps.spec.vectors import draw  # noqa: E402

pytestmark = pytest.mark.engine

RNG = np.random.default_rng(3)
LENGTHS = {"a": 9, "b": 4, "c": 1}
IDS = {
    group: {name: RNG.integers(4, 260, size).tolist() for name, size in LENGTHS.items()}
    for group in ("clean", "corrupted")
}
LONE = RNG.integers(4, 260, 6).tolist()
NEW = 4
HEADS = (1, 2)
ONE, OTHER = 7, 12

# Fewer tokens a step than a prompt has: a prompt comes in chunks, one of them of a single row.
SPEC = """
vtaps: 1
model: {{path: {model}, dtype: float32}}
engine: {{mode: {mode}, vllm: {{max_model_len: 64, max_num_seqs: 4, max_num_batched_tokens: 8{on_gpu}}}}}
reads:
  stream: {{at: "resid_post[*]", tokens: all, sees: after_edits}}
  heads:  {{at: ["z[1]", "resid_post[2]"], tokens: prompt, sees: after_edits}}
  mu:     {{at: "resid_post[1, 2]", tokens: all, mean_over: run}}
  own:    {{at: "resid_post[1]", tokens: prompt, mean_over: request}}
  dots:   {{at: "resid_post[2]", tokens: prompt, project: {{vectors: [between]}}}}
vectors:
  whole:   {{read: clean.mu}}
  between: {{read: clean.mu, minus: base.mu, norm: 2.0}}
  seen:    {{random: {{seed: 1, norm: 1.0}}}}
  single:  {{read: alone.own}}
gates:
  there:  {{at: "resid_post[0]", tokens: all, project: seen, above: 0.0, holds: row}}
edits:
  some:   {{at: "resid_post[1, 2]", tokens: prompt, set: {{rows: clean.stream}}, when: there}}
  push:   {{at: "resid_post[1, 2]", tokens: all, add: {{vector: whole, scale: 0.5}}}}
  out:    {{at: "resid_post[2]", tokens: prompt, project_out: {{vectors: [between]}}}}
  fill:   {{at: "resid_post[1]", tokens: {{positions: [0]}}, set: {{vector: single}}}}
  cell:   {{at: "resid_post[*]", tokens: prompt, set: {{rows: clean.stream}}}}
  swap:   {{at: "z[1]", tokens: {{rows: prompt, positions: [1..3, -1]}}, set: {{rows: clean.heads, heads: [1, 2]}}}}
  both:   {{at: ["z[1]", "resid_post[2]"], tokens: {{positions: [-1]}}, set: {{rows: swapped.heads}}}}
metrics:
  diff: {{logit_diff: [{one}, {other}], tokens: {{steps: [0]}}, normalize: {{one: clean, zero: base}}}}
prompts:
{prompts}
  lone: [{{id: c, ids: {lone}}}]
arms:
  again:   {{prompts: [corrupted], edits: [both], reads: [stream], metrics: [diff]}}
  grid:    {{prompts: [corrupted], edits: [cell], metrics: [diff], sweep: {{cell.at: each, cell.tokens: each}}, sampling: {{max_tokens: 1}}}}
  swapped: {{prompts: [corrupted], edits: [swap], reads: [stream, heads], metrics: [diff]}}
  clean:   {{prompts: [clean], reads: [stream, heads, mu], metrics: [diff]}}
  base:    {{prompts: [corrupted], reads: [stream, mu], metrics: [diff]}}
  some:    {{prompts: [corrupted], edits: [some], reads: [stream]}}
  pushed:  {{prompts: [corrupted], edits: [push], reads: [stream]}}
  outed:   {{prompts: [corrupted], edits: [out], reads: [stream]}}
  filled:  {{prompts: [corrupted], edits: [fill], reads: [stream, dots]}}
  alone:   {{prompts: [lone], reads: [own]}}
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
    text = SPEC.format(
        on_gpu=ON_GPU_YAML, model=model, mode=request.param, prompts=prompts, lone=LONE, one=ONE, other=OTHER, new=NEW
    )
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
        [m] = [m for m in run.result.metrics.to_pylist() if m["request"] == row["request"]]
        ends = [twin.forward(IDS[group][name]).logits[-1] for group in ("clean", "corrupted")]
        one, zero = (float(x[ONE] - x[OTHER]) for x in ends)
        assert abs(m["normalized"] - (wanted - zero) / (one - zero)) < TOLERANCE * VOCAB**0.5 / abs(one - zero)
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


def test_a_gate_chooses_the_rows_that_are_set(run: Run, twin: Twin) -> None:
    direction = draw(1, 1.0, 0, WIDTH).astype(np.float64)
    passed = []
    for name, case in run.cases("some").items():
        scores = twin.forward(case.fed).values["resid_post[0]"].astype(np.float64) @ direction
        assert np.abs(scores).min() > 10 * TOLERANCE, "a score lies within rounding of the bound"
        rows = [p for p in range(case.prompt) if scores[p] > 0]
        clean = twin.forward(IDS["clean"][name])
        seen = twin.forward(
            case.fed, [Edit(at, rows, put(clean.values[at][rows])) for at in ("resid_post[1]", "resid_post[2]")]
        )
        assert case.generated == seen.greedy(case.prompt)
        for layer in range(LAYERS):
            _, found = run.read("stream", case, f"resid_post[{layer}]")
            np.testing.assert_allclose(found, seen.values[f"resid_post[{layer}]"], atol=TOLERANCE)
        [row] = [r for r in run.rows if r["arm"] == "some" and r["prompt"] == name]
        assert (row["fired.some"], row["expected.some"]) == (len(rows), case.prompt)
        passed.append((len(rows), case.prompt))
    assert any(0 < some < size for some, size in passed), passed


def mean_of(run: Run, twin: Twin, arm: str, at: str) -> tuple[np.ndarray, int]:
    rows = [twin.forward(case.fed).values[at].astype(np.float64) for case in run.cases(arm).values()]
    return np.concatenate(rows).mean(0), sum(map(len, rows))


def test_a_mean_over_the_run_is_that_of_all_rows(run: Run, twin: Twin) -> None:
    mu = run.result["mu"]
    assert mu.rows["arm"].to_pylist() == ["clean", "base"]
    assert mu.rows["request"].null_count == 2
    for number, arm in enumerate(("clean", "base")):
        for at in ("resid_post[1]", "resid_post[2]"):
            wanted, count = mean_of(run, twin, arm, at)
            np.testing.assert_allclose(mu.site(at)[number], wanted, atol=TOLERANCE)
            assert mu.site(at, "count")[number] == count


def vectors(run: Run, twin: Twin) -> dict[str, np.ndarray]:
    """The vectors at resid_post[1] and [2] as the run should have made them, float64."""
    out = {f"whole {at}": mean_of(run, twin, "clean", at)[0] for at in ("resid_post[1]", "resid_post[2]")}
    between = out["whole resid_post[2]"] - mean_of(run, twin, "base", "resid_post[2]")[0]
    out["between resid_post[2]"] = 2 * between / np.linalg.norm(between)
    out["single resid_post[1]"] = twin.forward(LONE).values["resid_post[1]"].astype(np.float64).mean(0)
    return out


def test_vectors_of_reads_act_and_are_kept(run: Run, twin: Twin) -> None:
    made, folder = vectors(run, twin), run.result.path / "vectors"
    kept = {name: load_file(folder / f"{name}.safetensors") for name in ("whole", "between", "single")}
    for name, wanted in made.items():
        vector, at = name.split(" ")
        np.testing.assert_allclose(kept[vector][at], wanted, atol=TOLERANCE)

    def add(at: str) -> Change:
        return lambda x: x + 0.5 * torch.from_numpy(kept["whole"][at])

    def out(x: torch.Tensor) -> torch.Tensor:
        u = torch.from_numpy(made["between resid_post[2]"] / 2)
        return (x - (x.double() @ u)[:, None] * u).float()

    change: dict[str, Callable[[int, int], list[Edit]]] = {
        "pushed": lambda _, n: [Edit(at, range(n), add(at)) for at in ("resid_post[1]", "resid_post[2]")],
        "outed": lambda p, _: [Edit("resid_post[2]", range(p), out)],
        "filled": lambda _, __: [Edit("resid_post[1]", [0], put(kept["single"]["resid_post[1]"][None]))],
    }
    for name, size in LENGTHS.items():
        for arm, edits in change.items():
            case = run.cases(arm)[name]
            seen = twin.forward(case.fed, edits(size, case.rows))
            assert case.generated == seen.greedy(case.prompt)
            _, found = run.read("stream", case, "resid_post[3]")
            np.testing.assert_allclose(found, seen.values["resid_post[3]"], atol=2 * TOLERANCE)
        _, dots = run.read("dots", run.cases("filled")[name], "resid_post[2]")
        rows = twin.forward(run.cases("filled")[name].fed, change["filled"](size, 0)).values["resid_post[2]"][:size]
        wanted = rows.astype(np.float64) @ made["between resid_post[2]"]
        np.testing.assert_allclose(dots[:, 0], wanted, atol=10 * TOLERANCE)

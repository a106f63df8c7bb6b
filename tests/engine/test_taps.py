"""What the taps engine compiles, and when: locations are the graph, everything else is numbers in its tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.runs import python, serve
from tests.models import tiny

pytestmark = pytest.mark.engine

SPEC = """
vtaps: 1
model: {path: MODEL, dtype: float32}
engine: {mode: taps, vllm: {max_model_len: 128, max_num_seqs: 4, max_num_batched_tokens: 64}}
vectors:
  push: {random: {seed: 1, norm: 4.0}}
reads:
  stream: {at: [STEER, ALSO], tokens: all, sees: after_edits}
edits:
  steer: {at: STEER, tokens: sampling, add: {vector: push}}
  damp: {at: DAMP, tokens: all, scale: {by: 0.5}}
prompts:
  some: [{id: a, ids: [40, 75, 222]}, {id: b, ids: [17, 98, 113, 201, 9]}]
arms:
  base: {reads: [stream]}
  steered: {edits: [steer], reads: [stream], sweep: {steer.add.scale: [1, 2, 4]}}
  damped: {edits: [damp], reads: [stream]}
sampling: {temperature: 0, max_tokens: 4, ignore_eos: true}
"""


@dataclass(frozen=True)
class Places:
    """A model and the locations in it; ``other`` is where ``damp`` goes in the third start."""

    family: str
    steer: str
    damp: str
    other: str
    also: str


PLACES = {
    "modules": Places("llama", "resid_post[1]", "mlp_out[2]", "mlp_out[1]", "resid_post[3]"),
    # In the forward of the compiled model itself: Granite multiplies its embedding there.
    "inside": Places(
        "granitemoehybrid", "model.source.hidden_states_2.output", "model.norm.output",
        "model.source.self_embed_input_ids_0.output", "model.layers.1.shared_mlp.output",
    ),
}  # fmt: skip
CHANGES: dict[str, dict[str, str]] = {
    "first": {},
    # Other vector, scales, prompts and factor, and another arm: other numbers in the same tables.
    "numbers": {
        "seed: 1, norm: 4.0": "seed: 7, norm: 9.0",
        "[1, 2, 4]": "[0.5, 3, 8, 16, -2]",
        "by: 0.5": "by: -1.5",
        "{id: a, ids: [40, 75, 222]}": "{id: a, ids: [60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70]}",
        "  damped: {": "  both: {edits: [steer, damp], reads: [stream]}\n  damped: {",
    },
    "location": {"damp: {at: DAMP": "damp: {at: OTHER"},
}


@dataclass(frozen=True)
class Start:
    """One start of the engine in a process of its own: torch's counters when it had ``started`` and when it had
    ``served``, and what came out.  ``plain``: what a plain engine answered after it, in the process of the first."""

    steer: str
    started: dict[str, int]
    served: dict[str, int]
    answers: dict[str, Any]
    plain: dict[str, Any]
    reads: dict[str, Any]

    def count(self, name: str) -> int:
        return self.started.get(name, 0)


@pytest.fixture(scope="module", params=PLACES)
def starts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    """The changes one after another over one compile cache."""
    folder = tmp_path_factory.mktemp("taps")
    cache = {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return {name: start(folder / name, PLACES[request.param], changes, cache) for name, changes in CHANGES.items()}


def start(folder: Path, places: Places, changes: dict[str, str], cache: dict[str, str]) -> Start:
    folder.mkdir()
    text = SPEC
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    for name, place in (("STEER", places.steer), ("DAMP", places.damp), ("OTHER", places.other), ("ALSO", places.also)):
        text = text.replace(name, json.dumps(place))
    (folder / "spec.yaml").write_text(text.replace("MODEL", str(tiny(places.family))), encoding="utf-8")
    python("-m", "vtaps", "compile", str(folder / "spec.yaml"))
    lock = json.loads((folder / "spec.lock.json").read_text(encoding="utf-8"))
    requests = [
        {"key": f"{turn}/{arm}/{point}/{n}", "arm": arm, "point": point, "ids": ids, "sampling": entry["sampling"]}
        for turn in (1, 2)
        for arm, entry in lock["arms"].items()
        for point in range(len(entry["points"]))
        for n, ids in enumerate([[40, 75, 222], [17, 98, 113, 201, 9]])
    ]
    job = {"lock": lock, "base": str(folder), "block": str(folder / "spec.block.py")}
    batch = [r for r in requests if r["key"].startswith("1/")]
    alone = [r for r in requests if r["key"].startswith("2/")]
    jobs = [{**job, "requests": batch, "alone": alone}]
    if not changes:
        base = [r for r in batch if r["arm"] == "base"]
        jobs.append({"lock": lock, "base": str(folder), "requests": base})
    answers, *plain = serve(folder, *jobs, **cache)
    told = json.loads((folder / "engine-0.json").read_text(encoding="utf-8"))
    reads = dict(np.load(folder / "reads-0.npz"))
    return Start(places.steer, told["started"], told["served"], answers, plain[0] if plain else {}, reads)


HIT, MISS = "aot_autograd.autograd_cache_hit", "aot_autograd.autograd_cache_miss"
GRAPH_MISS = "inductor.fxgraph_cache_miss"


def test_a_model_is_compiled_once(starts: dict[str, Start]) -> None:
    first = starts["first"]
    assert (first.count(HIT), first.count(MISS)) == (0, 1) and first.count(GRAPH_MISS) == 1


def test_other_numbers_come_from_the_compile_cache(starts: dict[str, Start]) -> None:
    """Vectors, scales, prompts and arms are data: the compiled model of the first start is loaded."""
    assert (starts["numbers"].count(HIT), starts["numbers"].count(MISS)) == (1, 0)
    assert starts["numbers"].count(GRAPH_MISS) == 0


def test_another_location_is_another_model(starts: dict[str, Start]) -> None:
    assert (starts["location"].count(HIT), starts["location"].count(MISS)) == (0, 1)


@pytest.mark.parametrize("name", CHANGES)
def test_serving_compiles_nothing(name: str, starts: dict[str, Start]) -> None:
    """Every arm and sweep point, in shared batches and then one after another."""
    start = starts[name]
    assert start.started == start.served and start.count("stats.unique_graphs") >= 1
    assert len(start.answers) >= 20


def test_what_comes_from_the_cache_edits_with_the_new_numbers(starts: dict[str, Start]) -> None:
    """The stream moves along the vector of this start, by its scale: the compiled model holds neither."""
    from vtaps.spec.vectors import draw

    for name, seed, norm, scales in (("first", 1, 4.0, (1, 2, 4)), ("numbers", 7, 9.0, (0.5, 3, 8, 16, -2))):
        reads, steer = starts[name].reads, starts[name].steer
        vector = draw(seed, norm, 1 if steer.endswith("[1]") else None, 128)
        for turn in (1, 2):
            clean = reads[f"{turn}/base/0/0 stream {steer} rows"]
            for point, scale in enumerate(scales):
                edited = reads[f"{turn}/steered/{point}/0 stream {steer} rows"]
                np.testing.assert_allclose(edited[2] - clean[2], scale * vector, atol=1e-4)
                np.testing.assert_allclose(edited[:2], clean[:2], atol=1e-5)


def test_an_engine_after_it_has_no_taps(starts: dict[str, Start]) -> None:
    """Plain vLLM in the same process says what the arm without edits says."""
    plain, answers = starts["first"].plain, starts["first"].answers
    assert plain
    for key, answer in plain.items():
        assert answer["token_ids"] == answers[key]["token_ids"]
        assert answers[key]["token_ids"] != answers[key.replace("/base/0/", "/steered/2/")]["token_ids"]

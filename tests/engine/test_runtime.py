"""The engine at work in both modes, against Hugging Face, numpy in float64 and plain vLLM."""

# long because: one engine start serves every check in it
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch._dynamo.utils import counters  # noqa: E402

from tests.engine.case import (  # noqa: E402
    HEAD_DIM,
    LAYERS,
    arm,
    by_key,
    hugging_face,
    reference,
    request,
    tiny_llama,
    use,
    write_case,
)
from vtaps.runtime.engine import Engine, EngineError, RequestError, plain_engine  # noqa: E402
from vtaps.runtime.kernels import ADD, SET  # noqa: E402
from vtaps.runtime.records import Completion, Finished, Request  # noqa: E402
from vtaps.spec.vectors import draw  # noqa: E402

pytestmark = pytest.mark.engine

NEW = 6
GREEDY = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
STREAMS = [f"resid_post[{i}]" for i in range(LAYERS)]
ALL, SAMPLING = {"rows": "all"}, {"rows": "sampling"}
SAID = (40, 41, 42)
PROMPTS = {name: np.random.default_rng(n).integers(4, 260, size).tolist() for name, n, size in [
    ("short", 1, 3), ("middle", 2, 9), ("long", 3, 37), ("one", 4, 1),
]}  # fmt: skip
# On CUDA vLLM's attention multiplies float32 in TF32: 10 bits of a number, 1e-3 of values of the order of one.
TOLERANCE = 2e-3 if torch.cuda.is_available() else 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def twin(model: Path) -> Any:
    return hugging_face(model)


def the_case(folder: Path, model: Path, **more: Any) -> tuple[dict[str, Any], Path]:
    mid = "resid_post[1]"
    return write_case(
        folder,
        model,
        edits={
            "add": {"verb": "add", "sites": [mid], "tokens": SAMPLING},
            "scale": {"verb": "scale", "sites": [mid, "resid_pre[0]"], "tokens": ALL},
            "zero": {"verb": "zero", "sites": [mid], "tokens": {"rows": "all", "positions": [[1, 1]]}},
            "set": {"verb": "set", "sites": [mid], "tokens": {"rows": "all", "steps": [[1, 2]]}},
            "dims": {"verb": "set", "sites": ["resid_post[2]"], "tokens": ALL, "columns": [[3, 5], [100, 128]]},
            "head": {"verb": "zero", "sites": ["z[1]"], "tokens": ALL, "columns": [[64, 96]]},
            "v": {"verb": "zero", "sites": ["v[1]"], "tokens": ALL},
            "logits": {"verb": "add", "sites": ["logits"], "tokens": SAMPLING},
        },
        reads={
            "stream": {"kind": "rows", "sites": STREAMS, "tokens": ALL},
            "start": {"kind": "rows", "sites": ["resid_pre[0]", "resid_mid[0]"], "tokens": ALL},
            "before": {"kind": "rows", "sites": [mid], "tokens": ALL, "sees": "before_edits"},
            "lens": {"kind": "lens", "sites": STREAMS, "tokens": SAMPLING, "top": 10},
            "chosen": {"kind": "lens", "sites": [mid], "tokens": SAMPLING, "ids": [9, 4]},
            "mean": {"kind": "mean", "sites": STREAMS, "tokens": ALL},
            "norm": {"kind": "norm", "sites": STREAMS, "tokens": ALL},
            "dots": {"kind": "project", "sites": STREAMS, "tokens": ALL, "vectors": ["r", "s"]},
            "scores": {"kind": "rows", "sites": ["logits"], "tokens": SAMPLING},
        },
        vectors={"r": {"random": {"seed": 1, "norm": 6.0}}, "s": {"random": {"seed": 2, "norm": 1.0}}},
        overrides={"say": {"ids": list(SAID)}},
        metrics={
            "p": {"kind": "logprob", "ids": [7], "tokens": SAMPLING},
            "d": {"kind": "logit_diff", "ids": [7, 12], "tokens": {"rows": "all", "steps": [[0, 1]]}},
            "k": {"kind": "rank", "ids": [7], "tokens": SAMPLING},
        },
        arms={
            "plain": arm(),
            "look": arm(reads=["stream", "start", "lens", "chosen", "mean", "norm", "dots"], metrics=["p", "d", "k"]),
            "add": arm(use("add", mid, coefficient=1.5, vector="r"), reads=["stream", "before"]),
            "scale": arm(use("scale", mid, coefficient=0.5), reads=["stream"]),
            "first": arm(use("scale", "resid_pre[0]", coefficient=2.0), reads=["start"]),
            "zero": arm(use("zero", mid), reads=["stream"]),
            "set": arm(use("set", mid, coefficient=2.0, vector="s"), reads=["stream"]),
            "dims": arm(use("dims", "resid_post[2]", coefficient=1.0, vector="s"), reads=["stream"]),
            "head": arm(use("head", "z[1]"), reads=["stream"]),
            "v": arm(use("v", "v[1]"), reads=["stream"]),
            "forced": arm(overrides=[{"override": "say", "start": 2}], reads=["stream"], metrics=["p"]),
            "logits": arm(use("logits", "logits", coefficient=9.0, vector="s"), reads=["scores"], metrics=["p"]),
        },
        **more,
    )


@pytest.fixture(scope="module", params=["eager", "taps"])
def case(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    return the_case(tmp_path_factory.mktemp("case"), model, mode=request.param)


@pytest.fixture(scope="module")
def engine(case: tuple[dict[str, Any], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    lock, block = case
    with Engine(lock, block.parent, block, tmp_path_factory.mktemp("manifest")) as made:
        yield made


def serve(engine: Engine, *requests: Request, **sampling: Any) -> dict[str, Finished]:
    return by_key(list(engine.run(requests, lambda _: {**GREEDY, **sampling})))


def rows(completion: Completion, read: str, site: str, field: str = "rows") -> Any:
    return completion.record.reads[read, site].values[field]


def one(engine: Engine, arm: str, prompt: str = "middle", **sampling: Any) -> tuple[Completion, list[int]]:
    """A completion, and the token ids of its rows."""
    finished = serve(engine, request(f"{arm}-{prompt}", arm, PROMPTS[prompt]), **sampling)
    (completion,) = finished[f"{arm}-{prompt}"].completions
    return completion, [*PROMPTS[prompt], *completion.token_ids]


def test_every_layer_equals_hugging_face(engine: Engine, twin: Any) -> None:
    for prompt in PROMPTS:
        completion, ids = one(engine, "look", prompt)
        count = len(ids) - 1
        with torch.no_grad():
            out = twin(torch.tensor([ids[:count]]), output_hidden_states=True)
        _, seen = reference(twin, ids[:count])
        for layer, site in enumerate(STREAMS):
            read = completion.record.reads["stream", site]
            assert read.dtype == "float32" and read.positions.tolist() == list(range(count))
            np.testing.assert_allclose(read.values["rows"], seen[site], atol=TOLERANCE)
            if layer + 1 < LAYERS:
                np.testing.assert_allclose(read.values["rows"], out.hidden_states[layer + 1][0].numpy(), atol=TOLERANCE)
        embedded = twin.model.embed_tokens(torch.tensor(ids[:count])).detach().numpy()
        np.testing.assert_allclose(rows(completion, "start", "resid_pre[0]"), embedded, atol=1e-7)
        assert completion.token_ids == tuple(out.logits[0, -NEW:].argmax(-1).tolist())


def test_reductions_equal_numpy_in_float64(engine: Engine) -> None:
    completion, _ = one(engine, "look")
    for layer, site in enumerate(STREAMS):
        kept = rows(completion, "stream", site).astype(np.float64)
        np.testing.assert_allclose(rows(completion, "norm", site, "norm"), np.linalg.norm(kept, axis=-1), rtol=1e-6)
        np.testing.assert_allclose(rows(completion, "mean", site, "mean")[0], kept.mean(0), atol=1e-6)
        assert rows(completion, "mean", site, "count").tolist() == [len(kept)]
        vectors = np.stack([draw(1, 6.0, layer, 128), draw(2, 1.0, layer, 128)]).astype(np.float64)
        np.testing.assert_allclose(rows(completion, "dots", site, "project"), kept @ vectors.T, atol=1e-5)


def test_lens_equals_numpy_in_float64(engine: Engine, twin: Any) -> None:
    completion, _ = one(engine, "look", "long")
    norm = twin.model.norm.weight.detach().numpy().astype(np.float64)
    head = twin.lm_head.weight.detach().numpy().astype(np.float64)
    first = len(PROMPTS["long"]) - 1
    for site in STREAMS:
        kept = rows(completion, "stream", site).astype(np.float64)[first:]
        scaled = norm * kept / np.sqrt((kept**2).mean(-1, keepdims=True) + twin.config.rms_norm_eps)
        logits = scaled @ head.T
        order = np.argsort(-logits, axis=-1)[:, :10]
        got = completion.record.reads["lens", site]
        assert got.positions.tolist() == list(range(first, first + NEW))
        assert got.values["ids"].dtype == np.int32 and got.values["logits"].dtype == np.float32
        expected = np.take_along_axis(logits, order, -1)
        np.testing.assert_allclose(got.values["logits"], expected, atol=1e-4)
        differs = got.values["ids"] != order
        np.testing.assert_allclose(
            np.take_along_axis(logits, got.values["ids"].astype(np.int64), -1)[differs], expected[differs], atol=1e-4
        )
        total = np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(got.values["logsumexp"], total, atol=1e-4)
        if site == "resid_post[1]":
            chosen = completion.record.reads["chosen", site].values
            np.testing.assert_array_equal(chosen["ids"], [[9, 4]] * NEW)
            np.testing.assert_allclose(chosen["logits"], logits[:, [9, 4]], atol=1e-4)


def test_metrics_equal_hugging_face(engine: Engine, twin: Any) -> None:
    # Temperature and penalties change what is sampled, not what is measured.
    completion, ids = one(engine, "look", temperature=2.0, repetition_penalty=1.5, seed=3)
    logits, _ = reference(twin, ids[:-1])
    first = len(PROMPTS["middle"]) - 1
    logits = logits[first:].astype(np.float64)
    logprob = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    metrics = completion.record.metrics
    assert metrics["p"][0].tolist() == list(range(first, first + NEW))
    assert metrics["p"][1].dtype == np.float32
    np.testing.assert_allclose(metrics["p"][1], logprob[:, 7], atol=TOLERANCE)
    assert metrics["d"][0].tolist() == [first, first + 1]
    np.testing.assert_allclose(metrics["d"][1], (logits[:, 7] - logits[:, 12])[:2], atol=TOLERANCE)
    assert metrics["k"][1].tolist() == (logits > logits[:, 7:8]).sum(-1).tolist()


def changes(prompt: int) -> dict[str, tuple[str, Callable[[Any], Any], list[tuple[int, int]]]]:
    """Arm → where, what the edit does to all rows of a forward by hand, and the rows at which it fires."""
    last = prompt + NEW - 1

    def at(select: slice, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            x[select] = change(x[select])
            return x

        return apply

    r, s1, s2 = (torch.from_numpy(draw(*a, 128)) for a in ((1, 6.0, 1), (2, 1.0, 1), (2, 1.0, 2)))

    def dims(x: Any) -> Any:
        x[:, 3:5], x[:, 100:128] = s2[3:5], s2[100:128]
        return x

    def head(x: Any) -> Any:
        x[:, 2 * HEAD_DIM : 3 * HEAD_DIM] = 0
        return x

    mid = "resid_post[1]"
    return {
        "add": (mid, at(slice(prompt - 1, None), lambda x: x + 1.5 * r), [(prompt - 1, last)]),
        "scale": (mid, at(slice(None), lambda x: 0.5 * x), [(0, last)]),
        "zero": (mid, at(slice(1, 2), lambda x: 0 * x), [(1, 2)]),
        "set": (mid, at(slice(prompt, prompt + 2), lambda x: 0 * x + 2.0 * s1), [(prompt, prompt + 2)]),
        "dims": ("resid_post[2]", dims, [(0, last)]),
        "head": ("z[1]", head, [(0, last)]),
    }


@pytest.mark.parametrize("arm", ["add", "scale", "zero", "set", "dims", "head"])
def test_edits_equal_hugging_face_hooks(arm: str, engine: Engine, twin: Any) -> None:
    completion, ids = one(engine, arm)
    where, change, fired = changes(len(PROMPTS["middle"]))[arm]
    assert completion.record.fired == {arm: tuple(fired)}
    logits, seen = reference(twin, ids[:-1], {where: change})
    for site in STREAMS:
        np.testing.assert_allclose(rows(completion, "stream", site), seen[site], atol=TOLERANCE, err_msg=site)
    assert completion.token_ids == tuple(logits[-NEW:].argmax(-1).tolist())
    plain, _ = reference(twin, ids[:-1])
    assert np.abs(plain - logits).max() > 1e-2, "the edit would not be noticed"
    if arm == "add":
        _, clean = reference(twin, ids[:-1])
        np.testing.assert_allclose(rows(completion, "before", where), clean[where], atol=TOLERANCE)


def test_columns_of_the_fused_projection(engine: Engine, twin: Any) -> None:
    completion, ids = one(engine, "v")
    handle = twin.model.layers[1].self_attn.v_proj.register_forward_hook(lambda *a: torch.zeros_like(a[-1]))
    logits, seen = reference(twin, ids[:-1])
    handle.remove()
    np.testing.assert_allclose(rows(completion, "stream", STREAMS[-1]), seen[STREAMS[-1]], atol=TOLERANCE)
    assert completion.token_ids == tuple(logits[-NEW:].argmax(-1).tolist())


def test_the_first_layer_where_both_halves_are_one_tensor(engine: Engine, twin: Any) -> None:
    completion, ids = one(engine, "first")
    kept: dict[str, Any] = {}
    norm = twin.model.layers[0].post_attention_layernorm
    handles = [
        twin.model.embed_tokens.register_forward_hook(lambda *a: 2 * a[-1]),
        twin.model.layers[0].register_forward_pre_hook(lambda _, args: kept.update(pre=args[0][0].numpy())),
        norm.register_forward_pre_hook(lambda _, args: kept.update(mid=args[0][0].numpy())),
    ]
    logits, _ = reference(twin, ids[:-1])
    for handle in handles:
        handle.remove()
    np.testing.assert_allclose(rows(completion, "start", "resid_pre[0]"), kept["pre"], atol=1e-7)
    np.testing.assert_allclose(rows(completion, "start", "resid_mid[0]"), kept["mid"], atol=TOLERANCE)
    assert completion.token_ids == tuple(logits[-NEW:].argmax(-1).tolist())


def test_logits_are_a_location_of_sampled_rows(engine: Engine, twin: Any) -> None:
    completion, ids = one(engine, "logits")
    logits, _ = reference(twin, ids[:-1])
    first = len(PROMPTS["middle"]) - 1
    edited = logits[first:] + 9.0 * draw(2, 1.0, None, 320)
    got = completion.record.reads["scores", "logits"]
    assert got.positions.tolist() == list(range(first, first + NEW))
    np.testing.assert_allclose(got.values["rows"], edited, atol=TOLERANCE)
    assert completion.token_ids == tuple(edited.argmax(-1).tolist())
    assert completion.record.fired == {"logits": ((first, first + NEW),)}


def test_an_override_is_seen_everywhere(engine: Engine, twin: Any) -> None:
    completion, ids = one(engine, "forced", logprobs=2)
    first = len(PROMPTS["middle"]) - 1
    assert completion.token_ids[2:5] == SAID and completion.record.overridden == (2, 3, 4)
    logits, seen = reference(twin, ids[:-1])
    free = logits[first:].argmax(-1)
    assert completion.token_ids[:2] == tuple(free[:2]) and completion.token_ids[5] == free[5]
    assert tuple(free[2:5]) != SAID
    logprob = logits[first:].astype(np.float64)
    logprob -= np.log(np.exp(logprob).sum(-1, keepdims=True))
    assert completion.logprobs is not None
    np.testing.assert_allclose(completion.logprobs, logprob[np.arange(NEW), list(completion.token_ids)], atol=TOLERANCE)
    np.testing.assert_allclose(rows(completion, "stream", STREAMS[-1]), seen[STREAMS[-1]], atol=TOLERANCE)
    tokenizer = engine._frontend.llm.get_tokenizer()
    assert tokenizer.decode(SAID) in completion.text


def test_a_mixed_batch_equals_one_at_a_time(engine: Engine) -> None:
    arms = ["look", "add", "scale", "zero", "set", "head", "forced", "plain"]
    requests = [request(f"{a}/{p}", a, PROMPTS[p]) for a in arms for p in PROMPTS if (a, p) != ("zero", "one")]
    together = serve(engine, *requests)
    assert len(together) == len(requests)
    for r in requests:
        same(serve(engine, r)[r.key], together[r.key])


def same(alone: Finished, mixed: Finished) -> None:
    [a], [b] = alone.completions, mixed.completions
    assert a.token_ids == b.token_ids
    assert a.record.fired == b.record.fired
    assert a.record.reads.keys() == b.record.reads.keys()
    for where, read in a.record.reads.items():
        other = b.record.reads[where]
        assert read.positions.tolist() == other.positions.tolist()
        for field, value in read.values.items():
            if field != "ids":
                said = f"{alone.request.key} {where}"
                np.testing.assert_allclose(value, other.values[field], atol=2 * TOLERANCE, err_msg=said)
    assert a.record.metrics.keys() == b.record.metrics.keys()
    for name, (positions, values) in a.record.metrics.items():
        assert positions.tolist() == b.record.metrics[name][0].tolist()
        if name != "k":  # a rank
            np.testing.assert_allclose(values, b.record.metrics[name][1], atol=5 * TOLERANCE)


def test_what_ended_is_whole_a_step_later(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end in different steps and others begin in them; as with asynchronous scheduling, which vLLM does not
    have on a CPU."""
    monkeypatch.setitem(engine.report, "async_scheduling", True)
    monkeypatch.setitem(engine.report, "max_num_batched_tokens", 40)
    requests = [request(f"{a}/{p}", a, PROMPTS[p]) for a in ("look", "add", "forced", "plain") for p in PROMPTS]
    length = {r.key: 1 + (5 * n) % NEW for n, r in enumerate(requests)}
    sampling = {r.key: {**GREEDY, "max_tokens": length[r.key]} for r in requests}
    ended = list(engine.run(requests, lambda r: sampling[r.key]))
    assert [f.request.key for f in ended] != list(length)
    assert {f.request.key: len(f.completions[0].token_ids) for f in ended} == length
    for found in ended:
        (alone,) = engine.run([found.request], lambda r: sampling[r.key])
        same(alone, found)


def test_children_are_told_apart(engine: Engine, twin: Any) -> None:
    finished = serve(engine, request("n2", "look", PROMPTS["middle"]), n=2, temperature=1.0, seed=11)["n2"]
    first, second = finished.completions
    assert (first.index, second.index) == (0, 1) and first.token_ids != second.token_ids
    for completion in finished.completions:
        _, seen = reference(twin, [*PROMPTS["middle"], *completion.token_ids][:-1])
        np.testing.assert_allclose(rows(completion, "stream", STREAMS[2]), seen[STREAMS[2]], atol=TOLERANCE)


def test_rows_after_a_stop_do_not_count(engine: Engine) -> None:
    free, _ = one(engine, "look")
    stop = free.token_ids[2]
    cut = free.token_ids.index(stop) + 1
    completion, _ = one(engine, "look", stop_token_ids=[stop])
    assert completion.finish_reason == "stop" and len(completion.token_ids) == cut
    count = len(PROMPTS["middle"]) + cut - 1
    assert completion.record.reads["stream", STREAMS[0]].positions.tolist() == list(range(count))
    assert rows(completion, "mean", STREAMS[0], "count").tolist() == [count]


def test_a_vector_of_nan_on_an_idle_arm_changes_nothing(engine: Engine) -> None:
    """``add`` and ``set`` stand in the block at this location; no row of these requests is theirs."""
    requests = [request(a, a, PROMPTS["long"]) for a in ("look", "plain", "zero")]
    before = serve(engine, *requests)

    def vectors(worker: Any) -> list[Any]:
        board, program, _ = worker.vtaps_session.boards.find("resid_post[1]")
        addresses = [int(board.descriptors[s.descriptor, 2]) for s in program.statements if s.code in (ADD, SET)]
        return [board.tensors[address] for address in addresses]

    def poison(worker: Any) -> None:
        poison.kept = [v.clone() for v in vectors(worker)]  # type: ignore[attr-defined]
        assert len(poison.kept) == 2  # type: ignore[attr-defined]
        for v in vectors(worker):
            v.fill_(float("nan"))

    def heal(worker: Any) -> None:
        for v, kept in zip(vectors(worker), poison.kept, strict=True):  # type: ignore[attr-defined]
            v.copy_(kept)

    engine._frontend.llm.collective_rpc(poison)
    try:
        after = serve(engine, *requests)
    finally:
        engine._frontend.llm.collective_rpc(heal)
    for key in before:
        (a,), (b,) = before[key].completions, after[key].completions
        assert a.token_ids == b.token_ids
        for where, read in a.record.reads.items():
            for field, value in read.values.items():
                np.testing.assert_array_equal(value, b.record.reads[where].values[field])


def test_a_bad_request_fails_alone(engine: Engine) -> None:
    refused: list[RequestError] = []
    requests = [
        request("good", "look", PROMPTS["short"]),
        request("good", "look", PROMPTS["short"]),
        request("arm", "gone", PROMPTS["short"]),
        request("point", "look", PROMPTS["short"], point=4),
        request("long", "look", [5] * 400),
        request("empty", "look", []),
        request("fine", "plain", PROMPTS["short"]),
    ]
    finished = by_key(list(engine.run(requests, lambda _: GREEDY, failed=refused.append)))
    assert set(finished) == {"good", "fine"}
    assert [(e.key, e.code) for e in refused] == [
        ("good", "VT606"), ("arm", "VT603"), ("point", "VT603"), ("long", "VT603"), ("empty", "VT603"),
    ]  # fmt: skip
    assert all("\n" not in e.message for e in refused)


def test_a_run_given_up_leaves_nothing_behind(engine: Engine) -> None:
    run = engine.run((request(f"g{i}", "look", PROMPTS["short"]) for i in range(5)), lambda _: GREEDY)
    next(run)
    run.close()
    table = engine._frontend.llm.collective_rpc(lambda w: len(w.vtaps_session.table.alive))
    assert table == [0]
    assert set(serve(engine, request("g1", "look", PROMPTS["short"]))) == {"g1"}


def drive(frontend: Any, requests: Mapping[str, list[int]]) -> dict[str, Any]:
    for key, ids in requests.items():
        frontend.add(key, ids, {**GREEDY, "logprobs": 3}, None)
    out = {}
    while frontend.busy():
        out.update(dict(frontend.step()))
    return out


def test_other_numbers_go_on_without_compiling(case: tuple[dict[str, Any], Path], engine: Engine, twin: Any) -> None:
    lock, block = case
    other = copy.deepcopy(lock)
    other["vectors"]["r"]["random"]["seed"] = 5
    other["arms"]["again"] = copy.deepcopy(other["arms"]["add"])
    other["arms"]["again"]["points"][0]["edits"][0]["coefficient"] = -2.5
    before = (engine.compiled(), copy.deepcopy(counters))
    engine.load(other, block.parent, block)
    try:
        completion, ids = one(engine, "again")
        pushed = -2.5 * torch.from_numpy(draw(5, 6.0, 1, 128))
        prompt = len(PROMPTS["middle"])

        def push(x: Any) -> Any:
            x[prompt - 1 :] += pushed
            return x

        logits, seen = reference(twin, ids[:-1], {"resid_post[1]": push})
        for site in STREAMS:
            np.testing.assert_allclose(rows(completion, "stream", site), seen[site], atol=TOLERANCE)
        assert completion.token_ids == tuple(logits[-NEW:].argmax(-1).tolist())
    finally:
        engine.load(lock, block.parent, block)
    assert (engine.compiled(), counters) == before
    completion, _ = one(engine, "add")
    assert completion.record.fired


def test_another_structure_is_another_engine(case: tuple[dict[str, Any], Path], engine: Engine) -> None:
    lock, block = case
    other = {**lock, "block": {**lock["block"], "structure": "sha256:" + "6" * 64}}
    with pytest.raises(EngineError, match=r"VT607|two compilations"):
        engine.load(other, block.parent, block)
    with pytest.raises(EngineError, match="another model or other arguments"):
        engine.load({**lock, "model": {**lock["model"], "dtype": "bfloat16"}}, block.parent, block)
    completion, _ = one(engine, "look")
    assert completion.record.reads


NEIGHBOURS = {"a": "plain", "b": "add", "c": "plain", "d": "look", "e": "scale", "f": "plain"}


def test_unedited_neighbours_are_bit_identical_to_a_batch_with_nobody_edited(engine: Engine) -> None:
    prompts = dict(zip(NEIGHBOURS, [*PROMPTS.values(), PROMPTS["middle"], PROMPTS["short"]], strict=True))
    edited = serve(engine, *[request(k, a, prompts[k]) for k, a in NEIGHBOURS.items()], logprobs=3)
    nobody = serve(engine, *[request(k, "plain", prompts[k]) for k in NEIGHBOURS], logprobs=3)
    for key, arm_name in NEIGHBOURS.items():
        (a,), (b,) = edited[key].completions, nobody[key].completions
        if arm_name in ("plain", "look"):
            assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
        else:
            assert a.logprobs != b.logprobs, "the edit would not be noticed"


def test_the_proof_names_every_tap(case: tuple[dict[str, Any], Path], engine: Engine) -> None:
    lock, _ = case
    inside = [name for name in lock["sites"] if name != "logits"] if engine.program.mode == "taps" else []
    assert engine.proof.get("taps", 0) == len(inside)
    assert all(told["recorded"] == sorted(inside) for told in engine.workers)
    if not inside:
        return
    assert engine.report["compilation"] != "NONE"
    assert engine.report["async_scheduling"] == torch.cuda.is_available()
    if torch.cuda.is_available():
        passes = {mode: set(rows) for mode, rows in engine.proof["passes"].items()}
        assert passes["NONE"] == {17} and passes["FULL"] == {1, 2, 4, 8} and passes["PIECEWISE"] == {1, 2, 4, 8, 16}
    else:
        assert engine.proof["passes"] == {"NONE": [1]}


def test_unedited_neighbours_equal_plain_vllm(case: tuple[dict[str, Any], Path], engine: Engine) -> None:
    """On one schedule: the same prompts, lengths and order, with an edited request among them and without vtaps.

    Without compilation they are the same bits; a compiler may fuse around a tap differently.
    """
    lock, block = case
    prompts = dict(zip(NEIGHBOURS, [*PROMPTS.values(), PROMPTS["middle"], PROMPTS["short"]], strict=True))
    finished = serve(engine, *[request(k, a, prompts[k]) for k, a in NEIGHBOURS.items()], logprobs=3)
    eager = engine.program.mode == "eager"
    engine.close()
    plain = plain_engine(lock, block.parent, eager=eager)
    try:
        expected = drive(plain, prompts)
    finally:
        plain.close()
    for key, arm_name in NEIGHBOURS.items():
        (completion,) = finished[key].completions
        (output,) = expected[key]
        if arm_name in ("plain", "look"):
            assert completion.token_ids == output.token_ids
            if eager:
                assert completion.logprobs == output.logprobs
            else:
                assert completion.logprobs is not None and output.logprobs is not None
                np.testing.assert_allclose(completion.logprobs, output.logprobs, atol=TOLERANCE)

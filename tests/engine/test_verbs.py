"""Verbs that look at a row as a whole, on both engines: verb × location × rows × columns, against Hugging Face with the
formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from safetensors.numpy import save_file  # noqa: E402

from tests.engine.case import (  # noqa: E402
    HEAD_DIM,
    HEADS,
    LAYERS,
    WIDTH,
    arm,
    by_key,
    hugging_face,
    reference,
    request,
    tiny_llama,
    use,
    write_case,
)
from tests.saes import activations, drawn_npz, reconstruction, save_npz, write_sae  # noqa: E402
from vtaps.runtime.engine import Engine  # noqa: E402
from vtaps.spec.vectors import draw  # noqa: E402

pytestmark = pytest.mark.engine

STREAMS = [f"resid_post[{i}]" for i in range(LAYERS)]
GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
# On CUDA vLLM's attention multiplies float32 in TF32.
TOLERANCE = 4e-3 if torch.cuda.is_available() else 4e-5
EFFECT = 2e-2 if torch.cuda.is_available() else 8e-4
"""What every edit moves its rows by at least, so that one that did nothing would be seen."""
VECTORS = {"r": (1, 6.0), "s": (2, 1.0), "t": (3, 0.5)}
RNG = np.random.default_rng(5)
MATRICES = {
    "a": RNG.normal(size=(3, WIDTH)).astype(np.float32) / 4,
    "b": RNG.normal(size=(3, WIDTH)).astype(np.float32) / 4,
    "c": RNG.normal(size=3).astype(np.float32),
}
Floats = np.ndarray[Any, Any]
SCOPE = "scope.npz"
UNCENTRED = ("jumprelu", SCOPE)
SAES = {
    "standard": {},
    "jumprelu": {"apply_b_dec_to_input": False},
    "topk": {"k": 4},
    "gated": {},
    SCOPE: {"npz": True},
}
"""Architecture, or file → entries of its configuration."""
FEATURES, SIZE = 48, 0.5
TOP, IDS = 6, [47, 3, 0]
WEIGHT, BIAS = RNG.normal(size=(5, WIDTH)).astype(np.float32), RNG.normal(size=5).astype(np.float32)


@dataclass(frozen=True)
class Use:
    """One edit as the lock and the formula take it; ``first``: which row of a prompt of P tokens it begins at."""

    verb: str
    site: str
    rows: str
    more: dict[str, Any]
    point: dict[str, Any]
    columns: tuple[tuple[int, int], ...] | None = None


SELECTED: dict[str, Callable[[int, int], slice]] = {
    "all": lambda prompt, count: slice(0, count),
    "prompt": lambda prompt, count: slice(0, prompt),
    "sampling": lambda prompt, count: slice(prompt - 1, count),
    "generated": lambda prompt, count: slice(prompt, count),
}
MID, Z = "resid_post[1]", "z[1]"
HEAD = ((HEAD_DIM, 2 * HEAD_DIM),)
USES = {
    "out": Use("project_out", MID, "all", {"vectors": ["r"]}, {"coefficient": 1.0}),
    "out_three": Use("project_out", "resid_post[0]", "sampling", {"vectors": ["r", "s", "t"]}, {"coefficient": 1.0}),
    "out_half": Use("project_out", "resid_post[2]", "generated", {"vectors": ["s", "r"]}, {"coefficient": 0.5}),
    "out_head": Use("project_out", Z, "all", {"vectors": ["r"]}, {"coefficient": 1.0}, HEAD),
    "low": Use("clamp", MID, "all", {}, {"vector": "r", "min": 0.5, "max": None}),
    "high": Use("clamp", "resid_post[0]", "prompt", {}, {"vector": "s", "min": None, "max": -0.25}),
    "both": Use("clamp", "resid_post[2]", "sampling", {}, {"vector": "t", "min": -0.1, "max": 0.1}),
    "clamp_head": Use("clamp", Z, "all", {}, {"vector": "s", "min": 0.02, "max": 0.03}, HEAD),
    "low_rank": Use("affine", MID, "all", {"matrices": ["a", "b", "c"]}, {"coefficient": 0.8}),
    "no_bias": Use("affine", "resid_post[2]", "sampling", {"matrices": ["a", "b"]}, {"coefficient": -1.0}),
    "affine_head": Use("affine", Z, "all", {"matrices": ["a", "b", "c"]}, {"coefficient": 1.0}, HEAD),
    "feature": Use("feature", MID, "all", {"sae": {"dir": "standard", "does": "to"}},
                   {"coefficient": 3.0, "feature": 9}),
    "off": Use("feature", "resid_post[2]", "all", {"sae": {"dir": "jumprelu", "does": "to"}},
               {"coefficient": 0.0, "feature": 0}),
    "moved": Use("feature", "resid_post[0]", "sampling", {"sae": {"dir": "topk", "does": "by"}},
                 {"coefficient": -1.5, "feature": FEATURES - 1}),
    "gated": Use("feature", "resid_post[0]", "all", {"sae": {"dir": "gated", "does": "to"}},
                 {"coefficient": 2.0, "feature": 5}),
    "scope": Use("feature", "resid_post[2]", "prompt", {"sae": {"file": SCOPE, "does": "to"}},
                 {"coefficient": 1.5, "feature": 7}),
    "drop": Use("reconstruct", MID, "all", {"sae": {"dir": "topk", "does": "to"}}, {"coefficient": 2.0, "feature": 3}),
    "drop_gated": Use("reconstruct", "resid_post[0]", "generated", {"sae": {"dir": "gated", "does": "by"}},
                      {"coefficient": 0.0, "feature": 0}),
    "drop_scope": Use("reconstruct", "resid_post[2]", "sampling", {"sae": {"file": SCOPE, "does": "by"}},
                      {"coefficient": -1.0, "feature": 11}),
    "keep": Use("add", MID, "all", {"keep_norm": True}, {"coefficient": 0.7, "vector": "r"}),
    "keep_some": Use("add", "resid_post[2]", "generated", {"keep_norm": True}, {"coefficient": -2.0, "vector": "s"},
                     ((3, 40), (100, 128))),
    "keep_head": Use("add", Z, "sampling", {"keep_norm": True}, {"coefficient": 0.3, "vector": "t"}, HEAD),
}  # fmt: skip


SAE_TENSORS: dict[str, dict[str, Floats]] = {}


def sae_of(use: Use) -> str:
    return str(use.more["sae"].get("dir") or use.more["sae"]["file"])


def name_of(kind: str) -> str:
    return kind.removesuffix(".npz")


def formula(use: Use, x: Floats, layer: int) -> Floats:
    """float64 ``[rows, width]`` after the edit."""

    def vector(name: str) -> Floats:
        whole = draw(VECTORS[name][0], VECTORS[name][1], layer, x.shape[1]).astype(np.float64)
        return np.where(here, whole, 0.0) if use.verb != "add" else whole

    here = np.ones(x.shape[1], bool)
    if use.columns is not None:
        here[:] = False
        for a, b in use.columns:
            here[a:b] = True
    own = np.where(here, x, 0.0)
    if use.verb == "project_out":
        basis, _ = np.linalg.qr(np.stack([vector(v) for v in use.more["vectors"]], axis=1))
        out = x - use.point["coefficient"] * (own @ basis) @ basis.T
    elif use.verb == "affine":
        a, b = (np.where(here, MATRICES[name].astype(np.float64), 0.0) for name in ("a", "b"))
        bias = MATRICES["c"].astype(np.float64) if len(use.more["matrices"]) == 3 else 0.0
        out = x + use.point["coefficient"] * (own @ a.T + bias) @ b
    elif use.verb == "feature":
        kind, index, by = sae_of(use), use.point["feature"], use.point["coefficient"]
        sae = SAE_TENSORS[kind]
        if use.more["sae"]["does"] == "to":
            by = by - activations(sae, x, centred=kind not in UNCENTRED)[:, [index]]
        out = x + by * sae["W_dec"][index]
    elif use.verb == "reconstruct":
        kind, index = sae_of(use), use.point["feature"]
        active = activations(SAE_TENSORS[kind], x, k=SAES[kind].get("k"), centred=kind not in UNCENTRED)
        active[:, index] *= use.more["sae"]["does"] == "by"
        active[:, index] += use.point["coefficient"]
        out = reconstruction(SAE_TENSORS[kind], active)
    elif use.verb == "clamp":
        u = vector(use.point["vector"])
        u = u / np.linalg.norm(u)
        p = own @ u
        low, high = use.point["min"], use.point["max"]
        q = np.clip(p, -np.inf if low is None else low, np.inf if high is None else high)
        out = x + np.outer(q - p, u)
    else:
        y = x + use.point["coefficient"] * vector(use.point["vector"])
        now = np.linalg.norm(np.where(here, y, 0.0), axis=1, keepdims=True)
        out = y * np.linalg.norm(own, axis=1, keepdims=True) / now
    return np.where(here, out, x)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["eager", "taps"])
def engine(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("case")
    # As LoRA keeps them: the second one has the width first.
    save_file({"a": MATRICES["a"], "b": MATRICES["b"].T.copy(), "c": MATRICES["c"]}, folder / "low_rank.safetensors")
    for number, (kind, said) in enumerate(SAES.items()):
        if kind == SCOPE:
            SAE_TENSORS[kind] = save_npz(folder / kind, drawn_npz(WIDTH, FEATURES, seed=number, size=SIZE))
            continue
        SAE_TENSORS[kind] = write_sae(folder / kind, kind, WIDTH, FEATURES, seed=number, size=SIZE, **said)
    save_file({"w": WEIGHT.T.copy(), "b": BIAS}, folder / "probe.safetensors")
    lock, block = write_case(
        folder, model,
        edits={
            name: {
                "verb": u.verb, "sites": [u.site], "tokens": {"rows": u.rows}, **u.more,
                **({} if u.columns is None else {"columns": [list(c) for c in u.columns]}),
            }
            for name, u in USES.items()
        },
        reads={
            "stream": {"kind": "rows", "sites": STREAMS, "tokens": {"rows": "all"}},
            "probe": {"kind": "probe", "sites": STREAMS[1:], "tokens": {"rows": "all"}, "vectors": ["w", "bias"]},
            **{
                f"{name_of(kind)}_{way}": {
                    "kind": "features", "sites": STREAMS[:2], "tokens": {"rows": "all"}, "sae": kind, **said,
                }
                for kind in SAES for way, said in (("top", {"top": TOP}), ("ids", {"ids": IDS}))
            },
        },
        vectors={
            **{n: {"random": {"seed": seed, "norm": norm}} for n, (seed, norm) in VECTORS.items()},
            **{n: {"file": "low_rank.safetensors", "tensor": n, "digest": None} for n in MATRICES},
            "w": {"file": "probe.safetensors", "tensor": "w"}, "bias": {"file": "probe.safetensors", "tensor": "b"},
        },
        arms={
            "base": arm(reads=["stream", "probe", *(f"{name_of(k)}_{way}" for k in SAES for way in ("top", "ids"))]),
            **{
                name: arm({**use(name, u.site), "coefficient": None, "vector": None, **u.point}, reads=["stream"])
                for name, u in USES.items()
            },
        },
        # Prompts come in pieces, beside rows of others.
        vllm={"max_num_batched_tokens": 48},
        mode=request.param,
    )  # fmt: skip
    with Engine(lock, folder, block, folder / "manifest") as made:
        yield made


def test_every_verb_in_one_batch(engine: Engine, model: Path) -> None:
    twin = hugging_face(model)
    rng = np.random.default_rng(0)
    asked = [
        request(f"{name}/{size}", name, rng.integers(4, 260, size).tolist())
        for name in ("base", *USES)
        for size in (3, 19)
    ]
    served = by_key(list(engine.run(asked, lambda _: GREEDY)))
    assert len(served) == len(asked)
    moved = dict.fromkeys(USES, 0.0)
    for key, finished in served.items():
        (completion,) = finished.completions
        prompt = len(finished.request.prompt_token_ids)
        ids = [*finished.request.prompt_token_ids, *completion.token_ids][:-1]
        edits: dict[str, Any] = {}
        name = finished.request.arm
        if name in USES:
            one = USES[name]
            rows = SELECTED[one.rows](prompt, len(ids))

            def change(x: Any, one: Use = one, rows: slice = rows, name: str = name) -> Any:
                changed = torch.from_numpy(formula(one, x[rows].double().numpy(), int(one.site[-2]))).float()
                moved[name] = max(moved[name], float((changed - x[rows]).abs().max()))
                x[rows] = changed
                return x

            edits = {one.site: change}
            assert completion.record.fired[name] == ((rows.start, rows.stop),), key
        logits, streams = reference(twin, ids, edits)
        assert list(completion.token_ids) == logits[prompt - 1 :].argmax(-1).tolist(), key
        for site in STREAMS:
            got = completion.record.reads["stream", site].values["rows"]
            np.testing.assert_allclose(got, streams[site], atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"{key} {site}")
        if name == "base":
            hold_probes(completion.record.reads, streams)
    # A check that could not fail would pass on a verb that does nothing.
    assert min(moved.values()) > EFFECT, moved


def hold_probes(reads: Any, streams: dict[str, Floats]) -> None:
    """What probes and SAEs gave of the rows, against the formulas on Hugging Face's."""
    for site in STREAMS[1:]:
        want = streams[site].astype(np.float64) @ WEIGHT.T + BIAS
        np.testing.assert_allclose(reads["probe", site].values["probe"], want, atol=50 * TOLERANCE)
    for kind, said in SAES.items():
        for site in STREAMS[:2]:
            rows, k = streams[site].astype(np.float64), said.get("k")
            want = activations(SAE_TENSORS[kind], rows, k=k, centred=kind not in UNCENTRED)
            chosen = reads[f"{name_of(kind)}_ids", site].values
            assert (chosen["ids"] == IDS).all() and chosen["ids"].dtype == np.int32
            np.testing.assert_allclose(chosen["activations"], want[:, IDS], atol=10 * TOLERANCE)
            found = reads[f"{name_of(kind)}_top", site].values
            values = -np.sort(-want, axis=-1)[:, :TOP]
            np.testing.assert_allclose(found["activations"], values, atol=10 * TOLERANCE)
            assert found["activations"].dtype == np.float32
            assert ((found["ids"] == -1) == (found["activations"] == 0)).all()
            there = found["ids"] >= 0
            assert there.any() and (k is None or (there.sum(-1) <= k).all())
            picked = np.take_along_axis(want, np.maximum(found["ids"], 0), -1)
            np.testing.assert_allclose(picked[there], found["activations"][there], atol=10 * TOLERANCE)


def test_heads_are_whole_heads() -> None:
    assert HEAD == ((HEAD_DIM, 2 * HEAD_DIM),) and HEADS > 1

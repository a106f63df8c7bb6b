"""An edit in Python on both engines, against Hugging Face with the same function in a hook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engine.case import (  # noqa: E402
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
from vtaps.runtime.engine import Engine, RequestError  # noqa: E402
from vtaps.spec.vectors import draw  # noqa: E402

pytestmark = pytest.mark.engine

STREAMS = [f"resid_post[{i}]" for i in range(LAYERS)]
MID, HEADS = "resid_post[1]", "z[1]"
# On CUDA vLLM's attention multiplies float32 in TF32.
TOLERANCE = 4e-3 if torch.cuda.is_available() else 2e-5
SOURCE = """\
import torch

def keep_norm(rows):
    changed = rows.scatter(-1, rows.abs().argmax(-1, keepdim=True), 0.0)
    return changed * rows.norm(dim=-1, keepdim=True) / changed.norm(dim=-1, keepdim=True)

def fade(rows, at):
    assert len(at.requests) == len(at.positions) == len(rows) and at.layer == 1
    rows.mul_((1 / (1 + torch.from_numpy(at.positions))).to(rows)[:, None])

def felt(rows, at):
    # What is written into the rows changes nothing.
    first = torch.stack([rows[:, 0], rows.norm(dim=-1)], dim=-1)
    rows.fill_(float("nan"))
    return first.double()

def broken(rows):
    raise KeyError("nothing")
"""
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def python(function: str, sites: list[str], rows: str) -> dict[str, Any]:
    said = {"file": "edits.py", "function": function, "digest": None}
    return {"verb": "python", "sites": sites, "tokens": {"rows": rows}, "python": said}


def case(folder: Path, model: Path, mode: str) -> tuple[dict[str, Any], Path]:
    folder.mkdir(exist_ok=True)
    (folder / "edits.py").write_text(SOURCE, encoding="utf-8")
    return write_case(
        folder, model,
        edits={
            "push": {"verb": "add", "sites": [MID], "tokens": {"rows": "all"}},
            "norm": python("keep_norm", [MID], "sampling"),
            "fade": python("fade", [HEADS], "all"),
            "broken": python("broken", [MID], "all"),
        },
        reads={
            "before": {"kind": "rows", "sites": [MID], "tokens": {"rows": "all"}, "sees": "before_edits"},
            "stream": {"kind": "rows", "sites": STREAMS, "tokens": {"rows": "all"}},
            "felt": {
                "kind": "python", "sites": [HEADS, *STREAMS], "tokens": {"rows": "all"}, "sees": "before_edits",
                "python": {"file": "edits.py", "function": "felt", "digest": None},
            },
        },
        vectors={"r": {"random": {"seed": 1, "norm": 6.0}}},
        arms={
            "base": arm(reads=["stream"]),
            "norm": arm(use("norm", MID), reads=["stream", "before", "felt"]),
            "both": arm(use("push", MID, coefficient=1.5, vector="r"), use("norm", MID), use("fade", HEADS),
                        reads=["stream", "before", "felt"]),
            "broken": arm(use("broken", MID), reads=["stream"]),
        },
        # Prompts come in pieces, beside rows of others.
        vllm={"max_num_batched_tokens": 16},
        mode=mode,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["eager", "taps"])
def served(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("case")
    lock, block = case(folder, model, request.param)
    with Engine(lock, folder, block, folder / "manifest") as engine:
        yield engine


def test_what_the_function_makes_of_the_rows_goes_on(served: Engine, model: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(SOURCE, namespace)
    r = torch.from_numpy(draw(1, 6.0, 1, 128))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 260, size).tolist() for size in (5, 23, 40, 9, 1, 17)]
    arms = ["base", "norm", "both"] * 2
    requests = [request(f"{a}/{i}", a, p) for i, (a, p) in enumerate(zip(arms, prompts, strict=True))]
    twin = hugging_face(model)
    finished = by_key(list(served.run(requests, lambda _: GREEDY)))
    for key, f in finished.items():
        (completion,) = f.completions
        ids = [*f.request.prompt_token_ids, *completion.token_ids][:-1]
        first = len(f.request.prompt_token_ids) - 1
        seen: dict[str, Any] = {}

        def change(x: Any, f: Any = f, first: int = first, seen: dict[str, Any] = seen) -> Any:
            seen["before"] = x.numpy().copy()
            if f.request.arm == "both":
                x = x + 1.5 * r
            x[first:] = namespace["keep_norm"](x[first:])
            return x

        def fade(x: Any) -> Any:
            return x / (1 + torch.arange(len(x)))[:, None]

        edits: dict[str, Any] = {} if f.request.arm == "base" else {MID: change}
        logits, streams = reference(twin, ids, edits | ({HEADS: fade} if f.request.arm == "both" else {}))
        assert list(completion.token_ids) == logits[first:].argmax(-1).tolist(), key
        record = completion.record
        for site in STREAMS:
            rows = record.reads["stream", site].values["rows"]
            np.testing.assert_allclose(rows, streams[site], atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"{key} {site}")
        if f.request.arm != "base":
            rows = record.reads["before", MID].values["rows"]
            np.testing.assert_allclose(rows, seen["before"], atol=TOLERANCE, rtol=TOLERANCE, err_msg=key)
            assert record.fired["norm"] == ((first, len(ids)),)
            for site in STREAMS:
                x = (seen["before"] if site == MID else streams[site]).astype(np.float64)
                felt = record.reads["felt", site].values["python"]
                assert felt.dtype == np.float64
                wanted = np.stack([x[:, 0], np.linalg.norm(x, axis=-1)], axis=-1)
                np.testing.assert_allclose(felt, wanted, atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"{key} {site}")
            assert record.reads["felt", HEADS].values["python"].shape == (len(ids), 2)


def test_breaks_are_where_functions_run(served: Engine) -> None:
    broken = served.workers[0]["breaks"]
    assert broken == (sorted([HEADS, *STREAMS]) if served.program.mode == "taps" else [])


def test_what_the_function_raises_fails_the_request_by_name(served: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        list(served.run([request("a", "broken", [5, 6, 7])], lambda _: GREEDY))
    assert caught.value.code == "VT620"
    assert "resid_post[1]: edits.broken: edits.py:18, in edits.py:broken: KeyError: 'nothing'" in caught.value.message

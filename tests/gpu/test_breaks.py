"""Breaks on a GPU: Python in every replay of a decode graph, once a location and step, on the right rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.engine.case import LAYERS, arm, by_key, hugging_face, reference, request, tiny_llama, use, write_case  # noqa: E402
from vtaps.runtime.engine import Engine  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

STREAMS = [f"resid_post[{i}]" for i in range(LAYERS)]
SOURCE = """\
CALLS = []

def shrink(rows, at):
    CALLS.append((at.layer, tuple(zip(at.requests, at.positions.tolist()))))
    return rows * 0.9 + rows.mean(-1, keepdim=True)

def zero_kept(rows):
    KEPT.append(rows)  # a copy of the caller's: nothing that the model writes later
    rows[:, ::2] = 0

KEPT = []
"""
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
# vLLM's attention multiplies float32 in TF32.
TOLERANCE = 4e-3


def python(function: str, sites: list[str]) -> dict[str, Any]:
    said = {"file": "edits.py", "function": function, "digest": None}
    return {"verb": "python", "sites": sites, "tokens": {"rows": "all"}, "python": said}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("case")
    (folder / "edits.py").write_text(SOURCE, encoding="utf-8")
    lock, block = write_case(
        folder, model,
        edits={
            "every": python("shrink", STREAMS),
            "one": python("shrink", STREAMS[1:2]),
            "zero": python("zero_kept", ["z[1]"]),
        },
        reads={"stream": {"kind": "rows", "sites": STREAMS, "tokens": {"rows": "all"}}},
        arms={
            "base": arm(reads=["stream"]),
            "one": arm(use("one", STREAMS[1]), reads=["stream"]),
            "every": arm(use("every", *STREAMS), reads=["stream"]),
            "zero": arm(use("zero", "z[1]"), reads=["stream"]),
        },
        vllm={"max_num_batched_tokens": 256, "max_num_seqs": 16, "max_model_len": 512},
        mode="taps",
    )  # fmt: skip
    with Engine(lock, folder, block, folder / "manifest") as found:
        yield found


def functions() -> Any:
    """The file of functions as the worker, which is in this process, imported it."""
    (found,) = (m for name, m in sys.modules.items() if name.startswith("vtaps_python_") and hasattr(m, "CALLS"))
    return found


def shrunk(x: Any) -> Any:
    return x * 0.9 + x.mean(-1, keepdim=True)


def zeroed(x: Any) -> Any:
    x = x.clone()
    x[:, ::2] = 0
    return x


EDITS: dict[str, dict[str, Any]] = {
    "base": {},
    "one": {STREAMS[1]: shrunk},
    "every": dict.fromkeys(STREAMS, shrunk),
    "zero": {"z[1]": zeroed},
}


def test_every_shape_is_proved_with_its_breaks(engine: Engine) -> None:
    assert engine.workers[0]["breaks"] == sorted([*STREAMS, "z[1]"])
    assert engine.proof["passes"]["FULL"] and engine.proof["taps"] == LAYERS + 1
    assert engine.report["cudagraphs"] == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize("name", list(EDITS))
def test_values_are_those_of_hugging_face(engine: Engine, model: Path, name: str) -> None:
    twin = hugging_face(model)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(4, 260, size).tolist() for size in (5, 300, 40, 1, 17)]
    served = by_key(list(engine.run([request(f"{i}", name, p) for i, p in enumerate(prompts)], lambda _: GREEDY)))
    for key, finished in served.items():
        (completion,) = finished.completions
        ids = [*finished.request.prompt_token_ids, *completion.token_ids][:-1]
        _, streams = reference(twin, ids, EDITS[name])
        for site in STREAMS:
            rows = completion.record.reads["stream", site].values["rows"]
            np.testing.assert_allclose(rows, streams[site], atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"{key} {site}")


def test_a_function_runs_once_a_layer_and_row(engine: Engine) -> None:
    module = functions()
    module.CALLS.clear()
    prompts = {"a": [5, 6, 7], "b": list(range(4, 40))}
    list(engine.run([request(k, "every", p) for k, p in prompts.items()], lambda _: GREEDY))
    for layer in range(LAYERS):
        rows = sorted(row for at, some in module.CALLS if at == layer for row in some)
        assert rows == sorted((k, i) for k, p in prompts.items() for i in range(len(p) + GREEDY["max_tokens"] - 1))
    steps = len(module.CALLS) // LAYERS
    assert [at for at, _ in module.CALLS] == list(range(LAYERS)) * steps


def test_what_a_function_keeps_stays_as_it_was(engine: Engine) -> None:
    module = functions()
    module.KEPT.clear()
    list(engine.run([request("a", "zero", [5, 6, 7])], lambda _: GREEDY))
    assert len(module.KEPT) == GREEDY["max_tokens"]
    for rows in module.KEPT:
        assert not rows[:, ::2].any() and rows[:, 1::2].any()


def test_nothing_runs_where_nobody_asks(engine: Engine) -> None:
    module = functions()
    module.CALLS.clear()
    list(engine.run([request("a", "base", [5, 6, 7])], lambda _: GREEDY))
    assert module.CALLS == []

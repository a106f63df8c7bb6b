"""Quantised checkpoints: reads and edits are of activations, and equal a Hugging Face forward with the same rounded
numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engine.soak import Numbers, Regime, Told, hold  # noqa: E402
from tests.models import tiny  # noqa: E402
from tests.quantised import quantised  # noqa: E402
from vtaps.runtime.engine import Engine  # noqa: E402
from vtaps.runtime.records import Finished, Request  # noqa: E402

pytestmark = pytest.mark.engine

ALL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded_inputs(model: Any) -> None:
    """Let each linear layer see its input as int8 with a scale a row, as the quantised one does."""

    def rounded(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        scale = args[0].abs().amax(-1, keepdim=True) / 127
        return ((args[0] / scale).round() * scale,)

    for name, module in model.named_modules():
        if name.endswith(ALL_LAYERS):
            module.register_forward_pre_hook(rounded)


# format → (mode, dtype, what an error may be of the largest value of its row)
CASES = {"awq": ("taps", "bfloat16", 6e-2), "int8 a token": ("eager", "float32", 2e-2)}


@pytest.mark.parametrize("name", CASES)
def test_rows_and_edits_of_a_quantised_model(name: str, tmp_path: Path) -> None:
    same(*served(name, *CASES[name], tmp_path))


def served(name: str, mode: str, dtype: str, bound: float, tmp_path: Path) -> tuple[Finished, Finished]:
    """Hold every arm's rows, edits and tokens; returns an unedited request among edited ones and among unedited, on
    one schedule."""
    checkpoint, dense = quantised(tiny("llama"), name, tmp_path)
    numbers = Numbers.of(tmp_path, mode, 1, Regime(checkpoint=checkpoint, dtype=dtype), dense)
    holder = numbers.holder
    if name == "int8 a token":
        rounded_inputs(holder.model.model)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, 200, size).tolist()) for size in (60, 55, 90)]
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "n": 1, "logprobs": 0}
    arms = [arm for arm in numbers.lock["arms"] if arm != "said"]
    requests = [Request(f"{a}/{i}", a, 0, "any", f"{a}/{i}", prompts[i % 3]) for i, a in enumerate(arms)]
    told = Told()
    with Engine(numbers.lock, tmp_path, numbers.block, tmp_path / "manifest") as engine:
        finished = {f.request.key: f for f in engine.run(requests, lambda _: sampling)}
        nobody = [Request(r.key, "plain", 0, "any", r.key, r.prompt_token_ids) for r in requests]
        alike = [{f.request.key: f for f in engine.run(rs, lambda _: sampling)} for rs in (requests, nobody)]
    assert set(finished) == {r.key for r in requests}
    for one in finished.values():
        hold(one, sampling, holder, told, bound)
    assert told.wrong == [] and told.rows > 1000, told.wrong[:5]
    among, alone = (batch["plain/0"] for batch in alike)
    return among, alone


def same(a: Finished, b: Finished) -> None:
    """Weights that are rounded, and activations with a scale a row, let no neighbour in."""
    (one,), (other,) = a.completions, b.completions
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    for where, read in one.record.reads.items():
        np.testing.assert_array_equal(read.values["rows"], other.record.reads[where].values["rows"])

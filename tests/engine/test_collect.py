"""Collecting activations: rows narrowed on their way, files of bounded size, and a run that ends with its budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import vtaps
from tests.models import tiny
from vtaps.check import check_file
from vtaps.running import run_checked

pytestmark = pytest.mark.engine

LENGTHS = (9, 3, 21, 5, 17, 8, 30, 4, 11, 6)
SPEC = """vtaps: 1
model: {{path: {model}, dtype: {dtype}}}
engine:
  mode: {mode}
  vllm: {{max_model_len: 128, max_num_seqs: 2, max_num_batched_tokens: 16, kv_cache_memory_bytes: 67108864}}
reads:
  whole: {{at: "resid_post[*]", tokens: prompt, budget: {{tokens: 40}}}}
  wide:  {{at: "resid_post[*]", tokens: prompt, store: {{dtype: float32, shard: {{rows: 16}}}}}}
  half:  {{at: "resid_post[*]", tokens: prompt, store: {{dtype: float16, shard: 2 kB}}}}
  eighth: {{at: ["resid_post[*]", "z[0]"], tokens: prompt, store: {{dtype: float8_e4m3, scale: per_row}}}}
prompts:
  all: [{prompts}]
arms:
  base: {{reads: [whole, wide, half, eighth], sampling: {{max_tokens: 1}}}}
"""


@pytest.mark.parametrize(("mode", "dtype"), [("taps", "bfloat16"), ("eager", "float32")])
def test_rows_of_a_budget_in_every_form(mode: str, dtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    said = ", ".join(f'{{id: "{i}", ids: {rng.integers(4, 260, n).tolist()}}}' for i, n in enumerate(LENGTHS))
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(model=tiny("llama"), mode=mode, dtype=dtype, prompts=said), encoding="utf-8")
    checked = check_file(spec)
    assert checked.plan is not None, [d.message for d in checked.diagnostics]
    outcome = run_checked(checked, tmp_path / "run")
    # 9 + 3 + 21 + 5 + 17 rows: the fifth is started with 38 kept or on their way.
    assert (outcome.findings, outcome.served, outcome.not_run, outcome.ok) == ([], 5, 5, True)
    run = vtaps.load(tmp_path / "run")
    assert run.info["not_run"] == [f"all/{i}/base/0" for i in range(5, 10)]
    whole = run["whole"].values.astype(np.float64)
    assert whole.shape == (55, 4, 128) and run["whole"].rows["prompt"].to_pylist()[:10] == [*["0"] * 9, "1"]
    size, largest = abs(whole), abs(whole).max(-1, keepdims=True)
    stored = {name: run[name].sel(layer=[0, 1, 2, 3]) for name in ("wide", "half", "eighth")}
    stored["eighth"] = stored["eighth"].sel(site=list(run["whole"].sites))
    off = {name: abs(read.values - whole) for name, read in stored.items()}
    assert (off["eighth"] <= np.maximum(size / 16, largest / 458752) * 1.0001).all() and off["eighth"].max() > 0
    assert (off["half"] <= size / 2048 + 2.0**-25).all()
    # The sum of the pair, that `whole` has rounded to the model's dtype.
    assert (off["wide"] <= size / 256).all() and bool(off["wide"].max() > 0) == (dtype == "bfloat16")
    files = {name: len(list((tmp_path / f"run/reads/{name}").glob("resid_post.2*"))) for name in run.reads}
    assert files == {"whole": 1, "wide": 4, "half": 8, "eighth": 1}
    assert run.info["reads"]["eighth"]["fields"]["rows"]["dtype"] == "F8_E4M3"

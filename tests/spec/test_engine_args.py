"""Engine arguments: names, types, what is refused, and that the table is the one vLLM has."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vtaps.schemas import ENGINE_ARGS, load
from vtaps.spec.engine_args import OWNED, REFUSED, check, refusal
from vtaps.spec.engine_options import KINDS, SERVED, VALUES
from vtaps.spec.explain import page
from vtaps.spec.yaml import loads

ROOT = Path(__file__).parents[2]


def findings(text: str) -> list[Any]:
    doc, found = loads(f"engine:\n  vllm: {{{text}}}\n", "f.yaml", Path("."))
    assert doc is not None and not found
    return check(doc, ("engine", "vllm"), doc.data["engine"]["vllm"])


@pytest.mark.parametrize(
    "text",
    [
        "max_model_len: 512",
        "max_model_len: ~",
        "gpu_memory_utilization: 1",
        "gpu_memory_utilization: 0.5",
        "load_format: dummy",
        "hf_overrides: {}",
        "offload_backend: auto",
        "cpu_offload_gb: 0",
        "structured_outputs_config: {}",
        "scheduling_policy: priority",
        "cudagraph_capture_sizes: [1, 2]",
        "tensor_parallel_size: 1",
        "enable_prefix_caching: false",
        "enable_prefix_caching: ~",
        "enable_prefix_caching: true",
        "async_scheduling: false",
        "speculative_config: ~",
        "optimization_level: 2",
        "attention_backend: flash_attn",
        "tokenizer_mode: mine",
        "distributed_executor_backend: uni",
    ],
)
def test_accepted(text: str) -> None:
    assert findings(text) == []


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("max_model_length: 512", "VT501", "max_model_length"),
        ("_api_process_rank: 1", "VT501", "_api_process_rank"),
        ('max_model_len: "512"', "VT502", "a whole number or null, found the text"),
        ("max_model_len: 1e3", "VT502", "found the number 1000.0"),
        ("trust_remote_code: yes", "VT502", "true or false"),
        ("trust_remote_code: 1", "VT502", "true or false"),
        ("max_num_seqs: true", "VT502", "found true"),
        ("compilation_config: 3", "VT502", "a mapping"),
        ("kv_cache_dtype: fp16", "VT502", "none of vLLM's choices"),
        ("max_lora_rank: 7", "VT502", "none of vLLM's choices"),
        ("speculative_config: {method: ngram}", "VT503", "not served"),
        ("data_parallel_size: 0", "VT503", "not served"),
        ("enable_lora: true", "VT503", "not served"),
        ("async_scheduling: true", "VT503", "not served"),
        ("runner: pooling", "VT503", "not served"),
        ("hf_overrides: {num_attention_heads: 2}", "VT503", "not served"),
        ("model_impl: transformers", "VT503", "not served"),
        ("logprobs_mode: raw_logits", "VT503", "not served"),
        ("kv_offloading_size: 4", "VT503", "not served"),
        ("watermark_config: {}", "VT503", "not served"),
        ("cpu_offload_gb: 4", "VT506", "not proved"),
        ("enable_expert_parallel: true", "VT506", "not proved"),
        ("enable_sleep_mode: true", "VT506", "not proved"),
        ("distributed_executor_backend: ray", "VT506", "not proved"),
        ("structured_outputs_config: {backend: guidance}", "VT506", "not proved"),
        ("use_replayssm: true", "VT506", "not proved"),
        ("mamba_cache_mode: align", "VT506", "not proved"),
    ],
)
def test_refused(text: str, code: str, words: str) -> None:
    (d,) = findings(text)
    assert d.code == code
    assert words in d.message


@pytest.mark.parametrize("name", OWNED)
def test_what_vtaps_sets_is_refused_whatever_the_value(name: str) -> None:
    (d,) = findings(f"{name}: 1")
    assert d.code == "VT503" and name in d.message and d.note == OWNED[name]
    assert (d.span.line, d.span.column) == (2, 10)


def test_all_at_once_and_the_nearest_name() -> None:
    found = findings("max-num-seqs: 1, dtpe: x, seed: x")
    assert [(d.code, d.nearest) for d in found] == [("VT501", "max_num_seqs"), ("VT501", None), ("VT502", None)]


def test_every_rule_is_about_an_argument_that_vllm_has() -> None:
    known = load(ENGINE_ARGS)["properties"]
    assert set(OWNED) | set(REFUSED) <= set(known)
    assert len(known) > 200
    # vLLM's own defaults are served
    for name, (refused, _) in REFUSED.items():
        default = known[name].get("default")
        assert default is None or not refused(default), name


def test_every_argument_is_served_owned_or_refused_off_its_default() -> None:
    """A list of what is right: an argument that a later vLLM adds is refused until somebody puts it there."""
    known = load(ENGINE_ARGS)["properties"]
    assert SERVED | set(VALUES) <= set(known)
    assert not SERVED & (set(VALUES) | set(OWNED) | set(REFUSED))
    assert sum(map(len, KINDS.values())) == len(SERVED)
    other = {"boolean": [True, False], "integer": [7], "number": [7.5], "string": ["other"], "array": [["other"]],
             "object": [{"other": 1}]}  # fmt: skip
    for name, rule in known.items():
        if name in SERVED or name in OWNED:
            continue
        values = [v for v in rule.get("enum") or [v for t in rule["type"] for v in other.get(t, [])] if v is not None]
        off = [v for v in values if v != rule.get("default") and v not in VALUES.get(name, ())]
        # What is false or empty turns off what has no default.
        off = [v for v in off if v or "default" in rule]
        refused = [refusal(name, v) for v in off if not (name in REFUSED and not REFUSED[name][0](v))]
        assert refused and None not in refused, name


def test_the_page_lists_what_is_served() -> None:
    text = page("VT506")
    for what, names in KINDS.items():
        assert f"| {what} | {', '.join(f'`{n}`' for n in names)} |" in text
    for name, values in VALUES.items():
        assert f"`{name}` ({', '.join(map(str, values))})" in text


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_the_table_is_what_the_installed_vllm_gives() -> None:
    command = [sys.executable, "-m", "vtaps.runtime.compat.engine_args", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

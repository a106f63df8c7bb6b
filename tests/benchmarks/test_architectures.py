"""The trees of architectures: what the page says of a few is what a build says, and the parts that build nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.architecture_configs import LAYERS, SMALL, config_of
from benchmarks.architecture_page import HEAD, differing, page
from benchmarks.architecture_streams import FULL, PAIR, STREAMS, TENSOR, UNKNOWN, convention
from benchmarks.architectures import Row, in_fork
from vtaps.spec.snapshot import parse_value, read_tree
from vtaps.spec.tree import Dimensions, ModelTree, Module

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architectures.md"
TREES = ROOT / "tests" / "data" / "trees"

PLAIN, MOE, MLA = "Qwen3ForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"
HYBRIDS = ("JambaForCausalLM", "Qwen3NextForCausalLM")
SPARSE, ALIBI, SEEING = "DeepseekV32ForCausalLM", "BloomForCausalLM", "Qwen3_5ForCausalLM"


def test_the_page_says_what_a_build_says() -> None:
    """One of each kind: attention, experts, latent attention, state spaces, a gated delta net, a sparse indexer, slopes
    that a layer reads while it is built, and a file that imports what prepares images."""
    command = [sys.executable, "-m", "benchmarks.architectures", "--check", str(PAGE)]
    names = [PLAIN, MOE, MLA, *HYBRIDS, SPARSE, ALIBI, SEEING]
    done = subprocess.run([*command, *names], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == sorted(names, key=str.lower)
    assert all(" modules, " in line and ", shapes, " in line for line in lines), lines


def test_the_page_is_of_every_architecture_and_holds_what_was_promised() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if "ForCausalLM" in line]
    table = [row for row in rows if len(row) == 8]
    trees = [row for row in table if "no tree" not in row[2]]
    shapes = [row for row in trees if row[5].startswith("yes")]
    with_ops, without = (sum(int(row[column] or 0) for row in trees) for column in (3, 4))
    assert text.startswith(HEAD)
    assert len(table) >= 110
    assert len(trees) >= 0.95 * len(table)
    assert len(shapes) >= 0.80 * len(table)
    assert with_ops >= 0.95 * (with_ops + without)


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", PAIR), ("qwen3", PAIR), ("gemma2", PAIR), ("gpt2", TENSOR), ("opt", TENSOR), ("dbrx", TENSOR)],
)
def test_the_stream_of_a_committed_tree(family: str, expected: str) -> None:
    assert convention(read_tree(TREES / f"{family}.json")) == expected


ROWS_, WIDE, PAIRED = "float32[T,8]", "float32[T,4,8]", "(float32[T,8], float32[T,8])"


@pytest.mark.parametrize(
    ("output", "residual", "expected"),
    [
        (ROWS_, "None", TENSOR),
        (PAIRED, ROWS_, PAIR),
        (PAIRED, "None", FULL),  # the norm is given the first alone
        ("(float32[T,8], None)", "None", FULL),
        ("(float32[T,8], None, float32[T,8])", ROWS_, PAIR),
        (WIDE, "None", STREAMS),
        ("float32[T,32]", "None", STREAMS),
        ("float32[4,T,8]", "None", STREAMS),
        ("(float32[T,8], (float32[T,8], other))", "None", UNKNOWN),
        ("(float32[T,8], float32[T,2])", ROWS_, UNKNOWN),
    ],
)
def test_what_layers_put_out_says_how_the_stream_goes_on(output: str, residual: str, expected: str) -> None:
    norm = (("x", parse_value(ROWS_)), ("residual", parse_value(residual)))
    modules = [
        Module("model", "M", enter=0, leave=7, calls=1, output=parse_value(ROWS_)),
        Module("model.layers.0", "L", enter=1, leave=2, calls=1, output=parse_value(output)),
        Module("model.layers.1", "L", enter=3, leave=4, calls=1, output=parse_value(output)),
        Module("model.norm", "N", inputs=norm, enter=5, leave=6, calls=1, output=parse_value(ROWS_)),
    ]
    sizes = Dimensions(hidden=8, layers=2, heads=2, kv_heads=2, head_dim=4, intermediate=None, vocab=16)
    assert convention(ModelTree("A", "a", "float32", "0", sizes, {m.path: m for m in modules}, "")) == expected


def test_a_configuration_states_the_sizes_that_its_class_knows_and_what_the_table_adds() -> None:
    made = config_of("MiniMaxM2ForCausalLM", "minimax_m2", ("hidden_size", "num_hidden_layers", "use_cache"))
    assert (made["hidden_size"], made["num_hidden_layers"]) == (SMALL["hidden_size"], LAYERS)
    assert made["rotary_dim"] == 16 and "intermediate_size" not in made
    assert config_of("OrionForCausalLM", "orion", None)["rope_theta"] == 10000.0


def failed(why: str) -> Row:
    return Row("A", "m.A", unbuilt=why)


def test_a_build_that_hangs_is_given_up_and_one_that_dies_is_a_row() -> None:
    start = time.perf_counter()
    assert in_fork(lambda: time.sleep(60) or failed(""), failed, 1).unbuilt == "not done after 1 s"
    assert time.perf_counter() - start < 10
    assert in_fork(lambda: os._exit(3), failed, 10).unbuilt == "the process ended with 3"
    row = Row("A", "m.A", modules=3, without=(("f", "why"),), lacking=("x",))
    assert in_fork(lambda: row, failed, 10) == row


def test_a_page_counts_what_lacks_a_dependency_apart_and_gives_every_reason() -> None:
    rows = [
        Row("AForCausalLM", "vllm.model_executor.models.a.A", 5, 4, 3, stream=PAIR, op_shapes=True, aliases=True),
        Row("BForCausalLM", "vllm.models.b.B", 5, 4, 3, (("torch.f", "why not"),), TENSOR, lacking=("torchvision",)),
        Row("CForCausalLM", "vllm.models.c.C", 5, 0, 3, stream=UNKNOWN, unvalued="KeyError: x"),
        Row("DForCausalLM", "vllm.models.d.D", unbuilt="it needs y"),
    ]
    text = page(rows)
    assert "| a tree | 3 of 4 (75.0 %) |" in text
    assert "| a tree, nothing that vLLM requires missing | 2 of 4 (50.0 %) |" in text
    assert "| forwards with a list of ops | 9 of 10 (90.0 %) |" in text
    assert "| shapes of modules | 2 of 4 (50.0 %) |" in text
    assert "| AForCausalLM | a.A | 5 (4) | 3 |  | yes | pair | yes |" in text
    assert "| BForCausalLM² | b.B | 5 (4) | 3 | 1 | yes (modules) | tensor | no |" in text
    for reason in (
        "| CForCausalLM | KeyError: x |",
        "| DForCausalLM | it needs y |",
        "| `torch.f` | BForCausalLM | why",
    ):
        assert reason in text
    assert differing(rows, text) == []
    assert differing([Row("AForCausalLM", "a.A", 6)], text) == [
        "| AForCausalLM | a.A | 6 (0) | 0 |  | yes (modules) |  | no |"
    ]

"""Slots: the most rows of one request and one step, and the bytes, against schedules played through row by row."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trees import DATA, seed_cache
from vtaps.check import CheckResult, check_file
from vtaps.spec.budget import Load, Slots, limits, slots_of
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.slots import GATHERED_BYTES, row_bytes, slot_count, slot_rows
from vtaps.summary import describe, read_size

SPEC = """vtaps: 1
model: {{path: {data}/configs/smollm2, tokenizer: {data}/tokenizer}}
engine: {engine}
vectors: {{a: {{random: {{}}}}, b: {{random: {{seed: 1}}}}}}
reads:
  r: {{at: "{at}", tokens: {tokens}{kind}}}
overrides: {{think: {{start: 1, ids: [5, 6]}}}}
prompts:
  short: [{{id: s, ids: [7, 8, 9]}}]
  long: [{{id: l, ids: [1, 2, 3, 4, 9, 9, 3, 1]}}, {{id: m, ids: [9, 2, 2, 2]}}]
arms:
  one: {{prompts: [short], reads: [r], overrides: [think]}}
  two: {{prompts: [long], reads: [r], overrides: [think], sampling: {{max_tokens: {longest}, n: 2}}}}
  none: {{overrides: [think]}}
sampling: {{max_tokens: 5}}
"""


def errors(result: CheckResult) -> list[Diagnostic]:
    return [d for d in result.diagnostics if d.severity == "error"]


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    seed_cache(tmp_path / "cache", monkeypatch)

    def check(
        tokens: str = "all", engine: str = "{}", kind: str = "", at: str = "resid_post[0..3]", longest: int = 6
    ) -> CheckResult:
        text = SPEC.format(data=DATA, tokens=tokens, engine=engine, kind=kind, at=at, longest=longest)
        (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
        return check_file(tmp_path / "spec.yaml")

    return check


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        ("all", 8),
        ("prompt", 8),
        ("sampling", 1),
        ("generated", 1),
        ("{steps: [0..3]}", 1),
        ("{positions: [0, 2..9, -1]}", 7),
        ("{positions: [-1]}", 1),
        ("{ids: [9]}", 2),
        ("{ids: [9, 2]}", 4),
        ("{rows: generated, ids: [9]}", 1),
        ("{after: think}", 1),
        ("{rows: all, except: {positions: [0..5]}}", 2),
        ("{rows: all, except: {ids: [9]}}", 6),
        ("{rows: all, except: generated}", 8),
    ],
)
def test_rows_of_one_request_in_one_step(tokens: str, rows: int, checked) -> None:  # type: ignore[no-untyped-def]
    result = checked(tokens)
    assert errors(result) == []
    assert result.plan.reads["r"].step_rows == rows


def test_a_read_that_no_arm_lists_has_no_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path / "cache", monkeypatch)
    text = SPEC.format(data=DATA, tokens="all", engine="{tap_memory: 1 kB}", kind="", at="resid_post[0..3]", longest=6)
    (tmp_path / "spec.yaml").write_text(text.replace("reads: [r], ", ""), encoding="utf-8")
    plan = check_file(tmp_path / "spec.yaml").plan
    assert plan is not None and plan.reads["r"].step_rows == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_needs_more_rows(seed: int) -> None:
    """Requests with prompts and answers of any length, chunked and batched at random; each selects all its rows."""
    order = random.Random(seed)
    prompts = [order.randint(1, 30) for _ in range(order.randint(1, 12))]
    seqs, budget = order.randint(1, 6), order.randint(6, 40)
    bound = slot_rows(max(prompts), seqs, budget)
    waiting = [(size, size + order.randint(0, 5)) for size in prompts]
    alive: list[list[int]] = []
    while waiting or alive:
        while waiting and len(alive) < seqs:
            size, stop = waiting.pop()
            alive.append([0, size, stop])
        left, taken = budget, 0
        for request in alive:
            at, size, _ = request
            chunk = min(left, size - at if at < size else 1, order.randint(1, 30))
            request[0] += chunk
            taken += chunk
            left -= chunk
        assert taken <= bound
        alive = [r for r in alive if r[0] < r[2]]


@pytest.mark.parametrize(("kind", "item"), [("rows", 2), ("lens", 2), ("norm", 4), ("project", 4), ("mean", 4)])
def test_bytes(kind: str, item: int) -> None:
    assert row_bytes(kind, [128, 128, 64], "bfloat16") == 320 * item
    assert row_bytes(kind, [128], "float32") == 128 * 4
    assert row_bytes(kind, [128, 64], "bfloat16", "float16") == 192 * item
    assert row_bytes(kind, [128, 64], "bfloat16", "float32") == 192 * (2 if kind == "lens" else 4)


@pytest.mark.parametrize(
    ("store", "each", "told"),
    [
        ("", 2 * 576, "rows at"),
        (", store: {shard: 1 MiB}", 2 * 576, "rows at"),
        (", store: {dtype: float32}", 4 * 576, "rows as float32 at"),
        (", store: {dtype: float16}", 2 * 576, "rows as float16 at"),
        (", store: {dtype: float8_e4m3, scale: per_row}", 576 + 4, "rows as float8_e4m3 with a scale a row at"),
    ],
)
def test_the_bytes_that_check_prints_are_those_that_are_stored(
    store: str, each: int, told: str, checked: Callable[..., CheckResult]
) -> None:
    plan = checked(tokens="all", kind=store, engine="{mode: eager}").plan
    assert plan is not None
    # 3 + 4 rows of one prompt; (8 + 5) + (4 + 5) of two prompts, twice each; at four locations.
    rows = 4 * (3 + 4 + 2 * (8 + 5 + 4 + 5))
    assert read_size(plan, "r", plan.reads["r"]) == (rows, rows * each)
    assert f"read      r: {told} resid_post[0..3], up to {rows} rows" in describe(plan)


def test_rows_of_a_step() -> None:
    assert slot_rows(5, 4, 64) == 20
    assert slot_rows(5, 400, 64) == 64
    assert slot_rows(5, 400, None) == 2000


def test_few_rows_are_held_for_many_steps_and_many_for_two() -> None:
    assert slot_count(1, 8192) == 64
    assert slot_count(1, 1 << 20) == 64 and slot_count(1, 4 << 20) == 16
    assert slot_count(16384, 8192) == 2 * 16384
    assert slot_count(1024, 8192) == GATHERED_BYTES // 8192


@pytest.mark.parametrize(
    ("vllm", "seqs", "tokens"),
    [
        ({}, 1024, 16384),
        ({"performance_mode": "throughput"}, 2048, 32768),
        ({"max_num_seqs": 8}, 8, 16384),
        ({"max_num_batched_tokens": 99}, 1024, 99),
        ({"max_num_seqs": None, "max_num_batched_tokens": "x"}, 1024, 16384),
        ({"max_num_seqs": True, "max_num_batched_tokens": 0}, 1024, 16384),
        ({"enable_chunked_prefill": False}, 1024, None),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 99}, 1024, 99),
    ],
)
def test_limits(vllm: dict[str, Any], seqs: int, tokens: int | None) -> None:
    assert limits(vllm) == (seqs, tokens)


def test_requests_of_the_run_bound_what_is_alive(checked) -> None:  # type: ignore[no-untyped-def]
    """One prompt once and two prompts twice, of at most 8 rows; four layers of 576 columns in bfloat16, two steps."""
    need = 5 * 8 * 4 * 576 * 2 * 2
    assert checked(engine=f"{{tap_memory: {need}}}").ok
    (found,) = errors(checked(engine=f"{{tap_memory: {need - 1}}}"))
    assert (found.code, found.span.line) == ("VT321", 6)
    assert "'r' can take 40 rows a step, 360.0 KiB; engine.tap_memory is 360.0 KiB" in found.message
    # One row less: 39 tokens a step, or 4 requests at once, which is what binds.
    assert "`engine.vllm.max_num_seqs: 4` fits" in found.note


def test_what_is_said_to_fit_fits(checked) -> None:  # type: ignore[no-untyped-def]
    for engine, memory in (("max_num_batched_tokens: 20", 100_000), ("max_num_seqs: 3", 100_000), ("", 40_000)):
        (found,) = errors(checked(engine=f"{{tap_memory: {memory}, vllm: {{{engine}}}}}"))
        fit, more = found.note.split("`")[1].removeprefix("engine.vllm."), found.note.split("`")[3]
        name, value = fit.split(": ")
        assert checked(engine=f"{{tap_memory: {memory}, vllm: {{{fit}}}}}").ok
        larger = checked(engine=f"{{tap_memory: {memory}, vllm: {{{name}: {int(value) + 1}}}}}")
        assert [d.code for d in errors(larger)] == ["VT321"]
        assert checked(engine=f"{{{more}, vllm: {{{engine}}}}}").ok


def test_what_fits_is_what_vllm_takes(checked) -> None:  # type: ignore[no-untyped-def]
    """vLLM refuses fewer tokens a step than requests, and without chunked prefill fewer than a prompt may have."""
    (found,) = errors(checked(engine="{tap_memory: 40000, vllm: {max_num_batched_tokens: 20, max_num_seqs: 16}}"))
    assert found.note.startswith("`engine.vllm.max_num_batched_tokens: 4` with `max_num_seqs: 4` fits; so does")
    own = "max_num_batched_tokens: 20, enable_chunked_prefill: false"
    (found,) = errors(checked(engine=f"{{tap_memory: 100000, vllm: {{{own}}}}}"))
    assert found.note.startswith("`engine.vllm.max_num_seqs: 1` fits; so does")
    (found,) = errors(checked(engine=f"{{tap_memory: 40000, vllm: {{{own}}}}}"))
    assert found.note.startswith("it takes `tap_memory: 1 MiB`")


def test_where_nothing_fits_it_says_what_is_needed(checked) -> None:  # type: ignore[no-untyped-def]
    (found,) = errors(checked(engine="{tap_memory: 100}"))
    assert found.note.startswith("it takes `tap_memory: 1 MiB`")
    assert checked(engine="{tap_memory: 100, mode: eager}").ok


def test_means_and_norms_are_held_whole_in_float32(checked) -> None:  # type: ignore[no-untyped-def]
    for kind in (", norm: true", ", mean_over: request", ", project: {vectors: [a, b]}"):
        need = 5 * 8 * 4 * 576 * 4 * 2
        assert checked(kind=kind, engine=f"{{tap_memory: {need}}}").ok
        assert not checked(kind=kind, engine=f"{{tap_memory: {need - 1}}}").ok


def test_the_largest_of_several_reads_is_named() -> None:
    slots = Slots({"a": Load(10, 1, 100), "b": Load(10, 8, 20)}, seqs=4, tokens=16)
    assert (slots.rows, slots.bytes, slots.alive) == (4 + 16, 4 * 100 + 16 * 20, 4)
    assert slots.fitting(720) == "max_num_seqs: 4"
    # a binds by requests: with three, 3 × 100 + 16 × 20.
    assert slots.fitting(700) == "max_num_seqs: 3"
    # b binds by tokens where it takes more: 4 × 10 + 16 × 60 over, 4 × 10 + 10 × 60 under.
    other = Slots({"a": Load(10, 1, 10), "b": Load(10, 8, 60)}, seqs=4, tokens=16)
    assert other.fitting(645) == "max_num_batched_tokens: 10"


GATED = """\
vtaps: 1
model: {{path: {data}/configs/llama, dtype: float32, tokenizer: {data}/tokenizer}}
engine: {{mode: taps, tap_memory: {memory}, vllm: {{max_num_seqs: 3, max_num_batched_tokens: 16}}}}
vectors: {{v: {{random: {{seed: 1}}}}}}
gates:
  loud: {{at: "resid_post[1]", tokens: all, cosine: v, above: 0.1, holds: row}}
  last: {{at: "resid_post[1]", tokens: {{positions: [-1]}}, project: v, reduce: last, above: 0, holds: request}}
edits:
  row: {{at: "resid_post[2]", tokens: all, zero: {{}}, when: loud}}
  request: {{at: "resid_post[2]", tokens: generated, zero: {{}}, when: last}}
prompts: {{facts: [{{id: a, ids: [5, 6, 7, 8, 9, 10, 11]}}, {{id: b, ids: [5]}}]}}
arms: {{x: {{edits: [row]}}, y: {{edits: [request]}}}}
"""


def gated(folder: Path, monkeypatch: pytest.MonkeyPatch, memory: str) -> CheckResult:
    seed_cache(folder / "cache", monkeypatch)
    (folder / "spec.yaml").write_text(GATED.format(data=DATA, memory=memory), encoding="utf-8")
    return check_file(folder / "spec.yaml")


def test_check_says_what_the_scores_of_gates_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vtaps.compiling import compile_plan
    from vtaps.runtime import memory
    from vtaps.runtime.lockfile import parse_program

    plan = gated(tmp_path, monkeypatch, "4 GiB").plan
    assert plan is not None
    told = describe(plan)
    # Two prompts: 7 rows and 1 of at most 16 a step; one score a request.
    assert "loud: cosine with v above 0.1, each row for itself at resid_post[1], up to 14 scores a step, 336 B" in told
    assert "last: project with v above 0, last over the request at resid_post[1], up to 2 scores a step, 48 B" in told
    compiled, _ = compile_plan(plan)
    assert compiled is not None
    found = memory.slots(parse_program(compiled.lock, tmp_path), memory.Limits(16, 3, 16), "float32")
    slots = slots_of(plan.spec.engine.vllm, plan.reads, "float32", plan.gates)
    assert slots.taken(4 << 30) == 12 * sum(found.values()) and len(found) == 2


def test_scores_that_take_too_much_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = gated(tmp_path, monkeypatch, "380")
    [found] = [d for d in result.diagnostics if d.code == "VT321"]
    assert found.message.startswith("gate 'loud' can take 14 rows a step, 336 B of the 384 B that all reads take")
    assert (found.span.line, found.span.column) == (6, 3)

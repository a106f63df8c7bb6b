"""Arms that need what other arms kept: the order in which they go in, what is brought to the engine, what fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trees import seed_cache
from vtaps.check import check_file
from vtaps.running import requests_of
from vtaps.runtime.records import Failure, Request
from vtaps.runtime.results.means import RunMean
from vtaps.spec.plan import Plan
from vtaps.staging import Sources, batches, made_vectors

DATA = Path(__file__).parents[1] / "data"
WIDTH = 128
SPEC = f"""
vtaps: 1
model: {{path: {DATA}/configs/llama, dtype: float32, tokenizer: {DATA}/tokenizer}}
reads:
  stream: {{at: "resid_post[1, 2]", tokens: all, sees: after_edits}}
  mu: {{at: "resid_post[2]", tokens: all, mean_over: run, sees: after_edits}}
vectors:
  apart: {{read: clean.mu, minus: patched.mu, norm: 3.0}}
edits:
  patch: {{at: "resid_post[1, 2]", tokens: {{positions: [0, -1]}}, set: {{rows: clean.stream}}}}
  push: {{at: "resid_post[2]", tokens: sampling, add: {{vector: apart}}}}
prompts:
  clean: [{{id: a, ids: [5, 6, 7]}}, {{id: b, ids: [5]}}]
  corrupted: [{{id: a, ids: [5, 6, 8]}}, {{id: b, ids: [6]}}]
arms:
  pushed: {{prompts: [corrupted], edits: [push]}}
  grid: {{prompts: [corrupted], edits: [patch], sweep: {{patch.at: each, patch.tokens: each}}}}
  patched: {{prompts: [corrupted], edits: [patch], reads: [mu]}}
  clean: {{prompts: [clean], reads: [stream, mu]}}
sampling: {{max_tokens: 2}}
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    seed_cache(tmp_path, monkeypatch)
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    result = check_file(tmp_path / "spec.yaml")
    assert result.plan is not None, [d.message for d in result.diagnostics]
    return result.plan


def row(key: str, site: str, position: int) -> np.ndarray[Any, Any]:
    return np.full(WIDTH, len(key) * 100 + int(site[-2]) * 10 + position, np.float32)


class Kept:
    """What ``done`` requests kept: rows that say where they are from, and means."""

    def __init__(self, done: Sequence[str], means: Mapping[str, RunMean] | None = None) -> None:
        self.done, self.means = set(done), dict(means or {})

    def rows(self, key: str, read: str) -> tuple[list[int], dict[str, Any]] | None:
        if key not in self.done:
            return None
        positions = range(4 if "/a/" in key else 2)
        sites = {f"resid_post[{i}]" for i in (1, 2)}
        return list(positions), {s: np.stack([row(key, s, p) for p in positions]) for s in sites}

    def mean(self, keys: Sequence[str], read: str) -> RunMean | None:
        return self.means[keys[0].split("/")[2]] if set(keys) <= self.done else None


class Engine:
    def __init__(self) -> None:
        self.log: list[tuple[str, Any, Any]] = []

    def patch(self, edit: str, first: int, rows: Mapping[str, Any]) -> None:
        self.log.append((edit, first, rows))

    def define(self, vector: str, numbers: Mapping[str, Any]) -> None:
        self.log.append((vector, None, numbers))


def sources(plan: Plan, kept: Kept, engine: Engine, failed: dict[str, Failure] | None = None) -> Sources:
    return Sources(plan, Path("."), list(requests_of(plan)), kept, engine, {} if failed is None else failed)


def of(plan: Plan, *arms: str) -> list[Request]:
    return [r for r in requests_of(plan) if r.arm in arms]


def test_arms_are_served_after_those_that_they_need(plan: Plan) -> None:
    assert plan.stages == (("clean",), ("grid", "patched"), ("pushed",))
    stages = [[r.arm for r in batch] for batch in batches(plan, requests_of(plan))]
    # Of the grid, b has one of the two positions.
    assert stages == [["clean"] * 2, ["grid"] * 4 + ["patched"] + ["grid"] * 2 + ["patched"], ["pushed"] * 2]
    assert [[r.arm for r in batch] for batch in batches(plan, of(plan, "pushed"))] == [["pushed"] * 2]


def test_rows_are_brought_once_and_each_request_says_where_they_are(plan: Plan) -> None:
    engine = Engine()
    kept = Kept([r.key for r in of(plan, "clean")])
    ready = list(sources(plan, kept, engine).ready(of(plan, "grid", "patched")))
    assert [(name, first) for name, first, _ in engine.log] == [("patch", 0), ("patch", 2)]
    for (_, _, rows), (key, positions) in zip(engine.log, (("a", (0, 2)), ("b", (0,))), strict=True):
        for site in ("resid_post[1]", "resid_post[2]"):
            wanted = [row(f"clean/{key}/clean/0", site, p) for p in positions]
            np.testing.assert_array_equal(rows[site], wanted)
    assert {r.prompt_id: r.patches for r in ready} == {
        "a": {"patch": (0, ((0, 1), (2, 3)))},
        "b": {"patch": (2, ((0, 1),))},
    }


def test_a_request_without_its_rows_fails_by_name(plan: Plan) -> None:
    engine, failed = Engine(), {"clean/a/clean/0": Failure("it was refused")}
    kept = Kept(["clean/b/clean/0"])
    ready = list(sources(plan, kept, engine, failed).ready(of(plan, "patched")))
    assert [r.prompt_id for r in ready] == ["b"]
    assert failed["corrupted/a/patched/0"].reason == (
        "edit patch has no rows to set, since request clean/a/clean/0 failed: it was refused"
    )


def test_a_vector_is_made_once_its_arms_are_done(plan: Plan) -> None:
    means = {}
    for number, arm in enumerate(("clean", "patched")):
        means[arm] = RunMean()
        for count in (1, 3):
            means[arm].add(count, {"resid_post[2]": np.full(WIDTH, count + number, np.float32)})
    engine, failed = Engine(), {}
    kept = Kept([r.key for r in of(plan, "clean", "patched")], means)
    assert len(list(sources(plan, kept, engine, failed).ready(of(plan, "pushed")))) == 2
    [(name, _, numbers)] = engine.log
    # (1 + 3 · 3) / 4 − (2 + 3 · 4) / 4 = −1 in each of 128 columns, scaled to a norm of 3.
    np.testing.assert_allclose(numbers["resid_post[2]"], np.full(WIDTH, -3 / np.sqrt(WIDTH)), rtol=1e-6)
    assert name == "apart" and not failed
    made = made_vectors(plan, requests_of(plan), kept)
    np.testing.assert_array_equal(made["apart"]["resid_post[2]"], numbers["resid_post[2]"])


def test_a_vector_of_an_arm_that_is_not_whole_fails_its_requests(plan: Plan) -> None:
    engine, failed = Engine(), {}
    kept = Kept([r.key for r in of(plan, "clean")][:1], {"clean": RunMean(), "patched": RunMean()})
    assert list(sources(plan, kept, engine, failed).ready(of(plan, "pushed"))) == []
    assert set(failed) == {r.key for r in of(plan, "pushed")}
    assert "vector apart cannot be made: clean.mu lacks a request" in failed["corrupted/a/pushed/0"].reason
    assert not engine.log


def test_an_arm_waits_for_the_mean_that_its_gate_looks_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    text = SPEC.replace(
        "edits:\n",
        'gates:\n  near: {at: "resid_post[2]", tokens: all, cosine: apart, above: 0.1, holds: row}\n'
        'edits:\n  off: {at: "resid_post[2]", tokens: all, zero: {}, when: near}\n',
    ).replace("arms:\n", "arms:\n  gated: {prompts: [corrupted], edits: [off]}\n")
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    plan = check_file(tmp_path / "spec.yaml").plan
    assert plan is not None
    stage = {arm: number for number, arms in enumerate(plan.stages) for arm in arms}
    assert stage["clean"] < stage["patched"] < stage["gated"]
    engine = Engine()
    done = [r.key for r in of(plan, "clean", "patched")]
    means = {"clean": RunMean(), "patched": RunMean()}
    for number, mean in enumerate(means.values()):
        mean.add(1, {"resid_post[2]": np.full(WIDTH, number, np.float32)})
    assert list(sources(plan, Kept(done, means), engine).ready(of(plan, "gated")))
    assert [name for name, _, _ in engine.log] == ["apart"]

"""The parts of the grid that start no engine: loads, rows, order, arithmetic, files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from benchmarks import grid, grid_report
from benchmarks.grid_child import Job, Tally, measure
from benchmarks.grid_engines import EngineProcess
from benchmarks.grid_plan import Start, starts
from benchmarks.grid_rows import AGAIN, COLUMNS, PLAIN, ROWS, Due, due, groups, prompt_ids, spec_text
from benchmarks.grid_shapes import SHAPES, loads_of
from benchmarks.grid_stats import cells, half_width
from benchmarks.loads import Load
from vtaps.runtime.program import VERBS
from vtaps.runtime.records import Completion, ReadRows, Record
from vtaps.spec.parse import parse
from vtaps.spec.schema import validate
from vtaps.spec.spec import ReadKind
from vtaps.spec.yaml import load as load_yaml

EIGHT_B, TINY = SHAPES["llama-8b"], SHAPES["tiny"]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (None, Due(128)),
        ("idle", Due(128)),
        ("one_layer", Due(128, keys=1, rows=128)),
        ("every_layer", Due(128, keys=32, rows=32 * 128)),
        ("every_layer_prompt", Due(128, keys=32, rows=32 * 639)),  # 512 + 128: the last token has no row
        ("steer_every", Due(128, fired=639)),
        ("override", Due(128, overridden=128)),
        ("mean_one", Due(128, keys=1, rows=639)),
        ("every_layer_float8", Due(128, keys=32, rows=32 * 128)),
        ("reconstruct_one", Due(128, fired=639)),
        ("eight_every_layer", Due(1024, keys=256, rows=256 * 128)),
        ("sweep_256", Due(256 * 64, fired=256 * 95)),
        ("prompts_1024", Due(1024 * 16, keys=1024, rows=1024 * 16)),
    ],
)
def test_what_is_due(row: str | None, wanted: Due) -> None:
    found = ROWS[row] if row else None
    assert due(found, loads_of(EIGHT_B)[found.load if found else "one"], EIGHT_B) == wanted


def test_every_verb_and_every_kind_of_read_has_a_row(tmp_path: Path) -> None:
    text, _ = spec_text(list(ROWS.values()), TINY, tmp_path, "eager", {}, 0)
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    doc, _ = load_yaml(tmp_path / "spec.yaml")
    assert doc is not None
    spec = parse(doc)
    used = [row.uses for row in ROWS.values() if row.uses is not None]
    edits = [spec.edits[name] for section, name in used if section == "edits"]
    # Rows that are set come out of requests that were served before: the grid serves a row's requests alone.
    assert {e.operation for e in edits} == set(VERBS) - {"put"}
    assert any(e.keep_norm for e in edits) and any(e.when for e in edits)
    reads = [spec.reads[name] for section, name in used if section == "reads"]
    assert {*(r.kind for r in reads), "pattern"} == set(get_args(ReadKind))
    assert any(at.startswith("pattern") for r in reads for at in r.at.texts)


def test_a_mean_is_one_row_of_all_that_it_is_of() -> None:
    tally = Tally()
    mean = {"mean": np.ones((1, 64), np.float32), "count": np.array([5])}
    tally.take("k", replace(completion(3), record=Record(reads={("m", "a"): ReadRows(np.arange(5), mean, "float32")})))
    assert (tally.keys, tally.rows) == (1, 5) and tally.total > 0


def test_prompts_differ_by_repeat_and_not_by_column() -> None:
    load = loads_of(EIGHT_B)["eight"]
    first = prompt_ids(load, EIGHT_B, 0, 0)
    assert first == prompt_ids(load, EIGHT_B, 0, 0)
    assert [len(ids) for ids in first] == [512] * 8
    assert len({*first, *prompt_ids(load, EIGHT_B, 0, 1), *prompt_ids(load, EIGHT_B, 1, 0)}) == 24
    assert 100 <= min(min(ids) for ids in first) <= max(max(ids) for ids in first) < 128256


def test_the_points_of_a_sweep_have_one_prompt() -> None:
    ids = prompt_ids(loads_of(EIGHT_B)["sweep"], EIGHT_B, 0, 0)
    assert (len(ids), len(set(ids))) == (256, 1)


@pytest.mark.parametrize("install", ["each", "block", "together"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_engine_has_a_spec(tmp_path: Path, install: str, shape: str) -> None:
    for _, rows in groups(list(ROWS.values()), install):
        text, files = spec_text(rows, SHAPES[shape], tmp_path, "eager", dict(SHAPES[shape].vllm), 0)
        for name, content in {"spec.yaml": text, **files}.items():
            (tmp_path / name).write_text(content, encoding="utf-8")
        doc, found = load_yaml(tmp_path / "spec.yaml")
        assert doc is not None
        assert [d.message for d in [*found, *validate(doc)]] == []
        assert {row.name for row in rows} <= set(doc.data["arms"])


def test_the_scales_of_a_sweep_are_a_point_a_request_and_none_is_an_identity(tmp_path: Path) -> None:
    import yaml

    text, _ = spec_text([ROWS["sweep_256"]], EIGHT_B, tmp_path, "taps", {}, 0)
    scales = yaml.safe_load(text)["arms"]["sweep_256"]["sweep"]["steer_one.add.scale"]
    assert len(set(scales)) == 256
    assert 0 not in scales


def test_rows_share_engines_only_where_they_share_a_block() -> None:
    rows = [ROWS[n] for n in ("idle", "one_layer", "every_layer", "eight_one_layer", "steer_one", "sweep_256")]
    named = {name: [r.name for r in members] for name, members in groups(rows, "block")}
    assert named == {
        "every_layer": ["idle", "every_layer"],
        "one_layer": ["one_layer", "eight_one_layer"],
        "steer_one": ["steer_one", "sweep_256"],
    }
    assert [name for name, _ in groups(rows, "each")] == [r.name for r in rows]
    named = {name: [r.name for r in members] for name, members in groups(rows, "block", ("idle", "sweep_256"))}
    assert named["idle+sweep_256"] == ["idle", "sweep_256"]
    assert (named["every_layer"], named["steer_one"]) == (["every_layer"], ["steer_one"])


def test_columns_alternate_with_plain_at_both_ends() -> None:
    first, second = starts((AGAIN, "vtaps_taps", PLAIN), ("one_layer", "lens"), "each", 2)
    assert [(s.number, s.column, s.group) for s in first] == [
        (0, PLAIN, "plain"),
        (0, "vtaps_taps", "one_layer"),
        (0, "vtaps_taps", "lens"),
        (0, AGAIN, "plain"),
    ]
    assert [(s.number, s.column) for s in second] == [
        (1, AGAIN),
        (1, "vtaps_taps"),
        (1, "vtaps_taps"),
        (1, PLAIN),
    ]
    assert first[0].cells == ("one",)


def completion(rows: int, width: int = 64, fill: float = 1.0) -> Completion:
    values = {"rows": np.full((rows, width), fill, np.float32)}
    record = Record(reads={("r", "a"): ReadRows(np.arange(rows), values, "float32")}, fired={"e": ((0, 2), (4, 5))})
    return Completion(0, (7, 8), "", "length", record)


def test_a_tally_counts_and_sums() -> None:
    tally = Tally()
    tally.take("a/0/0", completion(3))
    assert (tally.tokens, tally.keys, tally.rows, tally.fired) == (2, 1, 3, 3)
    assert tally.total == 3 * 16
    assert tally.held_against(Due(2, keys=1, rows=3, fired=3)) is None
    assert tally.held_against(Due(2, keys=1, rows=4, fired=3)) == "4 rows were due, 3 came"


def test_a_tally_refuses_empty_values() -> None:
    tally = Tally()
    tally.take("a/0/0", completion(3, fill=0.0))
    assert tally.held_against(Due(2, keys=1, rows=3, fired=3)) == "every value is zero"
    with pytest.raises(ValueError, match="2 values for 3 rows"):
        tally.take_values(np.ones(2), 3)


def test_a_digest_does_not_know_the_order_of_finishing() -> None:
    one, two = Tally(), Tally()
    for tally, order in ((one, (0, 1, 10, 2)), (two, (10, 2, 1, 0))):
        for number in order:
            tally.take_tokens(f"cell/{id(tally)}/{number}", (number, 5))
    assert one.digest() == two.digest()
    two.take_tokens("cell/0/11", (1,))
    assert one.digest() != two.digest()


def test_half_of_the_interval_around_one() -> None:
    assert half_width([0.98]) == pytest.approx(0.01)
    assert half_width([1.01, 1.02]) == pytest.approx(0.01)
    assert half_width([0.97, 1.02]) == pytest.approx(0.025)


def told(seconds: Sequence[float], tokens: int = 128, digest: str = "x") -> dict[str, Any]:
    return {"seconds": list(seconds), "warmup": [], "tokens": tokens, "digests": [digest] * len(seconds)}


def child(column: str, start: int, found: Mapping[str, Any], install: str = "each") -> dict[str, Any]:
    return {"column": column, "start": start, "install": install, "group": "g", "cells": dict(found), "seconds": 1.0}


def call(*children: Mapping[str, Any]) -> dict[str, Any]:
    args = grid.parse(["--shape", "llama-8b", "--out", "x.json"])
    described = grid.describe(args, ["--shape", "llama-8b", "--out", "x.json"])
    return {"about": described, "children": list(children), "left_out": []}


def test_shares_are_paired_start_by_start() -> None:
    """A machine that is twice as slow in its second round leaves the shares alone."""
    one = call(
        child(PLAIN, 0, {"one": told([9.0, 1.0, 1.0])}),
        child(AGAIN, 0, {"one": told([1.01] * 3)}),
        child("vtaps_taps", 0, {"one_layer": told([1.02] * 3)}),
        child(PLAIN, 1, {"one": told([2.0] * 3)}),
        child("vtaps_taps", 1, {"one_layer": told([2.0, 2.0, 8.0], digest="y")}),
        child("vtaps_taps", 2, {"one_layer": told([500.0])}),  # without a plain one in its round
    )
    (cell,) = cells([one])
    assert (cell.row, cell.rounds) == ("one_layer", 2)
    assert (cell.low, cell.high) == pytest.approx((1 / 1.02, 1.0))
    assert cell.half_width == pytest.approx((1 - 1 / 1.01) / 2)
    assert cell.same == (3, 6)
    assert cell.met is False  # 0.980 and 0.005 of resolution; the goal is 0.99
    (cell,) = cells([call(*one["children"][:2], child("vtaps_taps", 0, {"one_layer": told([1.005] * 3)}))])
    assert cell.met is True


def test_a_run_in_which_plain_differs_from_plain_decides_nothing() -> None:
    (cell,) = cells(
        [
            call(
                child(PLAIN, 0, {"one": told([1.0])}),
                child(AGAIN, 0, {"one": told([2.0])}),
                child("vtaps_taps", 0, {"one_layer": told([1.2])}),
            )
        ]
    )
    assert (cell.half_width, cell.met) == (0.25, None)


def test_calls_are_not_paired_with_each_other() -> None:
    plain = call(child(PLAIN, 0, {"one": told([1.0])}))
    ours = call(child("vtaps_taps", 0, {"one_layer": told([1.0])}))
    assert cells([plain, ours]) == []
    assert "served, but plain was not" in grid_report.markdown([plain, ours])


def test_the_eager_engine_is_held_against_plain_eager() -> None:
    (cell,) = cells(
        [
            call(
                child(PLAIN, 0, {"one": told([1.0])}),
                child("plain_eager", 0, {"one": told([3.0])}),
                child("vtaps_eager", 0, {"every_layer": told([3.2])}),
            )
        ]
    )
    assert cell.share == pytest.approx(3 / 3.2)
    assert (cell.goal, cell.half_width, cell.met) == (0.90, None, True)


def test_a_report_merges_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for number, seconds in enumerate((1.0, 1.1)):
        files.append(tmp_path / f"{number}.json")
        failed = {**child("vtaps_taps", 0, {}), "failed": "exit code 1: no memory", "log": "/secret/path"}
        data = call(child(PLAIN, 0, {"one": told([1.0])}), child("vtaps_taps", 0, {"lens": told([seconds])}), failed)
        files[-1].write_text(json.dumps(data), encoding="utf-8")
    out = tmp_path / "all.md"
    assert grid.main(["report", *map(str, files), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert text == capsys.readouterr().out
    assert "| 0.955 | 0.909–1.000 |" in text
    assert "exit code 1: no memory" in text
    assert "/secret/path" not in out.with_suffix(".json").read_text(encoding="utf-8")
    assert "--out" not in text


def test_calls_of_other_settings_are_not_merged() -> None:
    one, two = call()["about"], call()["about"]
    assert grid_report.mismatch([one, two]) is None
    assert grid_report.mismatch([one, {**two, "process": "child", "seed": 4}]) == "process, seed"


class Fake:
    """Stands for the engines: each takes a minute of a clock that only it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop_at: int = 99) -> None:
        self.now, self.ran, self.stop_at = 1000.0, 0, stop_at
        self.served: list[tuple[str, str, int]] = []
        self.starts: list[tuple[str, int, str]] = []
        fake = self

        class Engine:
            alive = True

            def __init__(self, start: Start, told: Mapping[str, Any], job: Mapping[str, Any], _: float | None) -> None:
                self.start, self.told = start, {**told, "cells": {}, "seconds": 60.0}
                fake.starts.append(("starts", start.number, start.column))

            def ready(self) -> None:
                fake.starts.append(("is ready", self.start.number, self.start.column))
                if fake.ran == fake.stop_at:
                    raise KeyboardInterrupt
                fake.ran += 1
                fake.now += 60

            def serve(self, cell: str, repeat: int, warmup: int) -> None:
                fake.served.append((self.start.column, cell, repeat))
                self.told["cells"][cell] = told([1.0])

            def close(self) -> None:
                pass

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(grid, "compiled", lambda *_: (tmp_path, "lock", "block"))
        monkeypatch.setattr(grid, "EngineProcess", Engine)
        monkeypatch.setattr("benchmarks.grid.time.monotonic", lambda: self.now)


ARGUMENTS = ("--shape", "tiny", "--columns", "plain,vtaps_eager,plain2", "--rows", "generate,one_layer")


def test_no_engine_is_started_that_would_end_after_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = Fake(monkeypatch, tmp_path)
    out = tmp_path / "grid.json"
    assert grid.main([*ARGUMENTS, "--starts", "2", "--budget", "200", "--out", str(out)]) == 0
    assert fake.ran == 3
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [c["column"] for c in found["children"]] == ["plain", "vtaps_eager", "vtaps_eager"]
    assert found["left_out"][0] == "start 0, plain2 (one)"
    assert len(found["left_out"]) == 5


def test_a_killed_call_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Fake(monkeypatch, tmp_path, stop_at=1)
    out = tmp_path / "grid.json"
    with pytest.raises(KeyboardInterrupt):
        grid.main([*ARGUMENTS, "--starts", "1", "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [c["column"] for c in found["children"]] == ["plain"]
    assert found["left_out"] == [
        "start 0, vtaps_eager, generate (generate)",
        "start 0, vtaps_eager, one_layer (one_layer)",
        "start 0, plain2 (one)",
    ]


def test_batches_of_engines_side_by_side_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = Fake(monkeypatch, tmp_path)
    out = tmp_path / "grid.json"
    words = ["--shape", "tiny", "--columns", "plain,vtaps_taps", "--rows", "one_layer,eight_one_layer,lens"]
    words += ["--install", "block", "--side-by-side", "--starts", "1", "--warmup", "1", "--repeats", "1"]
    assert grid.main([*words, "--out", str(out)]) == 0
    first = [
        ("plain", "one"),
        ("vtaps_taps", "one_layer"),
        ("vtaps_taps", "lens"),
        ("plain", "eight"),
        ("vtaps_taps", "eight_one_layer"),
    ]
    assert fake.served[:5] == [(*x, 0) for x in first]
    assert fake.served[5:] == [(*first[n], 1) for n in (2, 1, 0, 4, 3)]
    assert len(json.loads(out.read_text(encoding="utf-8"))["children"]) == 3


def test_engines_that_compile_start_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = Fake(monkeypatch, tmp_path)
    words = [*ARGUMENTS[:2], "--columns", "plain,vtaps_taps", "--rows", "one_layer", "--side-by-side", "--starts", "2"]
    assert grid.main([*words, "--out", str(tmp_path / "grid.json")]) == 0
    assert fake.starts == [
        ("starts", 0, "plain"), ("is ready", 0, "plain"), ("starts", 0, "vtaps_taps"), ("is ready", 0, "vtaps_taps"),
        ("starts", 1, "vtaps_taps"), ("starts", 1, "plain"), ("is ready", 1, "vtaps_taps"), ("is ready", 1, "plain"),
    ]  # fmt: skip


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    start = Start("plain", 0, "plain", ("one",), "", ())
    engine = EngineProcess(start, {}, {"folder": str(tmp_path), "cells": []}, None)
    engine.ready()
    engine.serve("one", 0, 0)
    engine.close()
    assert engine.told["failed"].startswith("exit code 1: TypeError")
    assert "Traceback" in engine.told["log"]
    assert "cells" not in engine.told


def test_a_batch_that_brings_too_little_ends_the_engine() -> None:
    job = Job("plain", 0, "each", ("eight",), "tiny", "", "", "", "", {}, True, 0, {})
    with pytest.raises(SystemExit, match="plain, eight: 128 tokens were due, 0 came"):
        measure(job, lambda given: Tally(), "eight", 0)


def test_the_shapes_are_the_published_ones() -> None:
    assert (EIGHT_B.layers, EIGHT_B.vocabulary, EIGHT_B.dtype) == (32, 128256, "bfloat16")
    assert loads_of(EIGHT_B)["one"] == Load("one", 1, 512, 128)
    assert loads_of(TINY)["prompts"] == Load("prompts", 128, 4, 4)
    assert all(COLUMNS[c.base].base in (PLAIN, c.base) for c in COLUMNS.values())


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Fake(monkeypatch, tmp_path)
    monkeypatch.setattr("benchmarks.grid_peer.installed", lambda: False)
    out = tmp_path / "grid.json"
    words = ["--shape", "tiny", "--columns", "plain,nnsight", "--rows", "generate", "--starts", "1", "--out", str(out)]
    assert grid.main(words) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["left_out"] == ["nnsight (not installed)"]

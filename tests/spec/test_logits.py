"""The locations behind the forward: where they are, in any architecture, and what a lock says of edits there."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.spec.trees import tree
from tests.trees import DATA, seed_cache
from vtaps.check import check_file
from vtaps.codegen.lock import build
from vtaps.compiling import compile_plan
from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.memory import Limits, predicted
from vtaps.spec.diagnostics import Span
from vtaps.spec.locations import locate
from vtaps.spec.logits import sampled_only
from vtaps.spec.rows import Facts, Rows, compile_rows
from vtaps.spec.serving import compiled_part
from vtaps.spec.tree_view import render

TREES = sorted(path.stem for path in (DATA / "trees").glob("*.json"))


@pytest.mark.parametrize("family", TREES)
def test_every_architecture_has_logits_and_samples(family: str) -> None:
    at = tree(family)
    for text in ("logits", "logits_processor.output", "samples"):
        (site,), problems = locate(at, text, Span("s"))
        assert not problems and site.sampled
        assert (site.name, site.width) == (("samples", 1) if text == "samples" else ("logits", at.dimensions.vocab))
        assert site.order > max(m.leave or 0 for m in at.modules.values())
        assert compiled_part(at).tap(site) == (None if compiled_part(at).root is None else "hook")
    line = next(line for line in render(at).splitlines() if line.split()[:1] == ["logits_processor"])
    assert line.split()[-1] == "logits"


@pytest.mark.parametrize(
    "rows", [Rows("sampling"), Rows("generated"), Rows(steps=((0, 3),)), Rows("all"), Rows("prompt"), Rows(after="o")]
)
def test_sampled_only(rows: Rows) -> None:
    selected = compile_rows(rows, Facts(7, overrides={"o": (1, 2)})).select(0, np.zeros(20, np.int64))
    assert sampled_only(rows) == bool((selected >= 6).all())


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    seed_cache(tmp_path, monkeypatch)
    plan = check_file(Path(__file__).parents[1] / "golden" / "blocks" / "logits" / "spec.yaml").plan
    assert plan is not None
    compiled, _ = compile_plan(plan)
    assert compiled is not None
    return build(plan, compiled.block)


def test_the_lock_is_a_program(lock: dict[str, object], tmp_path: Path) -> None:
    program = parse_program(lock, tmp_path)
    assert {name for name, site in program.sites.items() if site.sampled} == {"logits", "samples"}
    assert program.sites["logits"].mode == "hook"
    uses = {e.edit: e for e in program.arms["all"].points[0].edits}
    assert uses["never"].coefficient == -math.inf and uses["never"].vector is None and program.edits["never"].value
    assert uses["more"].coefficient == 5.0 and not program.edits["sharp"].value
    # The first sweep point adds 0, which is nothing to do.
    assert [[e.edit for e in p.edits] for p in program.arms["swept"].points][:3] == [["never"], [], ["calm", "never"]]


def test_the_memory_of_a_number_is_one_row_of_ones(lock: dict[str, object], tmp_path: Path) -> None:
    program = parse_program(lock, tmp_path)
    limits = Limits(rows=64, requests=8, step_rows=64)
    with_edits = predicted(program, limits, "float32")
    assert with_edits > 0
    edits = {name: e for name, e in lock["edits"].items() if name != "more"}  # type: ignore[attr-defined]
    arms = {
        name: {**arm, "points": [{**p, "edits": [e for e in p["edits"] if e["edit"] != "more"]} for p in arm["points"]]}
        for name, arm in lock["arms"].items()  # type: ignore[attr-defined]
    }
    without = predicted(parse_program({**lock, "edits": edits, "arms": arms}, tmp_path), limits, "float32")
    # A row of ones as wide as the vocabulary, and a column of the table for 8 requests.
    assert with_edits - without == 4 * 320 + 4 * 8

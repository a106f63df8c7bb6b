"""The grid as it is called: two rows of a tiny model, plain eager vLLM and the eager engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import grid
from benchmarks.grid_stats import cells


@pytest.mark.engine
def test_two_rows(tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    done = grid.main(
        [
            *("--shape", "tiny", "--rows", "one_layer,every_layer", "--columns", "plain_eager,vtaps_eager"),
            *(
                "--install",
                "together",
                "--side-by-side",
                "--starts",
                "1",
                "--warmup",
                "1",
                "--repeats",
                "2",
                "--out",
                str(out),
            ),
        ]
    )
    found = json.loads(out.read_text(encoding="utf-8"))
    assert done == 0, [c.get("log") for c in found["children"]]
    assert [c["column"] for c in found["children"]] == ["plain_eager", "vtaps_eager"]
    measured = {cell.row: cell for cell in cells([found])}
    assert set(measured) == {"one_layer", "every_layer"}
    for cell in measured.values():
        assert cell.same == (2, 2)  # a read changes no token
        assert cell.rate > 0
    assert found["children"][-1]["engine"]["mode"] == "eager"
    assert found["left_out"] == []

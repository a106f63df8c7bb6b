"""A run some of whose requests failed: whole for its readers, and the same command tries those again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.results import make
from tests.results.test_folder import ORDER, content, opened, refused, write
from vtaps.runtime.records import Failure
from vtaps.runtime.results.load import load

FAILED = {ORDER[0]: Failure("its function raised", "VT620", "base", 7)}


def with_a_failure(path: Path) -> Path:
    with opened(path) as run:
        for request in make.requests()[1:]:
            run.add(make.finish(request))
        run.finish({"name": "by hand"}, failed=FAILED, token_text=lambda t: f"<{t}>")
    return path


def test_the_others_are_there_and_the_failed_one_is_tried_again(tmp_path: Path) -> None:
    path = with_a_failure(tmp_path / "run")
    assert load(path).requests["request"].to_pylist() == ORDER[1:]
    assert [f["request"] for f in json.loads((path / "run.json").read_text())["failed"]] == ORDER[:1]
    write(path)
    assert not (path / "partial").exists()
    whole = content(write(tmp_path / "whole"))
    found = content(path)
    assert found.keys() == whole.keys()
    assert all(found[name] == whole[name] for name in whole if name != "run.json")
    assert refused(path)[0] == "VT605"


def test_it_may_fail_again_or_not_be_tried(tmp_path: Path) -> None:
    path = with_a_failure(tmp_path / "run")
    before = content(path)
    opened(path).close()  # an engine that did not start
    assert content(path) == before
    with_done = opened(path)
    with with_done as run:
        assert run.done == frozenset(ORDER[1:])
        run.finish({"name": "by hand"}, failed=FAILED, token_text=lambda t: f"<{t}>")
    assert {n: v for n, v in content(path).items() if n != "run.json"} == {
        n: v for n, v in before.items() if n != "run.json"
    }


def test_where_all_have_failed_all_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with opened(path) as run:
        run.finish({}, failed=dict.fromkeys(ORDER, FAILED[ORDER[0]]))
    opened(path).close()
    write(path)
    assert load(path).requests["request"].to_pylist() == ORDER


def test_another_spec_does_not_go_on_there(tmp_path: Path) -> None:
    path = with_a_failure(tmp_path / "run")
    before = content(path)
    code, said = refused(path, order=ORDER[1:])
    assert code == "VT605" and "holds a finished run of another spec" in said and content(path) == before


def test_a_finish_that_is_killed_goes_on_from_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_a_failure(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("vtaps.runtime.results.folder.write_reads", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write(path)
    assert not (path / "run.json").exists()
    write(path)
    assert load(path).requests["request"].to_pylist() == ORDER

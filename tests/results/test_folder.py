"""A run folder: claimed once, filled whole request by whole request, never overwritten unasked."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from tests.results import make
from vtaps import schemas
from vtaps.codegen.lock import to_text
from vtaps.runtime.records import Failure, Request
from vtaps.runtime.results import folder as folder_module
from vtaps.runtime.results import reads as reads_module
from vtaps.runtime.results.claim import bare
from vtaps.runtime.results.folder import RunFolder
from vtaps.runtime.results.load import load
from vtaps.runtime.results.reads import ShapeError, site_files

REPOSITORY = Path(__file__).parents[2]
ORDER = [r.key for r in make.requests()]
BLOCKS = {"paris.block.py": "BLOCK = 1\n"}


def opened(path: Path, locked: dict[str, Any] = make.LOCK, **options: Any) -> RunFolder:
    run, found = RunFolder.open(path, locked, **({"order": ORDER, "blocks": BLOCKS} | options))
    assert run is not None, found
    return run


def refused(path: Path, locked: dict[str, Any] = make.LOCK, **options: Any) -> tuple[str, str]:
    run, found = RunFolder.open(path, locked, **({"order": ORDER, "blocks": BLOCKS} | options))
    assert run is None
    return found[0].code, f"{found[0].message} {found[0].note or ''}"


def write(path: Path, requests: Iterable[Request] | None = None) -> Path:
    with opened(path) as run:
        for request in make.requests() if requests is None else requests:
            if request.key not in run.done:
                assert run.add(make.finish(request)) == []
        assert run.finish({"name": "by hand"}, token_text=lambda t: f"<{t}>") == []
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_a_run_leaves(tmp_path: Path) -> None:
    run = write(tmp_path / "runs" / "paris")
    files = [*site_files(make.SITES).values(), "rows.parquet"]
    names = [f"reads/{r}/{f}" for r in ("average", "lens", "stream") for f in files]
    tables = ["requests.parquet", "run.json", "tokens.parquet"]
    assert sorted(content(run)) == ["lock.json", "metrics.parquet", "paris.block.py", *names, *tables]
    data = (run / "lock.json").read_bytes()
    assert data.decode() == to_text(bare(make.LOCK)) and b'"line"' not in data
    info = json.loads((run / "run.json").read_text())
    jsonschema.validate(info, schemas.load("run-v1.schema.json"))
    assert info["lock"]["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert info["counts"] == {"requests": 10, "completions": 10, "prompt_tokens": 40, "generated_tokens": 40}
    assert info["order"] == ORDER
    # 2 prompts × 2 points that steer × 4 sampling rows; (5 + 3) prompt rows × 3 points.
    assert info["fired"] == [
        {"kind": "edit", "name": "steer", "arm": "steered", "fired": 16, "expected": 16},
        {"kind": "edit", "name": "no_h3", "arm": "steered", "fired": 24, "expected": 24},
        {"kind": "override", "name": "think", "arm": "forced", "fired": 4, "expected": 4},
    ]


def test_tables(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    requests = pq.read_table(run / "requests.parquet")
    assert {f.name: str(f.type) for f in requests.schema} == {
        "request": "string", "completion": "int32", "prompt": "string", "group": "string", "arm": "string",
        "steer.add.scale": "double", "capital": "string", "size": "int64",
        "prompt_token_ids": "list<element: int32>", "token_ids": "list<element: int32>",
        "prompt_text": "string", "text": "string", "finish_reason": "string",
        "fired.steer": "int64", "expected.steer": "int64", "fired.no_h3": "int64", "expected.no_h3": "int64",
    }  # fmt: skip
    assert requests["request"].to_pylist() == ORDER
    assert requests["expected.steer"].to_pylist()[:5] == [None, 0, 4, 4, None]
    assert requests["fired.no_h3"].to_pylist()[:5] == [None, 5, 5, 5, None]
    assert requests["steer.add.scale"].to_pylist()[:5] == [None, 0.0, 4.0, 8.5, None]
    tokens = pq.read_table(run / "tokens.parquet").to_pylist()
    steered = [t for t in tokens if t["request"] == "france/steered/2"]
    assert [t["step"] for t in steered] == [None] * 5 + [0, 1, 2, 3]
    assert [t["fired"] for t in steered] == [*[["no_h3"]] * 4, ["steer", "no_h3"], *[["steer"]] * 3, None]
    forced = [t for t in tokens if t["request"] == "france/forced/0"]
    assert [(t["token_id"], t["text"], t["overridden"]) for t in forced[5:]] == [
        (21, "<21>", False), (77, "<77>", True), (78, "<78>", True), (24, "<24>", False)
    ]  # fmt: skip
    assert [t["logprob"] for t in forced[3:6]] == [None, None, -0.5]
    metrics = pq.read_table(run / "metrics.parquet").to_pylist()
    first = {k: metrics[0][k] for k in ("request", "metric", "position", "step", "value")}
    assert first == {"request": ORDER[0], "metric": "paris", "position": 4, "step": 0, "value": -1.5}


def test_rows_and_sites_of_a_read_line_up(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    rows = pq.read_table(run / "reads/stream/rows.parquet").to_pylist()
    by_key = {r.key: r for r in make.requests()}
    assert [(r["request"], r["position"], r["step"]) for r in rows[:5]] == [
        *((ORDER[0], 4 + i, i) for i in range(4)), (ORDER[1], 4, 0)
    ]  # fmt: skip
    for site in make.SITES:
        with safe_open(run / "reads/stream" / site_files([site])[site], framework="numpy") as f:
            values = f.get_tensor("rows")
        assert values.shape == (len(rows), make.WIDTH)
        for row, value in zip(rows, values, strict=True):
            assert value.tolist() == make.value(by_key[row["request"]], site, row["position"]).tolist()
    average = pq.read_table(run / "reads/average/rows.parquet").to_pylist()
    assert [(r["request"], r["position"]) for r in average] == [("france/base/0", None), ("japan/base/0", None)]


def test_the_order_of_finishing_and_an_interrupt_change_no_byte(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain")
    shuffled = make.requests()
    random.Random(3).shuffle(shuffled)
    with opened(tmp_path / "other") as run:
        for request in shuffled[:4]:
            run.add(make.finish(request))
    run = opened(tmp_path / "other")
    assert run.done == {r.key for r in shuffled[:4]}
    run.close()
    other = write(tmp_path / "other", shuffled)
    assert content(plain) == content(other)


KILLED = """
import sys, time
from pathlib import Path
from tests.results import make
from vtaps.runtime.results.folder import RunFolder
requests = make.requests()
order = [r.key for r in requests]
run, found = RunFolder.open(sys.argv[1], make.LOCK, order=order, blocks={"paris.block.py": "BLOCK = 1\\n"})
for request in requests:
    if request.key not in run.done:
        run.add(make.finish(request))
        print(request.key, flush=True)
        time.sleep(0.02)
"""


@pytest.mark.parametrize("after", [1, 4])
def test_kill_and_resume(tmp_path: Path, after: int) -> None:
    path = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-c", KILLED, path], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = [child.stdout.readline().strip() for _ in range(after)]
    assert f"process {child.pid} is writing" in refused(path)[1]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    (path / "partial" / ".tmp-0000009-0000.safetensors").write_bytes(b"half a requ")
    run = opened(path)
    assert set(said) <= run.done and len(run.done) in (after, after + 1)
    run.close()
    assert content(write(path)) == content(write(tmp_path / "plain"))


@pytest.mark.parametrize("where", ["write_tables", "write_reads", "run_index"])
def test_an_interrupt_while_the_files_are_written(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "run")
    assert content(write(tmp_path / "run")) == content(write(tmp_path / "plain"))


def test_more_sites_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = content(write(tmp_path / "plain"))
    monkeypatch.setattr(reads_module, "OPEN_FILES", 1)
    assert content(write(tmp_path / "run")) == plain


def test_a_journal_file_that_is_cut_off_is_done_again(tmp_path: Path) -> None:
    requests = make.requests()
    with opened(tmp_path / "run") as run:
        for request in requests[:2]:
            run.add(make.finish(request))
    (victim,) = (tmp_path / "run/partial").glob("0000001-*")
    victim.write_bytes(victim.read_bytes()[:-5])
    with opened(tmp_path / "run") as run:
        assert run.done == {requests[0].key}


def test_a_finished_run_is_overwritten_only_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    before = content(path)
    code, text = refused(path)
    assert code == "VT605" and "--overwrite" in text
    assert content(path) == before
    (path / "notes.txt").write_text("mine")
    before = content(path)
    # An engine that does not start costs nothing of the old run.
    with opened(path, overwrite=True) as run:
        assert run.done == frozenset()
    assert content(path) == before
    with opened(path, overwrite=True) as run:
        run.add(make.finish(make.requests()[0]))
        assert not (path / "run.json").exists()
    assert (path / "notes.txt").read_text() == "mine"
    write(path)
    assert content(path) == before


def test_an_unfinished_run_of_another_spec(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        run.add(make.finish(make.requests()[0]))
    before = content(tmp_path / "run")
    other = make.lock(outside={"v.npy": "sha256:6"})
    code, text = refused(tmp_path / "run", other)
    assert code == "VT605" and "another spec" in text
    assert refused(tmp_path / "run", order=ORDER[::-1])[0] == "VT605"
    assert content(tmp_path / "run") == before
    with opened(tmp_path / "run", other, overwrite=True) as run:
        assert run.done == frozenset()
        run.add(make.finish(make.requests()[1]))
        assert run.done == {ORDER[1]}
    assert len(list((tmp_path / "run/partial").glob("*.safetensors"))) == 1


def test_a_spec_whose_lines_moved_is_the_same_run(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        run.add(make.finish(make.requests()[0]))
    moved = make.lock()
    moved["edits"]["steer"]["line"] += 3
    moved["block"]["lines"] = {"21": 19}
    with opened(tmp_path / "run", moved) as run:
        assert run.done == {ORDER[0]}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["data.csv", "run.json", "partial/x.bin", "requests.parquet"])
def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text('{"mine": 1}')
    before = content(tmp_path / "run")
    assert refused(tmp_path / "run", overwrite=overwrite)[0] == "VT605"
    assert content(tmp_path / "run") == before


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (
        tmp_path / "file",
        tmp_path / "file" / "run",
        Path("/proc/run"),
        tmp_path / ("n" * 300),
        tmp_path / "a\0b",
    ):
        code, text = refused(path)
        assert code == "VT404", (path, text)
    assert (tmp_path / "file").read_text() == "x"


def test_one_run_at_a_time_and_nothing_left_of_nothing(tmp_path: Path) -> None:
    first = opened(tmp_path / "runs" / "x")
    assert refused(tmp_path / "runs" / "x")[0] == "VT605"
    first.close()
    assert not (tmp_path / "runs" / "x").exists()


def test_keys_of_any_characters(tmp_path: Path) -> None:
    keys = ["../../up", "a/b\0c", "ключ 🔑 \ud800", "k" * 5000, ".", ""]
    base = make.requests()[0]
    with opened(tmp_path / "run", order=keys) as run:
        for key in keys:
            run.add(make.finish(replace(base, key=key)))
        with pytest.raises(ValueError, match="already there"):
            run.add(make.finish(replace(base, key=keys[0])))
        with pytest.raises(ValueError, match="not of this run"):
            run.add(make.finish(replace(base, key="other")))
        run.finish({})
    assert os.listdir(tmp_path) == ["run"]
    assert load(tmp_path / "run").requests["request"].to_pylist()[2] == "ключ 🔑 \\ud800"


def test_requests_that_failed(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        for request in make.requests()[1:]:
            run.add(make.finish(request))
        with pytest.raises(ValueError, match="1 requests have not finished"):
            run.finish({})
        (found,) = run.finish({}, failed={ORDER[0]: Failure("out of slots", "VT620", "base", 7)})
    said = (found.code, found.message, found.span.line)
    assert said == ("VT620", f"request {ORDER[0]} failed: out of slots", 7)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["failed"] == [{"request": ORDER[0], "code": "VT620", "reason": "out of slots"}]
    jsonschema.validate(info, schemas.load("run-v1.schema.json"))


def test_findings_are_kept_through_a_resume(tmp_path: Path) -> None:
    requests = make.requests()
    done = make.finish(requests[2])
    record = replace(done.completions[0].record, fired={"no_h3": ((0, 5),)})
    broken = replace(done, completions=(replace(done.completions[0], record=record),))
    with opened(tmp_path / "run") as run:
        (live,) = run.add(broken)
    with opened(tmp_path / "run") as run:
        for request in requests:
            if request.key not in run.done:
                run.add(make.finish(request))
        assert run.finish({}) == [live]
    assert live.code == "VT602" and live.span.line == 16
    assert "arm steered, prompt france, steer.add.scale=4: fired at 0 rows, expected 4" in live.message
    assert load(tmp_path / "run").info["findings"][0]["note"] == "missing: positions 4..7"


def test_an_edit_that_never_acts_is_reported(tmp_path: Path) -> None:
    locked = make.lock()
    locked["edits"]["steer"]["tokens"] = {"rows": "all", "ids": [999]}
    with opened(tmp_path / "run", locked) as run:
        for request in make.requests():
            run.add(make.finish(request, locked))
        (found,) = run.finish({})
    assert found.code == "VT311" and "edit steer never acted in arm steered" in found.message


def test_prompt_columns_that_clash_or_mix(tmp_path: Path) -> None:
    base = make.requests()[0]
    columns: list[dict[str, Any]] = [
        {"text": 1, "mixed": 1, "half": 1},
        {"text": 2, "mixed": "a", "half": 0.5},
        {"half": None},
    ]
    keys = [f"k{i}" for i in range(3)]
    with opened(tmp_path / "run", order=keys) as run:
        for key, values in zip(keys, columns, strict=True):
            run.add(make.finish(replace(base, key=key, columns=values)))
        run.finish({})
    table = load(tmp_path / "run").requests
    assert table["prompt.text"].to_pylist() == [1, 2, None]
    assert table["mixed"].to_pylist() == ["1", '"a"', None]
    assert table["half"].to_pylist() == [1.0, 0.5, None]
    assert load(tmp_path / "run").info["columns"]["prompt"]["text"] == "prompt.text"


def test_site_files() -> None:
    names = ["resid_post[10]", "resid_post.10", "Resid_post.10", "model.layers.3.mlp.output[0]", "../../x", "[]"]
    assert list(site_files(names).values()) == [
        "resid_post.10.safetensors", "resid_post.10-2.safetensors", "Resid_post.10-3.safetensors",
        "model.layers.3.mlp.output.0.safetensors", "x.safetensors", "site.safetensors",
    ]  # fmt: skip


def test_requests_whose_rows_differ_in_shape_are_named(tmp_path: Path) -> None:
    """A function of the user's may give other shapes when a run is resumed."""
    said = {"file": "probes.py", "function": "f", "digest": None}
    locked = make.lock(reads={"probe": make.read("python", {"rows": "sampling"}, python=said)})
    locked["arms"] = {"base": make.arm(reads=["probe"])}
    requests = make.requests(locked)
    run, _ = RunFolder.open(tmp_path / "run", locked, order=[r.key for r in requests])
    assert run is not None
    with run:
        for width, request in enumerate(requests, 2):
            done = make.finish(request, locked)
            (completion,) = done.completions
            reads = {
                key: replace(rows, values={"python": np.ones((len(rows.positions), width), np.int64)})
                for key, rows in completion.record.reads.items()
            }
            record = replace(completion.record, reads=reads)
            assert run.add(replace(done, completions=(replace(completion, record=record),))) == []
        with pytest.raises(ShapeError, match=r"probe at resid_post\[10\]: .* holds python I64 \[3\] a row, .* \[2\]$"):
            run.finish({})

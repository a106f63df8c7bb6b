"""Reading a run back: coordinates, lazy arrays, differences, and what is said of a run that is not whole."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vtaps
from tests.results import make
from tests.results.test_folder import opened, write
from vtaps.runtime.records import Completion, Finished, ReadRows, Record, Request
from vtaps.runtime.results.load import RunError, RunResult, load
from vtaps.runtime.results.tensors import as_float32


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return vtaps.load(write(tmp_path_factory.mktemp("runs") / "paris"))


def test_selecting_by_name(run: RunResult) -> None:
    stream = run["stream"]
    assert (len(stream), stream.sites, stream.layers, stream.fields) == (32, make.SITES, (10, 11), ("rows",))
    assert stream.values.shape == (32, 2, 4)
    chosen = stream.sel(arm="steered", prompt="japan", layer=11, step=[1, 3], **{"steer.add.scale": 8.5})
    request = next(r for r in make.requests() if r.key == "japan/steered/2")
    assert chosen.rows["position"].to_pylist() == [3, 5]
    assert chosen.values.shape == (2, 1, 4)
    expected = [make.value(request, make.SITES[1], p).tolist() for p in (3, 5)]
    assert chosen.values[:, 0].tolist() == expected
    assert stream.sel(arm="steered").sel(position=range(4, 6)).rows["position"].to_pylist() == [4, 5] * 6
    assert len(stream.sel(**{"steer.add.scale": None})) == 8
    assert chosen.site(make.SITES[1]).tolist() == expected


def test_a_single_site_is_a_memory_map(run: RunResult) -> None:
    values = run["stream"].sel(site=make.SITES[0]).values
    assert isinstance(values.base, np.memmap) or isinstance(values, np.memmap)
    assert not values.flags.writeable


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda r: r["strem"], "no read named 'strem'; nearest is 'stream'"),
        (lambda r: r.fired("stear"), "no edit named 'stear'; nearest is 'steer'"),
        (lambda r: r["stream"].sel(arm="steerd"), "no arm 'steerd'; nearest is 'steered'"),
        (lambda r: r["stream"].sel(layer=12), "no layer 12; there are 10, 11"),
        (lambda r: r["stream"].sel(site="resid_post[1]"), r"no site 'resid_post\[1\]'; nearest"),
        (lambda r: r["stream"].sel(stp=1), "no coordinate 'stp'; nearest is 'step'"),
        (lambda r: r["stream"].sel(step=9), "no step 9"),
        (lambda r: r["stream"].sel(step=[0, 9]), "no step 9"),
        (lambda r: r["stream"].sel(position="a"), "holds int64"),
        (lambda r: r["lens"].numpy("logit"), "no field 'logit'; nearest is 'logits'"),
    ],
)
def test_names_that_are_not_there(run: RunResult, ask: Any, message: str) -> None:
    with pytest.raises(KeyError, match=message):
        ask(run)


def test_fields_of_a_lens_and_a_mean(run: RunResult) -> None:
    lens = run["lens"]
    assert set(lens.fields) == {"ids", "logits", "logsumexp"}
    assert lens.values.shape == (32, 2, 3)
    assert lens.numpy("ids").dtype == np.int64 and lens.numpy("ids")[0, 0].tolist() == [4, 5, 6]
    assert lens.numpy("logsumexp").shape == (32, 2)
    average = run["average"]
    assert average.values.shape == (2, 2, 4)
    assert average.numpy("count")[:, 0].tolist() == [5, 3]


def test_difference_of_two_arms(run: RunResult) -> None:
    diff = run["stream"].sel(**{"steer.add.scale": [None, 4.0]}).diff("steered", "base")
    assert diff.values.shape == (8, 2, 4)
    # The keys "…/steered/1" are three characters longer than "…/base/0", and a value counts 1000 a character.
    assert np.all(diff.values == 3000)
    assert diff.rows["arm"].unique().to_pylist() == ["steered"]
    assert len(run["stream"].diff("steered", "base")) == 24
    with pytest.raises(ValueError, match="several rows"):
        run["stream"].diff("base", "steered")
    with pytest.raises(ValueError, match="own top ids"):
        run["lens"].diff("steered", "base")


def test_a_difference_of_unequal_rows_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as folder:
        for request in make.requests():
            tokens = (21, 22) if request.arm == "base" else (21, 22, 23)
            folder.add(Finished(request, (make.complete(request, tokens),)))
        folder.finish({})
    stream = load(tmp_path / "run")["stream"]
    with pytest.raises(ValueError, match=r"arm steered has a row that arm base lacks: .*position 6"):
        stream.diff("steered", "base")
    assert len(stream.sel(step=[0, 1]).diff("steered", "base")) == 12


def test_loader(run: RunResult) -> None:
    stream = run["stream"].sel(prompt="japan")
    batches = list(stream.loader(5))
    assert [len(b) for b in batches] == [5, 5, 5, 1]
    assert np.array_equal(np.concatenate(batches), stream.values)


def test_fired(run: RunResult) -> None:
    table = run.fired("steer")
    assert table.column_names == [
        "request",
        "completion",
        "prompt",
        "group",
        "arm",
        "steer.add.scale",
        "fired",
        "expected",
    ]
    assert table["fired"].to_pylist() == [0, 4, 4, 0, 4, 4]


def test_bfloat16_reads_come_as_float32(tmp_path: Path) -> None:
    locked = make.lock(reads={"r": make.read("rows", {"rows": "sampling"})}, arms={"a": make.arm(reads=["r"])})
    request = Request("k", "a", 0, "facts", "france", (1, 2))
    bits = np.array([[0x3F80, 0xC000, 0x4049, 0x0001], [0x7F7F, 0x8080, 0x3DCC, 0x4110]], np.uint16)
    reads = {("r", s): ReadRows(np.array([1, 2]), {"rows": bits}, "bfloat16") for s in make.SITES}
    with opened(tmp_path / "run", locked, order=["k"]) as folder:
        assert folder.add(Finished(request, (Completion(0, (5, 6), "", "length", Record(reads=reads)),))) == []
        folder.finish({})
    found = load(tmp_path / "run")["r"]
    values = found.values
    assert values.dtype == np.float32
    # 1, -2, 3.140625, 2^-133; largest bfloat16, -2^-126, 0.099609375, 9
    assert values[0, 0].tolist() == [1.0, -2.0, 3.140625, 2.0**-133]
    assert values[1, 1].tolist() == [(2 - 2**-7) * 2.0**127, -(2.0**-126), 0.099609375, 9.0]
    assert load(tmp_path / "run").info["reads"]["r"]["fields"]["rows"] == {"dtype": "BF16", "shape": [4]}
    assert as_float32(np.array([0x7F80], np.uint16))[0] == np.inf


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_requests_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    locked = make.lock(reads={"r": make.read("rows", {"rows": "all"})}, arms={"a": make.arm(reads=["r"])})
    keys = data.draw(st.lists(st.text(max_size=8), min_size=1, max_size=5, unique=True), "keys")
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
    finished: list[Finished] = []
    kept: list[np.ndarray[Any, Any]] = []
    for key in keys:
        request = Request(key, "a", 0, "facts", data.draw(st.text(min_size=1, max_size=5)), tuple(data.draw(ids)))
        completions = []
        for index in range(data.draw(st.integers(1, 3))):
            tokens = tuple(data.draw(ids))
            count = len(request.prompt_token_ids) + len(tokens) - 1
            extra = data.draw(st.integers(0, 2))  # rows that ran past the stop
            shape = (count + extra, make.WIDTH)
            values = {s: data.draw(hnp.arrays(np.float32, shape, elements=st.floats(width=32))) for s in make.SITES}
            reads = {("r", s): ReadRows(np.arange(count + extra), {"rows": v}, "float32") for s, v in values.items()}
            text = data.draw(st.text(max_size=10))
            completions.append(Completion(index, tokens, text, "stop", Record(reads=reads)))
            kept.append(np.stack([v[:count] for v in values.values()], axis=1))
        finished.append(Finished(request, tuple(completions)))
    path = tmp_path_factory.mktemp("random") / "run"
    with opened(path, locked, order=keys) as folder:
        for done in data.draw(st.permutations(finished)):
            folder.add(done)
        folder.finish({})
    run = load(path)
    assert np.array_equal(run["r"].values, np.concatenate(kept), equal_nan=True)
    rows = [(f, c) for f in finished for c in f.completions]
    assert run.requests["token_ids"].to_pylist() == [list(c.token_ids) for _, c in rows]
    assert run.requests["text"].to_pylist() == [c.text.encode("utf-8", "backslashreplace").decode() for _, c in rows]
    assert run.requests["completion"].to_pylist() == [c.index for _, c in rows]
    assert run.tokens.num_rows == sum(len(f.request.prompt_token_ids) + len(c.token_ids) for f, c in rows)


def test_runs_that_are_not_whole(tmp_path: Path) -> None:
    def says(path: Path, message: str) -> None:
        with pytest.raises(RunError, match=message):
            load(path)

    says(tmp_path / "none", "there is no folder")
    says(Path(__file__), "is a file")
    says(tmp_path, "no run.json")
    with opened(tmp_path / "half") as folder:
        folder.add(make.finish(make.requests()[0]))
    says(tmp_path / "half", "has not finished")
    path = write(tmp_path / "run")
    victim = path / "reads/stream/resid_post.10.safetensors"
    data = victim.read_bytes()
    victim.write_bytes(data[:-1])
    says(path, re.escape("resid_post.10.safetensors has ") + ".* bytes, not")
    victim.write_bytes(b"\xff" * len(data))
    with pytest.raises(RunError, match="not a whole safetensors file"):
        load(path)["stream"]
    victim.unlink()
    says(path, "is missing")
    victim.write_bytes(data)
    (path / "requests.parquet").write_bytes(b"x" * (path / "requests.parquet").stat().st_size)
    with pytest.raises(RunError, match=r"requests.parquet is not the file that the run wrote"):
        _ = load(path).requests
    (path / "run.json").write_text("{")
    says(path, "cannot be read")
    (path / "run.json").write_text("{}")
    says(path, "not the index of a finished run")


def test_several_completions(tmp_path: Path) -> None:
    request = make.requests()[0]
    both = tuple(make.complete(request, (21 + i, 22), text=f"t{i}", index=i) for i in range(2))
    with opened(tmp_path / "run", order=[request.key]) as folder:
        folder.add(Finished(replace(request), both))
        folder.finish({})
    stream = load(tmp_path / "run")["stream"]
    assert stream.rows["completion"].to_pylist() == [0, 0, 1, 1]
    assert len(stream.sel(completion=1)) == 2


def test_importing_vtaps_imports_no_arrow() -> None:
    code = "import sys, vtaps; assert 'pyarrow' not in sys.modules; vtaps.load; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

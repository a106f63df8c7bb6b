"""Reads that are stored in fewer bytes and in several files, written and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.results import make
from tests.results.test_folder import opened
from vtaps import schemas
from vtaps.runtime.narrow import narrowed
from vtaps.runtime.records import Completion, Failure, Finished, ReadRows, Record, Request
from vtaps.runtime.results.array import ReadArray
from vtaps.runtime.results.load import load
from vtaps.runtime.results.tensors import E4M3
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.store import Store

COUNTS = (3, 1, 4, 2)
WIDTH = 4


def stored(folder: Path, store: dict[str, Any], values: np.ndarray) -> tuple[list[Diagnostic], ReadArray]:
    """A run of four requests with 3, 1, 4 and 2 rows at two sites: ``values`` ``[10, 2, width]``."""
    locked = make.lock(
        reads={"r": make.read("rows", {"rows": "sampling"}, store=store)}, arms={"a": make.arm(reads=["r"])}
    )
    fields, dtype = narrowed(torch.from_numpy(values), Store.from_json(store))
    numpy = {
        n: (a.view(torch.int16).numpy().view(np.uint16) if a.dtype == torch.bfloat16 else a.numpy())
        for n, a in fields.items()
    }
    found: list[Diagnostic] = []
    order = [f"k{number}" for number in range(len(COUNTS))]
    with opened(folder, locked, order=order) as run:
        start = 0
        for key, count in zip(order, COUNTS, strict=True):
            request = Request(key, "a", 0, "facts", key, (1, 2))
            some = {n: a[start : start + count] for n, a in numpy.items()}
            reads = {
                ("r", site): ReadRows(np.arange(1, count + 1), {n: a[:, i] for n, a in some.items()}, dtype)
                for i, site in enumerate(make.SITES)
            }
            done = Completion(0, tuple(range(count)), "", "length", Record(reads=reads))
            found += run.add(Finished(request, (done,)))
            start += count
        run.finish({})
    info = load(folder).info
    jsonschema.validate(dict(info), schemas.load("run-v1.schema.json"))
    return found, load(folder)["r"]


VALUES = np.random.default_rng(3).normal(size=(sum(COUNTS), 2, WIDTH)).astype(np.float32)
FP8 = {"dtype": "float8_e4m3", "scale": "per_row"}


@pytest.mark.parametrize(
    ("store", "files"),
    [
        ({"dtype": "auto"}, 1),
        ({"shard": {"rows": 3}}, 4),
        ({"shard": {"rows": 10}}, 1),
        ({"shard": {"rows": 1}}, 10),
        ({"shard": WIDTH * 4 * 6}, 2),
        ({"shard": 1}, 10),
        ({"dtype": "float16", "shard": {"rows": 4}}, 3),
        (FP8 | {"shard": 4 * (WIDTH + 4)}, 3),
    ],
)
def test_every_row_is_in_one_of_the_files_and_comes_back(store: dict[str, Any], files: int, tmp_path: Path) -> None:
    found, read = stored(tmp_path / "run", store, VALUES)
    assert found == []
    bound = {"float16": 2.0**-11, "float8_e4m3": 2.0**-4}.get(store.get("dtype", ""), 0.0)
    every = read.values
    least = abs(VALUES).max(-1, keepdims=True) * 2.0**-18 if bound else 0.0
    assert (abs(every - VALUES) <= bound * abs(VALUES) + least).all()
    assert len(list((tmp_path / "run/reads/r").glob("resid_post.10*.safetensors"))) == files
    pick = read.sel(prompt=["k3", "k1"], layer=11)
    np.testing.assert_array_equal(pick.values[:, 0], every[[3, 8, 9], 1])
    np.testing.assert_array_equal(np.concatenate(list(read.loader(4))), every)
    shuffled = np.array([9, 0, 5, 3])
    np.testing.assert_array_equal(replace(read, rows=read.rows.take(shuffled), _index=shuffled).values, every[shuffled])


def test_the_library_opens_the_files(tmp_path: Path) -> None:
    _, read = stored(tmp_path / "run", FP8 | {"shard": {"rows": 6}}, VALUES)
    first = tmp_path / "run/reads/r/resid_post.10-00001-of-00002.safetensors"
    with safe_open(str(first), "pt") as file:
        rows, scale = file.get_tensor("rows"), file.get_tensor("scale")
    assert rows.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == (6,)
    np.testing.assert_array_equal((rows.float() * scale[:, None]).numpy(), read.site(make.SITES[0])[:6])
    assert read.fields == ("rows", "scale") and read.numpy("scale").shape == (10, 2)
    quotients = VALUES[:6, 0] / scale.numpy()[:, None]
    nearest = np.nanmin(abs(E4M3[None, None] - quotients[..., None]), axis=-1)
    np.testing.assert_array_equal(abs(rows.float().numpy() - quotients), nearest)


def test_a_number_that_float16_does_not_hold_is_reported_with_what_does(tmp_path: Path) -> None:
    values = VALUES.copy()
    values[4, 1, 2] = 70000.0
    found, _ = stored(tmp_path / "run", {"dtype": "float16"}, values)
    assert [d.code for d in found] == ["VT604"] and "resid_post[11], position 1" in found[0].message
    assert found[0].note is not None and "`scale: per_row`" in found[0].note
    found, read = stored(tmp_path / "scaled", {"dtype": "float16", "scale": "per_row"}, values)
    assert found == [] and read.values[4, 1, 2] == 70000.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_float8_rows_that_are_zero_or_not_finite_are_reported(bad: float, tmp_path: Path) -> None:
    values = VALUES.copy()
    values[0, 0], values[7, 0, 1] = 0.0, bad
    found, _ = stored(tmp_path / "run", FP8, values)
    assert [(d.code, d.note) for d in found] == [("VT604", None)] * 2
    assert "1 row at 1 site all zero" in found[0].message and "1 row at 1 site not finite" in found[1].message


def test_a_read_without_rows_has_one_empty_file(tmp_path: Path) -> None:
    locked = make.lock(
        reads={"r": make.read("rows", {"rows": "sampling"}, store={"shard": {"rows": 2}})},
        arms={"a": make.arm(reads=["r"])},
    )
    with opened(tmp_path / "run", locked, order=["k"]) as run:
        run.finish({}, failed={"k": Failure("it failed")})
    read = load(tmp_path / "run")["r"]
    assert len(read) == 0 and read.site(make.SITES[0]).shape == (0,)

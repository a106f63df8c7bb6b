"""`vtaps plot`: the numbers that stand in a figure, and the files that come of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from tests.results import make
from tests.results.test_folder import opened
from vtaps.cli import main
from vtaps.drawing import page, png, svg
from vtaps.figures import Bars, Curves, Heat, NothingToPlot, figures
from vtaps.pictures import PlotError, plot
from vtaps.runtime.records import Finished
from vtaps.runtime.results.load import RunResult, load

HOSTILE = "</svg><script>alert(1)</script>$x_1$\x1b[31m\u202e"


def text(token: int) -> str:
    return f" t{token}"


@pytest.fixture
def run(tmp_path: Path) -> RunResult:
    """Arms base and steered (three scales), two prompts; a lens over two layers at every sampled row."""
    with opened(tmp_path / "run") as folder:
        for request in make.requests():
            folder.add(Finished(request, (make.complete(replace(request)),)))
        folder.finish({"seconds": 1.0}, token_text=text)
    return load(tmp_path / "run")


def named(run: RunResult, title: str) -> Heat | Curves | Bars:
    found = [f for f in figures(run, text) if f.title == title]
    assert len(found) == 1, [f.title for f in figures(run, text)]
    return found[0]


def test_a_metric_over_a_sweep_is_a_curve_a_prompt(run: RunResult) -> None:
    figure = named(run, "paris, steered")
    assert isinstance(figure, Curves)
    assert figure.x == (0.0, 4.0, 8.5)
    assert figure.x_label == "steer.add.scale"
    rows = [r for r in run.metrics.to_pylist() if r["arm"] == "steered"]
    for prompt, values in figure.lines[:-1]:
        due = {r["steer.add.scale"]: r["value"] for r in rows if r["prompt"] == prompt}
        assert [due[x] for x in figure.x] == pytest.approx(list(values))
    name, mean = figure.lines[-1]
    assert name == "mean of 2 prompts"
    assert list(mean) == pytest.approx(list(np.mean([v for _, v in figure.lines[:-1]], axis=0)))


def test_a_metric_without_a_sweep_is_a_bar_a_request(run: RunResult) -> None:
    figure = named(run, "paris")
    assert isinstance(figure, Bars)
    due = {r["prompt"]: r["value"] for r in run.metrics.to_pylist() if r["arm"] == "base"}
    assert dict(zip(figure.names, figure.values, strict=True)) == pytest.approx(due)


def test_a_lens_shows_the_likeliest_token_of_each_layer_and_its_probability(run: RunResult) -> None:
    read = run["lens"]
    rows = [i for i, r in enumerate(read.rows.to_pylist()) if (r["prompt"], r["arm"]) == ("france", "base")]
    figure = named(run, "lens, france, base: the likeliest token")
    assert isinstance(figure, Heat)
    assert figure.rows == ("10", "11")
    assert figure.columns == tuple(str(read.rows["position"][i].as_py()) for i in rows)
    logits, total, ids = read.numpy("logits"), read.numpy("logsumexp"), read.numpy("ids")
    assert figure.texts is not None
    for c, i in enumerate(rows):
        for r in range(2):
            assert figure.values[r, c] == pytest.approx(float(np.exp(logits[i, r, 0] - total[i, r])), rel=1e-5)
            assert figure.texts[r][c] == text(ids[i, r, 0])


def test_two_axes_make_a_grid(run: RunResult) -> None:
    rows = [
        {"prompt": p, "arm": "patched", "metric": "paris", "at": f"resid_post[{layer}]", "tokens": at, "value": v}
        for p, layer, at, v in [("a", 3, 0, 1.0), ("a", 3, 1, 2.0), ("a", 4, 0, -3.0), ("b", 3, 0, 5.0)]
    ]

    info = {**run.info, "columns": {"sweep": {"patch.at": "at", "patch.tokens": "tokens"}}, "reads": {}}
    lock = {**run.lock, "metrics": {"paris": {"kind": "logit_diff", "texts": [" Paris", " Rome"]}}}
    grid = RunResult(run.path, info, lock)
    grid.metrics = pa.Table.from_pylist(rows)
    [figure] = figures(grid, text)
    assert isinstance(figure, Heat)
    assert (figure.rows, figure.columns) == (("resid_post[3]", "resid_post[4]"), ("0", "1"))
    assert figure.values == pytest.approx(np.array([[3.0, 2.0], [-3.0, np.nan]]), nan_ok=True)
    assert figure.centred
    assert figure.value_label == "logit diff of ' Paris' − ' Rome'"
    assert figure.caption == "mean over 2 prompts"
    lock["metrics"]["paris"]["normalize"] = {"one": "clean", "zero": "base"}
    grid.metrics = pa.Table.from_pylist(
        [{**r, "normalized": r["value"] / 10 if r["at"] != "resid_post[4]" else None} for r in rows]
    )
    [figure] = figures(grid, text)
    assert isinstance(figure, Curves)
    assert dict(figure.lines)["mean of 2 prompts"] == pytest.approx([0.3, 0.2])


def test_a_page_stands_alone_and_nothing_in_it_is_markup_of_a_model(run: RunResult) -> None:
    heat = replace(named(run, "lens, france, base: the likeliest token"), title=HOSTILE, caption=HOSTILE)
    assert isinstance(heat, Heat)
    heat = replace(heat, texts=tuple(tuple(HOSTILE for _ in row) for row in heat.texts or ()))
    made = page([heat, heat], HOSTILE, [("model", HOSTILE)])
    assert "<script" not in made
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>|about="[^"]*"|resource="[^"]*"', "", made)
    ids = re.findall(r'\bid="([^"]+)"', made)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', made))
    assert {a or b for a, b in used} <= set(ids)
    assert page([heat, heat], HOSTILE, [("model", HOSTILE)]) == made
    assert set(re.findall(r"#[0-9a-f]{6}\b", svg(heat))) <= set(re.findall(r"#[0-9a-f]{6}\b", made))


@pytest.mark.parametrize("title", ["paris", "paris, steered", "lens, france, base: the likeliest token"])
def test_pictures_are_whole_and_take_the_colour_of_the_page(run: RunResult, title: str, tmp_path: Path) -> None:
    figure = named(run, title)
    drawn = svg(figure)
    root = ElementTree.fromstring(drawn)
    words = " ".join(t.text or "" for t in root.iter() if t.tag.endswith("}text"))
    assert (figure.value_label) in words
    assert "currentColor" in drawn
    png(figure, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 10


def test_files(run: RunResult, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plot", str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == str(run.path / "plot.html")
    load(run.path)
    files = plot(run.path, tmp_path / "out" / "p.png", names=["paris"])
    assert [f.name for f in files] == ["p-1.png", "p-2.png"]
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["p-1.png", "p-2.png"]


def test_refusals(
    run: RunResult, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, said in (
        ([str(run.path), "pari"], "nearest is 'paris'"),
        ([str(run.path), "--out", "x.pdf"], "FILE.html or FILE.png"),
        ([str(tmp_path / "none")], "there is no folder"),
        ([str(run.path), "--tokenizer", str(tmp_path)], "no tokenizer can be read"),
        ([str(run.path), "--out", str(run.path / "run.json" / "p.html")], "cannot write"),
    ):
        assert main(["plot", *words]) == 1
        assert said in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlotError, match=r"pip install 'vtaps\[plot\]'"):
        plot(run.path)


def test_a_run_with_nothing_to_draw_says_so(run: RunResult) -> None:
    bare = RunResult(run.path, {**run.info, "reads": {}}, run.lock)
    bare.metrics = run.metrics.slice(0, 0)
    with pytest.raises(NothingToPlot, match="no metric, lens"):
        figures(bare, text)

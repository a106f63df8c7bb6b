# ruff: noqa: E501 (one case a line)
"""Specs and command lines that must be refused: exit 1 or 2, the right place, nothing written, no traceback."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.trees import DATA, seed_cache
from vtaps.cli import main

MODEL = "{path: MODEL/smollm2, dtype: float32, tokenizer: DATA/tokenizer}"
GOOD = f"""vtaps: 1
model: {MODEL}
vectors:
  push: {{file: push.safetensors}}
reads:
  stream: {{at: "resid_post[*]", tokens: all, sees: after_edits}}
edits:
  steer: {{at: "resid_post[3]", tokens: sampling, add: {{vector: push, scale: 2}}}}
  half: {{at: "resid_post[3]", tokens: all, scale: {{by: 0.5}}}}
metrics:
  paris: {{logprob: " Paris", tokens: sampling}}
prompts:
  facts: [{{id: france, text: "The capital of France is"}}]
arms:
  base: {{reads: [stream], metrics: [paris]}}
  steered: {{edits: [steer, half], reads: [stream], sweep: {{steer.add.scale: [1, 2]}}}}
"""
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)


@dataclass(frozen=True)
class Hostile:
    """``change``: what is replaced in the good spec; ``says``: code and the text that is underlined (None: a whole
    file is at fault)."""

    name: str
    code: str
    says: str | None
    change: tuple[str, str] | None = None
    text: str | bytes | None = None
    files: dict[str, object] = field(default_factory=dict)


CASES = [
    Hostile("unknown key", "VT101", "alls", ("tokens: all, scale", "alls: all, tokens: all, scale")),
    Hostile("wrong width", "VT301", "push", files={"push.safetensors": np.ones(575, np.float32)}),
    Hostile("layer 30 of 30", "VT204", '"resid_post[30]"', ('half: {at: "resid_post[3]"', 'half: {at: "resid_post[30]"')),
    Hostile("layers.-31", "VT204", '"layers.-31.mlp.output"', ('half: {at: "resid_post[3]"', 'half: {at: "layers.-31.mlp.output"')),
    Hostile("a pattern that names nothing", "VT202", '"model.layers.*.expert.output"', ('half: {at: "resid_post[3]"', 'half: {at: "model.layers.*.expert.output"')),
    Hostile("duplicate key", "VT003", "steer", ("  half:", "  steer:")),
    Hostile("scale: yes", "VT103", "yes", ("scale: 2", "scale: yes")),
    Hostile("alias bomb", "VT005", None, text=BOMB),
    Hostile("a vector file that is a directory", "VT306", "push.safetensors", files={"push.safetensors": None}),
    Hostile("a truncated vector file", "VT306", "push.safetensors", files={"push.safetensors": b"\x10\0\0\0\0\0\0\0{\"a\""}),
    Hostile("an empty vector file", "VT306", "push.safetensors", files={"push.safetensors": b""}),
    Hostile("a header that claims more than memory", "VT306", "push.safetensors", files={"push.safetensors": b"\xff" * 64}),
    Hostile("a vector that holds NaN", "VT308", "push.safetensors", files={"push.safetensors": np.full(576, np.nan, np.float32)}),
    Hostile("a token text that is two tokens", "VT309", '"Paris"', ('" Paris"', '"Paris"')),
    Hostile("empty prompts", "VT107", "[]", ('[{id: france, text: "The capital of France is"}]', "[]")),
    Hostile("no prompt groups", "VT107", "prompts", ('\n  facts: [{id: france, text: "The capital of France is"}]', " {}")),
    Hostile("an arm naming nothing", "VT210", "stear", ("edits: [steer, half]", "edits: [stear, half]")),
    Hostile("heads on a location without heads", "VT302", "[0]", ("{by: 0.5}", "{by: 0.5, heads: [0]}")),
    Hostile("a read of an edited location without sees", "VT304", "stream", (", sees: after_edits", "")),
    Hostile("arms whose edits disagree in order", "VT305", "[steer, half]", ("base: {reads", "base: {edits: [half, steer], reads")),
    Hostile("a sweep path that names nothing", "VT215", "steer.add.scales", ("steer.add.scale:", "steer.add.scales:")),
    Hostile("a missing model", "VT213", "MODEL/smolm2", ("MODEL/smollm2", "MODEL/smolm2")),
    Hostile("a hub id that is not on the machine", "VT213", "nobody/nothing", ("MODEL/smollm2", "nobody/nothing")),
    Hostile("asynchronous scheduling on", "VT503", "true", ("vectors:", "engine: {vllm: {async_scheduling: true}}\nvectors:")),
    Hostile("an unknown engine argument", "VT501", "max_model_length", ("vectors:", "engine: {vllm: {max_model_length: 9}}\nvectors:")),
    Hostile("a pickle", "VT306", "push.npy", ("push.safetensors", "push.npy"), files={"push.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + b" " * 60 + b"\n" + b"\x80\x04]."}),
    Hostile("an empty file", "VT107", None, text=""),
    Hostile("binary", "VT007", None, text=b"\x80\x81\x82\xff"),
    Hostile("a NUL", "VT001", None, text="vtaps: 1\0"),
    Hostile("a Python object", "VT008", None, ('"The capital of France is"', "!!python/object/apply:os.system ['touch pwned']")),
    Hostile("ten thousand brackets", "VT006", None, text="a: " + "[" * 10000),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    seed_cache(tmp_path / "cache", monkeypatch)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def put(path: Path, content: object) -> None:
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        assert isinstance(content, np.ndarray)
        save_file({"push": content}, path)


def spec_text(text: str) -> str:
    return text.replace("MODEL", str(DATA / "configs")).replace("DATA", str(DATA))


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> list[dict[str, object]]:
    code = main(argv)
    out, err = capsys.readouterr()
    assert code in (1, 2), (out, err)
    assert "Traceback" not in out + err
    return list(json.loads(out)["findings"])


def test_the_spec_that_the_cases_spoil_is_good(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder / "push.safetensors", np.ones(576, np.float32))
    (folder / "spec.yaml").write_text(spec_text(GOOD))
    assert main(["check", "spec.yaml", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


@pytest.mark.parametrize("verb", ["check", "compile", "run"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_hostile(case: Hostile, verb: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in ({"push.safetensors": np.ones(576, np.float32)} | case.files).items():
        put(folder / name, content)
    if case.text is not None:
        text = case.text
    else:
        assert case.change is not None or case.files
        old, new = case.change or ("", "")
        assert old in GOOD
        text = spec_text(GOOD.replace(old, new, 1))
    (folder / "spec.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = snapshot(folder)
    found = refused(capsys, [verb, "spec.yaml", "--format", "json", *(["--out", "out"] if verb == "run" else [])])
    assert snapshot(folder) == before
    hit = [f for f in found if f["code"] == case.code]
    assert hit, found
    assert all(f["severity"] == "error" for f in found)
    assert len({f["code"] for f in found}) == 1, "one cause, one code"
    if case.says is not None:
        assert isinstance(text, str)
        line = text.splitlines()[int(str(hit[0]["line"])) - 1]
        told = line[int(str(hit[0]["column"])) - 1 : int(str(hit[0]["end_column"])) - 1]
        assert told == spec_text(case.says)


@pytest.mark.parametrize("out", ["/proc/vtaps-run", "a-file/run", "a-file"])
def test_unwritable_output_folder(out: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder / "push.safetensors", np.ones(576, np.float32))
    put(folder / "a-file", b"mine")
    (folder / "spec.yaml").write_text(spec_text(GOOD))
    before = snapshot(folder)
    found = refused(capsys, ["run", "spec.yaml", "--format", "json", "--out", out])
    assert [f["code"] for f in found] == ["VT404"]
    assert snapshot(folder) == before


def test_an_output_folder_that_is_something_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder / "push.safetensors", np.ones(576, np.float32))
    (folder / "spec.yaml").write_text(spec_text(GOOD))
    (folder / "photos").mkdir()
    put(folder / "photos" / "cat.jpg", b"cat")
    before = snapshot(folder)
    for extra in ([], ["--overwrite"]):
        found = refused(capsys, ["run", "spec.yaml", "--format", "json", "--out", "photos", *extra])
        assert [f["code"] for f in found] == ["VT605"]
    assert snapshot(folder) == before


def test_compile_leaves_foreign_files_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder / "push.safetensors", np.ones(576, np.float32))
    (folder / "spec.yaml").write_text(spec_text(GOOD))
    put(folder / "spec.block.py", b"print('mine')\n")
    before = snapshot(folder)
    found = refused(capsys, ["compile", "spec.yaml", "--format", "json"])
    assert [f["code"] for f in found] == ["VT404"]
    assert snapshot(folder) == before


@pytest.mark.parametrize("path", ["/dev/zero", ".", "gone.yaml", "x" * 300, "a\0b"])
def test_a_spec_that_is_no_file(path: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(capsys, ["check", path, "--format", "json"])
    assert [f["code"] for f in found] == ["VT007"]
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "argv", [[], ["chek"], ["check"], ["run", "a", "b"], ["check", "a", "--format", "xml"], ["explain", "VT999"]]
)
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    _, err = capsys.readouterr()
    assert code == 2 and err and "Traceback" not in err

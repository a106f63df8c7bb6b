"""``vtaps diff`` at the edge: revisions of git, locks, sides that are not there, formats, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.trees import DATA, seed_cache
from vtaps.cli import main

SPEC = """vtaps: 1
model: {path: ../models/llama, dtype: float32, tokenizer: ../models/tokenizer}
vectors:
  push: {file: vectors/push.safetensors}
edits:
  steer: {at: "resid_post[1]", tokens: sampling, add: {vector: push, scale: 4}}
prompts:
  facts: {file: facts.jsonl, id: {column: name}, text: {column: text}}
arms:
  base: {}
  steered: {edits: [steer]}
sampling: {temperature: 0, max_tokens: 4}
"""


def git(*args: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *author, *args], check=True, capture_output=True)


def vector(seed: int) -> None:
    numbers = np.random.default_rng(seed).standard_normal(128).astype(np.float32)
    save_file({"push": numbers}, "exp/vectors/push.safetensors")


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a spec and its files; the model is in the working tree alone, as weights are."""
    seed_cache(tmp_path / "cache", monkeypatch)
    root = tmp_path / "repo"
    (root / "exp" / "vectors").mkdir(parents=True)
    (root / "models").mkdir()
    (root / "models" / "llama").symlink_to(DATA / "configs" / "llama")
    (root / "models" / "tokenizer").symlink_to(DATA / "tokenizer")
    monkeypatch.chdir(root)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    Path(".gitignore").write_text("models\n")
    Path("exp/spec.yaml").write_text(SPEC)
    Path("exp/facts.jsonl").write_text('{"name": "france", "text": "The capital of France is"}\n')
    vector(0)
    git("init", "-q", "-b", "trunk")
    git("add", "exp", ".gitignore")
    git("commit", "-q", "-m", "first")
    return root


def diff(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["diff", *args])
    out, err = capsys.readouterr()
    assert "Traceback" not in err and "\x1b" not in out + err
    return code, out, err


def lines(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


def test_a_revision_against_the_working_tree(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(capsys, "HEAD:exp/spec.yaml", "exp/spec.yaml")[0] == 0
    Path("exp/spec.yaml").write_text(SPEC.replace("scale: 4", "scale: 6"))
    code, out, err = diff(capsys, "HEAD:exp/spec.yaml", "exp/spec.yaml")
    assert (code, err) == (1, "")
    assert "~ steer scale: 4 → 6" in lines(out)
    assert out.startswith("HEAD:exp/spec.yaml → exp/spec.yaml: 1 change; only data changes")
    missing = "../models/llama, ../models/tokenizer of the working tree, which the revision does not have"
    assert f"note: HEAD:exp/spec.yaml: {missing}" in lines(out)
    git("commit", "-q", "-am", "second")
    assert "~ steer scale: 6 → 4" in lines(diff(capsys, "trunk:exp/spec.yaml", "HEAD~1:exp/spec.yaml")[1])


def test_files_beside_the_spec_are_the_revisions(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same names, other content: of the vector and of the prompts; a file that was deleted is still there."""
    vector(1)
    with Path("exp/facts.jsonl").open("a") as stream:
        stream.write('{"name": "italy", "text": "The capital of Italy is"}\n')
    code, out, _ = diff(capsys, "HEAD:exp/spec.yaml", "exp/spec.yaml")
    said = lines(out)
    assert code == 1
    assert any(line.startswith("~ push file: vectors/push.safetensors (") for line in said)
    assert "~ facts 1 prompt → 2 prompts" in said and '+ italy: "The capital of Italy is" (10 tokens)' in said
    assert "requests 2 → 4" in said
    git("commit", "-q", "-am", "second")
    shutil.rmtree("exp")
    assert lines(diff(capsys, "HEAD~1:exp/spec.yaml", "HEAD:exp/spec.yaml")[1])[1:8] == said[1:8]


def test_a_file_that_git_keeps_filtered(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As LFS does: the blob is another text than the file of a checkout."""
    Path(".gitattributes").write_text("*.safetensors filter=kept\n")
    git("config", "filter.kept.clean", "base64")
    git("config", "filter.kept.smudge", "base64 -d")
    git("add", "--renormalize", ".")
    git("commit", "-q", "-m", "filtered")
    code, out, err = diff(capsys, "HEAD:exp/spec.yaml", "exp/spec.yaml")
    assert (code, err) == (0, "") and "no change in meaning" in out


def test_from_a_folder_below_the_root(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo / "exp")
    assert diff(capsys, "HEAD:exp/spec.yaml", "spec.yaml")[0] == 0
    assert diff(capsys, "HEAD:./spec.yaml", "spec.yaml")[0] == 0
    code, _, err = diff(capsys, "HEAD:spec.yaml", "spec.yaml")
    assert (code, err) == (2, "vtaps diff: HEAD:spec.yaml: HEAD has no file 'spec.yaml'; nearest: exp/spec.yaml\n")


def test_locks_beside_specs(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "exp/spec.yaml"]) == 0
    capsys.readouterr()
    code, out, _ = diff(capsys, "exp/spec.lock.json", "exp/spec.yaml")
    assert code == 0 and "no change in meaning" in out
    git("add", "exp")
    git("commit", "-q", "-m", "lock")
    Path("exp/spec.yaml").write_text(SPEC.replace("resid_post[1]", "resid_post[2]"))
    assert main(["compile", "exp/spec.yaml"]) == 0
    capsys.readouterr()
    code, out, _ = diff(capsys, "HEAD:exp/spec.lock.json", "exp/spec.lock.json")
    said = lines(out)
    assert code == 1 and "~ steer at: resid_post[1] → resid_post[2]" in said
    assert "rows not known: a lock does not hold the prompts" in said
    assert '-@BLOCK.location("resid_post[1]", module="model.layers.1", output=0, residual=1)' in said
    assert "compiled anew: the structure differs: locations, verbs, columns or kinds of reads" in said
    Path("exp/spec.block.py").write_text("# mine\n")
    code, out, _ = diff(capsys, "HEAD:exp/spec.lock.json", "exp/spec.lock.json")
    assert "note: exp/spec.lock.json: spec.block.py beside it is of another compilation" in lines(out)
    assert "\nblock\n" not in out


def test_what_is_not_there(repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    there = "exp/spec.yaml"
    wrong = {
        "exp/spce.yaml": "exp/spce.yaml: no such file; nearest: exp/spec.yaml",
        "HAED:exp/spec.yaml": "HAED:exp/spec.yaml: git has no revision 'HAED'; nearest: HEAD",
        "trnk:exp/spec.yaml": "trnk:exp/spec.yaml: git has no revision 'trnk'; nearest: trunk",
        "HEAD:exp/sepc.yaml": "HEAD:exp/sepc.yaml: HEAD has no file 'exp/sepc.yaml'; nearest: exp/spec.yaml",
        "HEAD:": "HEAD:: HEAD has no file ''",
        "HEAD:../../x.yaml": None,
    }
    for text, says in wrong.items():
        code, out, err = diff(capsys, text, there)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert says is None or err == f"vtaps diff: {says}\n"
    monkeypatch.chdir(repo.parent)
    assert "in no git repository" in diff(capsys, "HEAD:exp/spec.yaml", "repo/exp/spec.yaml")[2]
    monkeypatch.setenv("PATH", "")
    assert "needs git, which is not installed" in diff(capsys, "HEAD:exp/spec.yaml", "repo/exp/spec.yaml")[2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not a lock of this version: the whole file"),
        ('{"lock": 2}', "it is not a lock of this version"),
    ],
)
def test_a_lock_that_is_none(repo: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    Path("bad.lock.json").write_text(text)
    code, out, err = diff(capsys, "bad.lock.json", "exp/spec.yaml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_a_side_that_does_not_check(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its findings, where they stand, and none of the machine's own folders."""
    Path("exp/spec.yaml").write_text(SPEC.replace("resid_post[1]", "resid_pst[1]"))
    code, out, err = diff(capsys, "HEAD:exp/spec.yaml", "exp/spec.yaml")
    assert (code, out) == (2, "") and "--> exp/spec.yaml:6:15" in err and "nearest: resid_post" in err
    git("commit", "-q", "-am", "bad")
    code, out, err = diff(capsys, "HEAD~1:exp/spec.yaml", "HEAD:exp/spec.yaml")
    assert code == 2 and "--> HEAD:exp/spec.yaml:6:15" in err and "vtaps-diff-" not in err
    code, out, err = diff(capsys, "HEAD~1:exp/spec.yaml", "HEAD:exp/spec.yaml", "--format", "json")
    assert code == 2 and json.loads(out)["findings"][0]["file"] == "HEAD:exp/spec.yaml"
    shutil.rmtree("models")
    code, out, err = diff(capsys, "HEAD~1:exp/spec.yaml", "HEAD~1:exp/spec.yaml")
    assert code == 2 and "vtaps-diff-" not in err


def test_json_and_github(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("exp/spec.yaml").write_text(SPEC.replace("scale: 4", "scale: 6").replace("  base: {}\n", ""))
    code, out, _ = diff(capsys, "HEAD:exp/spec.yaml", "exp/spec.yaml", "--format", "json")
    told = json.loads(out)
    assert (code, told["same"]) == (1, False)
    [scale, arm] = told["changes"]
    assert {k: scale[k] for k in ("kind", "group", "name", "field", "old", "new")} == {
        "kind": "changed", "group": "edits", "name": "steer", "field": "scale", "old": "4", "new": "6",
    }  # fmt: skip
    assert (arm["kind"], arm["name"], arm["new"]) == ("removed", "base", None)
    assert told["run"]["requests"]["value"] == [2, 1] and told["run"]["engine"]["value"] == "load"
    code, out, _ = diff(capsys, "HEAD:exp/spec.yaml", "exp/spec.yaml", "--format", "github")
    assert "::notice file=exp/spec.yaml,line=6,title=edits%3A steer::scale: 4 → 6" in out.splitlines()
    assert code == 1 and all(line.startswith("::notice ") for line in out.splitlines())


def test_what_a_spec_says_drives_neither_terminal_nor_table(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SPEC.replace(
        "facts: {file: facts.jsonl, id: {column: name}, text: {column: text}}", "facts: [{id: a, text: TEXT}]"
    )
    Path("a.yaml").write_text(
        text.replace("TEXT", '"x"').replace("../models", "models").replace("vectors/", "exp/vectors/")
    )
    hostile = '"\\e[31m | `code` </details> ```"'
    Path("b.yaml").write_text(Path("a.yaml").read_text().replace('"x"', hostile))
    code, out, _ = diff(capsys, "a.yaml", "b.yaml")
    assert code == 1 and "\\x1b[31m" in out
    code, out, _ = diff(capsys, "a.yaml", "b.yaml", "--format", "markdown")
    [line] = [line for line in out.splitlines() if "code" in line]
    assert line.startswith("- ````") and line.endswith("````") and "| `code` <" in line

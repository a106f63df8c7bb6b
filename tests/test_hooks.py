"""What other repositories take from this one, pre-commit hooks and a GitHub action: their form, and that they work."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.trees import DATA, seed_cache
from vtaps.cli import VERBS, main
from vtaps.spec.vllm_version import installed

ROOT = Path(__file__).parents[1]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
FOLDER = ROOT / ".github/actions/vtaps"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]
SPEC = """vtaps: 1
model: {path: ../model}
edits:
  half: {at: "resid_post[1]", tokens: all, scale: {by: 0.5}}
prompts:
  facts: [{id: france, text: "The capital of France is"}]
arms:
  base: {edits: [half]}
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with a model and ``specs/a.yaml``, ``specs/b.yml`` and their blocks committed."""
    seed_cache(tmp_path / "cache", monkeypatch)
    here = tmp_path / "work"
    (here / "specs").mkdir(parents=True)
    shutil.copytree(DATA / "tokenizer", here / "model")
    shutil.copy(DATA / "configs/llama/config.json", here / "model")
    monkeypatch.chdir(here)
    for name in ("a.yaml", "b.yml"):
        Path("specs", name).write_text(SPEC, encoding="utf-8")
    assert main(["compile", "specs/a.yaml", "specs/b.yml"]) == 0
    git("init", "-q")
    commit()
    return here


def git(*words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()


def commit() -> str:
    git("add", ".")
    git("commit", "-q", "-m", "x")
    return git("rev-parse", "HEAD")


# pre-commit


def test_the_hooks_have_what_pre_commit_asks_for() -> None:
    """Its manifest: id, name, entry and language are required; `files` is a regular expression."""
    assert [hook["id"] for hook in HOOKS] == ["vtaps-check", "vtaps-compile-check"]
    optional = {"description", "require_serial", "exclude", "types", "types_or", "args", "pass_filenames", "always_run"}
    for hook in HOOKS:
        assert (
            {"id", "name", "entry", "language", "files"}
            <= set(hook)
            <= optional | {*("id", "name", "entry", "language", "files")}
        )
        assert hook["language"] == "system" and hook["require_serial"] is True
        assert all(isinstance(hook[key], str) for key in ("id", "name", "entry", "files", "description"))
    check, compiled = (re.compile(hook["files"]) for hook in HOOKS)
    for path in ("specs/a.yaml", "lab/specs/a.yml"):
        assert check.search(path) and compiled.search(path)
    for path in ("specs/a.block.py", "x/specs/a.lock.json"):
        assert not check.search(path) and compiled.search(path)
    for path in ("a.yaml", "specs/a.py", "specs/vectors/v.yaml.npy", "myspecs/a.yaml", "specs/run.json"):
        assert not check.search(path) and not compiled.search(path)


@pytest.mark.parametrize(
    ("change", "file", "codes"),
    [
        (None, "specs/a.yaml", [[], []]),
        (None, "specs/b.yml", [[], []]),
        (("specs/a.yaml", "resid_post[1]", "resid_pst[1]"), "specs/a.yaml", [["VT205"], ["VT205"]]),
        (("specs/a.yaml", "by: 0.5", "by: 0.25"), "specs/a.yaml", [[], ["VT401", "VT401"]]),
        (("specs/a.block.py", "vt.scale", "vt.skale"), "specs/a.block.py", [None, ["VT401"]]),
        (("specs/b.lock.json", '"arms"', '"arm"'), "specs/b.lock.json", [None, ["VT401"]]),
    ],
)
def test_the_hooks_at_work(
    change: tuple[str, str, str] | None,
    file: str,
    codes: list[list[str] | None],
    checkout: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if change is not None:
        text = Path(change[0]).read_text(encoding="utf-8")
        assert change[1] in text
        Path(change[0]).write_text(text.replace(change[1], change[2]), encoding="utf-8")
    for hook, wanted in zip(HOOKS, codes, strict=True):
        if not re.search(hook["files"], file):
            assert wanted is None
            continue
        program, *words = shlex.split(hook["entry"])
        assert program == "vtaps"
        capsys.readouterr()
        assert main([*words, file, "--format", "json"]) == bool(wanted)
        assert [f["code"] for f in json.loads(capsys.readouterr().out)["findings"]] == wanted


def test_a_spec_that_several_files_name_is_compiled_once(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--check", "specs/b.block.py", "specs/b.yml", "specs/b.lock.json"]) == 0
    assert capsys.readouterr().out.splitlines()[-1:] == ["specs/b.yml: up to date"]
    assert main(["compile", "--check", "specs/gone.block.py", "--format", "json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["code"], found["file"]) == ("VT007", "specs/gone.yaml")


# The action


def test_the_action_has_what_github_asks_for() -> None:
    """The metadata of a composite action: a step has `uses`, or `run` and `shell`; expressions name what is there."""
    assert set(ACTION) == {"name", "description", "inputs", "runs"} and set(ACTION["runs"]) == {"using", "steps"}
    assert ACTION["runs"]["using"] == "composite"
    for wanted in ACTION["inputs"].values():
        assert set(wanted) == {"description", "default"} and all(isinstance(text, str) for text in wanted.values())
    for step in STEPS:
        assert set(step) - {"name", "id", "if", "env"} in ({"run", "shell"}, {"uses", "with"})
        assert all(isinstance(value, str) for key in ("env", "with") for value in step.get(key, {}).values())
        assert "${{" not in step.get("run", ""), "an expression in a script is a way in: it goes through `env`"
    text = (FOLDER / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"\binputs\.(\w+)", text)) == set(ACTION["inputs"])
    assert set(re.findall(r"\bsteps\.(\w+)\.", text)) == {step["id"] for step in STEPS if "id" in step}
    steps = (FOLDER / "steps.sh").read_text(encoding="utf-8")
    called = [step["run"].split()[-1] for step in STEPS if "run" in step]
    assert called == re.findall(r"^(\w+)\)$", steps, re.MULTILINE)
    by_name = {step["run"].split()[-1]: step for step in STEPS if "run" in step}
    for name, body in re.findall(r"^(\w+)\)\n(.*?)^    ;;$", steps, re.MULTILINE | re.DOTALL):
        needed = {"SPECS"} if "find_specs" in body else set()
        needed |= {w for w in re.findall(r"\$\{?([A-Z]+)\b", body) if w not in ("MARK", "LONGEST")}
        given = set(by_name[name].get("env", {})) - {"GH_TOKEN"}
        assert given == needed - {"GITHUB", "RUNNER"}, name


def step(name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", os.fspath(FOLDER / "steps.sh"), name],
        env=os.environ | {"PATH": path, "GITHUB_ACTION_PATH": os.fspath(FOLDER)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def built(checkout: Path) -> Path:
    """The steps start the program, which finds a tree for the vLLM that is installed."""
    if installed() is None:
        pytest.skip("no vLLM is installed")
    return checkout


def test_the_steps_of_the_action(built: Path, tmp_path: Path) -> None:
    sarif = tmp_path / "out.sarif"
    outputs = tmp_path / "outputs"
    found = {"SPECS": "specs/**/*.y*ml", "SARIF": os.fspath(sarif), "GITHUB_OUTPUT": os.fspath(outputs)}
    assert step("install").stdout.startswith("vtaps ")
    done = step("check", **found)
    assert done.returncode == 0 and "specs/a.yaml: ok" in done.stdout and "specs/b.yml: ok" in done.stdout, done.stderr
    assert step("compile", **found).returncode == 0
    assert json.loads(sarif.read_text(encoding="utf-8"))["runs"][0]["results"] == []
    assert outputs.read_text(encoding="utf-8") == f"sarif={sarif}\n"
    Path("specs/a.yaml").write_text(SPEC.replace("0.5", "0.25"), encoding="utf-8")
    done = step("compile", **found)
    assert done.returncode == 1 and "::error file=specs/a.block.py,line=" in done.stdout
    results = json.loads(sarif.read_text(encoding="utf-8"))["runs"][0]["results"]
    places = {r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in results}
    assert places == {"specs/a.block.py", "specs/a.lock.json"}
    Path("specs/a.yaml").write_text(SPEC.replace("scale", "skale"), encoding="utf-8")
    assert step("check", **found).returncode == 1
    done = step("check", SPECS="nowhere/*.yaml")
    assert done.returncode == 1 and done.stdout == "::error::vtaps: no spec is at nowhere/*.yaml\n"
    assert step("check", SPECS="specs/b.yml\nspecs/no*.yaml").stdout.startswith("specs/b.yml: ok")


@pytest.mark.skipif("diff" not in VERBS, reason="needs `vtaps diff`")
def test_what_a_pull_request_is_told(built: Path, tmp_path: Path) -> None:
    base = git("rev-parse", "HEAD")
    body = tmp_path / "body.md"
    words = {"SPECS": "specs/*.y*ml", "BASE": base, "BODY": os.fspath(body), "GITHUB_STEP_SUMMARY": f"{body}.summary"}
    assert step("diff", **words).returncode == 0 and body.read_text(encoding="utf-8") == ""
    Path("specs/a.yaml").write_text(SPEC.replace("0.5", "0.25"), encoding="utf-8")
    shutil.copy("specs/b.yml", "specs/new.yaml")
    Path("specs/b.yml").write_text(SPEC.replace("scale", "skale"), encoding="utf-8")
    commit()
    done = step("diff", **words)
    assert done.returncode == 0, done.stderr
    told = body.read_text(encoding="utf-8")
    assert Path(f"{body}.summary").read_text(encoding="utf-8") == told
    a, b, new = (
        told.split(f"### specs/{name}\n")[1].split("### specs/")[0] for name in ("a.yaml", "b.yml", "new.yaml")
    )
    assert "0.25" in a and "0.5" in a
    assert "VT101" in b
    assert new.strip() == "A new spec."

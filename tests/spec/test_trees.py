"""Where a model is found, and where its tree comes from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from tests.spec.trees import DATA, FAMILIES, OTHERS, tree
from vtaps.runtime import trees
from vtaps.spec import vllm_version
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.models import find_config
from vtaps.spec.snapshot import read_tree

SPAN = Span("spec.yaml", 2, 10)
LLAMA = DATA / "configs" / "llama"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return trees.cache_folder()


def uninstalled(_: str) -> str:
    raise metadata.PackageNotFoundError


def the_one(problems: list[Diagnostic]) -> Diagnostic:
    (problem,) = problems
    assert problem.span == SPAN and "\n" not in problem.message
    return problem


# find_config


def test_a_folder_its_file_and_a_relative_path_are_one(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    shutil.copytree(LLAMA, folder)
    for text in (str(folder), "models/m", "models/m/config.json", str(folder / "config.json")):
        found, problems = find_config(text, tmp_path, SPAN)
        assert found == folder and not problems


def test_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(LLAMA, tmp_path / "m")
    assert find_config("~/m", Path("/"), SPAN)[0] == tmp_path / "m"


def test_a_missing_model_names_what_was_looked_at_and_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    found, problems = find_config("models/smollm2-135m-instrct", tmp_path, SPAN)
    problem = the_one(problems)
    assert found is None and problem.code == "VT213"
    assert problem.nearest == str(tmp_path / "models" / "smollm2-135m-instruct")
    assert str(tmp_path / "models") in problem.message


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert "holds no config.json" in the_one(find_config(str(tmp_path), tmp_path, SPAN)[1]).message


@pytest.mark.parametrize("text", ["", "\0", "x" * 5000, "a/b/c/d", "~nobody-here/m"])
def test_what_is_no_path_is_refused(text: str, tmp_path: Path) -> None:
    found, problems = find_config(text, tmp_path, SPAN)
    assert found is None and the_one(problems).code == "VT213"


def test_a_hub_id_that_is_not_here_is_refused_at_once(tmp_path: Path) -> None:
    start = time.perf_counter()
    problem = the_one(find_config("no-such-owner/no-such-model", tmp_path, SPAN)[1])
    assert time.perf_counter() - start < 3
    assert "Hugging Face cache" in problem.message


def test_a_hub_id_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--owner--m"
    snapshot = repo / "snapshots" / "abc"
    shutil.copytree(LLAMA, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    import huggingface_hub.file_download as download

    monkeypatch.setattr(download, "HF_HUB_CACHE", str(tmp_path), raising=False)
    found, problems = find_config("owner/m", Path("/"), SPAN)
    assert found == snapshot, problems


# tree_for


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "names no model"),
        ("\udc80", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_malformed_configuration(text: str, words: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    found, problems = trees.tree_for(tmp_path, "auto", SPAN)
    problem = the_one(problems)
    assert found is None and problem.code == "VT214" and words in problem.message


def test_without_vllm_the_cache_serves_and_nothing_else_does(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_version.metadata, "version", uninstalled)
    assert trees.vllm_version() is None
    found, problems = trees.tree_for(LLAMA, "float32", SPAN)
    assert found is None and the_one(problems).code == "VT504"
    config = json.loads((LLAMA / "config.json").read_text())
    file = trees.cache_file(config, "0.32.0", "float32")
    file.parent.mkdir(parents=True)
    shutil.copy(DATA / "trees" / "llama.json", file)
    found, problems = trees.tree_for(LLAMA, "float32", SPAN, vllm="0.32.0")
    assert found == tree("llama") and not problems


def test_the_key_is_what_the_configuration_says(tmp_path: Path) -> None:
    config = json.loads((LLAMA / "config.json").read_text())
    turned = dict(reversed(config.items()))
    assert trees.cache_file(config, "0.32.0", "auto") == trees.cache_file(turned, "0.32.0", "auto")
    keys = {
        trees.cache_file(config, "0.32.0", "auto"),
        trees.cache_file(config, "0.33.0", "auto"),
        trees.cache_file(config, "0.32.0", "float32"),
        trees.cache_file(config | {"hidden_size": 64}, "0.32.0", "auto"),
    }
    assert len(keys) == 4


def test_a_builder_that_fails_gives_one_line(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_version.metadata, "version", lambda _: "0.32.0")
    monkeypatch.setattr(trees.sys, "executable", shutil.which("false"))
    found, problems = trees.tree_for(LLAMA, "auto", SPAN)
    problem = the_one(problems)
    assert found is None and problem.code == "VT214" and "exit 1" in problem.message
    assert not list(cache.rglob("*.json"))


def test_nothing_heavy_is_imported_in_the_calling_process() -> None:
    code = (
        "import sys; from vtaps.runtime.trees import tree_for; from vtaps.spec.models import find_config;"
        "from vtaps.spec.locations import locate;"
        "assert not {'torch', 'vllm', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DATA.parent.parent)


# Building, with vLLM


@pytest.mark.engine
def test_a_tree_is_built_once_and_then_read(cache: Path) -> None:
    found, problems = trees.tree_for(LLAMA, "float32", SPAN)
    assert not problems
    assert found == tree("llama")
    start = time.perf_counter()
    again, _ = trees.tree_for(LLAMA, "float32", SPAN)
    assert time.perf_counter() - start < 0.1
    assert again == found
    (file,) = cache.rglob("*.json")
    file.write_text(file.read_text()[:-40])
    assert trees.tree_for(LLAMA, "float32", SPAN)[0] == found
    assert read_tree(file) == found


@pytest.mark.engine
@pytest.mark.parametrize("family", [f for f in (*FAMILIES, *OTHERS) if f != "llama"])
def test_the_committed_snapshots_are_what_vllm_builds(family: str, cache: Path) -> None:
    found, problems = trees.tree_for(DATA / "configs" / family, "float32", SPAN)
    assert not problems
    assert found == tree(family)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["NoSuchModel"], "model_type": "llama"}, "NoSuchModel"),
        ({"hidden_act": "tanh"}, "tanh"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"model_type": "no_such_type"}, "no_such_type"),
    ],
)
def test_a_model_that_vllm_refuses(change: dict[str, object], words: str, tmp_path: Path, cache: Path) -> None:
    config = json.loads((LLAMA / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, problems = trees.tree_for(tmp_path, "float32", SPAN)
    problem = the_one(problems)
    assert found is None and problem.code == "VT214" and words in problem.message
    assert "Traceback" not in problem.message and not list(cache.rglob("*.json"))

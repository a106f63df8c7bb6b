"""``vtaps init``: what it writes checks and compiles for every family, as it is and with its suggestions taken up."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.models import CHAT_TEMPLATE
from tests.spec.trees import OTHERS
from tests.trees import DATA, seed_cache
from vtaps.check import CheckResult, check_file
from vtaps.cli import main
from vtaps.compiling import compile_plan
from vtaps.spec import aliases
from vtaps.spec.files import create_text
from vtaps.spec.snapshot import read_tree
from vtaps.spec.spec import Spec

FAMILIES = sorted(p.name for p in (DATA / "configs").iterdir())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    seed_cache(tmp_path / "cache", monkeypatch)
    here = tmp_path / "work"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def model(family: str, folder: Path, template: str | None = None) -> Path:
    """A family's configuration with a tokenizer, and with no other chat template than ``template``."""
    folder.mkdir(parents=True)
    shutil.copy(DATA / "configs" / family / "config.json", folder)
    shutil.copy(DATA / "tokenizer" / "tokenizer.json", folder)
    told = json.loads((DATA / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))
    told.pop("chat_template", None)
    if template is not None:
        told["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


def good(path: str) -> tuple[CheckResult, Spec]:
    result = check_file(path)
    assert result.ok and result.plan is not None and result.spec is not None, [d.message for d in result.diagnostics]
    compiled, wrong = compile_plan(result.plan)
    assert compiled is not None and not wrong
    return result, result.spec


def findings(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["init", *words, "--format", "json"]) == 1
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)["findings"]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_spec_checks_and_compiles(family: str, folder: Path) -> None:
    model(family, folder / "models" / family)
    assert main(["init", f"models/{family}", "--out", "first.yaml"]) == 0
    result, spec = good("first.yaml")
    assert result.plan is not None and result.tree is not None
    tree = read_tree(DATA / "trees" / f"{family}.json")
    steered = next(p.site for p in result.plan.locations if any(s.name == "steer" for s in p.statements))
    if aliases.table_of(tree) is not None:
        assert (steered.alias, steered.layer) == ("resid_post", tree.dimensions.layers // 2)
    else:
        assert re.search(rf"\.{tree.dimensions.layers // 2}(\.|$)", steered.module), steered.module
    assert steered.width == tree.dimensions.hidden
    assert [r.kind for r in spec.reads.values()] == ["norm" if family == "llama_fp8" else "lens"]
    text = Path("first.yaml").read_text(encoding="utf-8")
    size = tree.dimensions
    assert f"{size.layers} layers, {size.heads} heads of {size.head_dim}, hidden size {size.hidden}" in text
    for name in aliases.names(tree):
        assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", *OTHERS, "lfm2"])
def test_what_it_suggests_is_good_too(family: str, folder: Path) -> None:
    model(family, folder / "models" / family)
    assert main(["init", f"models/{family}", "--out", "first.yaml"]) == 0
    text = Path("first.yaml").read_text(encoding="utf-8")
    suggested = re.findall(r"^  # (\w+): \{at: .*$", text, re.MULTILINE)
    tree = read_tree(DATA / "trees" / f"{family}.json")
    assert len(suggested) == (4 if aliases.table_of(tree) is None else 5)
    text = re.sub(r"^  # (\w+: \{at: .*)$", r"  \1", text, flags=re.MULTILINE)
    np.save("direction.npy", np.ones(tree.dimensions.hidden, np.float32))
    text = text.replace("  # direction: {file", "  direction: {file").replace("  direction: {random", "  # {random")
    edits = ", ".join(name for name in suggested if name != "rows")
    text = text.replace("  base: ", f"  more: {{edits: [{edits}], reads: [rows]}}\n  base: ")
    Path("more.yaml").write_text(text, encoding="utf-8")
    good("more.yaml")


@pytest.mark.parametrize(
    ("template", "chats"),
    [
        (None, False),
        (CHAT_TEMPLATE, True),
        ("{{ strftime_now('%Y') }}", False),  # another prompt tomorrow: refused by check
        ("{% for", False),
    ],
)
def test_chats_where_the_template_takes_them(template: str | None, chats: bool, folder: Path) -> None:
    model("llama", folder / "models/a", template)
    assert main(["init"]) == 0  # the only model here
    result, spec = good("a.yaml")
    assert result.plan is not None
    assert [p.kind for p in spec.prompts["questions"].items] == ["chat" if chats else "text"] * 2


def test_paths_start_at_the_spec(folder: Path) -> None:
    model("llama", folder / "models/a, b")
    Path("deep/specs").mkdir(parents=True)
    assert main(["init", "models/a, b", "--out", "deep/specs/x.yaml"]) == 0
    assert main(["init", "models/a, b/config.json", "--out", "y.yaml"]) == 0
    for path in ("deep/specs/x.yaml", "y.yaml"):
        good(path)
    text = Path("deep/specs/x.yaml").read_text(encoding="utf-8")
    assert 'model: {path: "../../models/a, b"}' in text and str(folder) not in text
    Path("link").symlink_to("deep/specs")  # whose `..` is deep
    assert main(["init", "models/a, b", "--out", "link/z.yaml"]) == 0
    good("link/z.yaml")
    Path("weights").symlink_to("models")
    assert main(["init", "weights/a, b", "--out", "w.yaml"]) == 0
    assert 'path: "weights/a, b"' in Path("w.yaml").read_text(encoding="utf-8")


def test_the_schema_of_the_first_line_is_the_nearest(folder: Path) -> None:
    model("llama", folder / "models/a")
    Path("specs").mkdir()
    line = "# yaml-language-server: $schema={}\n"
    assert main(["init", "--out", "specs/none.yaml"]) == 0
    assert Path("specs/none.yaml").read_text(encoding="utf-8").startswith(line.format("spec-v1.schema.json"))
    Path("schemas").mkdir()
    Path("schemas/spec-v1.schema.json").touch()
    assert main(["init", "--out", "specs/some.yaml"]) == 0
    assert Path("specs/some.yaml").read_text(encoding="utf-8").startswith(line.format("../schemas/spec-v1.schema.json"))


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
def test_nothing_is_written_over(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model("llama", folder / "models/a")
    there = folder / "a.yaml"
    match kind:
        case "file":
            there.write_text("mine", encoding="utf-8")
        case "folder":
            there.mkdir()
        case _:
            there.symlink_to("gone")
    (found,) = findings(capsys)
    assert found["code"] == "VT404" and "a.yaml" in str(found["message"]) and "--out" in str(found["note"])
    assert kind != "file" or there.read_text(encoding="utf-8") == "mine"
    assert not (folder / "gone").exists()
    with pytest.raises(FileExistsError):  # also one that came in between
        create_text(there, "x")


def test_models_that_are_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [f["code"] for f in findings(capsys)] == ["VT213"]  # none here
    model("llama", folder / "models/llama-tiny")
    (found,) = findings(capsys, "models/lama-tiny")
    assert (found["code"], found["file"]) == ("VT213", "models/lama-tiny")
    assert str(found["nearest"]).endswith("models/llama-tiny")
    shutil.copytree(folder / "models/llama-tiny", folder / "models/other")
    (found,) = findings(capsys)
    assert found["valid"] == ["models/llama-tiny", "models/other"]
    (folder / "models/other/tokenizer.json").unlink()
    (found,) = findings(capsys, "models/other")
    assert (found["code"], found["file"]) == ("VT214", "models/other")  # without a tokenizer nothing checks
    (folder / "models/other/config.json").write_text("{", encoding="utf-8")
    assert [f["code"] for f in findings(capsys, "models/other")] == ["VT214"]
    assert [f["code"] for f in findings(capsys, "models/llama-tiny", "--out", "no/where.yaml")] == ["VT404"]
    assert [f["code"] for f in findings(capsys, "a\0b", "--out", "x.yaml")] == ["VT213"]
    assert [f["code"] for f in findings(capsys, "models/llama-tiny", "--out", "a\0b")] == ["VT404"]
    assert sorted(p.name for p in folder.iterdir()) == ["models"]

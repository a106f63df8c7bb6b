"""``vtaps schema``: what is printed is what ships, stands alone, and takes the files that it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from vtaps.cli import main
from vtaps.schemas import FILES
from vtaps.spec.yaml import load

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "examples").glob("*.yaml"))
LOCKS = sorted((ROOT / "examples").glob("*.lock.json"))
REFERENCE = "vllm-0.32-engine-args.json"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["schema", *words]) == 0
    return capsys.readouterr().out


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(child) for child in node.values()))
    return set().union(*(references(child) for child in node)) if isinstance(node, list) else set()


@pytest.mark.parametrize("of", [name for name in FILES if name != "spec"])
def test_it_is_the_file_that_ships(of: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, of) == (ROOT / "schemas" / FILES[of]).read_text(encoding="utf-8")


def test_the_specs_is_the_file_that_ships_with_the_engine_arguments_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert text == printed(capsys, "spec")
    schema = json.loads(text)
    arguments = schema["$defs"].pop("engine_args")
    outer = json.loads((ROOT / "schemas" / REFERENCE).read_text(encoding="utf-8"))
    assert {"$schema": outer["$schema"]} | arguments == outer
    file = json.loads((ROOT / "schemas" / FILES["spec"]).read_text(encoding="utf-8"))
    assert schema["properties"]["engine"]["properties"]["vllm"].pop("$ref") == "#/$defs/engine_args"
    assert file["properties"]["engine"]["properties"]["vllm"].pop("$ref") == REFERENCE
    assert schema == file


def test_the_schemas_of_specs_and_locks_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for of in FILES:
        assert all(ref.startswith("#") for ref in references(json.loads(printed(capsys, of)))), of


def test_every_example_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    specs = Draft202012Validator(json.loads(printed(capsys)))
    assert len(SPECS) == len(LOCKS) > 10
    for path in SPECS:
        doc, found = load(path)
        assert doc is not None and not found
        specs.validate(doc.data)
        with pytest.raises(ValidationError):
            specs.validate(doc.data | {"edit": {}})
        with pytest.raises(ValidationError):
            specs.validate(doc.data | {"engine": {"vllm": {"max_model_len": "long"}}})
    locks = Draft202012Validator(json.loads(printed(capsys, "lock")))
    for path in LOCKS:
        locks.validate(json.loads(path.read_text(encoding="utf-8")))


def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = printed(capsys, "tree")
    for _ in range(2):  # one of its own is replaced, also an older version's
        assert printed(capsys, "tree", "--out", "s.json") == ""
        assert Path("s.json").read_text(encoding="utf-8") == wanted
        Path("s.json").write_text('{"title": "vtaps tree snapshot, version 3"}', encoding="utf-8")
    for content in ('{"title": "mine"}', '["vtaps spec"]', "", '{"title": "vtaps specs of mine, version 1"}'):
        Path("mine.json").write_text(content, encoding="utf-8")
        assert main(["schema", "--out", "mine.json", "--format", "json"]) == 1
        (found,) = json.loads(capsys.readouterr().out)["findings"]
        assert (found["code"], found["file"]) == ("VT404", "mine.json")
        assert Path("mine.json").read_text(encoding="utf-8") == content
    for path in ("no/where.json", ".", "a\0b"):
        assert main(["schema", "--out", path, "--format", "json"]) == 1
        assert [f["code"] for f in json.loads(capsys.readouterr().out)["findings"]] == ["VT404"]


def test_another_name_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["schema", "sepc"])
    assert stop.value.code == 2 and "engine-args" in capsys.readouterr().err

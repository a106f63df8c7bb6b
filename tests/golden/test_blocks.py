"""Each folder of ``blocks/`` is a spec with the block and the lock it compiles to; ``pytest --regen`` writes them."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.trees import seed_cache
from vtaps.check import check_file
from vtaps.codegen.verify import verify
from vtaps.compiling import compile_plan
from vtaps.schemas import load

CASES = Path(__file__).parent / "blocks"
ROOT = Path(__file__).parents[2]
NAMES = sorted(p.parent.name for p in CASES.glob("*/spec.yaml"))


def compiled(path: Path) -> dict[str, str]:
    result = check_file(path)
    assert result.plan is not None, [d.message for d in result.diagnostics]
    assert result.diagnostics == []
    done, wrong = compile_plan(result.plan)
    assert done is not None and wrong == []
    return done.files


@pytest.mark.parametrize("name", NAMES)
def test_golden(name: str, regen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    files = compiled(CASES / name / "spec.yaml")
    for file, text in files.items():
        expected = CASES / name / file
        if regen:
            expected.write_text(text, encoding="utf-8")
        assert text == expected.read_text(encoding="utf-8"), "if this is right: pytest tests/golden --regen"
    jsonschema.validate(json.loads(files["spec.lock.json"]), load("lock-v1.schema.json"))


@pytest.mark.parametrize("seed", ["1", "77"])
def test_same_bytes_under_any_hash_seed(seed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    specs = [str(CASES / name / "spec.yaml") for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-m", "vtaps", "compile", "--check", *specs],
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("up to date") == len(NAMES)


def shuffled(value: Any, order: random.Random, path: tuple[str, ...] = ()) -> Any:
    """The same spec with the keys of every mapping in another order; a sweep's order is the order of its points."""
    if isinstance(value, list):
        return [shuffled(v, order, path) for v in value]
    if not isinstance(value, dict) or path[-1:] == ("sweep",):
        return value
    keys = list(value)
    order.shuffle(keys)
    return {k: shuffled(value[k], order, (*path, k)) for k in keys}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_key_order_means_nothing(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vtaps.spec.yaml import loads

    seed_cache(tmp_path, monkeypatch)
    text = (CASES / name / "spec.yaml").read_text(encoding="utf-8")
    doc, _ = loads(text, "spec.yaml", CASES / name)
    assert doc is not None
    other = tmp_path / "case" / "spec.yaml"
    shutil.copytree(CASES / name, other.parent)
    data = shuffled(doc.data, random.Random(seed))
    for key in ("path", "tokenizer"):
        data["model"][key] = str((CASES / name / data["model"][key]).resolve())
    other.write_text(json.dumps(data), encoding="utf-8")
    files, wanted = compiled(other), {}
    for file in files:
        wanted[file] = (CASES / name / file).read_text(encoding="utf-8")
    # The path of the model is spelled otherwise, and with it the digest of the spec.
    assert strip(files["spec.block.py"]) == strip(wanted["spec.block.py"])
    mine, golden = (json.loads(f["spec.lock.json"]) for f in (files, wanted))
    for lock in (mine, golden):
        for key in ("spec", "model"):
            lock.pop(key)
        lock["block"].pop("digest")
    assert mine == golden


def strip(block: str) -> list[str]:
    return [line for line in block.splitlines() if "spec=" not in line and not line.startswith("# spec ")]


def test_a_reformatted_spec_compiles_to_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, blank lines and line numbers are not in the block: adding one is no drift."""
    seed_cache(tmp_path, monkeypatch)
    source = CASES / "families" / "spec.yaml"
    moved = CASES / "families" / f".{os.getpid()}" / "spec.yaml"
    text = "# a comment\n\n" + source.read_text(encoding="utf-8").replace("\ntaps:", "\n# more\ntaps:")
    text = text.replace("../../../data", "../../../../data")
    moved.parent.mkdir()
    try:
        moved.write_text(text, encoding="utf-8")
        block = compiled(moved)["spec.block.py"]
    finally:
        moved.unlink(missing_ok=True)
        moved.parent.rmdir()
    assert strip(block) == strip((source.parent / "spec.block.py").read_text(encoding="utf-8"))


def test_structure_ignores_data_and_sees_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    source = (CASES / "verbs" / "spec.yaml").read_text(encoding="utf-8")
    for name in ("vectors.safetensors", "low_rank.safetensors", "edits.py"):
        (tmp_path / name).write_bytes((CASES / "verbs" / name).read_bytes())

    def structure(old: str, new: str) -> str:
        assert old in source
        text = source.replace(old, new).replace("../../../data", str(ROOT / "tests" / "data"))
        (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
        return str(json.loads(compiled(tmp_path / "spec.yaml")["spec.lock.json"])["block"]["structure"])

    base = structure("scale: 3", "scale: 3")
    assert structure("scale: 3}", "scale: 4}") == base
    assert structure("tokens: sampling", "tokens: all") == base
    assert structure("seed: 1", "seed: 2") == base
    assert structure("heads: [0, 3]", "heads: [0, 2]") != base
    assert structure("mlp_out[1]", "mlp_out[2]") != base
    assert structure("zero: {heads: [0, 3]}", "scale: {by: 2, heads: [0, 3]}") != base


def test_a_gates_bounds_are_data_and_what_it_gates_is_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    for name in ("edits.py", "sae"):
        (tmp_path / name).symlink_to(CASES / "gates" / name)
    source = (CASES / "gates" / "spec.yaml").read_text(encoding="utf-8")

    def structure(old: str, new: str) -> str:
        assert old in source
        text = source.replace(old, new, 1).replace("../../../data", str(ROOT / "tests" / "data"))
        (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
        return str(json.loads(compiled(tmp_path / "spec.yaml")["spec.lock.json"])["block"]["structure"])

    base = structure("above: 0.1", "above: 0.1")
    assert structure("above: 0.1", "below: 0.3") == base
    assert structure("[0.25, 0.5]", "[0.25, 0.5, 1, 2]") == base
    assert structure("cosine: seen", "project: push") == base
    assert structure("reduce: max", "reduce: last") == base
    assert structure("zero: {heads: [0]}, when: loud", "zero: {heads: [0]}") != base
    assert structure('loud: {at: "resid_post[1]"', 'loud: {at: "resid_post[0]"') != base


def test_verify_refuses_a_block_that_is_not_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from vtaps.codegen.block import emit, statements_of

    seed_cache(tmp_path, monkeypatch)
    plan = check_file(CASES / "verbs" / "spec.yaml").plan
    assert plan is not None
    block = emit(plan)
    assert list(verify(block, plan)) == []

    def broken(old: str, new: str) -> list[str]:
        assert old in block.source
        source = block.source.replace(old, new, 1)
        try:
            statements = statements_of(source)
        except SyntaxError:
            statements = {}
        return list(verify(replace(block, source=source, statements=statements), plan))

    assert broken('vt.scale(t, "scale", hidden, residual)', "pass")
    assert broken("vt.Block(", "vt.Block((")
    assert broken('"z[1]"', '"z[3]"')
    assert broken('vt.add(t, "add", hidden, residual)', 'vt.add(t, "add_dims", hidden, residual)')
    assert broken("BLOCK = vt", "import os\nBLOCK = vt")


def test_which_tokens_are_biased_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled at the logits: other tokens and other numbers are the same structure, all of them another."""
    seed_cache(tmp_path, monkeypatch)
    source = (CASES / "logits" / "spec.yaml").read_text(encoding="utf-8")
    source = source.replace("../../../data", str(ROOT / "tests" / "data"))

    def structure(said: str) -> str:
        text = source.replace('add: {value: 5, ids: [" Paris", 12, 11]}', said)
        assert said in text
        (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
        return str(json.loads(compiled(tmp_path / "spec.yaml")["spec.lock.json"])["block"]["structure"])

    few = {"add: {value: 5, ids: [12]}", "add: {value: -1, ids: [7, 8, 300]}", "add: {value: 1, dims: [0..9]}"}
    [base] = {structure(said) for said in few}
    assert structure("add: {value: 1}") != base and structure("scale: {by: 1, ids: [12]}") != base

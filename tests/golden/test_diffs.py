"""Each folder of ``diffs/`` is two specs and what ``vtaps diff`` says of them; ``pytest --regen`` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.golden.test_blocks import CASES as BLOCKS
from tests.golden.test_blocks import NAMES as BLOCK_NAMES
from tests.trees import seed_cache
from vtaps.cli import main
from vtaps.codegen.changes import compare
from vtaps.diff_views import render
from vtaps.diffing import difference
from vtaps.schemas import load as schema
from vtaps.sides import Side, side
from vtaps.spec.yaml import loads

CASES = Path(__file__).parent / "diffs"
NAMES = sorted(p.parent.name for p in CASES.glob("*/a.yaml"))
ROOT = Path(__file__).parents[2]
SAME = {"order-and-comments", "renamed"}


@pytest.mark.parametrize("name", NAMES)
def test_expected(
    name: str, regen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed_cache(tmp_path, monkeypatch)
    monkeypatch.chdir(CASES / name)
    for format, file in (("text", "expected.txt"), ("markdown", "expected.md")):
        code = main(["diff", "a.yaml", "b.yaml", "--format", format])
        out, err = capsys.readouterr()
        assert (code, err) == (0 if name in SAME else 1, "")
        if regen:
            Path(file).write_text(out, encoding="utf-8")
        assert out == Path(file).read_text(encoding="utf-8"), "if this is right: pytest tests/golden --regen"


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_are_as_many_changes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    monkeypatch.chdir(CASES / name)
    a, b = side("a.yaml"), side("b.yaml")
    there, back = difference(a, b).comparison, difference(b, a).comparison
    assert [(c.group, c.name, c.field, c.old, c.new) for c in there.changes] == [
        (c.group, c.name, c.field, c.new, c.old) for c in sorted(back.changes, key=there_order(there.changes))
    ]
    assert {(r.section, r.old, r.new) for r in there.renames} == {(r.section, r.new, r.old) for r in back.renames}


def there_order(changes: Any) -> Callable[[Any], int]:
    order = {(c.group, c.name, c.field): i for i, c in enumerate(changes)}
    return lambda c: order[c.group, c.name, c.field]


LOCKS = sorted([*ROOT.glob("examples/*.lock.json"), *BLOCKS.glob("*/spec.lock.json")])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: f"{p.parent.name}-{p.name.split('.')[0]}")
def test_nothing_differs_from_itself(lock: Path) -> None:
    found = difference(side(str(lock)), side(str(lock)))
    assert found.same
    assert (found.comparison.changes, found.comparison.renames, found.block, found.notes) == ((), (), (), ())
    assert {m.about: m.value for m in found.means}["results"] == "same"


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_a_spec_is_its_lock(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    found = difference(side(str(BLOCKS / name / "spec.lock.json")), side(str(BLOCKS / name / "spec.yaml")))
    assert (found.comparison.changes, found.comparison.renames, found.block) == ((), (), ())
    told = {m.about: m.value for m in found.means}
    assert told["results"] == "same" and told["engine"] == "load" and told["requests"][0] == told["requests"][1]


def spec(folder: Path, name: str, *changes: tuple[str, str]) -> Side:
    """The golden pairs' first spec with some of its text replaced."""
    text = (CASES / "scale-changed" / "a.yaml").read_text(encoding="utf-8")
    for old, new in (*changes, ("../../../data", str(ROOT / "tests" / "data"))):
        assert old in text
        text = text.replace(old, new)
    (folder / name).write_text(text, encoding="utf-8")
    found = side(str(folder / name))
    assert found.lock is not None, [d.message for d in found.findings]
    return found


def meant(old: Side, new: Side) -> dict[str, Any]:
    return {m.about: m.value for m in difference(old, new).means}


def test_what_a_live_engine_can_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``Engine.load`` refuses: another structure, mode, model or argument of vLLM; nothing else."""
    seed_cache(tmp_path, monkeypatch)
    base = spec(tmp_path, "base.yaml")

    def engine(said: str) -> Side:
        return spec(tmp_path, "other.yaml", ("reads:\n", f"engine: {said}\nreads:\n"))

    memory, eager, length = (
        engine("{tap_memory: 1 GiB}"),
        engine("{mode: eager}"),
        engine("{vllm: {max_model_len: 64}}"),
    )
    assert meant(base, memory)["engine"] == "load" and not difference(base, memory).same
    assert [meant(base, eager)[k] for k in ("engine", "compiled")] == ["start", "nothing"]
    assert [meant(eager, base)[k] for k in ("engine", "compiled")] == ["start", "anew"]
    assert [meant(base, length)[k] for k in ("engine", "compiled")] == ["start", "same"]
    gone = spec(tmp_path, "gone.yaml", ("reads: [stream], ", ""))
    assert [meant(base, gone)[k] for k in ("engine", "compiled")] == ["start", "anew"]
    assert meant(base, gone)["reads.stream"] == ["up to 72 rows, 36.0 KiB", "none"]


def test_another_name_and_another_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    new = spec(
        tmp_path,
        "b.yaml",
        ("steered:", "STEERED:"),
        ("steer", "nudge"),
        ("STEERED", "steered"),
        ("scale: 4}", "scale: 5}"),
    )
    found = difference(spec(tmp_path, "a.yaml"), new)
    assert [(r.section, r.old, r.new) for r in found.comparison.renames] == [("edits", "steer", "nudge")]
    assert [(c.name, c.field, c.old, c.new) for c in found.comparison.changes] == [("nudge", "scale", "4", "5")]
    assert found.comparison.untouched == ("base", "steered")  # which sweeps it
    assert found.headline == "1 change, 1 renamed; only data changes: a live engine can load it"


def test_twins_keep_their_order_under_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    line = '  quiet: {at: "z[2]", tokens: all, zero: {heads: [0]}}\n'

    def twins(file: str, one: str, two: str) -> Side:
        both = line.replace("quiet", one) + line.replace("quiet", two)
        return spec(tmp_path, file, (line, both), ("edits: [steer, quiet]", f"edits: [{one}, steer, {two}]"))

    found = difference(twins("a.yaml", "a", "b"), twins("b.yaml", "z", "y"))
    assert found.same
    assert [(r.old, r.new) for r in found.comparison.renames] == [("a", "z"), ("b", "y")]


def test_long_sweeps_and_other_combinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are told by their ends where there are many, and points that pair the same values otherwise are told."""
    seed_cache(tmp_path, monkeypatch)

    def swept(file: str, said: str) -> Side:
        edits = ("steered: {edits: [steer]", "steered: {edits: [steer, quiet]")
        return spec(tmp_path, file, edits, ("sweep: {steer.add.scale: [2, 4]}", f"sweep: {said}"))

    long = [list(range(1, 31)), [*range(1, 10), 99, *range(11, 31)]]
    found = difference(*(swept(f"{i}.yaml", f"{{steer.add.scale: {v}}}") for i, v in enumerate(long)))
    [change] = found.comparison.changes
    assert change.old == "1, 2, 3, 4, … 29, 30 (30 values)" and change.new == f"{change.old}, not the same"
    pairs = [f"[{{steer.add.scale: [1, 2], quiet.on: {on}}}]" for on in ("[true, false]", "[false, true]")]
    both = [swept(f"{i}.yaml", p) for i, p in enumerate(pairs)]
    [change] = difference(*both).comparison.changes
    assert (change.name, change.field, change.old, change.new) == ("steered", "points", "2", "2, not the same")


def test_colours_are_all_that_they_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    monkeypatch.chdir(CASES / "location-added")
    found = difference(side("a.yaml"), side("b.yaml"))
    plain, coloured = render(found, "text"), render(found, "text", color=True)
    assert "\x1b" not in plain and re.sub(r"\x1b\[[0-9]+m", "", coloured) == plain
    assert "\x1b[32m  + resid_post[3]" in coloured


SILENT = {"spec", "block", "outside"}
"""Of a lock, what is told by other parts of it: digests of the spec, the block and the files of definitions."""
DERIVED = {"reason", "step_rows", "requests", "slots", "attention", "line", "file"}


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        if (not path and key in SILENT) or key in DERIVED:
            continue
        if path == ("reads",) and "." in str(key):
            continue
        if isinstance(inside, dict | list) and inside:
            yield from leaves(inside, (*path, key))
        else:
            yield (*path, key)


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return {"all": "prompt", "prompt": "all", "sampling": "all", "generated": "all"}.get(value, value + "_")
    return {"x": 1} if isinstance(value, dict) else 7 if value is None else [*value, 7]


@pytest.mark.parametrize("name", ["sweeps", "gates", "verbs", "patterns", "logits"])
def test_no_leaf_of_a_lock_changes_unsaid(name: str) -> None:
    """Whatever value of a lock is another one, and the schema lets it be, the two are not the same."""
    text = (BLOCKS / name / "spec.lock.json").read_text(encoding="utf-8")
    lock = json.loads(text)
    paths = list(leaves(lock))
    valid = jsonschema.Draft202012Validator(schema("lock-v1.schema.json")).is_valid
    assert len(paths) > 100
    unsaid = []
    for path in paths:
        changed = json.loads(text)
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = other(at[path[-1]])
        if valid(changed) and compare(lock, changed).same:
            unsaid.append(path)
    assert unsaid == []


@pytest.mark.parametrize(("name", "file"), [("features", "saes/"), ("paris", "model:tokenizer.json")])
def test_files_that_no_definition_holds(name: str, file: str) -> None:
    text = (ROOT / "examples" / f"{name}.lock.json").read_text(encoding="utf-8")
    lock, changed = json.loads(text), json.loads(text)
    [one, *_] = [f for f in lock["outside"] if f.startswith(file)]
    changed["outside"][one] = "sha256:" + "0" * 64
    found = compare(lock, changed)
    assert [(c.group, c.name, c.new) for c in found.changes] == [("files", one, "0" * 12)]
    assert found.untouched == ()


def renamed(data: dict[str, Any], other: Callable[[str], str]) -> dict[str, Any]:
    """A spec with every name of a definition replaced, by the language's own rules and not the program's."""
    own = {
        s: set(data.get(s, {}))
        for s in ("vectors", "saes", "taps", "reads", "gates", "edits", "overrides", "metrics", "prompts", "arms")
    }

    def name(section: str, text: Any) -> Any:
        return other(text) if isinstance(text, str) and text in own[section] else text

    def pair(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        arm, _, read = text.partition(".")
        return f"{name('arms', arm)}.{name('reads', read)}"

    def tokens(rows: Any) -> Any:
        if not isinstance(rows, dict):
            return rows
        out = dict(rows)
        if "after" in out:
            out["after"] = name("overrides", out["after"])
        if "except" in out:
            out["except"] = tokens(out["except"])
        return out

    def at(places: Any) -> Any:
        return [name("taps", p) for p in places] if isinstance(places, list) else name("taps", places)

    def body(verb: str, said: Any) -> Any:
        if verb in ("project", "cosine") and isinstance(said, str):
            return name("vectors", said)
        if not isinstance(said, dict):
            return said
        out = {}
        for key, value in said.items():
            if key in ("vector", "down", "up", "bias", "weight"):
                value = name("vectors", value)
            elif key == "vectors":
                value = [name("vectors", v) for v in value]
            elif key == "sae":
                value = name("saes", value)
            elif key == "rows":
                value = pair(value)
            out[key] = value
        return out

    def acting(definition: Mapping[str, Any]) -> dict[str, Any]:
        out = {}
        for key, value in definition.items():
            special = {"at": at, "tokens": tokens, "when": lambda v: name("gates", v)}.get(key)
            if key == "normalize":
                out[key] = {k: name("arms", v) for k, v in value.items()}
            else:
                out[key] = special(value) if special else body(key, value)
        return out

    def factor(axes: Mapping[str, Any]) -> dict[str, Any]:
        out = {}
        for path, values in axes.items():
            target, _, field = path.partition(".")
            section = {"start": "overrides", "above": "gates", "below": "gates"}.get(field, "edits")
            swept = [name("vectors", v) for v in values] if field.endswith(".vector") else values
            out[f"{name(section, target)}.{field}"] = swept
        return out

    def arm(definition: Mapping[str, Any]) -> dict[str, Any]:
        out = {}
        for key, value in definition.items():
            if key == "sweep":
                value = [factor(f) for f in value] if isinstance(value, list) else factor(value)
            elif key != "sampling":
                value = [name(key, v) for v in value]
            out[key] = value
        return out

    def vector(definition: Mapping[str, Any]) -> dict[str, Any]:
        return {
            k: name("saes", v) if k == "sae" else pair(v) if k in ("read", "minus") else v
            for k, v in definition.items()
        }

    write = {
        "reads": acting,
        "gates": acting,
        "edits": acting,
        "metrics": acting,
        "arms": arm,
        "vectors": vector,
        "taps": at,
    }
    out: dict[str, Any] = {}
    for section, value in data.items():
        if section in own:
            value = {other(n): write.get(section, lambda d: d)(d) for n, d in value.items()}
        out[section] = value
    return out


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_new_names_are_no_change(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path, monkeypatch)
    text = (BLOCKS / name / "spec.yaml").read_text(encoding="utf-8")
    doc, _ = loads(text, "spec.yaml", BLOCKS / name)
    assert doc is not None
    data = renamed(doc.data, lambda n: f"{n}_other")
    data = json.loads(json.dumps(data).replace("../../../data", str(ROOT / "tests" / "data")))
    for file in (BLOCKS / name).iterdir():
        if file.name != "spec.yaml":
            (tmp_path / file.name).symlink_to(file)
    old = tmp_path / "old.yaml"
    old.write_text(text.replace("../../../data", str(ROOT / "tests" / "data")), encoding="utf-8")
    new = tmp_path / "new.yaml"
    new.write_text(json.dumps(data), encoding="utf-8")
    a, b = side(str(old)), side(str(new))
    assert b.lock is not None, [d.message for d in b.findings]
    found = difference(a, b)
    assert found.comparison.changes == ()
    expected = {
        (s, n, f"{n}_other")
        for s in ("reads", "gates", "edits", "overrides", "metrics", "prompts", "arms", "vectors")
        for n in (a.lock or {}).get(s, {})
        if "." not in n
    }
    assert {(r.section, r.old, r.new) for r in found.comparison.renames} == expected
    assert found.block == ()
    assert main(["diff", str(old), str(new)]) == 0

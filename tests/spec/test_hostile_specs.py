"""Specs that mean to break what reads them: one finding each, at its place, soon."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.spec.fuzz import within
from tests.trees import DATA, model_beside
from vtaps.check import check_file
from vtaps.codegen import lock
from vtaps.compiling import compile_plan, write_files
from vtaps.spec.diagnostics import Diagnostic

HEAD = "vtaps: 1\nmodel: {path: data/configs/llama, dtype: float32, tokenizer: data/tokenizer}\n"
EDITS = 'edits: {half: {at: "resid_post[1]", tokens: all, scale: {by: 0.5}}}\n'
PROMPTS = "prompts: {facts: [{id: a, text: The capital of France}]}\n"
ARMS = "arms: {main: {edits: [half]}}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return model_beside(tmp_path, monkeypatch)


def found_in(folder: Path, text: str, seconds: float = 2) -> list[Diagnostic]:
    (folder / "spec.yaml").write_text(text, encoding="utf-8")
    with within(seconds):
        return [d for d in check_file("spec.yaml").diagnostics if d.severity == "error"]


def test_the_spec_that_is_spoilt_here_is_good(folder: Path) -> None:
    assert found_in(folder, HEAD + EDITS + PROMPTS + ARMS) == []


@pytest.mark.parametrize("version", ["2", "!!str 1", "!x 1", "!!binary 1", "~", '"a\\nb"', "[1]"])
@pytest.mark.parametrize("edit", ["[1]", "{at: x}", "{add: prompt}", "{set: {rows: {run: x}}}"])
def test_nothing_is_made_of_a_spec_of_another_version(version: str, edit: str, folder: Path) -> None:
    text = HEAD.replace("vtaps: 1", f"vtaps: {version}") + f"edits: {{half: {edit}}}\n" + PROMPTS + ARMS
    assert {d.code for d in found_in(folder, text)} <= {"VT106", "VT008"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # the definition, a part of it, a section, and what stands below an anchor in a key that means nothing
        ("arms: {a: {reads: &x [[half]]}, main: {edits: [half], reads: *x}}\n", 5),
        ("arms: {a: &x {edits: [half], sweep: 3}, main: *x}\n", 5),
        ("arms: {main: {edits: [half]}}\ntaps: &x {bad: 3}\nreads: *x\n", 6),
        ("arms: {main: {edits: [half]}}\nwhatever: &x {at: embed, tokens: {steps: [[]]}}\nreads: {r: *x}\n", 6),
        ("arms: {main: {edits: [half]}}\nwhatever: {y: &x {steps: [[]]}}\nreads: {r: {at: embed, tokens: *x}}\n", 6),
    ],
)
def test_what_an_alias_repeats_is_broken_where_it_is_repeated(text: str, line: int, folder: Path) -> None:
    found = found_in(folder, HEAD + EDITS + PROMPTS + text)
    assert found and {d.span.line for d in found} <= {line, line + 1}


def test_a_sound_definition_beside_a_broken_one_is_still_looked_at(folder: Path) -> None:
    """Only what repeats the fault is left out."""
    edits = 'edits: {a: &x {at: embed, tokens: 3, zero: {}}, b: *x, c: {at: "ln1[9]", tokens: all, zero: {}}}\n'
    found = found_in(folder, HEAD + edits + PROMPTS + "arms: {main: {edits: [a, b, c]}}\n")
    assert {d.code for d in found} == {"VT103", "VT204"}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("edits: [half]", "edits: [half], sampling: {max_tokens: 9223372036854775807}", "VT104"),
        ("edits: [half]", "edits: [half], sampling: {max_tokens: 1048577}", "VT104"),
        ("tokens: all", f"tokens: {{steps: ['0..{'9' * 5000}']}}", "VT104"),
        ("tokens: all", f"tokens: {{positions: ['-{'9' * 5000}..1']}}", "VT104"),
        ("tokens: all", 'tokens: {steps: ["0..3\\n"]}', "VT104"),
        ("half:", '"half\\n":', "VT104"),
        ("half:", f"{'h' * 101}:", "VT104"),
        ("scale: {by: 0.5}", 'python: "a.py:f\\n"', "VT104"),
        ("tokens: all", "tokens: " + "{except: " * 70 + "all" + "}" * 70, "VT006"),
    ],
)
def test_a_value_past_all_bounds(old: str, new: str, code: str, folder: Path) -> None:
    text = HEAD + EDITS + PROMPTS + ARMS
    assert old in text
    codes = {d.code for d in found_in(folder, text.replace(old, new))}
    assert code in codes and codes <= {code, "VT210"}


def test_the_longest_name_and_the_most_tokens_that_are_taken(folder: Path) -> None:
    text = (HEAD + EDITS + PROMPTS + ARMS).replace("half", "h" * 100)
    assert found_in(folder, text + "sampling: {max_tokens: 1048576}\n") == []


def test_a_sweep_that_multiplies_past_counting(folder: Path) -> None:
    names = [f"e{i}" for i in range(20)]
    edits = "edits:\n" + "".join(f'  {n}: {{at: "resid_post[1]", tokens: all, scale: {{by: 2}}}}\n' for n in names)
    axes = ", ".join(f"{n}.scale.by: [{', '.join('23456789')}]" for n in names)
    found = found_in(
        folder, HEAD + edits + PROMPTS + f"arms: {{main: {{edits: [{', '.join(names)}], sweep: {{{axes}}}}}}}\n"
    )
    assert [d.code for d in found] == ["VT318"] and "1,152,921,504,606,846,976 points" in found[0].message


def test_a_thousand_names_that_mean_nothing(folder: Path) -> None:
    """The nearest of a thousand names is looked for a thousand times, in less time than a person waits."""
    edits = "edits:\n" + "".join(f'  edit_{i:05}: {{at: "embed", tokens: all, zero: {{}}}}\n' for i in range(1000))
    arms = "arms:\n" + "".join(f"  arm_{i}: {{edits: [edyt_{i:05}]}}\n" for i in range(1000))
    found = found_in(folder, HEAD + edits + PROMPTS + arms, 4)
    assert {d.code for d in found} == {"VT210"} and len(found) == 1000


FILES = [
    "a b",
    "é",
    "a'b",
    'a"b',
    'a"""b',
    "a\\b",
    "a\nimport os\nb",
    "a\r\nb",
    "#",
    "a\u2028b",
    "-",
    "a" * 200,
    "...",
    "%s{x}",
]


@pytest.mark.parametrize("name", FILES)
def test_the_name_of_a_spec_is_text_in_its_block(name: str, folder: Path) -> None:
    (folder / "specs").mkdir()
    (folder / "specs" / "data").symlink_to(DATA)
    spec = folder / "specs" / f"{name}.yaml"
    spec.write_text(HEAD + EDITS + PROMPTS + ARMS, encoding="utf-8")
    plan = check_file(spec).plan
    assert plan is not None
    compiled, wrong = compile_plan(plan)
    assert compiled is not None and not wrong
    assert [type(node).__name__ for node in ast.parse(compiled.block.source).body] == [
        "Expr", "ImportFrom", "Assign", "FunctionDef",
    ]  # fmt: skip
    names, problems = write_files(compiled.files, spec.parent, str(spec))
    assert problems == [] and set(names) == set(lock.names(str(spec)))
    assert {p.name for p in folder.iterdir()} == {"data", "specs"}
    assert {p.name for p in spec.parent.iterdir()} == {*names, spec.name, "data"}


@pytest.mark.parametrize("match", ["\u2028", "\x85", "\n", "'''\"\"\"", "# x", "\\N{x}", "x" * 5000 + " y" * 5000])
def test_a_text_stays_inside_its_comment(match: str, folder: Path) -> None:
    import json

    text = HEAD + EDITS.replace("tokens: all", f"tokens: {{match: {json.dumps(match)}}}")
    prompt = json.dumps("The " + match)
    (folder / "spec.yaml").write_text(text + f"prompts: {{facts: [{{id: a, text: {prompt}}}]}}\n" + ARMS)
    plan = check_file("spec.yaml").plan
    assert plan is not None
    compiled, wrong = compile_plan(plan)
    assert compiled is not None and not wrong
    [comment] = [line for line in compiled.block.source.splitlines() if "edits.half" in line]
    assert comment.startswith("    # edits.half: {")

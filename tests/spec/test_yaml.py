"""YAML 1.2 scalars, places, bounds, and what is refused."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml as pyyaml

from vtaps.spec import yaml
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.document import Document

HERE = Path(".")


def loads(text: str) -> tuple[Document, list[Diagnostic]]:
    doc, found = yaml.loads(text, "f.yaml", HERE)
    assert doc is not None, found
    return doc, found


def codes(text: str) -> list[str]:
    return [d.code for d in yaml.loads(text, "f.yaml", HERE)[1]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("y", "y"),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("tRue", "tRue"),
        ("null", None),
        ("~", None),
        ("", None),
        ("nULL", "nULL"),
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        (".", "."),
        ("+12", 12),
        ("017", 17),
        ("0o17", 15),
        ("0o8", "0o8"),
        ("0x1F", 31),
        ("-0x1F", "-0x1F"),
        ("1_000", "1_000"),
        ("190:20:30", "190:20:30"),
        ("2001-12-14", "2001-12-14"),
        ("2..4", "2..4"),
        ("-1", -1),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("inf", "inf"),
        ("'7'", "7"),
        ('""', ""),
        ("!!str 7", "7"),
        ('!!int "7"', 7),
        ("!!float 7", 7.0),
        ("<<", "<<"),
        ("=", "="),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    doc, found = loads(f"a: {text}\n")
    assert not found
    assert doc.data["a"] == value
    assert type(doc.data["a"]) is type(value)


def test_not_a_number() -> None:
    assert math.isnan(loads("a: .nan")[0].data["a"])


def test_places_count_code_points() -> None:
    doc, _ = loads("naïve: {日本: [😀, 'zwei'], b: 3}\nblock:\n  - x\n  - y: 1\n    z: long text\n\n# end\n")
    assert doc.at("naïve", "日本", 0) == Span("f.yaml", 1, 14, 1, 15)
    assert doc.at("naïve", "日本", 1) == Span("f.yaml", 1, 17, 1, 23)
    assert doc.key("naïve", "日本") == Span("f.yaml", 1, 9, 1, 11)
    assert doc.key("naïve", "b") == Span("f.yaml", 1, 26, 1, 27)
    assert doc.at("naïve") == Span("f.yaml", 1, 8, 1, 31)
    # a block collection ends with its last child, not where the next token starts
    assert doc.at("block") == Span("f.yaml", 3, 3, 5, 17)
    assert doc.at() == Span("f.yaml", 1, 1, 5, 17)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_and_byte_order_mark(newline: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + f"a: 1{newline}bé: {{c: x}}{newline}".encode())
    doc, found = yaml.load(path)
    assert doc is not None and not found
    assert doc.data == {"a": 1, "bé": {"c": "x"}}
    assert doc.at("bé", "c") == Span(str(path), 2, 9, 2, 10)
    assert doc.folder == tmp_path


def test_line_breaks_of_yaml_1_1_are_text() -> None:
    doc, found = loads('a: "x\u2028y\x85z"\nb: 1\n')
    assert doc.data["a"] == "x\u2028y\x85z" and not found
    assert doc.at("b").line == 2


def test_an_alias_repeats_values_and_their_places() -> None:
    doc, found = loads("a: &x {b: [1, 2]}\nc: *x\n")
    assert not found and doc.data["c"] == {"b": [1, 2]}
    assert doc.at("c") == Span("f.yaml", 2, 4, 2, 6)
    assert doc.at("c", "b", 1) == doc.at("a", "b", 1) == Span("f.yaml", 1, 15, 1, 16)


def test_all_unquoted_brackets_at_once_and_the_rest_is_read() -> None:
    doc, found = loads("a: {at: z[1], b: resid_post[*].output}\nc: [k[-1], 3]\n")
    assert [(d.code, d.span.line, d.span.column, d.span.end_column) for d in found] == [
        ("VT002", 1, 9, 13),
        ("VT002", 1, 18, 38),
        ("VT002", 2, 5, 10),
    ]
    assert found[0].note == 'write "z[1]"'
    assert doc.data == {"a": {"at": "z[1]", "b": "resid_post[*].output"}, "c": ["k[-1]", 3]}


def test_brackets_in_block_style_need_no_quotes() -> None:
    doc, found = loads("a:\n  at: resid_post[*]\n  b:\n  - z[1, 2]\n")
    assert not found and doc.data == {"a": {"at": "resid_post[*]", "b": ["z[1, 2]"]}}


def test_duplicate_keys_keep_the_first_and_name_its_line() -> None:
    doc, found = loads("a: 1\nb: {c: 1, c: {d: 2}}\na: 3\n")
    assert [(d.code, d.span.line, d.span.column) for d in found] == [("VT003", 2, 11), ("VT003", 3, 1)]
    assert "line 1" in found[1].message
    assert doc.data == {"a": 1, "b": {"c": 1}}
    assert set(doc.values) == {(), ("a",), ("b",), ("b", "c")}


@pytest.mark.parametrize("key", ["1", "1.5", "true", "~", "? [a]\n", "? {a: b}\n", "? *x\n"])
def test_keys_that_are_not_text(key: str) -> None:
    assert "VT004" in codes(f"x: &x y\n{key}: z\n")


@pytest.mark.parametrize("key", ["'1'", "yes", "on", "1e", "<<", "2001-01-01"])
def test_keys_that_are_text(key: str) -> None:
    assert codes(f"{key}: z\n") == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a: {b", "VT001"),
        ("a: 'b", "VT001"),
        ("a:\n\tb: 1", "VT001"),
        ("a: b: c", "VT001"),
        ("a: @b", "VT001"),
        ('a: "\\q"', "VT001"),
        ("a: *b", "VT001"),
        ("a: *.mlp", "VT001"),
        ("a: \x00", "VT001"),
        ("a: \ud800", "VT001"),
        (f"a: {'9' * 5000}", "VT001"),
        (f"a: 0x{'9' * 5000}", "VT001"),
        ("%YAML 3.0\n---\na: 1", "VT001"),
        ("a: {b: Say [x] now}", "VT002"),
        ("a: &a [*a]", "VT005"),
        ("a: " + "[" * 100_000, "VT006"),
        ("- " * 100_000, "VT006"),
        ("a: " + "x" * yaml.MAX_BYTES, "VT006"),
        ("a: !!python/object/apply:os.system [ls]", "VT008"),
        ("a: !foo b", "VT008"),
        ("a: !f!oo b", "VT008"),
        ("a: !!int b", "VT008"),
        ("a: !!set {b}", "VT008"),
        ("a: 1\n---\nb: 1", "VT008"),
        ("", "VT107"),
        ("# nothing\n", "VT107"),
        ("---\n...\n", "VT107"),
    ],
)
def test_refused(text: str, code: str) -> None:
    assert codes(text) == [code]


def test_an_alias_bomb_is_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    start = time.process_time()
    assert codes("\n".join(lines)) == ["VT005"]
    assert time.process_time() - start < 1.5


def test_aliases_may_not_nest_deeper_than_brackets() -> None:
    deep = "[" * 50 + "x" + "]" * 50
    assert codes(f"a: &a {deep}\nb: {deep.replace('x', '*a')}\n") == ["VT006"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: 1\nö: é".encode("latin-1"))
    utf16 = tmp_path / "utf16.yaml"
    utf16.write_bytes("a: 1".encode("utf-16"))
    for path in (tmp_path / "missing.yaml", tmp_path, latin, utf16, tmp_path / "nul\0.yaml", Path("/dev/null")):
        doc, found = yaml.load(path)
        assert doc is None and [d.code for d in found] == ["VT007"], path
    assert (yaml.load(latin)[1][0].span.line, yaml.load(latin)[1][0].span.column) == (2, 1)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (yaml.MAX_BYTES + 1))
    assert [d.code for d in yaml.load(big)[1]] == ["VT006"]


@pytest.mark.parametrize(
    "text",
    [
        "a: {at: resid_post[10, 12], tokens: all}\n",
        "a: [resid_post[*], z[1]]\n",
        "a: {b: c\nd: e\n",
        "a: 'x\n",
        "a: b: c\n",
        "a:\n\tb: c\n",
        "a: @x\n",
        "a: {b: c}}\n",
        "a: !f!b c\n",
        "a: *\n",
        "é: {b: ö[1], 1: 2}\na: &a {b: *c}\n",
    ],
)
def test_both_parsers_of_pyyaml_say_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_libyaml = yaml.loads(text, "f", HERE)
    monkeypatch.setattr(yaml, "_Loader", pyyaml.SafeLoader)
    assert yaml.loads(text, "f", HERE) == with_libyaml

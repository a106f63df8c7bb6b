"""What each format says, and that a spec cannot break out of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.sarif import SCHEMA, sarif
from vtaps.spec.codes import CODES
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.reporters import FORMATS, render, summary

TEXT = "vtaps: 1\nreads:\n  a: {at: 日本[0], tokn: all}\n"
ERROR = Diagnostic("VT101", "unknown key `tokn`", Span("s.yaml", 3, 18, 3, 22), ("at", "tokens"), "tokens", "why: 5%")
WARNING = Diagnostic("VT212", "never used", Span("s.yaml", 1, 1, 3, 2))
ELSEWHERE = Diagnostic("VT007", "cannot read", Span("dir/a b,c:é.yaml"))


def test_text() -> None:
    assert render([ERROR, WARNING, ELSEWHERE], "text", {"s.yaml": TEXT}) == (
        "error[VT007]: cannot read\n"
        " --> dir/a b,c:é.yaml:1:1\n"
        "\n"
        "warning[VT212]: never used\n"
        " --> s.yaml:1:1\n"
        "  |\n"
        "1 | vtaps: 1\n"
        "  | ^^^^^^^^\n"
        "\n"
        "error[VT101]: unknown key `tokn`\n"
        " --> s.yaml:3:18\n"
        "  |\n"
        "3 |   a: {at: 日本[0], tokn: all}\n"
        "  |                    ^^^^\n"  # two columns of a terminal for each of 日本
        "  = valid: at, tokens\n"
        "  = nearest: tokens\n"
        "  = note: why: 5%\n"
        "\n"
        "2 errors, 1 warning\n"
    )


def test_colour_only_where_asked() -> None:
    plain = render([ERROR], "text", {"s.yaml": TEXT})
    painted = render([ERROR], "text", {"s.yaml": TEXT}, color=True)
    assert "\x1b" not in plain and "\x1b[1;31merror[VT101]\x1b[0m" in painted
    for code in ("\x1b[0m", "\x1b[1m", "\x1b[1;31m", "\x1b[1;34m"):
        painted = painted.replace(code, "")
    assert painted == plain


def test_control_characters_do_not_reach_the_terminal() -> None:
    source = "a: \x1b[2J\t\u202e\x00 x\n"
    d = Diagnostic("VT001", "bad \x1b[31m\n\ud800", Span("f\x07.yaml", 1, 9, 1, 10), ("\r",), None, "\x9b")
    out = render([d], "text", {"f\x07.yaml": source})
    assert out.splitlines() == [
        "error[VT001]: bad \\x1b[31m\\n\\ud800",
        " --> f\\x07.yaml:1:9",
        "  |",
        "1 | a: \\x1b[2J\\t\\u202e\\x00 x",
        "  |             ^^^^^^",
        "  = valid: \\r",
        "  = note: \\x9b",
        "",
        "1 error",
    ]


def test_a_long_line_shows_a_window_around_the_place() -> None:
    line = "x" * 5000 + "HERE" + "y" * 5000
    out = render([Diagnostic("VT001", "m", Span("f", 1, 5001, 1, 5005))], "text", {"f": line}).splitlines()
    assert len(out[3]) < 140
    at = out[4].index("^")
    assert out[3][at : at + 4] == "HERE" and out[4].count("^") == 4


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_lines_are_the_editors_lines(newline: str) -> None:
    text = f"a: 1{newline}b:\x85 2{newline}c: 3"
    out = render([Diagnostic("VT001", "m", Span("f", 3, 1, 3, 2))], "text", {"f": text})
    assert "3 | c: 3\n" in out


def test_a_place_past_the_text_is_not_quoted() -> None:
    out = render([Diagnostic("VT001", "m", Span("f", 9, 9, 9, 9))], "text", {"f": "a"})
    assert out == "error[VT001]: m\n --> f:9:9\n\n1 error\n"
    assert "^" in render([Diagnostic("VT001", "m", Span("f", 1, 9, 1, 9))], "text", {"f": "a: b"})


def test_details_are_lines_of_their_own() -> None:
    d = Diagnostic("VT401", "m", Span("f"), detail=("-old\x1b", "+new"))
    assert render([d], "text", {}) == "error[VT401]: m\n --> f:1:1\n    -old\\x1b\n    +new\n\n1 error\n"
    assert render([d], "github", {}).endswith("::m%0A-old\x1b%0A+new\n")


def test_one_per_place_code_and_message_in_order() -> None:
    found = json.loads(render([ERROR, WARNING, ERROR], "json", {}))
    assert [f["code"] for f in found["findings"]] == ["VT212", "VT101"]


def test_json() -> None:
    out: dict[str, Any] = json.loads(render([ERROR], "json", {}))
    assert out == {
        "version": 1,
        "findings": [
            {
                "code": "VT101",
                "severity": "error",
                "title": "unknown key",
                "message": "unknown key `tokn`",
                "file": "s.yaml",
                "line": 3,
                "column": 18,
                "end_line": 3,
                "end_column": 22,
                "valid": ["at", "tokens"],
                "nearest": "tokens",
                "note": "why: 5%",
                "detail": [],
            }
        ],
        "summary": {"errors": 1, "warnings": 0, "info": 0},
    }


def test_github_escapes_what_its_commands_reserve() -> None:
    assert render([ERROR, WARNING, ELSEWHERE], "github", {}).splitlines() == [
        "::error file=dir/a b%2Cc%3Aé.yaml,line=1,endLine=1,col=1,endColumn=1,title=VT007::cannot read",
        "::warning file=s.yaml,line=1,endLine=3,title=VT212::never used",
        "::error file=s.yaml,line=3,endLine=3,col=18,endColumn=22,title=VT101::unknown key `tokn`"
        "%0Avalid: at, tokens%0Anearest: tokens%0Anote: why: 5%25",
    ]
    injected = Diagnostic("VT001", "x\n::set-output name=a::b\r", Span("f\n::error::"))
    assert len(render([injected], "github", {}).splitlines()) == 1


def test_sarif() -> None:
    log = sarif([ERROR, WARNING, ELSEWHERE])
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert (log["version"], run["columnKind"]) == ("2.1.0", "unicodeCodePoints")
    assert [r["id"] for r in rules] == ["VT007", "VT101", "VT212"]
    assert rules[1]["help"]["markdown"].startswith("# VT101: unknown key")
    assert [rules[r["ruleIndex"]]["id"] for r in run["results"]] == [r["ruleId"] for r in run["results"]]
    assert [r["level"] for r in run["results"]] == ["error", "warning", "error"]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "dir/a%20b%2Cc%3A%C3%A9.yaml"
    assert run["results"][2]["locations"][0]["physicalLocation"]["region"] == {
        "startLine": 3,
        "startColumn": 18,
        "endLine": 3,
        "endColumn": 22,
    }


def test_sarif_of_every_code_and_of_none() -> None:
    """Each golden case is held against the schema too (tests/golden)."""
    assert sarif([])["runs"][0]["results"] == []
    log = sarif([Diagnostic(code, "m", Span("a:b c/é#?%.yaml")) for code in CODES])
    levels = {"error": "error", "warning": "warning", "info": "note"}
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert {r["id"]: r["defaultConfiguration"]["level"] for r in rules} == {c: levels[CODES[c].severity] for c in CODES}


def test_what_is_no_sarif_is_told() -> None:
    """The schema of the tests is no empty form."""
    good = sarif([ERROR])
    for path, value in (
        (("version",), "2.0.0"),
        (("runs", 0, "tool"), {}),
        (("runs", 0, "columnKind"), "bytes"),
        (("runs", 0, "results", 0, "level"), "info"),
        (("runs", 0, "results", 0, "message"), "text"),
        (("runs", 0, "results", 0, "message"), {}),
        (("runs", 0, "results", 0, "locations", 0, "physicalLocation", "region", "startLine"), 0),
        (("runs", 0, "results", 0, "locations", 0, "physicalLocation", "region", "start"), 1),
    ):
        log = copy.deepcopy(good)
        node: Any = log
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value
        assert not SCHEMA.is_valid(log), path


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_encodes_whatever_a_file_name_holds(format: Any) -> None:
    d = Diagnostic("VT007", "cannot read \udcff", Span("caf\udce9.yaml"))
    render([d], format, {}).encode("utf-8")
    render([], format, {})


def test_summary() -> None:
    assert summary([]) == "no findings"
    assert summary([ERROR]) == "1 error"
    with pytest.raises(ValueError, match="no format"):
        render([], "xml", {})  # type: ignore[arg-type]

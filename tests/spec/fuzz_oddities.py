"""What nobody means to write: odd values in the data of a spec, odd YAML around it, slips in the bytes of a file."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

LONG = "x" * 5000
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3.0,
    0.5,
    -0.0,
    1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
    10**400,
    "",
    " ",
    "~",
    "yes",
    "on",
    "1",
    "1e5",
    "nan",
    "-inf",
    "all",
    "each",
    "*",
    "**",
    "base",
    "e0",
    "resid_post[0]",
    "logits",
    "0..3",
    "3..0",
    "-1..-5",
    "0..9223372036854775807",
    f"0..{'9' * 4400}",
    f"{'9' * 4400}..1",
    "99999999999..99999999999",
    "é",
    "日本",
    "😀",
    "\u202e",
    "a\u2028b",
    "\x85",
    "\ufeff",
    "a\nb",
    "a\r\nb",
    "e0\n",
    "\t",
    "a\\b",
    '"',
    "'",
    "#",
    "# x",
    "{",
    "]",
    "../x",
    "../../../../etc/passwd",
    "/dev/zero",
    "/etc/passwd",
    "~",
    "~nobody/x",
    "CON",
    "a/b",
    "a\0b",
    ".",
    "..",
    "%s",
    "{layer}",
    LONG,
    "x.safetensors",
    "../v.npy",
    "/dev/zero.npy",
    "a\0b.npy",
    "fifo.npy",
    "fifo.safetensors",
    "fifo.jsonl",
    "folder.jsonl",
    "none.pt",
    "fifo.py:look",
    "probes.py:none",
    "probes.py:look\n",
    "a\nb.py:look",
    "/dev/stdin.py:f",
    "~nobody.py:f",
    "a\0.py:f",
    LONG + ".npy",
    LONG + "/x.safetensors",
    LONG + ".jsonl",
    LONG + ".py:look",
    "zero.npy",
    "cut.safetensors",
    "bomb.pt",
    "runs.pt",
    "claims.gguf",
    "\ud800",
    "\ud800.npy",
    "a" * 101,
    {"run": "a\0b", "arm": "base", "read": "r0"},
    {"run": "~nobody/x", "arm": "a", "read": "b"},
    {"run": "strange", "arm": "base", "read": "r0"},
    {"file": "fifo.npy"},
    {"file": "bomb.pt"},
    {"file": "claims.gguf"},
    {"file": "cut.safetensors"},
    {"file": LONG + ".npy"},
    {"dir": LONG},
    {"dir": "a\0"},
    {"dir": "fifos"},
    [{"id": "x", "text": "\ud83d"}],
    [{"id": "x", "text": " "}],
    [],
    {},
    [[]],
    [{}],
    {"": 0},
    {"a": {"b": {}}},
    [0] * 300,
    ["all"],
    ["resid_post[0]", "resid_post[0]"],
    {"x": None},
)
KEYS = (
    "",
    "x",
    "<<",
    "=",
    "at",
    "tokens",
    "add",
    "scale",
    "set",
    "lens",
    "steps",
    "except",
    "rows",
    "prompts",
    "sweep",
    "é",
    "a b",
    "e0\n",
    LONG,
    "1",
    "null",
    "main",
    "on",
)


def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    out = [path]
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        out += paths(value, (*path, key))
    return out


def bent(r: Random, data: Any) -> Any:
    """A copy with one thing wrong, or merely strange."""
    data = {"root": copy.deepcopy(data)}
    path = ("root", *r.choice(paths(data["root"])))
    parent: Any = data
    for step in path[:-1]:
        parent = parent[step]
    key = path[-1]
    match r.choice(["value", "value", "value", "delete", "rename", "add", "repeat", "wrap", "deep"]):
        case "value":
            parent[key] = copy.deepcopy(r.choice(VALUES))
        case "delete":
            del parent[key]
        case "rename" if isinstance(parent, dict):
            parent[r.choice(KEYS)] = parent.pop(key)
        case "add" if isinstance(parent[key], dict):
            parent[key][r.choice(KEYS)] = copy.deepcopy(r.choice(VALUES))
        case "repeat" if isinstance(parent[key], list):
            parent[key] = parent[key] * r.choice([0, 2, 40])
        case "wrap":
            parent[key] = r.choice([[parent[key]], {"x": parent[key]}, str(parent[key])])
        case "deep":
            for _ in range(r.choice([3, 30, 70, 300])):
                parent[key] = r.choice([[parent[key]], {"except": parent[key]}])
    return data.get("root")


class _Aliased(yaml.SafeDumper):
    """Writes texts as they are, whatever they hold."""


def _nodes(data: Any) -> Any:
    """The data with equal parts one object: PyYAML writes an anchor and aliases for them."""
    known: dict[str, Any] = {}

    def one(value: Any) -> Any:
        if isinstance(value, dict):
            value = {k: one(v) for k, v in value.items()}
        elif isinstance(value, list):
            value = [one(v) for v in value]
        else:
            return value
        return known.setdefault(repr(value), value)

    return one(data)


def _json(r: Random, data: Any) -> str:
    return json.dumps(data, ensure_ascii=r.random() < 0.3, indent=r.choice([None, 1]))


def _block(r: Random, data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=r.random() < 0.3, allow_unicode=True, width=r.choice([40, 120, 10**6]))


def _flow(r: Random, data: Any) -> str:
    return yaml.safe_dump(data, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6)


def _anchored(r: Random, data: Any) -> str:
    return yaml.dump(_nodes(data), Dumper=_Aliased, sort_keys=False, allow_unicode=True)


def text_of(r: Random, data: Any) -> str:
    """The data as YAML, in one of the ways to write it."""
    write: Callable[[Random, Any], str] = r.choice([_block, _block, _flow, _anchored, _json])
    try:
        return write(r, data)
    except (yaml.YAMLError, RecursionError, ValueError):  # a NUL, or deeper than the writer goes
        return repr(data)


BOMB = "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9 if i else ['x'] * 9)}]\n" for i in range(9))


def dressed(r: Random, text: str) -> bytes:
    """The text of a spec in an encoding and with marks, breaks, tags or a bomb that YAML has and nobody needs."""
    lines = text.split("\n")
    at = r.randrange(len(lines))
    match r.randrange(16):
        case 0:
            return b"\xef\xbb\xbf" + text.encode("utf-8", "surrogatepass")
        case 1:
            text = text.replace("\n", r.choice(["\r\n", "\r", "\x85", "\u2028"]))
        case 2:
            return text.encode(r.choice(["utf-16", "utf-32", "utf-16-le", "latin-1"]), "replace")
        case 3:
            lines[at] += r.choice(["\0", "\x1b", "\ud800", "\ufffe", "\t", " # é", "\x7f"])
            text = "\n".join(lines)
        case 4:
            text = BOMB + text
        case 5:
            text = text.replace(
                ": ",
                f": {r.choice(['!!str', '!!python/name:os.system', '!x', '!!int', '!!binary', '!'])} ",
                r.choice([1, -1]),
            )
        case 6:
            text = r.choice(["---\n", "%YAML 1.1\n---\n", "%TAG ! !x\n---\n", "...\n", "%YAML 9.9\n---\n"]) + text
        case 7:
            text += r.choice(["---\n", "...\n", "--- x\n", "...\n---\nvtaps: 1\n", "\n\n# end"])
        case 8:
            lines.insert(at, lines[at])
            text = "\n".join(lines)
        case 9:
            lines.insert(
                at, r.choice(["<<: *x", "<<: {a: 1}", "? [a]\n: b", "? ", ": x", "&a a: *a", "*a : b", "- x", "\tx: y"])
            )
            text = "\n".join(lines)
        case 10:
            text += r.choice(
                [
                    "[" * 3000,
                    "{a: " * 200,
                    "- " * 500,
                    "? " * 400,
                    "&a " * 50,
                    "x: &x [*x]\n",
                    "y: '",
                    'y: "\\ud800"\n',
                    'y: "\\q"\n',
                ]
            )
        case 11:
            text = f"vtaps: &v 1\nx: *v\ny: *w\n{text}"
        case 12:
            text = "\n".join(f"{' ' * r.choice([0, 0, 0, 1])}{line}" for line in lines)
        case 13:
            text = text.replace("1", "9" * r.choice([20, 1000, 6000]), 1)
        case 14:
            text = f"? |\n {LONG}\n: >\n {LONG}\n{text}"
        case 15:
            text = text.replace(
                "The capital", r.choice(['\\"', "\\0", "\\x00", "\\ud83d\\ude00", "\\N", "\\u2029", "'", '"']), 1
            )
    return text.encode("utf-8", "surrogatepass")


TOKENS = (
    b"\n",
    b"  ",
    b"\t",
    b":",
    b": ",
    b"- ",
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b'"',
    b"'",
    b"&a ",
    b"*a",
    b"!!x ",
    b"|",
    b">",
    b"#",
    b"\0",
    b"\xff",
    b"\xc3",
    b"\r",
    b"\xe2\x80\xa8",
    b"<<: ",
    b"99999999999999999999",
    b"-1",
    b"1e999",
    b".nan",
    b"null",
    b"true",
    b"..",
    b"*",
    b"{layer}",
)


def slipped(r: Random, raw: bytes, others: list[bytes]) -> bytes:
    """A file with one to five slips of the hand, or with lines of another file among its own."""
    for _ in range(r.choice([1, 1, 1, 2, 4])):
        lines = raw.split(b"\n")
        at, to = r.randrange(len(lines)), r.randrange(len(lines))
        place = r.randrange(len(raw) + 1)
        match r.choice(["byte", "cut", "insert", "drop", "double", "swap", "move", "splice", "words", "end", "indent"]):
            case "byte" if place < len(raw):
                raw = raw[:place] + bytes([r.randrange(256)]) + raw[place + 1 :]
            case "cut":
                raw = raw[:place] + raw[place + r.randrange(1, 20) :]
            case "insert":
                raw = raw[:place] + r.choice(TOKENS) + raw[place:]
            case "drop":
                raw = b"\n".join(lines[:at] + lines[at + 1 :])
            case "double":
                raw = b"\n".join(lines[: at + 1] + lines[at:])
            case "swap":
                lines[at], lines[to] = lines[to], lines[at]
                raw = b"\n".join(lines)
            case "move":
                line = lines.pop(at)
                lines.insert(to, line)
                raw = b"\n".join(lines)
            case "splice":
                theirs = r.choice(others).split(b"\n")
                start = r.randrange(len(theirs))
                raw = b"\n".join(lines[:at] + theirs[start : start + r.randrange(1, 6)] + lines[at:])
            case "words":
                words = lines[at].split(b" ")
                i, j = r.randrange(len(words)), r.randrange(len(words))
                words[i], words[j] = words[j], words[i]
                lines[at] = b" ".join(words)
                raw = b"\n".join(lines)
            case "end":
                raw = raw[: place or 1]
            case "indent":
                lines[at] = b" " * r.randrange(1, 4) + lines[at]
                raw = b"\n".join(lines)
    return raw

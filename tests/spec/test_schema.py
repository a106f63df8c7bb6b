"""The walker against the schema: one finding per cause, and the same verdict as a JSON Schema validator."""

from __future__ import annotations

import copy
import math
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from vtaps.schemas import load, spec_schema
from vtaps.spec import engine_args, schema
from vtaps.spec.codes import CODES
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.explain import UnknownCode, page
from vtaps.spec.schema import ANNOTATIONS, KEYWORDS, validate
from vtaps.spec.yaml import loads

ROOT = Path(__file__).parents[2]
HERE = Path(".")
GOOD = """\
vtaps: 1
model: {path: ../models/x, dtype: float32, revision: main, tokenizer: ../t}
engine: {mode: auto, vllm: {max_model_len: 512}}
vectors:
  a: {file: v.safetensors, tensor: "l_{layer}", row: 0}
  b: {file: v.npy, row: 1}
  c: {random: {seed: 0, norm: 1.5}}
taps: {mid: "resid_post[10]", two: ["z[1]", "z[2]"]}
reads:
  r: {at: mid, tokens: all, sees: before_edits}
  s: {at: [mid, two], tokens: {steps: [0, 2..4], positions: [0, 4..9, -1], match: x, ids: [1]}, norm: true}
  t: {at: mid, tokens: {turn: user, skip: 1, after: o, rows: all, except: {rows: prompt, except: all}},
    mean_over: request}
  u: {at: mid, tokens: sampling, project: {vectors: [a]}}
  v: {at: mid, tokens: sampling, lens: {top: 3}}
  w: {at: mid, tokens: sampling, lens: {ids: [1, " Paris"]}}
edits:
  e: {at: mid, tokens: all, add: {vector: a, scale: 8.0, heads: [0, 3..5], dims: [0..3]}}
  f: {at: mid, tokens: all, scale: {by: 2}}
  g: {at: mid, tokens: all, zero: {}}
  h: {at: mid, tokens: all, set: {vector: b}}
  i: {at: logits, tokens: sampling, add: {value: 5, ids: [" Paris", 1]}}
  j: {at: logits, tokens: sampling, set: {value: -inf, ids: [1]}}
  k: {at: mid, tokens: all, set: {value: 0.5, dims: [0..3]}}
overrides: {o: {start: 0, text: " x"}, p: {start: 2, ids: [1, 2]}}
metrics:
  m: {logprob: " Paris", tokens: {steps: [0]}}
  n: {logit_diff: [" a", 7], tokens: sampling}
  q: {rank: 3, tokens: sampling}
prompts:
  facts: [{id: a, text: x, n: 1, ok: true, none: ~}, {id: b, chat: [{role: user, content: hi}]}, {id: c, ids: [1]}]
  file: {file: f.jsonl, id: {column: k}, chat: {column: m}}
arms:
  base: {}
  x: {prompts: [facts], reads: [r, s], edits: [e, f], overrides: [o], metrics: [m], sampling: {n: 2},
    sweep: {e.at: each, e.add.scale: [0, 4]}}
  y: {sweep: [{e.add.scale: [1, 2], e.add.vector: [a, b]}, {g.on: [true, false]}]}
sampling: {temperature: 0, max_tokens: 16, top_p: 0.9, top_k: -1, min_p: 0, seed: 1, stop: ["x"], stop_token_ids: [1],
  ignore_eos: true, logprobs: 3, presence_penalty: 0, frequency_penalty: -1.5, repetition_penalty: 1.1, min_tokens: 0}
"""


def findings(text: str) -> list[tuple[str, int, int, str | None]]:
    doc, found = loads(text, "f.yaml", HERE)
    assert doc is not None
    return [(d.code, d.span.line, d.span.column, d.nearest) for d in [*found, *validate(doc)]]


def test_a_spec_that_uses_everything_is_valid() -> None:
    assert findings(GOOD) == []


def test_the_example_of_the_manual_is_valid() -> None:
    text = (ROOT / "docs/language.md").read_text(encoding="utf-8")
    assert findings(text.split("```yaml\n")[1].split("```")[0]) == []


# In the new text, ‸ stands before the place that the one finding must point at.
@pytest.mark.parametrize(
    ("old", "new", "code", "near"),
    [
        # a typo is one fault: no missing key, no missing verb beside it
        ("tokens: all, zero", "‸tokns: all, zero", "VT101", "tokens"),
        ("zero: {}", "‸zeros: {}", "VT101", "zero"),
        ("start: 0", "‸strat: 0", "VT101", "start"),
        ("vtaps: 1", "‸vtapps: 1", "VT101", "vtaps"),
        # one finding inside a union, about the branch that was meant
        ("lens: {top: 3}", "lens: {top: 3, ‸k: 1}", "VT101", None),
        ("lens: {top: 3}", "lens: {top: ‸-1}", "VT104", None),
        ("norm: 1.5}", "norm: ‸-1}", "VT104", None),
        ("steps: [0, 2..4]", "steps: [0, ‸-2..4]", "VT104", None),
        ("{id: c, ids: [1]}", "{id: c, ids: [‸-1]}", "VT104", None),
        ("{e.at: each, e", "{e.at: ‸eech, e", "VT104", "each"),
        ("b: {file: v.npy, row: 1}", "b: {file: v.npy, ‸tensor: x}", "VT101", None),
        # keys that exclude each other are one fault, whatever stands below them
        ("zero: {}", "zero: {}, ‸scale: 8", "VT105", None),
        ("{id: a, text: x, n: 1", "‸{id: a, txt: x", "VT105", "text"),
        ('logprob: " Paris"', 'rank: 1, ‸logprob: " Paris"', "VT105", None),
        ("turn: user, skip: 1", "‸skip: 1", "VT102", None),
        ("{random: {seed: 0, norm: 1.5}}", "{random: ‸3}", "VT103", None),
        ("norm: true", "norm: ‸yes", "VT103", None),
        ("norm: true", "norm: ‸false", "VT104", None),
        ("reads: [r, s]", "reads: [r, s, ‸r]", "VT104", None),
        ("vtaps: 1", "vtaps: ‸true", "VT106", None),
        ("base: {}", "‸base:", "VT107", None),
    ],
)
def test_one_finding_per_cause(old: str, new: str, code: str, near: str | None) -> None:
    assert GOOD.count(old) == 1
    text = GOOD.replace(old, new)
    before = text[: text.index("‸")]
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    assert findings(text.replace("‸", "")) == [(code, line, column, near)]


def test_another_version_silences_everything_else() -> None:
    assert findings("vtaps: 2\nwhatever: [1]\n") == [("VT106", 1, 8, None)]


def test_a_key_that_the_loader_refused_is_not_reported_again() -> None:
    assert [f[0] for f in findings(GOOD.replace("taps: {mid:", "taps: {1: x, mid:"))] == ["VT004"]


def _walk(node: Any, path: str = "") -> Any:
    yield path, node
    if isinstance(node, dict):
        for key in ("items", "additionalProperties", "propertyNames", "if", "then", "not"):
            if isinstance(node.get(key), dict):
                yield from _walk(node[key], f"{path}/{key}")
        for key in ("properties", "$defs"):
            for name, child in node.get(key, {}).items():
                if isinstance(child, dict):
                    yield from _walk(child, f"{path}/{key}/{name}")
        for key in ("oneOf", "anyOf"):
            for i, child in enumerate(node.get(key, ())):
                yield from _walk(child, f"{path}/{key}/{i}")


def test_the_schema_is_one_and_uses_only_what_the_walker_knows() -> None:
    for name in ("spec-v1", "lock-v1", "tree-v4", "run-v1", "verify-v1"):
        Draft202012Validator.check_schema(load(f"{name}.schema.json"))
    Draft202012Validator.check_schema(spec_schema())
    for path, node in _walk(load("spec-v1.schema.json")):
        assert set(node) <= KEYWORDS | ANNOTATIONS, path


def test_an_editor_has_something_to_say_about_every_property() -> None:
    raw = load("spec-v1.schema.json")
    closed = [(p, n) for p, n in _walk(raw) if "properties" in n and "/if" not in p and "/then" not in p]
    assert len(closed) > 20
    for path, node in closed:
        for name, child in node["properties"].items():
            assert {"title", "description", "examples"} <= set(child), f"{path}/{name}"
        if not path.endswith("/prompt"):  # further keys of a prompt are columns
            assert node["additionalProperties"] is False, path


def test_examples_in_the_schema_are_valid() -> None:
    whole = spec_schema()
    for path, node in _walk(whole):
        if "/engine_args" not in path:
            checker = Draft202012Validator({**node, "$defs": whole["$defs"]})
            for example in node.get("examples", ()):
                checker.validate(example)


# Agreement with a validator that reads the same file.

_TYPES = Draft202012Validator.TYPE_CHECKER.redefine_many(
    {
        # A spec is stricter than JSON: 16.0 is no whole number, and numbers are finite and fit in 64 bits.
        "integer": lambda _, v: type(v) is int and -(2**63) <= v < 2**63,
        "number": lambda _, v: (type(v) is float and math.isfinite(v)) or (type(v) is int and -(2**63) <= v < 2**63),
    }
)
_Validator = jsonschema.validators.extend(Draft202012Validator, type_checker=_TYPES)  # type: ignore[no-untyped-call]
_REFERENCE = copy.deepcopy(spec_schema())
_REFERENCE["$defs"]["engine_args"] = {"type": "object"}  # spec.engine_args checks them
REFERENCE = _Validator(_REFERENCE)

_WORDS = sorted({k for _, n in _walk(load("spec-v1.schema.json")) for k in n.get("properties", {})})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 10, 2**70, 0.0, 1.0, 0.5, -2.5, math.inf, math.nan]),
    st.sampled_from(["", "x", "yes", "all", "each", "3..5", "-1..2", "v.npy", "v.safetensors", "f.jsonl", "request"]),
)
KEYS = st.one_of(st.sampled_from(_WORDS), st.sampled_from(["", "x", "1x", "<<", "txt", "tokns"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def _paths(data: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from _paths(value, (*path, key))


GOOD_DATA = loads(GOOD, "f.yaml", HERE)[0].data  # type: ignore[union-attr]
GOOD_PATHS = list(_paths(GOOD_DATA))


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    data = copy.deepcopy(GOOD_DATA)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(GOOD_PATHS))
        parent: Any = {"root": data}
        steps = ("root", *path)
        try:
            for step in steps[:-1]:
                parent = parent[step]
            if isinstance(parent, dict) and not isinstance(steps[-1], str):
                continue  # a list stood there: no loader gives a mapping whole numbers for keys
            match draw(st.sampled_from(["replace", "delete", "add", "rename"])):
                case "replace":
                    parent[steps[-1]] = draw(VALUES)
                case "delete":
                    del parent[steps[-1]]
                case "add":
                    parent[steps[-1]][draw(KEYS)] = draw(VALUES)
                case "rename":
                    parent[draw(KEYS)] = parent.pop(steps[-1])
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
        if not path and "root" in parent:
            data = parent["root"]
    return data


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_the_walker_agrees_with_a_validator(data: Any) -> None:
    found = validate(Document("f.yaml", "", data, HERE))
    assert (not found) == REFERENCE.is_valid(data), (found, list(REFERENCE.iter_errors(data)))


# Nothing raises, nothing hangs.


def check_all(text: str) -> list[Diagnostic]:
    start = time.perf_counter()
    doc, found = loads(text, "f.yaml", HERE)
    if doc is None:
        assert found
    else:
        found = [*found, *validate(doc)]
        engine = doc.data.get("engine") if isinstance(doc.data, dict) else None
        if isinstance(engine, dict) and isinstance(engine.get("vllm"), dict):
            found += engine_args.check(doc, ("engine", "vllm"), engine["vllm"])
    assert time.perf_counter() - start < 2
    lines = re.split("\r\n|\r|\n", text)
    for d in found:
        assert 1 <= d.span.line <= len(lines) and d.span.column >= 1
        assert (d.span.line, d.span.column) <= (d.span.end_line, d.span.end_column)
    return found


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80) | st.text(alphabet="{}[]:,-?*&!|>'\"%@#~<. \n\tab1", max_size=60))
def test_any_text_gives_findings_and_never_raises(text: str) -> None:
    check_all(text)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_slip_in_a_good_spec_gives_findings_and_never_raises(data: st.DataObject) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        size = data.draw(st.integers(0, 12))
        slip = data.draw(st.text(alphabet="{}[]:,-*&! \n\t\"'axé😀\x00", max_size=4))
        text = text[:at] + slip + text[at + size :]
    check_all(text)


@pytest.mark.parametrize(
    "text",
    [
        f"vtaps: 1\n{'k' * 1_000_000}: 1\n",
        f"vtaps: 1\nengine: {{mode: {'k' * 1_000_000}, vllm: {{{'k' * 1000}: 1}}}}\n",
        "vtaps: 1\nprompts: {a: [" + "{id: 1}, " * 3000 + "]}\n",
        "a: " + "{b: " * 60 + "1" + "}" * 60 + "\n",
        "? " * 3000,
        '"' * 100_000,
        "a: [" + "z[1], " * 2000 + "]\n",
    ],
)
def test_large_faults_are_quick(text: str) -> None:
    assert check_all(text)


# Pages


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_page_with_its_title(code: str) -> None:
    text = page(code)
    assert text.splitlines()[0] == f"# {code}: {CODES[code].title}"
    assert re.findall("^## (.*)$", text, re.M) == ["What it means", "Why", "Example", "Instead"]


def test_every_page_has_a_code() -> None:
    assert {p.stem for p in (ROOT / "spec/pages").iterdir()} == set(CODES)
    assert (ROOT / "docs/codes").resolve() == ROOT / "spec/pages"


@pytest.mark.parametrize("code", [c for c in CODES if c < "VT6"])
def test_what_a_page_recommends_is_yaml(code: str) -> None:
    for kind, text in re.findall("```(\\w+)\n(.*?)```", page(code).split("## Instead")[1], re.S):
        if kind == "yaml":
            assert loads(text, f"{code}.md", HERE)[1] == []


def test_unknown_codes_name_the_nearest() -> None:
    assert page("vt101 ") == page("101") == page("VT101")
    for wrong, near in (("VT199", "VT107"), ("VT299", "VT219"), ("VT1077", "VT107"), ("zebra", None)):
        with pytest.raises(UnknownCode) as caught:
            page(wrong)
        assert caught.value.nearest == near


def test_no_slow_import() -> None:
    """``check`` may take 0.3 s: half of that would go into importing jsonschema."""
    import subprocess
    import sys

    code = "import sys, vtaps.spec.schema, vtaps.spec.reporters, vtaps.spec.engine_args; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"jsonschema", "torch", "vllm", "numpy", "rich"} & set(out.split())
    assert schema.__name__ in out.split()

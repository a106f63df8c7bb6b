"""What ``vtaps verify`` says when something is wrong: a lock that is not the one that was meant, on a real engine.

The engine serves it as it serves any lock, so nothing fails by itself; what it computes is another program's.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("vllm")

import vtaps
from tests.engine.case import LAYERS, arm, request, tiny_llama, use, write_case
from tests.models import tiny
from vtaps import schemas
from vtaps.cli import main
from vtaps.comparing import difference
from vtaps.forcing import forced
from vtaps.runtime.engine import Engine
from vtaps.runtime.records import Finished
from vtaps.runtime.reference.forward import HuggingFace
from vtaps.runtime.reference.holding import Holder, Meant
from vtaps.spec.document import Document
from vtaps.verification import Verification, counted, findings, together
from vtaps.verifying import bound_of

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
STREAMS = [f"resid_post[{i}]" for i in range(LAYERS)]
PROMPTS = {"short": [40, 75, 222], "long": [7 + (i * 37) % 250 for i in range(19)]}
Lock = dict[str, Any]
Tamper = Callable[[Lock], None]


def coefficient(lock: Lock) -> None:
    """1 % more of the vector."""
    lock["arms"]["steered"]["points"][0]["edits"][0]["coefficient"] *= 1.01


def layer(lock: Lock) -> None:
    lock["arms"]["steered"]["points"][0]["edits"][0]["sites"] = ["resid_post[2]"]


def selector(lock: Lock) -> None:
    """One row later."""
    lock["edits"]["steer"]["tokens"] = {"rows": "all", "steps": [[1, 2]]}


def vector(lock: Lock) -> None:
    lock["vectors"]["r"]["random"]["seed"] += 1


def read_rows(lock: Lock) -> None:
    lock["reads"]["stream"]["tokens"] = {"rows": "all", "except": {"rows": "all", "steps": [[3, 3]]}}


def probe(lock: Lock) -> None:
    """The read projects on a vector of another draw."""
    lock["vectors"]["s"]["random"]["seed"] += 1


def token(lock: Lock) -> None:
    lock["metrics"]["likely"]["ids"] = [51]


TAMPERED: dict[str, tuple[Tamper, set[str], str]] = {
    # the change, the codes that it must cause, a word that names what is at fault
    "coefficient": (coefficient, {"VT611"}, "stream"),
    "layer": (layer, {"VT611"}, "resid_post[1] first"),
    "selector": (selector, {"VT611", "VT602"}, "steer"),
    "vector": (vector, {"VT611"}, "stream"),
    "read": (read_rows, {"VT611"}, "read stream"),
    "probe": (probe, {"VT611"}, "read along"),
    "metric": (token, {"VT611"}, "metric likely"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def case(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Lock, Path]:
    lock, block = write_case(
        tmp_path_factory.mktemp("case"), model,
        edits={"steer": {"verb": "add", "sites": ["resid_post[1]", "resid_post[2]"],
                         "tokens": {"rows": "all", "steps": [[0, 1]]}}},
        reads={
            "stream": {"kind": "rows", "sites": STREAMS, "tokens": {"rows": "all"}},
            "along": {"kind": "project", "sites": ["resid_post[3]"], "tokens": {"rows": "sampling"}, "vectors": ["s"]},
            "mean": {"kind": "mean", "sites": ["resid_mid[0]"], "tokens": {"rows": "prompt"}},
            "length": {"kind": "norm", "sites": ["z[1]"], "tokens": {"rows": "all"}},
            "lens": {"kind": "lens", "sites": STREAMS, "tokens": {"rows": "sampling"}, "top": 5},
        },
        metrics={"likely": {"kind": "logprob", "ids": [50], "tokens": {"rows": "sampling"}},
                 "place": {"kind": "rank", "ids": [50], "tokens": {"rows": "sampling"}}},
        vectors={"r": {"random": {"seed": 1, "norm": 6.0}}, "s": {"random": {"seed": 2, "norm": 1.0}}},
        arms={
            "base": arm(reads=["stream", "along", "mean", "length", "lens"], metrics=["likely", "place"]),
            "steered": arm(use("steer", "resid_post[1]", coefficient=2.0, vector="r"), reads=["stream"],
                           metrics=["likely"]),
        },
    )  # fmt: skip
    lock["tree"] = {"architecture": "LlamaForCausalLM"}
    return lock, block


@pytest.fixture(scope="module")
def engine(case: tuple[Lock, Path]) -> Iterator[Engine]:
    lock, block = case
    with Engine(lock, block.parent, block, block.parent / "manifest") as made:
        yield made


@pytest.fixture(scope="module")
def holder(case: tuple[Lock, Path], model: Path) -> Holder:
    meant = Meant(case[0], case[1].parent)
    return Holder(meant, HuggingFace(str(model), meant.architecture, meant.placed()))


def serve(engine: Engine, case: tuple[Lock, Path], lock: Lock) -> list[Finished]:
    engine.load(lock, case[1].parent, case[1])
    asked = [request(f"{a}/{p}", a, ids) for a in ("base", "steered") for p, ids in PROMPTS.items()]
    return list(engine.run(asked, lambda _: GREEDY))


def held(holder: Holder, finished: list[Finished]) -> Verification:
    every = [holder.hold(one, GREEDY) for one in finished]
    counts = counted((c for one in finished for c in holder.meant.counts(one)), every[-1].moved)
    bound = bound_of("float32")
    told = Verification(
        "case.yaml", "eager", "float32", "huggingface", "", bound, len(finished), len(finished),
        together((m for one in every for m in one.measured), bound), counts,
        not_checked=tuple(s for one in every for s in one.skipped),
    )  # fmt: skip
    return Verification(**{**vars(told), "findings": tuple(findings(told, Document("case.yaml", "", {}, Path())))})


def test_what_was_meant_is_within_bounds(engine: Engine, case: tuple[Lock, Path], holder: Holder) -> None:
    found = held(holder, serve(engine, case, case[0]))
    assert found.findings == () and found.exit_code == 0 and found.not_checked == ()
    compared = {(c.what, c.name) for c in found.comparisons}
    assert compared >= {("read", r) for r in case[0]["reads"]} | {("metric", m) for m in case[0]["metrics"]}
    assert compared >= {("logprobs", ""), ("tokens", "")}
    assert {(c.site, c.values) for c in found.comparisons if c.name == "mean"} == {("resid_mid[0]", 2)}
    (steer,) = found.fired
    assert (steer.edit, steer.fired, steer.expected) == ("steer", 4, 4)
    assert steer.moved is not None and steer.moved > 1000 * found.bound


@pytest.mark.parametrize("name", TAMPERED)
def test_what_is_wrong_is_found(name: str, engine: Engine, case: tuple[Lock, Path], holder: Holder) -> None:
    tamper, codes, word = TAMPERED[name]
    lock = copy.deepcopy(case[0])
    tamper(lock)
    found = held(holder, serve(engine, case, lock))
    assert {d.code for d in found.findings} == codes
    assert found.exit_code == 1
    told = [f"{d.message} {d.note}" for d in found.findings]
    assert any(word in text for text in told), told


def test_forced_tokens_are_the_same_and_an_edit_of_the_neighbours_is_seen(
    engine: Engine, case: tuple[Lock, Path]
) -> None:
    finished = serve(engine, case, case[0])
    nobody, requests = forced(case[0], finished, edits=False)
    engine.load(nobody, case[1].parent, case[1])
    again = {one.request.key: one for one in engine.run(requests, lambda _: GREEDY)}
    for one in finished:
        other = again[one.request.key]
        assert one.completions[0].token_ids == other.completions[0].token_ids
        assert not other.completions[0].record.fired
        unedited = one.request.arm == "base"
        assert (difference(one, other) is None) == unedited, difference(one, other)


SPEC = """vtaps: 1
model: {path: MODEL, dtype: float32}
engine: {mode: MODE, vllm: {max_model_len: LENGTH, max_num_seqs: 4}}
vectors:
  push: {random: {seed: 1, norm: 4}}
reads:
  stream: {at: "resid_post[*]", tokens: sampling, sees: after_edits}
  gate: {at: "model.layers.1.mlp.gate_up_proj.output", tokens: {steps: [0]}}
  centred: {at: "resid_post[0]", tokens: prompt, python: "mine.py:centred"}
edits:
  steer: {at: "resid_post[1]", tokens: sampling, add: {vector: push}}
  mine: {at: "resid_post[2]", tokens: sampling, python: "mine.py:same"}
metrics:
  first: {logprob: "e", tokens: {steps: [0]}}
prompts:
  some: [{id: one, text: "a prompt of some length"}, {id: two, text: "another"}]
arms:
  base: {reads: [stream, gate], metrics: [first]}
  steered: {edits: [steer], reads: [stream], sweep: {steer.add.scale: [1, 2]}}
  own: {edits: [mine], reads: [stream, centred]}
sampling: {temperature: 0, max_tokens: 4, ignore_eos: true}
"""


MORE = {
    "\nreads:\n": """
gates:
  near: {at: "resid_post[0]", tokens: all, project: push, above: 0, holds: row}
  sum: {at: "resid_post[1]", tokens: prompt, cosine: push, reduce: mean, above: -1, holds: request}
reads:
  kept: {at: "resid_post[1]", tokens: prompt}
  attn: {at: "pattern[1]", tokens: prompt, heads: [1, 2]}
  eighth: {at: "resid_post[2]", tokens: all, store: {dtype: float8_e4m3, scale: per_row}}
""",
    "\nedits:\n": """
edits:
  calm: {at: "resid_post[1]", tokens: all, scale: {by: 0.5}, when: near}
  late: {at: "resid_post[0]", tokens: generated, zero: {}, when: sum}
  cell: {at: "resid_post[2]", tokens: {positions: [0, 1]}, add: {vector: push}}
  patch: {at: "resid_post[1]", tokens: prompt, set: {rows: base.kept}}
""",
    "arms:\n  base: {reads: [": """arms:
  patched: {edits: [patch], reads: [stream]}
  gated: {edits: [calm, late], reads: [attn, eighth]}
  cells: {edits: [cell], sweep: {cell.tokens: each}}
  base: {reads: [kept, """,
}
"""What the reference knows too: gates, patterns, rows in fewer bits, single rows; and what it does not serve."""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "vtaps", "verify", "spec.yaml", *words], cwd=folder, env=env, text=True,
        capture_output=True, timeout=600,
    )  # fmt: skip


def write(folder: Path, length: int = 256, mode: str = "eager", axis: int = -1, more: bool = False) -> None:
    """``axis``: of what the function of a read takes the mean; 0 is that of whatever rows come together."""
    text = SPEC.replace("MODEL", str(tiny("llama"))).replace("LENGTH", str(length)).replace("MODE", mode)
    for old, new in MORE.items() if more else ():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "spec.yaml").write_text(text)
    lines = [
        "def same(rows):",
        "    return rows",
        "",
        "def centred(rows):",
        f"    return rows - rows.mean({axis}, True)",
    ]
    (folder / "mine.py").write_text("\n".join(lines) + "\n")


def test_the_command_says_what_it_checked_and_what_not(tmp_path: Path) -> None:
    write(tmp_path, more=True)
    found = command(tmp_path, "--format", "json", "--limit", "13")
    assert found.returncode == 0, found.stderr[-3000:]
    told = json.loads(found.stdout)
    jsonschema.validate(told, schemas.load("verify-v1.schema.json"))
    assert told["ok"] and told["findings"] == [] and (told["requests"], told["total"]) == (13, 16)
    assert told["reference"] == "huggingface" and "gate_up_proj" in told["reason"]
    assert 1 < told["chunk"] < 23
    compared = {(c["what"], c["name"]) for c in told["comparisons"] if c["error"] is not None and c["ok"]}
    assert compared == {
        ("read", "stream"), ("edit", "steer"), ("metric", "first"), ("logprobs", ""), ("tokens", ""),
        ("chunked", "stream"), ("chunked", "gate"), ("chunked", "logprobs"), ("chunked", "centred"),
        ("alone", "stream"), ("alone", "gate"), ("alone", "logprobs"),
        ("gate", "near"), ("gate", "sum"), ("edit", "calm"), ("edit", "late"), ("edit", "cell"),
        ("read", "attn"), ("chunked", "attn"), ("read", "eighth"), ("chunked", "eighth"),
        ("read", "kept"), ("chunked", "kept"), ("alone", "kept"),
    }  # fmt: skip
    assert told["isolation"] == {"bits": 2, "differing": []}
    fired = {f["edit"]: (f["fired"], f["expected"]) for f in told["fired"]}
    calm, late = fired.pop("calm"), fired.pop("late")
    assert calm[0] == calm[1] > 0 and late == (6, 6)
    assert fired.pop("cell") in ((3, 3), (4, 4)) and fired.pop("steer") in ((12, 12), (16, 16))
    assert fired == {"mine": (8, 8)}
    skipped = {(s["what"], s["name"]): s["reason"] for s in told["not_checked"]}
    assert "gate_up_proj" in skipped["read", "gate"] and "own definition" in skipped["edit", "mine"]
    assert ("tokens", "arm own") in skipped and "sets rows that another request kept" in skipped["arm", "patched"]


def test_taps_with_raw_locations_are_held_against_the_eager_engine_and_past_a_bound_is_1(tmp_path: Path) -> None:
    write(tmp_path, mode="taps", axis=0)
    past = command(tmp_path, "--bound", "1e-12", "--limit", "4", "--format", "json")
    assert past.returncode == 1 and "error[VT611]: read stream" in past.stderr, past.stderr[-3000:]
    assert "Traceback" not in past.stderr
    told = json.loads(past.stdout)
    jsonschema.validate(told, schemas.load("verify-v1.schema.json"))
    assert (told["engine"], told["reference"]) == ("taps", "eager") and "gate_up_proj" in told["reason"]
    errors = {(c["what"], c["name"]): c["error"] for c in told["comparisons"]}
    for what in (("read", "stream"), ("read", "gate"), ("edit", "steer"), ("metric", "first"), ("logprobs", "")):
        assert errors[what] < 1e-5, what
    assert errors["tokens", ""] == 0 and told["not_checked"] == []
    assert errors["chunked", "centred"] > 0.1 and errors["chunked", "stream"] < 1e-5
    assert any(f["code"] == "VT613" and "centred" in f["message"] for f in told["findings"])


def test_wrong_usage_is_2_and_a_failed_run_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 100_000)
    failed = command(tmp_path, "--quiet")
    assert failed.returncode == 3 and "error[VT607]" in failed.stderr, failed.stderr[-3000:]
    monkeypatch.chdir(tmp_path)
    for words in (["--bound", "-1"], ["--limit", "0"], ["--limit", "none"], ["--against", "me"]):
        with pytest.raises(SystemExit) as stopped:
            main(["verify", "spec.yaml", *words])
        assert stopped.value.code == 2
    (tmp_path / "spec.yaml").write_text("vtaps: 1\n")
    found = vtaps.verify("spec.yaml")
    assert found.exit_code == 1
    jsonschema.validate(found.to_json(), schemas.load("verify-v1.schema.json"))

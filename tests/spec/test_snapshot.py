"""Snapshots: nothing lost, nothing large, nothing slow, and a digest of the content alone."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.spec.trees import DATA, FAMILIES, OTHERS, tree
from vtaps.spec import snapshot
from vtaps.spec.source import KINDS, Forward, Op
from vtaps.spec.tree import Dimensions, ModelTree, Module, Value

SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "tree-v4.schema.json").read_text())

axes = st.one_of(st.integers(0, 2**31), st.sampled_from(["T", "2*T", "T+1", "?7"]))
parts = st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), axes)), max_size=2, unique_by=lambda part: part[0])


def tensor(dtype: str, shape: list[int | str], parts: list[tuple[int, int | str | None]], mark: str) -> Value:
    shards = tuple(sorted((axis, part) for axis, part in parts if axis < len(shape)))
    return Value("tensor", dtype, tuple(shape), (), shards, mark)  # type: ignore[arg-type]


tensors = st.builds(
    tensor,
    st.sampled_from(["bfloat16", "float32", "int64"]),
    st.lists(axes, max_size=3),
    parts,
    st.sampled_from(["", "partial", "alone"]),
)
plain = st.one_of(tensors, st.just(Value("none")), st.just(Value("other")))
values = st.recursive(
    plain, lambda inner: st.builds(Value, st.just("tuple"), items=st.lists(inner, max_size=3).map(tuple)), max_leaves=5
)
words = st.sampled_from(["layers", "h", "0", "1", "2", "3", "mlp", "norm", "x"])
paths = st.one_of(st.just(""), st.lists(words, min_size=1, max_size=4).map(".".join))
numbers = st.one_of(st.none(), st.integers(0, 500))
named = st.sampled_from(["a.Linear.forward", "b.Linear.forward", "a.Block.forward", "a.Base.forward", "f"])
ops = st.builds(
    Op, st.sampled_from(["q_0", "f_1"]), st.integers(1, 9), st.sampled_from(KINDS), st.text("f(x): ", max_size=8)
)
functions = st.one_of(
    st.builds(Forward, named, reason=st.text(max_size=5)),
    st.builds(
        Forward,
        named,
        st.just("vllm/a.py"),
        st.integers(1, 99),
        st.integers(1, 99),
        st.just("0" * 64),
        st.lists(ops, max_size=3).map(tuple),
        st.text(max_size=3),
    ),
)


@st.composite
def trees(draw: st.DrawFn) -> ModelTree:
    """Trees of any shape, made likely to hold stacks: a layer repeated with its calls shifted."""
    names = draw(st.lists(paths, max_size=8, unique=True))
    if draw(st.booleans()):
        rest = draw(st.lists(st.sampled_from(["", ".mlp", ".attn", ".attn.0"]), min_size=1, unique=True))
        count = draw(st.integers(1, 4))
        stack = [f"model.layers.{i}{r}" for i in range(count) for r in rest]
        names = list(dict.fromkeys([*names, *stack]))
    forwards = {f.where: f for f in draw(st.lists(functions, max_size=4))}
    runs = st.sampled_from([None, *forwards])
    modules = {}
    for name in names:
        modules[name] = Module(
            path=name,
            cls=draw(st.sampled_from(["Linear", "Block"])),
            parameters=draw(st.sampled_from([(), (("weight", (4, 8)),)])),
            inputs=draw(st.one_of(st.just(()), st.tuples(st.tuples(st.just("x"), st.one_of(st.none(), values))))),
            output=draw(st.one_of(st.none(), values)),
            enter=draw(numbers),
            leave=draw(numbers),
            same_as=draw(st.one_of(st.none(), st.sampled_from(["model.layers.0.mlp", "model.layers.1.mlp", "x"]))),
            calls=draw(st.integers(0, 3)),
            forward=draw(runs),
            ops=draw(st.sampled_from([(), (("q_0", Value("tensor", "float32", ("T", 4))), ("f_0", Value("none")))])),
        )
    size = Dimensions(8, 2, 2, 1, 4, draw(st.one_of(st.none(), st.just(16))), 32)
    unvalued, unsharded = (draw(st.one_of(st.none(), st.text(max_size=10))) for _ in range(2))
    return ModelTree("A", "a", "float32", "0.32.0", size, modules, "", unvalued, forwards, unsharded)


@given(trees())
@settings(max_examples=150, deadline=None)
def test_any_tree_comes_back_whole_and_in_order(made: ModelTree) -> None:
    text = snapshot.dumps(made)
    back = snapshot.loads(text)
    assert replace(back, digest="") == made
    assert list(back.modules) == list(made.modules)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert snapshot.dumps(back) == text


@given(values)
def test_a_value_is_one_word_and_back(value: Value) -> None:
    text = snapshot.value_text(value)
    assert text is not None
    assert snapshot.parse_value(text) == value


@pytest.mark.parametrize(
    "text", ["", "(", "float32", "float32[T", "None,", "(None", "(None None)", "x]", "float32[T]:whole", "None:alone"]
)
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(snapshot.SnapshotError):
        snapshot.parse_value(text)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS, "smollm2"])
def test_the_committed_snapshots_are_what_is_written(family: str) -> None:
    file = DATA / "trees" / f"{family}.json"
    assert snapshot.dumps(tree(family)) == file.read_text(encoding="utf-8")
    jsonschema.validate(json.loads(file.read_text(encoding="utf-8")), SCHEMA)
    assert file.stat().st_size < 70_000


def test_reading_thirty_layers_is_fast() -> None:
    text = (DATA / "trees" / "smollm2.json").read_text(encoding="utf-8")
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        snapshot.loads(text)
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.03


def test_repeated_layers_stand_once_and_the_first_keeps_its_differences() -> None:
    data = json.loads((DATA / "trees" / "smollm2.json").read_text(encoding="utf-8"))
    stack = data["modules"]["model.layers.[0..29]"]
    assert [(b["layers"], b.get("like")) for b in stack["blocks"]] == [("1..29", None), ("0", "1..29")]
    # The first layer gets no residual, and its norm gives one tensor in place of two.
    first = dict(tree("smollm2").modules["model.layers.0"].inputs)
    assert first["residual"] == Value("none")
    assert tree("smollm2").modules["model.layers.0.input_layernorm"].output == Value("tensor", "bfloat16", ("T", 576))


def test_the_digest_is_of_the_content_not_of_the_layout() -> None:
    text = (DATA / "trees" / "llama.json").read_text(encoding="utf-8")
    tight = json.dumps(json.loads(text), separators=(",", ":"))
    assert snapshot.loads(tight) == snapshot.loads(text)
    changed = tight.replace('"layers":4', '"layers":5')
    assert changed != tight
    with pytest.raises(snapshot.SnapshotError, match="digest"):
        snapshot.loads(changed)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"vtaps_tree": 2}', "[" * 100_000, '{"vtaps_tree": 3}'])
def test_what_is_no_snapshot_is_refused(text: str) -> None:
    with pytest.raises(snapshot.SnapshotError):
        snapshot.loads(text)

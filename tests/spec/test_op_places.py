"""Locations inside forwards: what an op is, what it takes in, and what the function that it calls computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.spec.test_locations import SPAN, refused, sites
from tests.spec.trees import tree
from vtaps.codegen.source_ops import ops_of
from vtaps.spec.locations import locate
from vtaps.spec.source import Arg, Forward, Op
from vtaps.spec.tree import ModelTree, Value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A module that is called has it as its input; a name is what it is bound to.
        ("model.layers.1.self_attn.source.self_attn_0.input[0]", "rot_q[1]"),
        ("model.layers.1.self_attn.source.self_attn_0.input.query", "rot_q[1]"),
        ("model.layers.1.source.self_self_attn_0.input.hidden_states", "ln1[1]"),
        ("model.layers.1.source.self_mlp_0.input", "ln2[1]"),
        ("model.layers.1.self_attn.source.self_rotary_emb_0.input[2]", "k[1]"),
        ("model.layers.1.mlp.source.maybe_fused_act_quant_0.input[1]", "model.layers.1.mlp.gate_up_proj.output"),
        (
            "model.layers.1.mlp.source.maybe_fused_act_quant_0.source.act_fn_0",
            "model.layers.1.mlp.source.maybe_fused_act_quant_0.source.act_fn_0.output",
        ),
        (
            "model.layers.1.mlp.source.maybe_fused_act_quant.source.act_fn_0.input",
            "model.layers.1.mlp.source.maybe_fused_act_quant_0.source.act_fn_0.input[0]",
        ),
    ],
)
def test_what_an_op_takes_in_and_what_is_inside_its_function(text: str, expected: str) -> None:
    assert [site.name for site in sites(text, "llama")] == [expected]


def test_what_the_functions_of_a_forward_compute() -> None:
    path = "model.layers.1.self_attn.source.self__apply_qk_norm_0"
    (view,) = sites(f"{path}.source.q_view_0", "cohere")
    assert (view.op, view.width, view.heads) == ("self__apply_qk_norm_0.source.q_view_0", 128, 4)
    assert view.functions == (
        "vllm.model_executor.models.commandr.CohereAttention.forward",
        "vllm.model_executor.models.commandr.CohereAttention._apply_qk_norm",
    )
    (norm,) = sites(f"{path}.source.self_k_norm_0.input", "cohere")
    assert norm.name == "model.layers.1.self_attn.k_norm.input.hidden_states"
    orders = [sites(f"{path}{place}", "cohere")[0].order for place in (
        ".source.q_view_0", ".source.self_q_norm_0", ".source.q_view_1", ".source.k_view_1",
    )]  # fmt: skip
    rotated = sites("model.layers.1.self_attn.source.self_rotary_emb_0.output[0]", "cohere")[0].order
    assert orders == sorted(orders) and orders[-1] < rotated


def test_a_function_with_a_compiler_of_its_own_is_refused_by_name() -> None:
    problem = refused("model.layers.1.input_layernorm.source.layer_norm_func_0.source.binop_sub_0", "cohere")
    assert problem.code == "VT216"
    assert problem.message.endswith("layer_norm_func_0 calls: layer_norm_func is compiled on its own")


def computing(*ops: Op, inputs: tuple[str, ...] = (), args: tuple[str, ...] = (), dtype: str = "float32") -> ModelTree:
    """Llama's tree with a module ``model.layers.1.mlp`` whose forward is ``ops``, each of ``[T, 128]``, as are
    ``args``, which they take in."""
    plain, path = tree("llama"), "model.layers.1.mlp"
    value = Value("tensor", dtype, ("T", 128))
    module = replace(
        plain.modules[path],
        forward="a.B.forward",
        inputs=tuple((name, value) for name in inputs),
        ops=tuple((name, value) for name in (*(op.name for op in ops if not op.fixed), *args)),
    )
    forwards = dict(plain.forwards) | {"a.B.forward": Forward("a.B.forward", ops=ops)}
    return replace(plain, modules=plain.modules | {path: module}, forwards=forwards)


F = Op("f_0", 2, "call", "f")
X, Y = Op("x_0", 2, "bind", "f(a)", "f_0"), Op("y_0", 3, "bind", "x")


@pytest.mark.parametrize(
    ("ops", "inputs", "name", "expected"),
    [
        ((F, X, Y), (), "y_0", "f_0.output"),
        ((F, X, Y, Op("z_0", 4, "bind", "y")), (), "z_0", "f_0.output"),
        ((Op("y_0", 2, "bind", "h"),), ("h",), "y_0", "input.h"),
        # The call may have changed it in place.
        ((F, X, Op("g_0", 3, "call", "g"), Y), (), "y_0", None),
        ((Op("g_0", 2, "call", "g"), Op("y_0", 3, "bind", "h")), ("h",), "y_0", None),
        # x, y = y, x
        ((F, X, Op("y_0", 3, "bind", "f"), Op("x_1", 4, "bind", "y"), Op("y_1", 4, "bind", "x")), (), "y_1", None),
    ],
)
def test_a_name_for_a_name_is_the_value(
    ops: tuple[Op, ...], inputs: tuple[str, ...], name: str, expected: str | None
) -> None:
    found, problems = locate(computing(*ops, inputs=inputs), f"model.layers.1.mlp.source.{name}", SPAN)
    if expected is None:
        assert [p.code for p in problems] == ["VT216"] and "another name of" in problems[0].message
        return
    place = expected if expected.startswith("input") else f"source.{expected}"
    assert [s.name for s in found] == [f"model.layers.1.mlp.{place}"] and not problems


def taking(*args: Arg) -> Op:
    return Op("h_0", 9, "call", "h", args=args)


G = Op("g_0", 3, "call", "g")


@pytest.mark.parametrize(
    ("ops", "arg", "expected"),
    [
        ((F, X), Arg(0, name="x"), "source.f_0.output"),
        ((F, X, Op("binop_add_0", 3, "binary", "x + 1")), Arg(0, name="x"), "source.f_0.output"),
        ((F,), Arg(0, of="f_0"), "source.f_0.output"),
        ((), Arg(0, name="a"), "input.a"),
        ((F, X, Y), Arg(0, name="y"), "source.f_0.output"),
        # A call, or something that is assigned to in place, may have changed it.
        ((F, X, G), Arg(0, name="x"), None),
        ((G,), Arg(0, name="a"), None),
        ((F, X, Op("y_0", 3, "item", "1")), Arg(0, name="x"), None),
        ((F, X, Op("y_0", 3, "augmented", "y += 1")), Arg(0, name="x"), None),
        ((F, X, Op("g_0", 3, "call", "g", fixed="in a comprehension")), Arg(0, name="x"), None),
        ((F, X, G, Y), Arg(0, name="y"), None),
        # No op binds it, or one that runs more than once.
        ((), Arg(0, name="b"), None),
        ((F, replace(X, repeats=True)), Arg(0, name="x"), None),
        ((), Arg(0, other=True), None),
        # Of a tensor that is a row.
        ((F,), Arg(0, of="f_0", item=1), None),
    ],
)
def test_an_argument_is_the_value_where_that_is_the_same_tensor(
    ops: tuple[Op, ...], arg: Arg, expected: str | None
) -> None:
    given = computing(*ops, taking(arg), inputs=("a",), args=("h_0.input[0]",))
    found, problems = locate(given, "model.layers.1.mlp.source.h_0.input[0]", SPAN)
    assert not problems and [s.name for s in found] == [f"model.layers.1.mlp.{expected or 'source.h_0.input[0]'}"]
    if expected is None:
        assert (found[0].op, found[0].side, found[0].element) == ("h_0", "input", 0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # if not here: a = …
        ((), (Op("a_0", 3, "bind", "g(a)"),), None),
        ((F, Op("a_0", 2, "bind", "f(x)", "f_0")), (Op("a_1", 3, "bind", "g(a)"),), None),
        ((), (Op("a_0", 3, "element", "pair", item=0),), None),
        # for t in …: …; a = t
        ((), (Op("a_0", 3, "bind", "t", fixed="a name of what `t` is then"),), None),
        # Another name is none of it.
        ((), (Op("b_0", 3, "bind", "g(a)"),), "input.a"),
    ],
)
def test_a_name_that_is_bound_anew_out_of_sight_is_no_known_value(
    before: tuple[Op, ...], after: tuple[Op, ...], expected: str | None
) -> None:
    """A branch that is not taken on this machine may be taken by a worker, and a name may be bound to what has no op:
    the tap is then at the call."""
    given = computing(*before, *after, taking(Arg(0, name="a")), inputs=("a",), args=("h_0.input[0]",))
    module = given.modules["model.layers.1.mlp"]
    skipped = {op.name for op in after}
    here = replace(module, ops=tuple((name, value) for name, value in module.ops if name not in skipped))
    given = replace(given, modules=given.modules | {"model.layers.1.mlp": here})
    found, problems = locate(given, "model.layers.1.mlp.source.h_0.input[0]", SPAN)
    assert not problems and [s.name for s in found] == [f"model.layers.1.mlp.{expected or 'source.h_0.input[0]'}"]


@pytest.mark.parametrize("swap", ["x, y = y, x", "x, y = (\n        y,\n        x,\n    )"])
def test_names_that_are_exchanged_are_not_followed(swap: str) -> None:
    ops = ops_of(f"def forward(self, x, y):\n    {swap}\n    return h(y)\n")
    given = computing(*ops, inputs=("x", "y"), args=("h_0.input[0]",))
    (site,), problems = locate(given, "model.layers.1.mlp.source.h_0.input[0]", SPAN)
    assert not problems and site.name == "model.layers.1.mlp.source.h_0.input[0]"


def test_a_subscripted_value_is_an_element_of_a_tuple_and_no_row_of_a_tensor() -> None:
    op = Op("x_0", 2, "bind", "f(a)[1]", "f_0", 1)
    (row,), _ = locate(computing(F, op), "model.layers.1.mlp.source.x_0", SPAN)
    assert row.name == "model.layers.1.mlp.source.x_0.output"
    plain = computing(F, op)
    module, value = plain.modules["model.layers.1.mlp"], Value("tensor", "float32", ("T", 128))
    several = replace(module, ops=(("f_0", Value("tuple", items=(value, value))), ("x_0", value)))
    changed = replace(plain, modules=plain.modules | {"model.layers.1.mlp": several})
    (element,), _ = locate(changed, "model.layers.1.mlp.source.x_0", SPAN)
    assert (element.name, element.op, element.element) == ("model.layers.1.mlp.source.f_0.output[1]", "f_0", 1)


def test_a_name_unpacked_from_a_name_is_its_element() -> None:
    """``a, b = pair``: the tap is around ``pair``."""
    ops = (Op("a_0", 2, "element", "pair", item=0), Op("b_0", 2, "element", "pair", item=1))
    (site,), problems = locate(computing(*ops), "model.layers.1.mlp.source.b_0", SPAN)
    assert not problems and (site.op, site.element) == ("b_0", 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "int64", "bool"])
def test_a_value_of_another_dtype_is_refused(dtype: str) -> None:
    found, problems = locate(computing(F, dtype=dtype), "model.layers.1.mlp.source.f_0", SPAN)
    assert not found and [p.code for p in problems] == ["VT208"]
    assert problems[0].message.endswith(f"is {dtype}[T, 128]: tables hold the model's dtype, float32")


def test_what_nothing_is_in_yet_is_refused() -> None:
    diagnostic = refused("model.layers.1.self_attn.attn.source.output_0", "llama")
    assert diagnostic.code == "VT216"
    assert diagnostic.message.startswith("nothing is in model.layers.1.self_attn.attn.source.torch_empty_0 yet")


def test_a_body_that_is_not_run_is_not_called_a_branch() -> None:
    norm = tree("llama").forwards[str(tree("llama").modules["model.norm"].forward)]
    diagnostic = refused(f"model.norm.source.{norm.ops[0].name}", "llama")
    assert diagnostic.code == "VT216" and "RMSNorm does not run that body here" in diagnostic.message

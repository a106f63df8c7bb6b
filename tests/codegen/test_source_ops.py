"""The names of a forward's ops: what is named, in which order, and where nothing can be put around it."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtaps.codegen.source_ops import SourceError, ops_of
from vtaps.spec.source import KINDS, Arg, Op, op_text, parse_op

ATTENTION = '''\
    def forward(self, positions, hidden_states):
        """Attention.
no indent here
        """
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output + hidden_states
'''


def names(source: str) -> list[str]:
    return [op.name for op in ops_of(source)]


def told(source: str) -> list[str]:
    return [op_text(op) for op in ops_of(source)]


def body(*lines: str) -> str:
    return "def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines)


def test_an_attention() -> None:
    assert told(ATTENTION) == [
        "5 self_qkv_proj_0 call(hidden_states): self.qkv_proj",
        "5 qkv_0 element of self_qkv_proj_0[0]: self.qkv_proj(hidden_states)",
        "6 qkv_split_0 call(?, dim=-): qkv.split",
        "6 q_0 element of qkv_split_0[0]: qkv.split([self.q_size, self.kv_size], dim=-1)",
        "6 k_0 element of qkv_split_0[1]: qkv.split([self.q_size, self.kv_size], dim=-1)",
        "6 v_0 element of qkv_split_0[2]: qkv.split([self.q_size, self.kv_size], dim=-1)",
        "7 self_rotary_emb_0 call(positions, q, k): self.rotary_emb",
        "7 q_1 element of self_rotary_emb_0[0]: self.rotary_emb(positions, q, k)",
        "7 k_1 element of self_rotary_emb_0[1]: self.rotary_emb(positions, q, k)",
        "8 self_attn_0 call(q, k, v): self.attn",
        "8 attn_output_0 bind of self_attn_0: self.attn(q, k, v)",
        "9 self_o_proj_0 call(attn_output): self.o_proj",
        "9 output_0 element of self_o_proj_0[0]: self.o_proj(attn_output)",
        "10 binop_add_0 binary(output, hidden_states): output + hidden_states",
    ]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("return self.a(self.b(x))", ["self_b_0", "self_a_0"]),
        ("return f(a(x), key=b(x), *c(x))", ["a_0", "c_0", "b_0", "f_0"]),
        ("return one(x) if test(x) else two(x)", ["test_0", "one_0", "two_0"]),
        ("self.state[key(x)] = value(x)", ["value_0", "key_0", "self_state_0"]),
        ("return x * scale(x) + shift(x)", ["scale_0", "binop_mul_0", "shift_0", "binop_add_0"]),
        ("x += self.bias(x)", ["self_bias_0", "x_0"]),
        ("x = x + x", ["binop_add_0", "x_0"]),
        ("return x @ x - x // 2 ** x", ["binop_matmul_0", "binop_pow_0", "binop_floordiv_0", "binop_sub_0"]),
        ("a, (b, c) = f(x)", ["f_0", "a_0"]),
        ("a, *rest = f(x)", ["f_0"]),
        ("a, b = f(x), g(x)", ["f_0", "g_0", "a_0", "b_0"]),
        ("a = b = f(x)", ["f_0", "a_0", "b_0"]),
        ("x: int = f(x)", ["f_0", "x_0"]),
        ("x: f(1)", []),
        ("return super().forward(x)", ["forward_0"]),
        ("return super(type(self), self).forward(x)", ["type_0", "super_0", "forward_0"]),
        ("return (y := f(x)) + y", ["f_0", "y_0", "binop_add_0"]),
        ("return self.layers[0](x)", ["self_layers_0"]),
        ("return (lambda: x)()", ["call_0"]),
        ("return {f(x): g(x), **h(x)}", ["f_0", "g_0", "h_0"]),
        ("return x", []),
    ],
)
def test_what_is_named_and_in_which_order(line: str, wanted: list[str]) -> None:
    assert names(body(line)) == wanted


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["return f(x, g(x), 2, -1, self.a, x[0], k=x, m=None)"], "x, @g_0, -, -, ?, ?, k=x, m=-"),
        (["return f(*x, x, k=x, **x)"], "*, *, k=x, *"),
        (["return f(g(x)[1], k=g(x)[0][1])"], "@g_0[1], k=?"),
        (["return f(self, lambda: x, [y for y in x], f'{x}')"], "-, -, -, -"),
        (["return f(y := g(x))"], "@g_0"),
        # Something else than an op binds these, or a part of them.
        (["for x in x: pass", "return f(x)"], "?"),
        (["with x as y: pass", "return f(x, y)"], "x, ?"),
        (["y, *z = x", "a, (b, c) = x", "return f(y, z, a, b)"], "?, ?, a, ?"),
        (["y = x", "y[0] = 1", "return f(y)"], "?"),
        (["try: pass", "except Exception as y: pass", "return f(y)"], "?"),
        (["import a.b as y", "del y", "return f(y)"], "?"),
        (["def y(): nonlocal x", "return f(x, y)"], "?, ?"),
        (["z = [(y := a) for a in x]", "return f(y, a)"], "?, a"),
        (["match x:", "    case [y, *z]: return f(y, z)"], "?, ?"),
    ],
)
def test_what_a_call_takes_in(lines: list[str], wanted: str) -> None:
    (op,) = [op for op in ops_of(body(*lines)) if op.name == "f_0"]
    assert f"f_0 call({wanted}): f" in op_text(op)
    assert parse_op(op_text(op)) == op


def test_what_is_in_a_loop_takes_nothing_in_that_can_be_tapped() -> None:
    ops = ops_of(body("for y in x:", "    f(y)", "return [g(z) for z in x]"))
    assert all(not op.args for op in ops)


def test_a_subscripted_value_is_an_element_of_it() -> None:
    assert told(body("y = f(x)[0]", "a.b[0] = g(x)", "self.c = g(x)[1]", "z = (x + y)[2]"))[1::2] == [
        "2 y_0 bind of f_0[0]: f(x)[0]",
        "3 a_b_0 item of g_0: g(x)",
        "4 self_c_0 bind of g_1[1]: g(x)[1]",
        "5 z_0 bind of binop_add_0[2]: (x + y)[2]",
    ]


def test_a_name_of_what_a_loop_binds_is_no_value_of_its_own() -> None:
    (op,) = ops_of(body("for y in x: pass", "z = y"))
    assert (op.name, op.fixed) == ("z_0", "a name of what `y` is then")


def test_names_count_over_the_whole_function() -> None:
    assert names(body("if x:", "    y = f(x)", "else:", "    y = f(x)", "return f(y)")) == [
        "f_0",
        "y_0",
        "f_1",
        "y_1",
        "f_2",
    ]


def test_what_is_in_a_loop_says_so() -> None:
    ops = ops_of(body("for layer in layers(x):", "    x = layer(x)", "while go(x):", "    x = x + 1", "return f(x)"))
    assert {op.name: op.repeats for op in ops} == {
        "layers_0": False, "layer_0": True, "x_0": True, "go_0": True, "binop_add_0": True, "x_1": True, "f_0": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("return [f(y) for y in x]", "in a comprehension"),
        ("return map(lambda y: f(y), x)", "in a lambda"),
        ("return f'{f(x)}'", "in an f-string"),
    ],
)
def test_where_nothing_can_be_put_around_an_op(line: str, why: str) -> None:
    (op,) = [op for op in ops_of(body(line)) if op.name == "f_0"]
    assert op.fixed == why


def test_a_nested_function() -> None:
    ops = ops_of(body("def inner(y):", "    return f(y)", "return inner(x)"))
    assert [(op.name, op.fixed) for op in ops] == [("f_0", "in the nested function inner"), ("inner_0", "")]


def test_decorators_and_defaults_are_not_the_bodys() -> None:
    assert names("@wrap(1)\ndef forward(self, x=make()) -> kind(2):\n    return f(x)\n") == ["f_0"]


@pytest.mark.parametrize("source", ["x = 1\n", "def f(x:\n", "class A:\n    pass\n", ""])
def test_what_is_no_function_is_refused(source: str) -> None:
    with pytest.raises(SourceError):
        ops_of(source)


identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,8}_\d{1,2}", fullmatch=True)


def args_of(kinds: list[str]) -> tuple[Arg, ...]:
    return tuple(
        Arg(
            "" if kind == "starred" else f"k{n}" if kind == "keyword" else n,
            "f_0" if kind in ("of", "item") else "",
            n if kind == "item" else None,
            "x" if kind in ("name", "keyword") else "",
            kind == "other",
        )
        for n, kind in enumerate(kinds)
    )


@given(
    st.builds(
        Op,
        identifiers,
        st.integers(1, 999),
        st.sampled_from(KINDS),
        st.text("abc (),.:*[]!→é", max_size=20),
        st.one_of(st.just(""), identifiers),
        st.one_of(st.none(), st.integers(0, 9)),
        st.booleans(),
        st.sampled_from(["", "in a lambda", "in the nested function f"]),
        st.sampled_from(["", "vllm.m.A.f", "vllm.m.f"]),
        st.sampled_from(["", "decorated", "a C function"]),
        st.lists(st.sampled_from(["name", "of", "item", "other", "constant", "starred", "keyword"])).map(args_of),
    )
)
def test_an_op_is_one_line_and_back(op: Op) -> None:
    assert parse_op(op_text(op)) == op


@pytest.mark.parametrize("text", ["", "3 x", "x_0 call: f", "3 x_0 other: f", "3 x_0 call f", "3 x_0 call(x y): f"])
def test_what_is_no_op_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an "):
        parse_op(text)


def forwards() -> Iterator[tuple[str, str]]:
    """The forwards of every model in vLLM, as Python's own parser finds them."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    for file in sorted((Path(found.origin).parent / "model_executor" / "models").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for holder in ast.parse(text).body:
            for node in holder.body if isinstance(holder, ast.ClassDef) else ():
                if isinstance(node, ast.FunctionDef) and node.name == "forward":
                    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    yield f"{file.stem}.{holder.name}", "".join(lines[start - 1 : node.end_lineno])


def callee(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        parts += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.value
    return "_".join([*([node.id] if isinstance(node, ast.Name) else []), *parts[::-1]]) or "call"


def test_every_forward_of_vllm_has_names() -> None:
    """Calls counted by Python's parser, name by name; every name once; a line of the function each."""
    pytest.importorskip("vllm")
    count = 0
    for where, source in forwards():
        ops = ops_of(source)
        assert len({op.name for op in ops}) == len(ops), where
        assert all(1 <= op.line <= source.count("\n") for op in ops), where
        calls = Counter(op.name.rpartition("_")[0] for op in ops if op.kind == "call")
        (function,) = ast.parse("class _:\n" + source if source[:1].isspace() else source).body
        function = function.body[0] if isinstance(function, ast.ClassDef) else function
        assert isinstance(function, ast.FunctionDef)
        wanted = Counter(
            callee(node.func)
            for part in function.body
            for node in ast.walk(part)
            if isinstance(node, ast.Call)
            and not (isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args)
        )
        assert calls == wanted, where
        count += 1
    assert count > 500

"""Taps inside forwards: values that are no rows of columns, and locks made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trees import seed_cache
from vtaps.check import check_file
from vtaps.cli.compile import show_forwards
from vtaps.runtime import forward_text, source_taps
from vtaps.runtime.block import Location
from vtaps.runtime.compat.forwards import tapped
from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.program import LockError
from vtaps.runtime.source_taps import At, ForwardError, rows_of, value_of


def test_rows_of_columns_are_a_view() -> None:
    whole = torch.zeros(5, 24)
    halves = whole[:, :12].view(5, 3, 4)
    rows_of(halves, "here")[2, 5] = 1
    assert whole[2, 5] == 1 and whole.sum() == 1
    assert rows_of(torch.zeros(5, 1, 4)[:, :, ::1], "here").shape == (5, 4)


@pytest.mark.parametrize("x", [torch.zeros(5, 3, 4).transpose(1, 2), torch.zeros(5, 1, 4).expand(5, 3, 4)])
def test_what_has_no_such_view_is_refused_by_name(x: torch.Tensor) -> None:
    with pytest.raises(ForwardError, match=r"here: \[5, \d, \d\] with strides .* is not rows of columns"):
        rows_of(x, "here")


FORWARD = {"file": "vllm/a.py", "digest": "sha256:0", "ops": ["1 x_0 call: f"]}


@pytest.mark.parametrize(
    ("forwards", "said"),
    [
        ([FORWARD], "forwards: list where a mapping was expected"),
        ({"vllm.a.f": {**FORWARD, "ops": "abc"}}, "forwards.vllm.a.f: not an op: 'a'"),
        ({"vllm.a.f": {**FORWARD, "ops": [1]}}, "forwards.vllm.a.f: "),
        ({"vllm.a.f": None}, "forwards.vllm.a.f: "),
    ],
)
def test_a_forward_of_a_lock_that_is_none_is_named(forwards: Any, said: str) -> None:
    lock = {"lock": 1, "block": {"structure": "s", "digest": "d"}, "forwards": forwards}
    with pytest.raises(LockError) as error:
        parse_program(lock, Path())
    assert said in str(error.value)


@pytest.mark.parametrize("file", ["", "..", "../x.py", "/etc/passwd", "vllm/\0x.py", "no_such_package/x.py", "None"])
def test_a_file_that_is_no_packages_has_no_lines(file: str) -> None:
    assert forward_text.file_lines(file) is None


def test_lines_are_counted_as_python_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted").mkdir()
    (tmp_path / "counted" / "__init__.py").write_bytes(b"")
    text = 'a = """\x0c\xe2\x80\xa8"""\r\n\x0c\r\nclass A:\r\n    def forward(self):\r\n        return 1\r\n'
    (tmp_path / "counted" / "a.py").write_bytes(text.encode("latin-1"))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = forward_text.find_texts("counted.a.A.forward", "counted/a.py")
    assert found == ["    def forward(self):\n        return 1\n"]


LOCK = Path(__file__).parents[1] / "golden" / "blocks" / "forwards" / "spec.lock.json"


def test_the_text_of_a_function_that_a_forward_calls_guards_the_lock_too() -> None:
    pytest.importorskip("vllm")
    lock = json.loads(LOCK.read_text(encoding="utf-8"))
    where = "vllm.model_executor.models.commandr.CohereAttention._apply_qk_norm"
    assert where in lock["forwards"] and forward_text.changed(parse_program(lock, Path())) is None
    lock["forwards"][where]["digest"] = "sha256:0"
    told = forward_text.changed(parse_program(lock, Path()))
    assert told is not None and told.startswith(
        f"{where} is another text in the installed vLLM: compiled for the ops q_v"
    )


def test_a_forward_is_shown_with_the_copy_that_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    seed_cache(tmp_path, monkeypatch)
    plan = check_file(LOCK.with_name("spec.yaml")).plan
    assert plan is not None
    show_forwards(plan)
    added = [line[1:].strip() for line in capsys.readouterr().out.splitlines() if line[:2] == "+ "]
    assert added == [
        "q, k = __vtaps_self__apply_qk_norm_0__(self, q, k)",
        'parallel_block_output = __vtaps_tap__("binop_add_0.input[0]", hidden_states_attention) + hidden_states_mlp',
        'hidden_states = __vtaps_tap__("binop_add_1.input[0]", residual) + parallel_block_output',
        'k = __vtaps_tap__("k_view_0", k.view(*k.shape[:-1], -1, self.head_dim))',
        'q = __vtaps_tap__("q_view_1", q.view(*q.shape[:-2], -1))',
    ]


@pytest.mark.parametrize("which", ["forward", "inside"])
def test_a_lock_without_the_text_of_a_function_is_refused(which: str) -> None:
    lock = json.loads(LOCK.read_text(encoding="utf-8"))
    site = next(site for site in lock["sites"].values() if "inside" in site)
    del lock["forwards"][site[which]]
    with pytest.raises(LockError, match=f"forwards has no {site[which]}"):
        parse_program(lock, Path())


DEFINED = """\
if True:
    class A:
        def forward(self):
            return 1
else:
    class A:
        def forward(self):
            return 2

def make():
    try:
        class B:
            def forward(self):
                def inner():
                    return 3
                return inner
    finally:
        pass
"""


@pytest.mark.parametrize(
    ("where", "lines"),
    [
        ("A.forward", ["return 1", "return 2"]),
        ("make.<locals>.B.forward", ["return inner"]),
        ("make.<locals>.B.forward.<locals>.inner", ["return 3"]),
        ("B.forward", []),
        ("A", []),
    ],
)
def test_functions_in_functions_and_branches_are_found(
    where: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "branched").mkdir()
    (tmp_path / "branched" / "__init__.py").write_text(DEFINED)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = forward_text.find_texts(f"branched.{where}", "branched/__init__.py")
    assert [text.splitlines()[-1].strip() for text in found] == lines


class Fills(nn.Module):
    """What it calls fills a tensor that it takes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out.add_(x)
        self.fill(out, x)
        return out

    def fill(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out.add_(x * 2)


def test_what_a_call_takes_in_is_handed_on_itself() -> None:
    """A read there leaves what the call writes into its argument where it was; an edit is of the tensor."""
    Fills.forward.__module__ = Fills.fill.__module__ = "vllm.toy"
    x = torch.arange(6.0).view(2, 3)
    seen: list[torch.Tensor] = []

    def act(scale: float) -> Any:
        def acting(rows: torch.Tensor, _: Any, number: int) -> None:
            seen.append(rows.clone())
            rows.mul_(scale)

        return acting

    for scale, expected in ((1.0, 3 * x), (0.0, 2 * x)):
        module, name = Fills(), "source.self_fill_0.input[0]"
        place = Location(name, "", lambda t, x: None, None, 0, None, None, "self_fill_0")
        made = tapped(module, [value_of(place)])
        assert made is not None
        at = At(place, 0, act(scale))
        made.put(module, "", lambda function, at=at: source_taps._tap(function, [at]))  # type: ignore[misc]
        assert torch.equal(module(x), expected) and torch.equal(seen[-1], x)


def test_rows_that_share_memory_are_not_written_into() -> None:
    place = Location("here", "", lambda t, x: None, None, 0, None, None, "f_0")
    acting = source_taps._acting(At(place, 0, lambda x, _, number: None))
    with pytest.raises(ForwardError, match=r"here: \[5, 3\] with strides \[1, 0\] shares its rows or columns"):
        acting(torch.zeros(5, 1).expand(5, 3))

"""Taps inside forwards: values that are no rows of columns, and locks made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vtaps.runtime import forward_text
from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.program import LockError
from vtaps.runtime.source_taps import ForwardError, rows_of


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

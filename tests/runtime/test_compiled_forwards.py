"""Taps in the forward of a module that vLLM compiles by itself: in that module alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CompilationMode

from tests.runtime.decorated import Doubles, Inherits, Triples, build, expected, outputs, put, rows_of, serve, tap_all
from vtaps.codegen.instrument import InstrumentError
from vtaps.runtime.compat.compiled_forwards import is_compiled
from vtaps.runtime.compat.vllm_0_32 import _recorded
from vtaps.runtime.hooks import InstallError
from vtaps.runtime.program import SiteEntry


@pytest.fixture(params=["1", "0"], ids=["by its code", "by Dynamo's cache"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways in which vLLM calls what was compiled."""
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    monkeypatch.setenv("VLLM_USE_BYTECODE_HOOK", request.param)
    yield
    torch._dynamo.reset()


def test_each_module_has_its_own_taps(calls: None) -> None:
    kinds = (Doubles, Inherits, Triples)
    before = [(kind.forward, kind.forward.__code__) for kind in kinds]
    model = build()
    tap_all(model)
    graphs = []
    for x, first in ((rows_of(3), 100.0), (rows_of(5), 300.0), (rows_of(4), -7.0)):
        added = {number: first + number for number in range(5)}
        with serve(added) as called:
            for path, found in outputs(model, x).items():
                assert torch.equal(found, expected(path, x, added)), path
        assert called == [0, 1, 2, 3, 4]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1, "other rows or numbers were compiled anew"
    # The classes are what they were, and a model after this one has no taps.
    assert [(kind.forward, kind.forward.__code__) for kind in kinds] == before
    assert type(model["plain"]) is Doubles and isinstance(model["first"], Doubles)
    after = build()
    if os.environ["VLLM_USE_BYTECODE_HOOK"] == "0":
        # Dynamo's cache goes by a function's code, and there vLLM lets models of one class share it.
        del after["holds"]
    with serve(dict.fromkeys(range(5), 100.0)) as called:
        for path, found in outputs(after, x).items():
            assert torch.equal(found, expected(path, x, dict.fromkeys(range(5), 0.0))), path
    assert called == []


def test_a_module_that_is_not_compiled_runs_it_as_it_is(calls: None) -> None:
    model, x, added = build(CompilationMode.NONE), rows_of(3), {number: number + 1.0 for number in range(5)}
    tap_all(model)
    assert not is_compiled(model["first"])
    with serve(added) as called:
        for path, found in outputs(model, x).items():
            assert torch.equal(found, expected(path, x, added)), path
    assert called == [0, 1, 2, 3, 4]


def test_a_forward_that_has_been_compiled_is_refused(calls: None) -> None:
    model = build()
    outputs(model, rows_of(3))
    with pytest.raises(InstrumentError, match=r"vLLM has compiled Doubles\.forward already"):
        put(model["first"], "first", "binop_mul_0", 0)


@pytest.mark.parametrize(
    ("module", "op", "said"),
    [
        ("first", "binop_mul_0", None),
        ("first.inner", None, None),
        ("first.inner", "x_0", None),
        ("first", None, "first is not inside what vLLM compiles"),
        ("lone", "x_0", "lone is not inside what vLLM compiles"),
    ],
)
def test_a_lock_s_recorded_locations_are_held_against_the_model(module: str, op: str | None, said: str | None) -> None:
    """Of a compiled module itself what its forward computes, of those in it their inputs and outputs too."""
    model: Any = nn.ModuleDict({**build(), "lone": nn.Linear(4, 4)})
    site = SiteEntry("here", module, None, None, None, None, None, 4, mode="recorded", op=op)
    session: Any = SimpleNamespace(program=SimpleNamespace(sites={"here": site}))
    if said is None:
        assert _recorded(session, model)(module)
        return
    with pytest.raises(InstallError, match=re.escape(said)):
        _recorded(session, model)

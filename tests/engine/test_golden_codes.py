"""The golden cases of codes that only an engine can cause: what is shown when a real one refuses or fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.case import LAYERS, arm, request, tiny_llama, write_case
from vtaps.runtime import hooks, session
from vtaps.runtime.engine import Engine, EngineError
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.reporters import render

pytestmark = pytest.mark.engine

CASES = Path(__file__).parents[1] / "golden" / "diagnostics"
READS = {"stream": {"kind": "rows", "sites": ["resid_post[1]"], "tokens": {"rows": "all"}}}
GREEDY = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
Cause = Callable[[Path, Path, pytest.MonkeyPatch], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def start(
    folder: Path,
    model: Path,
    *,
    in_process: bool = True,
    broken: str = "",
    mode: str = "eager",
    tap_memory: int | None = None,
    **vllm: Any,
) -> Engine:
    lock, block = write_case(
        folder, model, reads=READS, arms={"look": arm(reads=["stream"])}, vllm=vllm, broken=broken, mode=mode
    )
    lock["engine"]["tap_memory"] = tap_memory
    return Engine(lock, folder, block, folder / "manifest", in_process=in_process)


def no_plugin(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A worker that may not load vtaps' plug-in."""
    patch.setenv("VLLM_PLUGINS", "none")
    patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    start(folder, model, in_process=False)


def unknown(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A request that the worker would refuse: its arm has no such sweep point."""
    with start(folder, model) as engine:
        list(engine.run([request("france", "look", [5, 6], point=3)], lambda _: GREEDY))


def fault(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A statement of the block that raises, with the line of the spec behind it."""
    start(folder, model, broken="resid_post[1]")


def memory(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A lock whose slots do not fit what it allows: `check` refuses the spec, a lock may be made by hand."""
    start(folder, model, mode="taps", tap_memory=1 << 20, max_num_batched_tokens=2048)


def silent(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A model that does not call a tapped module's forward: here it goes past the wrapper around it."""
    install = hooks.install

    def past_one(block: Any, program: Any, tapped: Any, act_of: Any) -> tuple[str, ...]:
        names = install(block, program, tapped, act_of)
        layer = tapped.get_submodule("model.layers.1")
        layer.forward = type(layer).forward.__get__(layer)
        return names

    patch.setattr(session, "install", past_one)
    start(folder, model, mode="taps", max_num_batched_tokens=64)


def twice(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """One key for two requests that are alive together."""
    with start(folder, model) as engine:
        list(engine.run([request("france", "look", [5, 6])] * 2, lambda _: GREEDY))


def too_long(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A length that the model does not have."""
    start(folder, model, max_model_len=100_000)


def another_forward(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A lock that was made for another text of a forward with taps."""
    lock, block = write_case(folder, model, reads=READS, arms={"look": arm(reads=["stream"])})
    lock["forwards"] = {
        "vllm.model_executor.models.llama.LlamaMLP.forward": {
            "file": "vllm/model_executor/models/llama.py",
            "line": 1,
            "digest": "sha256:" + "0" * 64,
            "ops": ["2 self_gate_up_proj_0 call: self.gate_up_proj", "3 self_act_fn_0 call: self.act_fn"],
        }
    }
    Engine(lock, folder, block, folder / "manifest")


CAUSES: dict[str, Cause] = {
    "VT505-text": another_forward,
    "VT601-plugin": no_plugin,
    "VT603-point": unknown,
    "VT606-twice": twice,
    "VT607-fault": fault,
    "VT607-length": too_long,
    "VT607-memory": memory,
    "VT608-silent": silent,
}


@pytest.mark.parametrize("name", list(CAUSES))
def test_findings(name: str, model: Path, tmp_path: Path, regen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LAYERS > 1
    with pytest.raises(EngineError) as caught:
        CAUSES[name](tmp_path, model, monkeypatch)
    assert caught.value.code == name[:5]
    text = render([Diagnostic(caught.value.code, caught.value.message, Span("case.yaml"))], "text", {})
    text = re.sub(r"/\S*/", "…/", text)
    expected = CASES / name / "expected.txt"
    if regen:
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8"), "if this is right: pytest --regen"

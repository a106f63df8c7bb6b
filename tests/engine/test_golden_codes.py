"""The golden cases of codes that only an engine can cause: what is shown when a real one refuses or fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.case import LAYERS, arm, request, tiny_llama, write_case
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


def start(folder: Path, model: Path, *, in_process: bool = True, broken: str = "", **vllm: Any) -> Engine:
    lock, block = write_case(folder, model, reads=READS, arms={"look": arm(reads=["stream"])}, vllm=vllm, broken=broken)
    return Engine(lock, folder, block, folder / "manifest", in_process=in_process)


def no_plugin(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A worker that may not load vtaps' plug-in."""
    patch.setenv("VLLM_PLUGINS", "none")
    patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    start(folder, model, in_process=False)


def fault(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A statement of the block that raises, with the line of the spec behind it."""
    with start(folder, model, broken="resid_post[1]") as engine:
        list(engine.run([request("france", "look", [5, 6])], lambda _: GREEDY))


def twice(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """One key for two requests that are alive together."""
    with start(folder, model) as engine:
        list(engine.run([request("france", "look", [5, 6])] * 2, lambda _: GREEDY))


def too_long(folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """A length that the model does not have."""
    start(folder, model, max_model_len=100_000)


CAUSES: dict[str, Cause] = {
    "VT601-plugin": no_plugin,
    "VT603-fault": fault,
    "VT606-twice": twice,
    "VT607-length": too_long,
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

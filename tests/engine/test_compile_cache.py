"""vLLM's compile cache over modules that have taps in their own forwards: whose taps come back, and with which numbers.

vLLM keeps whole compiled models on CUDA; its backend works on a CPU too, where it is only turned off.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode

from tests.engine.runs import python
from tests.runtime.decorated import build, expected, outputs, rows_of, serve, tap_all
from vtaps.runtime.compat.vllm_0_32 import compiled

pytestmark = pytest.mark.engine


def define_what_a_cpu_lacks() -> None:
    """vLLM's own backend names operations of CUDA builds, to look for them in a graph."""
    import vllm._custom_ops

    file = Path(vllm.__file__).parent / "compilation" / "passes" / "utility" / "fix_functionalization.py"
    names = set(re.findall(r"torch\.ops\._C\.(\w+)\.default", file.read_text(encoding="utf-8")))
    library = torch.library.Library("_C", "FRAGMENT")
    for name in sorted(names):
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}(Tensor x) -> ()")
    globals()["_library"] = library  # it lives as long as its operations


def child(out: str, structure: str, first: float) -> None:
    """What the modules put out, and what was compiled."""
    define_what_a_cpu_lacks()
    model = build(CompilationMode.VLLM_COMPILE, structure)
    tap_all(model)
    with serve({number: first + number for number in range(5)}) as called:
        found = {path: x.tolist() for path, x in outputs(model, rows_of(3)).items()}
    Path(out).write_text(json.dumps({"outputs": found, "called": called, "compiled": compiled()}), encoding="utf-8")


STARTS = {"first": ("one", 100.0), "other numbers": ("one", 500.0), "another structure": ("two", 100.0)}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Processes one after another over one cache, with vLLM's whole compiled models in it."""
    folder = tmp_path_factory.mktemp("cache")
    found = {}
    for name, asked in STARTS.items():
        out = folder / f"{name}.json"
        arguments = json.dumps([str(out), *asked])
        variables = {"VLLM_CACHE_ROOT": str(folder), "VLLM_USE_AOT_COMPILE": "1"}
        python("-m", "tests.engine.test_compile_cache", arguments, **variables)
        found[name] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", STARTS)
def test_a_compiled_model_from_the_cache_has_the_taps_of_its_module(
    name: str, starts: dict[str, dict[str, Any]]
) -> None:
    """Modules of one class share name and line, which is all that vLLM's key knows of a forward."""
    first = STARTS[name][1]
    added = {number: first + number for number in range(5)}
    x = rows_of(3)
    for path, found in starts[name]["outputs"].items():
        assert torch.equal(torch.tensor(found), expected(path, x, added)), path
    assert starts[name]["called"] == [0, 1, 2, 3, 4]


def test_other_numbers_trace_and_compile_nothing(starts: dict[str, dict[str, Any]]) -> None:
    first, again, other = (starts[name]["compiled"] for name in STARTS)
    assert first["traced"] > 0 and first["compiled"] > 0 and first["loaded"] == 0
    assert (again["traced"], again["compiled"]) == (0, 0) and again["loaded"] > 0
    assert other["traced"] == first["traced"]


if __name__ == "__main__":
    child(*json.loads(sys.argv[1]))

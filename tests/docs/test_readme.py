"""What README.md shows is what the program prints; ``pytest --regen tests/docs/test_readme.py`` writes it anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.demo_model import cache_folder, is_complete

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
EXAMPLE = "examples/paris.yaml"
FUNCTIONS = ("z_10", "resid_post_24")


def section(name: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- begin: {name} -->\n(.*?)<!-- end -->", re.DOTALL)


def held(name: str, text: str, regen: bool, compared: Callable[[str], str] = str) -> None:
    readme = README.read_text(encoding="utf-8")
    if regen:
        filled = f"<!-- begin: {name} -->\n{text}<!-- end -->"
        readme = section(name).sub(lambda _: filled, readme)
        README.write_text(readme, encoding="utf-8")
    match = section(name).search(readme)
    assert match is not None and compared(match[1]) == compared(text), (
        "if this is right: pytest --regen tests/docs/test_readme.py"
    )


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


def vtaps(*args: str) -> str:
    env = {**os.environ, "COLUMNS": "120", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run([sys.executable, "-m", "vtaps", *args], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def test_spec(regen: bool) -> None:
    held("spec", fenced("yaml", (ROOT / EXAMPLE).read_text(encoding="utf-8")), regen)


def test_block(regen: bool) -> None:
    source = (ROOT / "examples" / "paris.block.py").read_text(encoding="utf-8")
    functions = {
        m[1]: m[0].strip() for m in re.finditer(r"@BLOCK[^\n]*\ndef (\w+)\(.*?(?=\n\n\n|\Z)", source, re.DOTALL)
    }
    held("block", fenced("python", "\n\n\n".join(functions[f] for f in FUNCTIONS)), regen)


@pytest.mark.engine
def test_check_and_run(regen: bool, tmp_path: Path) -> None:
    assert is_complete(cache_folder()), "make model"
    held("check", fenced("console", f"$ vtaps check {EXAMPLE}\n{vtaps('check', EXAMPLE)}"), regen)
    out = vtaps("run", EXAMPLE, "--out", str(tmp_path / "paris")).replace(str(tmp_path), "runs")
    held("run", fenced("console", f"$ vtaps run {EXAMPLE} --out runs/paris\n{sizes_off(out)}"), regen, tables)
    assert "Paris.\\n\\nThe answer" in out


def tables(text: str) -> str:
    """Rows, metrics and files; the last digits, and texts where two tokens are nearly tied, are the processor's."""
    return re.sub(r"-?\d+\.\d+ *", "#", text[text.index("Rows fired") :])


def sizes_off(text: str) -> str:
    return re.sub(r" +\d+(\.\d+)? (B|KiB|MiB)$", "", text, flags=re.MULTILINE)

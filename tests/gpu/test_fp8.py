"""Checkpoints in fp8, which need CUDA: reads and edits are of activations there too."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.engine.test_quantised import served  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mode", ["eager", "taps"])
def test_rows_and_edits_of_a_model_in_fp8(mode: str, tmp_path: Path) -> None:
    """Isolation is not held: one scale for all rows of a step lets neighbours in, and VT507 says so."""
    served("fp8 a tensor", mode, "bfloat16", 0.15, tmp_path)

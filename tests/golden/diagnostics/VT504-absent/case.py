"""No vLLM in the environment and no tree in the cache."""

from pathlib import Path

from tests.golden.cases import Found, copy_of
from vtaps.check import check_file
from vtaps.runtime import trees


def findings(folder: Path) -> Found:
    copy_of("blocks/families", folder)
    before, trees.vllm_version = trees.vllm_version, lambda: None
    try:
        result = check_file("spec.yaml")
    finally:
        trees.vllm_version = before
    return result.diagnostics, result.documents

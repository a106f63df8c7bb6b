"""The versioned JSON Schemas of the spec, the lock, the tree snapshot, the run index and a verification."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

ENGINE_ARGS = "vllm-0.32-engine-args.json"
FILES = {
    "spec": "spec-v1.schema.json",
    "lock": "lock-v1.schema.json",
    "run": "run-v1.schema.json",
    "verify": "verify-v1.schema.json",
    "tree": "tree-v4.schema.json",
    "engine-args": ENGINE_ARGS,
}
"""What each schema is of, and its file."""


def text(of: str) -> str:
    """One of ``FILES`` as a file that stands alone: the spec's has vLLM's engine arguments in it."""
    if of == "spec":
        return json.dumps(spec_schema(), indent=2, ensure_ascii=False) + "\n"
    return files(__name__).joinpath(FILES[of]).read_text(encoding="utf-8")


@cache
def load(name: str) -> dict[str, Any]:
    """The schema file ``name``, such as ``lock-v1.schema.json``, as it stands.  Shared: do not change it."""
    data: dict[str, Any] = json.loads(files(__name__).joinpath(name).read_text(encoding="utf-8"))
    return data


@cache
def spec_schema() -> dict[str, Any]:
    """The schema of the spec in one piece, vLLM's engine arguments included.  Shared: do not change it."""
    text = json.dumps(load("spec-v1.schema.json")).replace(f'"{ENGINE_ARGS}"', '"#/$defs/engine_args"')
    schema: dict[str, Any] = json.loads(text)
    arguments = {k: v for k, v in load(ENGINE_ARGS).items() if k != "$schema"}
    schema["$defs"]["engine_args"] = arguments
    return schema

"""Where a model's ``config.json`` is on this machine; the network is never asked."""

from __future__ import annotations

import re
from pathlib import Path

from vtaps.spec.diagnostics import Diagnostic, Span, nearest

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_config(
    path_or_id: str, folder: Path, span: Span, revision: str | None = None
) -> tuple[Path | None, list[Diagnostic]]:
    """The directory that holds ``config.json``: a directory or a file relative to ``folder`` (``~`` allowed),
    or a hub id in the local Hugging Face cache. VT213 says what was looked at."""
    try:
        path = folder / Path(path_or_id).expanduser()
        if path.is_file() and path.name == "config.json":
            return path.parent, []
        if path.is_dir():
            if (path / "config.json").is_file():
                return path, []
            return None, [_missing(f"{path} holds no config.json", span)]
        if path.is_file():
            return None, [_missing(f"{path} is a file, not a model's folder or its config.json", span)]
    except (OSError, ValueError, RuntimeError) as fault:  # too long, a NUL, no home directory
        return None, [_missing(f"{path_or_id!r} is no path: {fault}", span)]

    looked = [str(path)]
    if _HUB_ID.fullmatch(path_or_id):
        cached, where = _from_hub_cache(path_or_id, revision)
        if cached is not None:
            return cached, []
        looked.append(where)
    near = _near(path)
    message = f"no model {path_or_id!r} on this machine: looked at {' and '.join(looked)}"
    note = f"`hf download {path_or_id}` fetches it" if len(looked) > 1 and near is None else None
    return None, [Diagnostic("VT213", message, span, nearest=near, note=note)]


def _missing(message: str, span: Span) -> Diagnostic:
    return Diagnostic("VT213", message, span)


def _from_hub_cache(repo: str, revision: str | None) -> tuple[Path | None, str]:
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    where = f"the Hugging Face cache {constants.HF_HUB_CACHE}"
    try:
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except HFValidationError:
        return None, where
    return (Path(found).parent, where) if isinstance(found, str) else (None, where)


def _near(path: Path) -> str | None:
    """The nearest sibling of the first part of ``path`` that does not exist, with the rest kept."""
    missing = path
    while not missing.parent.is_dir() and missing.parent != missing:
        missing = missing.parent
    try:
        siblings = [p.name for p in missing.parent.iterdir() if p.is_dir()]
    except OSError:
        return None
    close = nearest(missing.name, siblings)
    return str(missing.parent / close / path.relative_to(missing)) if close else None

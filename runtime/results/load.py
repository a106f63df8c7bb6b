"""``vtaps.load(folder)``: a finished run, its tables and its reads, nothing read before it is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vtaps.runtime.results.array import ReadArray
from vtaps.spec.diagnostics import nearest
from vtaps.spec.files import read_bytes


class RunError(Exception):
    """The folder holds no finished run, or not all of it."""


class RunResult:
    """A finished run.  ``info`` is run.json, ``lock`` the lock it was served from."""

    def __init__(self, path: Path, info: Mapping[str, Any], lock: Mapping[str, Any]) -> None:
        self.path = path
        self.info = info
        self.lock = lock

    def __repr__(self) -> str:
        counts = self.info["counts"]
        return f"<RunResult {self.path}: {counts['requests']} requests, reads {', '.join(self.reads) or 'none'}>"

    def _table(self, name: str) -> Any:
        return _parquet(self.path / name)

    @cached_property
    def requests(self) -> Any:
        """pyarrow.Table, one row a completion, in the order of the plan: ``request``, ``completion``, ``prompt``,
        ``group``, ``arm``, a column a sweep path and prompt column, ``prompt_token_ids``, ``token_ids``,
        ``prompt_text``, ``text``, ``finish_reason``, ``fired.EDIT`` and ``expected.EDIT`` (int64, null where the arm
        does not use the edit).  Of a gate: ``scored.GATE``, and ``passed.GATE`` (rows), or ``decided.GATE`` (bool) and
        ``score.GATE`` (float32) where it holds for a request."""
        return self._table("requests.parquet")

    @cached_property
    def metrics(self) -> Any:
        """pyarrow.Table, one row a value: the request's columns, ``metric``, ``position``, ``step`` (the generated
        token that the row samples), ``value`` (float32)."""
        return self._table("metrics.parquet")

    @cached_property
    def tokens(self) -> Any:
        """pyarrow.Table, one row a token, prompt included: ``request``, ``completion``, ``position``, ``step`` (null
        in the prompt), ``token_id``, ``text``, ``turn``, ``fired`` (edits that acted on its row; null for the last
        token, which has none), ``overridden``, ``logprob``."""
        return self._table("tokens.parquet")

    @cached_property
    def gates(self) -> Any:
        """pyarrow.Table of every row that a gate scored: :meth:`gate` of all of them, with a column ``gate``.  Raises
        RunError where the run has none."""
        return self._table("gates.parquet")

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the reads, as ``run[NAME]`` takes them."""
        return tuple(self.info["reads"])

    def __getitem__(self, name: str) -> ReadArray:
        """The rows of one read.  Raises KeyError, with the nearest name, where the run has no such read."""
        if name not in self.info["reads"]:
            raise KeyError(_unknown("read", name, self.reads))
        try:
            return ReadArray.open(self, name)
        except (OSError, ValueError, pa.ArrowException) as e:
            raise RunError(f"read {name} of {self.path} cannot be opened: {e}") from e

    def __contains__(self, name: object) -> bool:
        return name in self.info["reads"]

    def fired(self, edit: str) -> Any:
        """pyarrow.Table of the completions whose arm uses ``edit``: ``request``, ``completion``, ``prompt``,
        ``group``, ``arm``, sweep columns, ``fired`` and ``expected`` (int64).  Raises KeyError for an unknown edit."""
        if edit not in self.lock["edits"]:
            raise KeyError(_unknown("edit", edit, tuple(self.lock["edits"])))
        table = self.requests
        keep = ["request", "completion", "prompt", "group", "arm", *self.info["columns"]["sweep"].values()]
        used = table.filter(pc.is_valid(table[f"expected.{edit}"]))
        fired = used.select([*keep, f"fired.{edit}", f"expected.{edit}"])
        return fired.rename_columns([*keep, "fired", "expected"])

    def gate(self, name: str) -> Any:
        """pyarrow.Table of the rows that a gate scored: ``request``, ``completion``, ``prompt``, ``group``, ``arm``,
        sweep columns, ``position``, ``step``, ``score`` (float32, the very number that it was decided on), ``passed``:
        what was decided there, of a gate that holds for a request the same in all of its rows.

        Raises KeyError for an unknown gate.
        """
        gates = self.lock.get("gates") or {}
        if name not in gates:
            raise KeyError(_unknown("gate", name, tuple(gates)))
        table = self.gates
        return table.filter(pc.equal(table["gate"], name)).drop_columns(["gate"])


def _unknown(what: str, name: str, names: tuple[str, ...]) -> str:
    near = nearest(name, names)
    return (
        f"no {what} named {name!r}"
        + (f"; nearest is {near!r}" if near else "")
        + (f"; there are {', '.join(names)}" if names else "; there are none")
    )


def _parquet(path: Path) -> Any:
    try:
        return pq.read_table(path, memory_map=True)
    except (OSError, pa.ArrowException) as e:
        raise RunError(f"{path} cannot be read: {e}") from e


def load(path: str | Path) -> RunResult:
    """Open a finished run folder.

    Raises RunError where there is no run, where it has not finished, or where a file of it is missing or cut off.
    """
    path = Path(path)
    info = _info(path)
    check_files(path, info)
    return RunResult(path, info, _json(path / info["lock"]["file"]))


def check_files(path: Path, info: Mapping[str, Any]) -> None:
    """Raises RunError where a file that run.json lists is missing or of another size."""
    for name, size in info["files"].items():
        file = path / name
        if not file.is_file():
            raise RunError(f"{path} is not whole: {name} is missing")
        if file.stat().st_size != size:
            raise RunError(f"{path} is not whole: {name} has {file.stat().st_size} bytes, not {size}")


def _info(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise RunError(f"there is no folder {path}")
    if not path.is_dir():
        raise RunError(f"{path} is a file, not the folder of a run")
    file = path / "run.json"
    if not file.exists():
        if (path / "partial").is_dir():
            raise RunError(f"the run in {path} has not finished; `vtaps run` with the same --out resumes it")
        raise RunError(f"{path} is not a run: it has no run.json")
    info = _json(file)
    if info.get("run") != 1 or info.get("status") != "complete":
        raise RunError(f"{file} is not the index of a finished run of this version of vtaps")
    return info


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as e:
        raise RunError(f"{path} cannot be read: {e}") from e
    if not isinstance(value, dict):
        raise RunError(f"{path} does not hold a JSON object")
    return value

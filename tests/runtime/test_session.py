"""Hooks, session and harvest on a toy model: what is found, what is refused, what is a fault."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vtaps.runtime.hooks import BlockFault, InstallError, parameter_names
from vtaps.runtime.program import LockError
from vtaps.runtime.rowtable import Scheduled, TableError
from vtaps.runtime.session import Manifest, Session
from vtaps.runtime.transport import unpack

WIDTH = 4


class Op(nn.Module):
    """Dispatches as vLLM's custom ops do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return (x + 1, x) if residual is None else (x + residual, residual)


class Compiled(nn.Module):
    """Skips ``nn.Module.__call__``, as vLLM's compile decorator does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.op, self.inner, self.idle = Op(), Compiled(), nn.Identity()
        self.twice = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.op(x, residual=None)
        if self.twice:
            self.op(x)
        out: torch.Tensor = self.inner(hidden + residual)
        return out


def session(tmp_path: Path, sites: dict[str, dict[str, Any]], body: str = "", **more: Any) -> Session:
    """A block with one read (``rows``, everywhere) of ``sites``, attached to a toy."""
    lines = [
        "from vtaps.runtime import block as vt",
        'BLOCK = vt.Block(spec="", tree="", structure="s", vllm="", architecture="")',
    ]
    for number, (name, site) in enumerate(sites.items()):
        where = {k: v for k, v in site.items() if k in ("module", "output", "input", "residual", "columns")}
        lines += [
            f"@BLOCK.location({name!r}, **{where!r})",
            f"def at_{number}(t, x, residual=None):",
            "    # toy.yaml:7 reads.look: everything",
            body or '    vt.keep(t, "look", x, residual)',
        ]
    block = tmp_path / "toy.block.py"
    block.write_text("\n".join(lines) + "\n")
    lock = {
        "lock": 1,
        "spec": {"file": "toy.yaml"},
        "block": {"digest": "sha256:" + hashlib.sha256(block.read_bytes()).hexdigest(), "structure": "s"},
        "sites": {name: {"width": WIDTH, "layer": None, **site} for name, site in sites.items()},
        "reads": {"look": {"kind": "rows", "sites": list(sites), "tokens": {"rows": "all"}}},
        "arms": {"a": {"reads": ["look"], "points": [{}]}},
        **more,
    }
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    return Session(Manifest(block, tmp_path / "lock.json", tmp_path))


X = torch.arange(12, dtype=torch.float32).reshape(3, WIDTH)


def step(s: Session, model: nn.Module) -> None:
    s.table.admit("r", {"key": "k", "arm": "a", "point": 0}, 3)
    s.begin([Scheduled("r", 0, np.arange(3), 0)])
    model(X.clone())
    s.end(None)


def run(s: Session) -> dict[str, Any]:
    model = Toy()
    s.attach(model, lambda x: x)
    step(s, model)
    record = unpack(s.collect([("k", 0, 1)]))["k", 0]
    return {site: read.values["rows"] for (_, site), read in record.reads.items()}


def test_where_values_are_found(tmp_path: Path) -> None:
    x = X.numpy()
    got = run(session(tmp_path, {
        "by name": {"module": "op", "input": "x"},
        "no residual yet": {"module": "op", "input": "x", "residual": "residual"},
        "element": {"module": "op", "output": 1},
        "pair": {"module": "op", "output": 0, "residual": 1},
        "columns": {"module": "op", "output": 0, "columns": [1, 3], "width": 2},
        "past __call__": {"module": "inner"},
        "its input": {"module": "inner", "input": "x"},
        "bare as element 0": {"module": "inner", "output": 0},
        "whole model": {"module": ""},
    }))  # fmt: skip
    expected = {
        "by name": x, "no residual yet": x, "element": x, "pair": 2 * x + 1, "columns": (x + 1)[:, 1:3],
        "past __call__": 2 * (2 * x + 1), "its input": 2 * x + 1, "bare as element 0": 2 * (2 * x + 1),
        "whole model": 2 * (2 * x + 1),
    }  # fmt: skip
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_custom_ops_have_the_names_of_forward_native() -> None:
    assert parameter_names(Op()) == ("x", "residual")


@pytest.mark.parametrize(
    ("site", "says"),
    [
        ({"module": "gone"}, "s: the model has no module gone"),
        ({"module": "op", "input": "y"}, "s: op has no input y; it has x, residual"),
        ({"module": "op", "input": "x", "residual": "z"}, "s: op has no input z"),
    ],
)
def test_what_is_not_there_is_refused_at_start(site: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=says):
        run(session(tmp_path, {"s": site}))


@pytest.mark.parametrize(
    ("site", "says"),
    [
        ({"module": "op", "output": 2}, "s: op put out 2 values; there is no element 2"),
        ({"module": "op"}, "s: op has tuple there, not a tensor"),
        ({"module": "op", "input": "residual"}, r"s \(residual\): op has NoneType there, not a tensor"),
        ({"module": "inner", "output": 1}, "s: inner put out Tensor, which has no element 1"),
        ({"module": "op", "input": "x", "width": 5}, r"has shape \[3, 4\] there; \[3, 5\] was compiled"),
        ({"module": "idle"}, "read look saw nothing at s"),
    ],
)
def test_what_is_not_there_at_run_time_is_a_fault(site: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(BlockFault, match=says):
        run(session(tmp_path, {"s": site}))


def test_a_module_called_twice_is_a_fault(tmp_path: Path) -> None:
    s, model = session(tmp_path, {"s": {"module": "op", "input": "x"}}), Toy()
    s.attach(model, lambda x: x)
    model.twice = True
    with pytest.raises(BlockFault, match="s: op was called twice in one step"):
        step(s, model)


def test_a_statement_that_is_missing_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(BlockFault, match="read look saw nothing at s"):
        run(session(tmp_path, {"s": {"module": "op", "input": "x"}}, body="    pass"))


@pytest.mark.parametrize("lines", [{}, {"6": 31}])
def test_an_exception_names_the_lines_of_block_and_spec(lines: dict[str, int], tmp_path: Path) -> None:
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}}, body="    x[99]")
    block = json.loads((tmp_path / "lock.json").read_text())
    block["block"]["lines"] = lines
    (tmp_path / "lock.json").write_text(json.dumps(block))
    s = Session(s.manifest)
    where = "toy.yaml:31" if lines else "toy.yaml:7"
    with pytest.raises(BlockFault, match=rf"^toy\.block\.py:6 \({where}\), at s: IndexError"):
        run(s)


def test_outside_a_step_the_model_is_untouched(tmp_path: Path) -> None:
    """Dummy and warm-up runs call the model with no step begun."""
    s, model = session(tmp_path, {"s": {"module": "op", "input": "x"}}, body="    raise SystemError"), Toy()
    s.attach(model, lambda x: x)
    model(X.clone())
    s.begin([])
    model(X.clone())


def test_a_changed_block_is_refused(tmp_path: Path) -> None:
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    with s.manifest.block.open("a") as file:
        file.write("# changed\n")
    with pytest.raises(LockError, match="not the block that was locked"):
        Session(s.manifest)


def long_mean(tmp_path: Path, computed: int) -> tuple[Session, np.ndarray[Any, Any]]:
    """A request of 3 prompt tokens whose rows 0 … computed−1 went into a mean, and those rows."""
    reads = {"look": {"kind": "mean", "sites": ["s"], "tokens": {"rows": "all"}}}
    site = {"module": "op", "input": "x"}
    s, model = session(tmp_path, {"s": site}, body='    vt.mean(t, "look", x)', reads=reads), Toy()
    s.attach(model, lambda x: x)
    rows = np.random.default_rng(0).normal(size=(computed, WIDTH)).astype(np.float32)
    s.table.admit("r", {"key": "k", "arm": "a", "point": 0}, 3)
    for start, stop in [(0, 2), (2, 3), *((i, i + 1) for i in range(3, computed))]:
        s.begin([Scheduled("r", start, np.zeros(stop - start, np.int64), 0)])
        model(torch.from_numpy(rows[start:stop].copy()))
        s.end(None)
    return s, rows


@pytest.mark.parametrize(("computed", "generated"), [(6, 4), (7, 3), (400, 398), (400, 390)])
def test_a_mean_leaves_out_rows_after_the_stop(computed: int, generated: int, tmp_path: Path) -> None:
    s, rows = long_mean(tmp_path, computed)
    read = unpack(s.collect([("k", 0, generated)]))["k", 0].reads["look", "s"]
    count = 3 + generated - 1
    assert read.positions.tolist() == list(range(count)) and read.values["count"].tolist() == [count]
    np.testing.assert_allclose(read.values["mean"][0], rows[:count].astype(np.float64).mean(0), atol=1e-6)


def test_a_mean_that_cannot_leave_them_out_says_so(tmp_path: Path) -> None:
    s, _ = long_mean(tmp_path, 400)
    with pytest.raises(TableError, match="already part of the mean"):
        s.collect([("k", 0, 5)])


def test_a_row_computed_again_counts_once_and_the_later_value_stands(tmp_path: Path) -> None:
    s, model = session(tmp_path, {"s": {"module": "op", "input": "x"}}), Toy()
    s.attach(model, lambda x: x)
    s.table.admit("r", {"key": "k", "arm": "a", "point": 0}, 3)
    for start, stop, value in [(0, 3, 1.0), (3, 4, 2.0), (0, 2, 5.0), (2, 5, 6.0)]:
        s.begin([Scheduled("r", start, np.zeros(stop - start, np.int64), 0)])
        model(torch.full((stop - start, WIDTH), value))
        s.end(None)
    read = unpack(s.collect([("k", 0, 3)]))["k", 0].reads["look", "s"]
    assert read.positions.tolist() == [0, 1, 2, 3, 4]
    assert read.values["rows"][:, 0].tolist() == [5.0, 5.0, 6.0, 6.0, 6.0]


def test_half_precision_travels_as_bits(tmp_path: Path) -> None:
    s, model = session(tmp_path, {"s": {"module": "op", "input": "x"}}), Toy()
    s.attach(model, lambda x: x)
    s.table.admit("r", {"key": "k", "arm": "a", "point": 0}, 3)
    x = torch.linspace(-2, 2, 12).reshape(3, WIDTH).to(torch.bfloat16)
    s.begin([Scheduled("r", 0, np.arange(3), 0)])
    model(x)
    s.end(None)
    read = unpack(s.collect([("k", 0, 1)]))["k", 0].reads["look", "s"]
    assert read.dtype == "bfloat16" and read.values["rows"].dtype == np.uint16
    widened = (read.values["rows"].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(widened, x.float().numpy())

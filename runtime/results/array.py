"""The rows of one read as lazy arrays with named coordinates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vtaps.runtime.results.tensors import Tensor, decoded, memory_map, read_header
from vtaps.spec.diagnostics import nearest

if TYPE_CHECKING:
    from vtaps.runtime.results.load import RunResult

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Shard:
    """One file of a site: its rows are ``start … stop−1`` of the site's."""

    file: str
    tensors: Mapping[str, Tensor]
    start: int
    stop: int


def _shards(folder: Path, files: str | list[str]) -> tuple[_Shard, ...]:
    out: list[_Shard] = []
    for file in [files] if isinstance(files, str) else files:
        tensors = read_header(folder / file)[1]
        start = out[-1].stop if out else 0
        rows = next((t.shape[0] for t in tensors.values()), 0)
        out.append(_Shard(file, tensors, start, start + rows))
    return tuple(out)


@dataclass(frozen=True, eq=False)
class ReadArray:
    """Rows of a read: ``rows`` (pyarrow.Table) names the first axis, ``sites`` the second.

    ``rows`` has ``request``, ``completion``, ``prompt``, ``group``, ``arm``, ``position``, ``step`` (the generated
    token that the row samples; null before the last prompt row) and a column a sweep path.  A mean has one row a
    completion and no position.  ``field`` is what :attr:`values` gives; :attr:`fields` lists what there is.
    Selections are views: nothing is read from disk before values are asked for.
    """

    name: str
    kind: str
    rows: Any
    sites: tuple[str, ...]
    field: str
    _run: RunResult
    _shards: Mapping[str, tuple[_Shard, ...]]
    _index: npt.NDArray[np.int64] | None = None

    @staticmethod
    def open(run: RunResult, name: str) -> ReadArray:
        read = run.info["reads"][name]
        rows = pq.read_table(run.whole(f"reads/{name}/rows.parquet"), memory_map=True)
        rows = _with_sweep(rows, run)
        sites = tuple(read["sites"])
        shards = {site: _shards(run.path, read["sites"][site]) for site in sites}
        fields = tuple(read["fields"])
        preferred = ("rows", "mean", "norm", "project", "probe", "logits", "activations", "python", "pattern")
        field = next((f for f in preferred if f in fields), fields[0] if fields else "rows")
        return ReadArray(name, read["kind"], rows, sites, field, run, shards)

    def __repr__(self) -> str:
        return f"<ReadArray {self.name} ({self.kind}): {len(self)} rows × {len(self.sites)} sites, {self.fields}>"

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of what is kept of a row: ``rows`` (and its ``scale``); ``mean``, ``count``; ``norm``; ``project``;
        ``probe``; ``ids``, ``logits``, ``logsumexp``; ``ids``, ``activations``; ``python``; ``pattern``, ``keys``."""
        return tuple(self._run.info["reads"][self.name]["fields"])

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The layer of each site, None for a site outside the layers."""
        return tuple(self._run.lock["sites"][site].get("layer") for site in self.sites)

    def sel(self, **wanted: Any) -> ReadArray:
        """The rows and sites with these coordinates: a scalar, or a list, tuple, set or range of scalars.

        Names are the columns of :attr:`rows` (``**{"steer.add.scale": 8}`` for one with dots), ``site`` and
        ``layer``.  Both axes are kept.  Raises KeyError for a name or a value that is not there.
        """
        out = self
        for name, value in wanted.items():
            values = list(value) if isinstance(value, list | tuple | set | frozenset | range | np.ndarray) else [value]
            values = [v.item() if isinstance(v, np.generic) else v for v in values]
            if name in ("site", "layer"):
                out = out._at_sites(name, values)
            elif name in self.rows.column_names:
                out = out._at_rows(name, values)
            else:
                names = ["site", "layer", *self.rows.column_names]
                raise KeyError(_unknown(f"read {self.name} has no coordinate", name, names))
        return out

    def _at_sites(self, name: str, values: list[Any]) -> ReadArray:
        labels = self.sites if name == "site" else self.layers
        for value in values:
            if value not in labels:
                raise KeyError(_unknown(f"read {self.name} has no {name}", value, labels))
        kept = tuple(s for s, label in zip(self.sites, labels, strict=True) if label in values)
        return replace(self, sites=kept)

    def _at_rows(self, name: str, values: list[Any]) -> ReadArray:
        column = self.rows[name]
        try:
            there = pa.array(values, type=column.type)
        except (pa.ArrowException, OverflowError) as e:
            raise KeyError(f"coordinate {name} of read {self.name} holds {column.type}, not {values}") from e
        absent = pc.filter(there, pc.invert(pc.is_in(there, value_set=pc.unique(column))))
        if len(absent):
            raise KeyError(
                _unknown(f"read {self.name} has no {name}", absent[0].as_py(), pc.unique(column).to_pylist())
            )
        chosen = np.flatnonzero(pc.is_in(column, value_set=there).to_numpy(zero_copy_only=False))
        return self.at(chosen)

    def at(self, numbers: npt.NDArray[np.int64]) -> ReadArray:
        """The rows of these numbers, counted from 0."""
        index = numbers if self._index is None else self._index[numbers]
        return replace(self, rows=self.rows.take(pa.array(numbers)), _index=index)

    def stored(self, site: str) -> Array:
        """:meth:`site` as it lies on disk: bfloat16 as its bits in uint16."""
        values = self.site(site)
        first = next(iter(self._shards[site]), None)
        tensor = None if first is None else first.tensors.get(self.field)
        if tensor is not None and tensor.dtype == "BF16":
            return np.asarray(np.ascontiguousarray(values).view(np.uint32) >> 16, np.uint16)
        return values

    def site(self, site: str, field: str | None = None) -> Array:
        """``[rows, …]`` of one site: a read-only memory map where all rows are wanted and lie in one file, otherwise a
        copy of the wanted ones.  bfloat16, float8 and rows with a scale come as float32."""
        field = self._field(field)
        if site not in self.sites:
            raise KeyError(_unknown(f"read {self.name} has no site", site, self.sites))
        parts = [self._part(shard, field) for shard in self._shards[site] if field in shard.tensors]
        if not parts:
            return np.empty((0,), np.float32)
        if self._index is None or len(parts) == 1:
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        # In the order of the index, which need not be that of the files.
        which = np.searchsorted([shard.stop for shard in self._shards[site]], self._index, side="right")
        out = np.empty((len(self._index), *parts[0].shape[1:]), parts[0].dtype)
        for number, part in enumerate(parts):
            out[which == number] = part
        return out

    def _part(self, shard: _Shard, field: str) -> Array:
        """The wanted rows of one file."""
        tensor, index = shard.tensors[field], self._index
        path = self._run.whole(shard.file)
        values, scale = memory_map(path, tensor), None
        if field == "rows" and "scale" in shard.tensors:
            scale = memory_map(path, shard.tensors["scale"])
        if index is not None:
            index = index[(shard.start <= index) & (index < shard.stop)] - shard.start
            values, scale = values[index], None if scale is None else scale[index]
        values = decoded(values, tensor.dtype)
        return values if scale is None else values.astype(np.float32) * scale[:, None]

    def numpy(self, field: str | None = None) -> Array:
        """``[rows, sites, …]`` of ``field`` (default: :attr:`field`), dtype as stored; bfloat16, float8 and rows with a
        scale as float32.

        Raises ValueError where the sites hold rows of different widths, KeyError for an unknown field.
        """
        if not self.sites:
            raise ValueError(f"read {self.name}: no site is selected")
        parts = [self.site(site, field) for site in self.sites]
        shapes = {site: p.shape[1:] for site, p in zip(self.sites, parts, strict=True)}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"read {self.name}: sites have rows of different shapes, select one: {shapes}")
        return parts[0][:, None] if len(parts) == 1 else np.stack(parts, axis=1)

    @property
    def values(self) -> Array:
        """:meth:`numpy` of the default field."""
        return self.numpy()

    def loader(self, batch: int, field: str | None = None) -> Iterator[Array]:
        """Batches ``[≤ batch, sites, …]`` in row order; only one batch is in memory."""
        if batch < 1:
            raise ValueError("a batch holds at least one row")
        for start in range(0, len(self), batch):
            index = np.arange(start, min(start + batch, len(self)), dtype=np.int64)
            if self._index is not None:
                index = self._index[index]
            yield replace(self, rows=self.rows.slice(start, batch), _index=index).numpy(field)

    def diff(self, a: str, b: str, field: str | None = None) -> ReadDiff:
        """Rows of arm ``a`` minus rows of arm ``b``.

        Rows pair by group, prompt, completion, position and the sweep columns that both arms have; where ``a`` alone
        is swept, each of its points is set against ``b``.  Raises ValueError where a row has no partner or several,
        or where the field holds token ids.
        """
        field = self._field(field)
        if field == "ids" or self._own_ids():
            raise ValueError(f"read {self.name} keeps each row's own top ids: rows of two arms do not pair")
        one, other = self.sel(arm=a), self.sel(arm=b)
        sweep = [
            c
            for c in self._run.info["columns"]["sweep"].values()
            if one.rows[c].null_count < len(one) and other.rows[c].null_count < len(other)
        ]
        key = ["group", "prompt", "completion", "position", *sweep]
        partner: dict[tuple[Any, ...], int] = {}
        for i, row in enumerate(_tuples(other.rows, key)):
            if row in partner:
                raise ValueError(
                    f"arm {b} has several rows for {_named(key, row)}: select one sweep point with .sel(…)"
                )
            partner[row] = i
        keys = list(_tuples(one.rows, key))
        lonely = next((k for k in keys if k not in partner), None)
        if lonely is not None:
            raise ValueError(f"arm {a} has a row that arm {b} lacks: {_named(key, lonely)}; select rows both have")
        spare = partner.keys() - set(keys)
        if spare:
            first = min(spare, key=lambda k: partner[k])
            raise ValueError(f"arm {b} has a row that arm {a} lacks: {_named(key, first)}; select rows both have")
        return ReadDiff(a, b, one, other, np.array([partner[k] for k in keys], np.int64), field)

    def _own_ids(self) -> bool:
        """Whether each row of a lens, or of features, keeps its own top ids."""
        return self._run.lock["reads"][self.name].get("top") is not None

    def _field(self, field: str | None) -> str:
        if field is None:
            return self.field
        if field not in self.fields:
            raise KeyError(_unknown(f"read {self.name} has no field", field, self.fields))
        return field


@dataclass(frozen=True, eq=False)
class ReadDiff:
    """Arm ``a`` minus arm ``b``; ``rows`` and ``sites`` are those of ``a``."""

    a: str
    b: str
    _one: ReadArray
    _other: ReadArray
    _partner: npt.NDArray[np.int64]
    field: str

    @property
    def rows(self) -> Any:
        return self._one.rows

    @property
    def sites(self) -> tuple[str, ...]:
        return self._one.sites

    def __len__(self) -> int:
        return len(self._one)

    def numpy(self) -> Array:
        """``[rows, sites, …]``; float16 is subtracted in float32."""
        one, other = self._one.numpy(self.field), self._other.numpy(self.field)
        wide = np.promote_types(one.dtype, np.float32)
        out: Array = one.astype(wide) - other[self._partner].astype(wide)
        return out

    @property
    def values(self) -> Array:
        return self.numpy()


def _with_sweep(rows: Any, run: RunResult) -> Any:
    """The coordinates with the sweep columns of their requests beside them."""
    sweep = list(run.info["columns"]["sweep"].values())
    if not sweep or sweep[0] in rows.column_names:  # a mean over requests has its own
        return rows
    requests = run.requests
    where = pc.index_in(rows["request"], value_set=requests["request"])
    for name in sweep:
        rows = rows.append_column(name, requests[name].take(where))
    return rows


def _tuples(table: Any, names: list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[n].to_pylist() for n in names), strict=True)


def _named(names: list[str], row: tuple[Any, ...]) -> str:
    return ", ".join(f"{n} {v}" for n, v in zip(names, row, strict=True))


def _unknown(lead: str, name: Any, names: Iterable[Any]) -> str:
    known = [str(n) for n in names]
    near = nearest(str(name), known)
    shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return f"{lead} {name!r}" + (f"; nearest is {near!r}" if near else "") + f"; there are {shown or 'none'}"

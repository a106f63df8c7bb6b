"""Vectors from files and from random draws, with numpy alone: ``check`` and the workers read them the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.spec.saes import folder_at, open_sae
from vtaps.spec.tensor_files import TensorInfo as TensorInfo
from vtaps.spec.tensor_files import VectorError as VectorError
from vtaps.spec.tensor_files import array_in, spelled
from vtaps.spec.tensor_files import file_digest as file_digest
from vtaps.spec.tensor_files import tensors_in as tensors_in

Floats = npt.NDArray[np.float32]


def read_vector(definition: Mapping[str, Any], folder: Path, layer: int | None, width: int) -> Floats:
    """The vector ``definition`` names at a site of ``layer``: float32 ``[width]``, finite.

    ``definition`` is ``{"file", "tensor"?, "row"?, "norm"?}`` (``file`` relative to ``folder``; ``norm``: the L2 norm
    that it is scaled to), ``{"sae", "feature", "norm"?}`` (a decoder row; ``sae``: the folder) or
    ``{"random": {"seed", "norm"}}``.

    Raises VectorError.
    """
    if definition.get("random") is not None:
        random = definition["random"]
        return draw(int(random.get("seed", 0)), float(random.get("norm", 1.0)), layer, width)
    if definition.get("sae") is not None:
        sae = open_sae(folder, folder_at(str(definition["sae"]), layer))
        vector, said = sae.decoder(int(definition["feature"])), f"feature {definition['feature']} of {sae.folder}"
    else:
        path = folder / str(definition["file"])
        name = tensor_name(definition, layer)
        said = spelled(path, name)
        with np.errstate(over="ignore"):
            vector = _row(array_in(path, name), definition.get("row"), path, name).astype(np.float32)
    if vector.shape[0] != width:
        raise VectorError("width", f"{said} is {vector.shape[0]} wide; {width} is needed here")
    bad = int(np.count_nonzero(~np.isfinite(vector)))
    if bad:
        raise VectorError("nonfinite", f"{said} holds {bad} values that are not finite")
    if (norm := definition.get("norm")) is None:
        return vector
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not length:
        raise VectorError("direction", f"{said} is zero: it cannot be scaled to a norm of {norm:g}")
    scaled: Floats = (vector.astype(np.float64) * (norm / length)).astype(np.float32)
    return scaled


def draw(seed: int, norm: float, layer: int | None, width: int) -> Floats:
    """Normal draws scaled to an L2 norm of ``norm``, float32 ``[width]``.

    The generator is Philox keyed by (seed, layer or 0): a site's vector does not depend on which other sites
    there are.
    """
    key = np.array([seed % 2**64, layer or 0], dtype=np.uint64)
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(width)
    length = float(np.linalg.norm(values))
    vector = (values * (norm / length) if length else values).astype(np.float32)
    if not np.all(np.isfinite(vector)):
        raise VectorError("nonfinite", f"a random vector of norm {norm} is not finite in float32")
    return vector


def read_affine(
    definitions: Sequence[Mapping[str, Any]], names: Sequence[str], folder: Path, layer: int | None, width: int
) -> tuple[Floats, Floats, Floats]:
    """What ``affine`` reads and writes at a site of ``layer``: (down ``[rank, width]``, up ``[rank, width]``, bias
    ``[rank]``), float32 and finite.  In the files down and up have two axes, in either order; without a third
    definition the bias is zero.

    Raises VectorError.
    """
    down, up = (
        _two_axes(_numbers(definition, folder, layer, width), said, "rank", width)
        for definition, said in zip(definitions[:2], names, strict=False)
    )
    if len(down) != len(up):
        raise VectorError("width", f"{names[0]} has rank {len(down)} and {names[1]} rank {len(up)}")
    if len(down) > RANK:
        raise VectorError("width", f"{names[0]} has rank {len(down)}; {RANK} is the most")
    if len(definitions) < 3:
        return down, up, np.zeros(len(down), np.float32)
    bias = _numbers(definitions[2], folder, layer, width)
    if bias.shape != (len(down),):
        raise VectorError("width", f"{names[2]} has the shape {list(bias.shape)}; [{len(down)}], the rank, is needed")
    return down, up, bias


def read_probe(
    definitions: Sequence[Mapping[str, Any]], names: Sequence[str], folder: Path, layer: int | None, width: int
) -> tuple[Floats, Floats]:
    """What ``probe`` reads at a site of ``layer``: (weight ``[classes, width]``, bias ``[classes]``), float32, finite.
    In the file the weight of several classes has two axes, in either order; without a second definition the bias is
    zero.

    Raises VectorError.
    """
    weight = _two_axes(_numbers(definitions[0], folder, layer, width), names[0], "classes", width)
    if len(definitions) < 2:
        return weight, np.zeros(len(weight), np.float32)
    bias = _numbers(definitions[1], folder, layer, len(weight)).reshape(-1)
    if bias.shape != (len(weight),):
        raise VectorError("width", f"{names[1]} has {len(bias)} numbers; the classes of {names[0]} are {len(weight)}")
    return weight, bias


def _two_axes(found: Floats, said: str, what: str, width: int) -> Floats:
    """``[what, width]``, from either order; one axis is one of them.  Raises VectorError."""
    if found.ndim == 1:
        found = found[None]
    if found.ndim != 2 or width not in found.shape:
        raise VectorError("width", f"{said} has the shape {list(found.shape)}; [{what}, {width}] is needed here")
    if found.shape == (width, width):
        raise VectorError("width", f"{said} is square: which of its axes is the location's cannot be told")
    return found if found.shape[1] == width else np.ascontiguousarray(found.T)


def _numbers(definition: Mapping[str, Any], folder: Path, layer: int | None, width: int) -> Floats:
    """A tensor of any shape, float32; one drawn at random, or with a norm of its own, is one vector."""
    if any(definition.get(key) is not None for key in ("random", "sae", "norm")):
        return read_vector(definition, folder, layer, width)
    path, name = folder / str(definition["file"]), tensor_name(definition, layer)
    found = array_in(path, name)
    if (row := definition.get("row")) is not None:
        found = _row(found, row, path, name)
    with np.errstate(over="ignore"):
        numbers: Floats = np.ascontiguousarray(found, np.float32)
    if bad := int(np.count_nonzero(~np.isfinite(numbers))):
        raise VectorError("nonfinite", f"{spelled(path, name)} holds {bad} values that are not finite")
    return numbers


RANK = 256
"""``affine`` reads and writes at most as many vectors."""
DEPENDENT = 1e-6
"""A direction is no new one where less than this share of its length is left beside the ones before it."""


def directions(vectors: Sequence[Floats], names: Sequence[str], columns: Sequence[tuple[int, int]] | None) -> Floats:
    """Orthonormal directions that span ``vectors`` (float32 ``[width]`` each) in the half-open ``columns`` (None: all),
    in order: float32 ``[len(vectors), width]``, 0 in other columns.  Worked out in float64.

    Raises VectorError (direction) for a vector that is zero there, or a sum of the ones before it.
    """
    found: list[npt.NDArray[np.float64]] = []
    for vector, name in zip(vectors, names, strict=True):
        own = np.zeros(len(vector)) if columns is not None else vector.astype(np.float64)
        for a, b in columns or ():
            own[a:b] = vector[a:b]
        length = float(np.linalg.norm(own))
        if not length:
            where = "in the columns of this edit" if columns is not None else "here"
            raise VectorError("direction", f"{name} is zero {where}: it has no direction")
        own /= length
        for _ in range(2):  # once more, for what rounding left
            for other in found:
                own -= (own @ other) * other
        if float(np.linalg.norm(own)) < DEPENDENT:
            raise VectorError("direction", f"{name} lies in what the vectors before it span; leave it out")
        found.append(own / np.linalg.norm(own))
    return np.stack(found).astype(np.float32)


def tensor_name(definition: Mapping[str, Any], layer: int | None) -> str | None:
    """The tensor's name at ``layer``: ``{layer}`` replaced.  Raises VectorError where there is no layer."""
    name = definition.get("tensor")
    if name is None or "{layer}" not in name:
        return name
    if layer is None:
        raise VectorError("tensor", f'tensor "{name}" asks for a layer and this location has none')
    return str(name).replace("{layer}", str(layer))


def _row(array: npt.NDArray[Any], row: int | None, path: Path, name: str | None) -> npt.NDArray[Any]:
    """One vector ``[width]`` out of ``[width]`` or, with ``row``, ``[n, width]``."""
    where = spelled(path, name)
    if array.ndim == 1 and row is None:
        return array
    if array.ndim == 2 and row is not None:
        if not -array.shape[0] <= row < array.shape[0]:
            raise VectorError("tensor", f"{where} has rows 0 to {array.shape[0] - 1}; there is no row {row}")
        return array[row]  # type: ignore[no-any-return]
    if array.ndim == 2:
        raise VectorError("ambiguous", f"{where} is {array.shape[0]} vectors: say which with `row`")
    if array.ndim == 1:
        raise VectorError("tensor", f"{where} is one vector; `row` is for tensors of two axes")
    raise VectorError("tensor", f"{where} has {array.ndim} axes; a vector has one, or two with `row`")

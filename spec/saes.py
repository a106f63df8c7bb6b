"""Sparse autoencoders in the layout of SAELens, ``cfg.json`` and ``sae_weights.safetensors`` in one folder, read with
numpy alone: ``check`` and the workers read them the same way.

With x a row ``[d_in]``, all by SAELens's ``SAE.encode``: p = (x − b_dec) W_enc + b_enc (b_dec left out where
``apply_b_dec_to_input`` is false), and the activations are max(p, 0); of ``jumprelu`` 0 where p ≤ threshold; of
``topk`` 0 but for the k largest p.  The reconstruction is a W_dec + b_dec.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.spec.files import nearest_file
from vtaps.spec.tensor_files import Mapped, VectorError, map_tensors, must_be_file

Floats = npt.NDArray[np.float32]

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
ARCHITECTURES = ("standard", "jumprelu", "topk")
TENSORS = ("W_enc", "b_enc", "W_dec", "b_dec")

FOLD = "fold what SAELens scales into the weights and save it again"
_NORMALIZED = {
    "expected_average_only_in": "`sae.fold_activation_norm_scaling_factor(factor)` does it, with the factor of the run",
    "constant_norm_rescale": "each row was scaled by its own length, which no weights can hold",
    "layer_norm": "each row was normed, which no weights can hold",
}


@dataclass(frozen=True)
class Feature:
    """One feature: p = x · encoder + bias and its activation, p where it is above ``threshold`` and 0 elsewhere (of
    ``topk`` only among the k largest).  ``encoder`` and ``decoder`` are float32 ``[d_in]``."""

    encoder: Floats
    bias: float
    threshold: float
    decoder: Floats


@dataclass(frozen=True)
class Sae:
    """``folder`` as it is named to people; ``k`` is of ``topk``; ``centred``: b_dec is taken from the row before it is
    encoded; ``hook``: where TransformerLens would have read the rows that it was trained on, if the files say so."""

    folder: str
    architecture: str
    d_in: int
    d_sae: int
    centred: bool
    k: int | None
    hook: str | None
    tensors: Mapping[str, Mapped]

    @property
    def dtype(self) -> str:
        """Of the encoder, as safetensors spells it."""
        return self.tensors["W_enc"].dtype

    def held(self, ids: Sequence[int] | None) -> tuple[int, int]:
        """(columns of the encoder that a read of ``ids``, or of the most active, has on the device; their bytes with
        bias and threshold)."""
        count = self.d_sae if ids is None or self.architecture == "topk" else len(ids)
        item = 4 if self.dtype in ("F32", "F64") else 2
        return count, count * (self.d_in * item + 4 + (4 if self.architecture == "jumprelu" else 0))

    def feature(self, index: int) -> Feature:
        """Raises VectorError (feature, nonfinite)."""
        if not 0 <= index < self.d_sae:
            raise VectorError("feature", f"{self.folder} has the features 0 … {self.d_sae - 1}, not {index}")
        encoder = self._numbers("W_enc", (slice(None), index))
        bias = float(self._numbers("b_enc", (slice(index, index + 1),))[0])
        if self.centred:
            bias -= float(self._numbers("b_dec", ()).astype(np.float64) @ encoder.astype(np.float64))
        return Feature(encoder, bias, self.threshold(index), self.decoder(index))

    def decoder(self, index: int) -> Floats:
        """The feature's row of W_dec, float32 ``[d_in]``.  Raises VectorError (feature, nonfinite)."""
        if not 0 <= index < self.d_sae:
            raise VectorError("feature", f"{self.folder} has the features 0 … {self.d_sae - 1}, not {index}")
        return self._numbers("W_dec", (index,))

    def threshold(self, index: int) -> float:
        """What p must be above.  SAELens puts max(p, 0) through the threshold: one below 0 is as good as 0."""
        if self.architecture != "jumprelu":
            return 0.0
        return max(0.0, float(self._numbers("threshold", (slice(index, index + 1),))[0]))

    def _numbers(self, name: str, part: tuple[Any, ...]) -> Floats:
        found = self.tensors[name].read(part)
        if bad := int(np.count_nonzero(~np.isfinite(found))):
            raise VectorError("nonfinite", f"{name} of {self.folder} holds {bad} values that are not finite")
        return found


def files_of(folder: str) -> tuple[str, str]:
    """The files of an SAE in ``folder``, named as it is."""
    return f"{folder.rstrip('/')}/{CONFIG}", f"{folder.rstrip('/')}/{WEIGHTS}"


def folder_at(folder: str, layer: int | None) -> str:
    """``{layer}`` replaced.  Raises VectorError (sae) where there is no layer."""
    if "{layer}" not in folder:
        return folder
    if layer is None:
        raise VectorError("sae", f'"{folder}" asks for a layer and this location has none')
    return folder.replace("{layer}", str(layer))


def open_sae(base: Path, folder: str) -> Sae:
    """The SAE in ``folder`` (relative to ``base``): its configuration, and the headers of its weights.

    Raises VectorError (sae).
    """
    config, weights = (base / name for name in files_of(folder))
    for path in (config, weights):
        if not _is_file(path):
            there = _is_file(path.parent, stat.S_IFDIR)
            what = f"it has no {path.name}" if there else "there is no such folder"
            close = nearest_file(path)
            raise VectorError("sae", f"{folder}: {what}" + (f" (there is {close})" if close else ""))
    said = _config(config, folder)
    tensors = _tensors(weights, folder)
    kind, k = _architecture(said, folder)
    _refuse_scaled(said, tensors, folder)
    wanted = (*TENSORS, "threshold") if kind == "jumprelu" else TENSORS
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise VectorError("sae", f"{folder}: {WEIGHTS} has no {', '.join(missing)}; it holds {', '.join(tensors)}")
    strange = sorted(tensors.keys() - {*TENSORS, "threshold", "scaling_factor"})
    if strange:
        raise VectorError("sae", f"{folder}: {WEIGHTS} holds {', '.join(strange)}, which a {kind} SAE has no use for")
    d_in, d_sae = _shape(tensors, wanted, said, folder)
    if k is not None and not 1 <= k <= d_sae:
        raise VectorError("sae", f"{folder}: k is {k}, and there are {d_sae} features")
    meta = said.get("metadata") if isinstance(said.get("metadata"), dict) else {}
    hook = said.get("hook_name") or said.get("hook_point") or (meta or {}).get("hook_name")
    return Sae(
        folder, kind, d_in, d_sae, bool(said.get("apply_b_dec_to_input", True)), k,
        hook if isinstance(hook, str) else None, {name: tensors[name] for name in wanted},
    )  # fmt: skip


def _is_file(path: Path, kind: int = stat.S_IFREG) -> bool:
    try:
        return stat.S_IFMT(path.stat().st_mode) == kind
    except (OSError, ValueError):  # too long a name, a NUL
        return False


def _config(path: Path, folder: str) -> dict[str, Any]:
    try:
        must_be_file(path)
        said = json.loads(path.read_text(encoding="utf-8"))
    except (VectorError, OSError, ValueError, RecursionError) as error:
        raise VectorError("sae", f"{folder}: {CONFIG} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise VectorError("sae", f"{folder}: {CONFIG} is no mapping")
    return said


def _tensors(path: Path, folder: str) -> dict[str, Mapped]:
    try:
        return map_tensors(path)
    except VectorError as error:
        raise VectorError("sae", f"{folder}: {error.message}") from error


def _architecture(said: Mapping[str, Any], folder: str) -> tuple[str, int | None]:
    """(architecture, k)"""
    kind = said.get("architecture", "standard")
    function = said.get("activation_fn", said.get("activation_fn_str", "relu"))
    further = said.get("activation_fn_kwargs")
    k = said.get("k", further.get("k") if isinstance(further, dict) else None)
    if kind == "standard" and function == "topk":
        kind = "topk"
    elif function not in ("relu", "topk"):
        raise VectorError("sae", f"{folder}: the activation function {function} is not served; relu and topk are")
    if kind not in ARCHITECTURES:
        raise VectorError("sae", f"{folder}: the architecture {kind} is not served; {', '.join(ARCHITECTURES)} are")
    if kind != "topk":
        return kind, None
    if type(k) is not int:
        raise VectorError("sae", f"{folder}: {CONFIG} of a topk SAE says no k")
    return kind, k


def _refuse_scaled(said: Mapping[str, Any], tensors: Mapping[str, Mapped], folder: str) -> None:
    """What SAELens does to rows or activations beside the weights."""
    norm = said.get("normalize_activations")
    norm = "expected_average_only_in" if norm is True else norm
    if norm not in (None, False, "none"):
        why = _NORMALIZED.get(str(norm), FOLD)
        raise VectorError("sae", f"{folder}: normalize_activations is {norm}: {why}")
    if said.get("rescale_acts_by_decoder_norm"):
        message = "rescale_acts_by_decoder_norm is on: `sae.fold_W_dec_norm()` puts it into the weights"
        raise VectorError("sae", f"{folder}: {message}")
    scaled = "scaling_factor" in tensors and bool((tensors["scaling_factor"].read(()) != 1).any())
    if said.get("finetuning_scaling_factor") or scaled:
        raise VectorError("sae", f"{folder}: finetuning_scaling_factor is on: {FOLD}")


def _shape(
    tensors: Mapping[str, Mapped], wanted: tuple[str, ...], said: Mapping[str, Any], folder: str
) -> tuple[int, int]:
    """(d_in, d_sae)"""
    shape = tensors["W_enc"].shape
    if len(shape) != 2 or 0 in shape:
        raise VectorError("sae", f"{folder}: W_enc has the shape {list(shape)}; [d_in, d_sae] is needed")
    d_in, d_sae = shape
    right = {"b_enc": (d_sae,), "W_dec": (d_sae, d_in), "b_dec": (d_in,), "threshold": (d_sae,)}
    for name in wanted[1:]:
        if tensors[name].shape != right[name]:
            needed = f"{list(right[name])} is needed beside a W_enc of {list(shape)}"
            raise VectorError("sae", f"{folder}: {name} has the shape {list(tensors[name].shape)}; {needed}")
    for name, value in (("d_in", d_in), ("d_sae", d_sae)):
        if said.get(name, value) != value:
            raise VectorError("sae", f"{folder}: {CONFIG} says {name} is {said[name]}, and W_enc is {list(shape)}")
    return d_in, d_sae


_HOOKS = {
    r"blocks\.(\d+)\.hook_resid_pre": "resid_pre[{}]",
    r"blocks\.(\d+)\.hook_resid_mid": "resid_mid[{}]",
    r"blocks\.(\d+)\.hook_resid_post": "resid_post[{}]",
    r"blocks\.(\d+)\.hook_attn_out": "attn_out[{}]",
    r"blocks\.(\d+)\.attn\.hook_z": "z[{}]",
    r"blocks\.(\d+)\.hook_mlp_out": "mlp_out[{}]",
    r"blocks\.(\d+)\.mlp\.hook_post": "mlp_post[{}]",
    r"hook_embed": "embed",
}


def alias_of(hook: str) -> str | None:
    """The alias of a TransformerLens hook: ``blocks.8.hook_resid_post`` → ``resid_post[8]``; None where it has none."""
    for pattern, alias in _HOOKS.items():
        if found := re.fullmatch(pattern, hook):
            return alias.format(*found.groups())
    return None

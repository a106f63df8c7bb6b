"""Sparse autoencoders in the layout of SAELens, ``cfg.json`` and ``sae_weights.safetensors`` in one folder, or of Gemma
Scope, one ``.npz``, read with numpy alone: ``check`` and the workers read them the same way.

With x a row ``[d_in]``, all by SAELens's ``SAE.encode``: p = (x − b_dec) W_enc + b_enc (b_dec left out where
``apply_b_dec_to_input`` is false, and in Gemma Scope), and the activations are max(p, 0); of ``jumprelu`` 0 where
p ≤ threshold; of ``topk`` 0 but for the k largest p.  The reconstruction is a W_dec + b_dec.

Of ``gated`` (Rajamanoharan et al., 2024, arXiv:2404.16014), with q = (x − b_dec) W_enc: 0 where q + b_gate ≤ 0, else
max(q exp(r_mag) + b_mag, 0).  With g = exp(r_mag) and p = g q + b_mag that is p where it is above
max(0, b_mag − g b_gate), as in a jumprelu SAE.
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
from vtaps.spec.npz_files import map_npz
from vtaps.spec.tensor_files import Mapped, VectorError, map_tensors, must_be_file

Floats = npt.NDArray[np.float32]

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
NPZ = ".npz"
ARCHITECTURES = ("standard", "jumprelu", "topk", "gated")
TENSORS = ("W_enc", "b_enc", "W_dec", "b_dec")
_TENSORS = {
    "standard": TENSORS, "topk": TENSORS, "jumprelu": (*TENSORS, "threshold"),
    "gated": ("W_enc", "b_gate", "r_mag", "b_mag", "W_dec", "b_dec"),
}  # fmt: skip

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
class Columns:
    """Some columns of an encoder: p = gain · (x weight) + bias (``gain`` None: 1), and the activations are p where that
    is above ``threshold`` (None: 0) and 0 elsewhere.  ``weight`` float32 ``[d_in, n]``, the others float64 ``[n]``."""

    weight: Floats
    bias: npt.NDArray[np.float64]
    gain: npt.NDArray[np.float64] | None
    threshold: npt.NDArray[np.float64] | None


@dataclass(frozen=True)
class Sae:
    """``folder`` (or file) as it is named to people; ``k`` is of ``topk``; ``centred``: b_dec is taken from the row
    before it is encoded; ``hook``: where TransformerLens would have read the rows that it was trained on, if the files
    say so."""

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
        bias, gain and threshold)."""
        count = self.d_sae if ids is None or self.architecture == "topk" else len(ids)
        numbers = {"jumprelu": 2, "gated": 3}.get(self.architecture, 1)
        return count, count * (self.d_in * _item(self.dtype) + 4 * numbers)

    @property
    def whole(self) -> int:
        """Bytes of encoder and decoder on the device."""
        return self.held(None)[1] + self.d_in * (self.d_sae * _item(self.tensors["W_dec"].dtype) + 4)

    def columns(self, some: Any) -> Columns:
        """Those of the encoder at ``some``, an index of numpy's.  Raises VectorError (nonfinite)."""
        weight = self._numbers("W_enc", (slice(None), some))
        centre = np.zeros(weight.shape[1])
        if self.centred:
            centre = self._numbers("b_dec", ()).astype(np.float64) @ weight.astype(np.float64)
        if self.architecture == "gated":
            gate, r, bias = (self._numbers(n, (some,)).astype(np.float64) for n in ("b_gate", "r_mag", "b_mag"))
            with np.errstate(over="ignore"):
                gain = np.exp(r)
                used = gain.astype(np.float32)
            if bad := int(np.count_nonzero(~np.isfinite(used))):
                raise VectorError("nonfinite", f"exp(r_mag) of {self.folder} has {bad} values that are not finite")
            return Columns(weight, bias - gain * centre, gain, np.maximum(0.0, bias - gain * gate))
        bias = self._numbers("b_enc", (some,)).astype(np.float64) - centre
        if self.architecture != "jumprelu":
            return Columns(weight, bias, None, None)
        # SAELens puts max(p, 0) through the threshold: one below 0 is as good as 0.
        return Columns(weight, bias, None, np.maximum(0.0, self._numbers("threshold", (some,)).astype(np.float64)))

    def feature(self, index: int) -> Feature:
        """Raises VectorError (feature, nonfinite)."""
        self.check(index)
        one = self.columns(slice(index, index + 1))
        gain = 1.0 if one.gain is None else float(one.gain[0])
        encoder = (one.weight[:, 0] * gain).astype(np.float32)
        threshold = 0.0 if one.threshold is None else float(one.threshold[0])
        return Feature(encoder, float(one.bias[0]), threshold, self.decoder(index))

    def decoder(self, index: int) -> Floats:
        """The feature's row of W_dec, float32 ``[d_in]``.  Raises VectorError (feature, nonfinite)."""
        self.check(index)
        return self._numbers("W_dec", (index,))

    def decode(self) -> tuple[Floats, Floats]:
        """W_dec float32 ``[d_sae, d_in]`` and b_dec ``[d_in]``.  Raises VectorError (nonfinite)."""
        return self._numbers("W_dec", ()), self._numbers("b_dec", ())

    def check(self, index: int) -> None:
        """Raises VectorError (feature) where there is no such one."""
        if not 0 <= index < self.d_sae:
            raise VectorError("feature", f"{self.folder} has the features 0 … {self.d_sae - 1}, not {index}")

    def _numbers(self, name: str, part: tuple[Any, ...]) -> Floats:
        found = self.tensors[name].read(part)
        if bad := int(np.count_nonzero(~np.isfinite(found))):
            raise VectorError("nonfinite", f"{name} of {self.folder} holds {bad} values that are not finite")
        return found


def _item(dtype: str) -> int:
    return 4 if dtype in ("F32", "F64") else 2


def key_of(path: str) -> str:
    """The field of ``saes`` that ``path`` is given in."""
    return "file" if path.endswith(NPZ) else "dir"


def files_of(folder: str) -> tuple[str, ...]:
    """The files of an SAE in ``folder``, or of one that is a file, named as it is."""
    if folder.endswith(NPZ):
        return (folder,)
    return f"{folder.rstrip('/')}/{CONFIG}", f"{folder.rstrip('/')}/{WEIGHTS}"


def folder_at(folder: str, layer: int | None) -> str:
    """``{layer}`` replaced.  Raises VectorError (sae) where there is no layer."""
    if "{layer}" not in folder:
        return folder
    if layer is None:
        raise VectorError("sae", f'"{folder}" asks for a layer and this location has none')
    return folder.replace("{layer}", str(layer))


def open_sae(base: Path, folder: str) -> Sae:
    """The SAE in ``folder`` (relative to ``base``), or the ``.npz`` file of that name: its configuration, and the
    headers of its weights.

    Raises VectorError (sae).
    """
    if folder.endswith(NPZ):
        return _open_npz(base, folder)
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
    wanted = _TENSORS[kind]
    _refuse_names(kind, tensors, folder, WEIGHTS, also=("threshold", "scaling_factor"))
    d_in, d_sae = _shape(tensors, wanted, said, folder)
    if k is not None and not 1 <= k <= d_sae:
        raise VectorError("sae", f"{folder}: k is {k}, and there are {d_sae} features")
    meta = said.get("metadata") if isinstance(said.get("metadata"), dict) else {}
    hook = said.get("hook_name") or said.get("hook_point") or (meta or {}).get("hook_name")
    return Sae(
        folder, kind, d_in, d_sae, bool(said.get("apply_b_dec_to_input", True)), k,
        hook if isinstance(hook, str) else None, {name: tensors[name] for name in wanted},
    )  # fmt: skip


def _open_npz(base: Path, file: str) -> Sae:
    """A jumprelu SAE, or without a threshold a standard one; b_dec is not taken from the row."""
    try:
        tensors = map_npz(base / file)
    except VectorError as error:
        raise VectorError("sae", f"{file}: {error.message}") from error
    kind = "jumprelu" if "threshold" in tensors else "standard"
    _refuse_names(kind, tensors, file, "it")
    d_in, d_sae = _shape(tensors, _TENSORS[kind], {}, file)
    return Sae(file, kind, d_in, d_sae, False, None, None, {name: tensors[name] for name in _TENSORS[kind]})


def _refuse_names(kind: str, tensors: Mapping[str, Mapped], folder: str, who: str, also: tuple[str, ...] = ()) -> None:
    """Tensors that the architecture needs and the file lacks, or the other way round; ``also``: left aside."""
    if missing := [name for name in _TENSORS[kind] if name not in tensors]:
        there = ", ".join(tensors) or "no tensor"
        raise VectorError("sae", f"{folder}: {who} has no {', '.join(missing)}; it holds {there}")
    if strange := sorted(tensors.keys() - {*_TENSORS[kind], *also}):
        raise VectorError("sae", f"{folder}: {who} holds {', '.join(strange)}, which a {kind} SAE has no use for")


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
    right = {"W_dec": (d_sae, d_in), "b_dec": (d_in,)}
    for name in wanted[1:]:
        due = right.get(name, (d_sae,))
        if tensors[name].shape != due:
            needed = f"{list(due)} is needed beside a W_enc of {list(shape)}"
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

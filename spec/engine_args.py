"""vLLM's own engine arguments under ``engine.vllm``: held against the names and types of vLLM 0.32.

No vLLM is imported: the table is ``schemas/vllm-0.32-engine-args.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vtaps.schemas import ENGINE_ARGS, load
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document, NodePath
from vtaps.spec.engine_options import proved
from vtaps.spec.schema_words import close, expected, fits, found, short, shown, type_note

# Arguments that vtaps sets, and where the spec says the same.
OWNED: dict[str, str] = {
    "model": "say it as `model.path`",
    "tokenizer": "say it as `model.tokenizer`",
    "dtype": "say it as `model.dtype`",
    "revision": "say it as `model.revision`",
    "enforce_eager": "say it as `engine.mode`: `eager` turns compile and CUDA graphs off, `taps` keeps them",
    "worker_cls": "vtaps needs its own worker; there is nothing to say instead",
    "worker_extension_cls": "vtaps installs its own extension; there is nothing to say instead",
    "additional_config": "vtaps hands its block to the workers in it; there is nothing to say instead",
    "skip_tokenizer_init": "prompts, overrides and metrics need the tokenizer; leave it out",
}

_SPECULATIVE = "a drafted token has rows before it is known to be sampled, so reads and overrides would be wrong"
_ONE_PROCESS = "this version serves a model in one worker; leave it at 1"
_GENERATES = "reads, edits and metrics are defined on rows of text generation; leave it out"
_ELSEWHERE = "edited KV must not reach another engine, and rows that a read needs must not come from one"
_OFFLOADED = "rows of a prompt would come back from it where a read needs them computed; leave it out"
_ANOTHER_TREE = "locations are held against the module tree of `model.path`/config.json, which does not hear of it"
_AFTER_SAMPLING = "tokens would be other than those that the logits, the metrics and the overrides say; leave it out"
_MEANS_LOGPROB = "the log probabilities in the results would be something else; leave it out"


def _set(value: Any) -> bool:
    return value is not None


def _on(value: Any) -> bool:
    return bool(value)


def _not_one(value: Any) -> bool:
    return bool(value != 1)


# Settings that vLLM takes and neither engine does: (whether the value is one of them, why).
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "speculative_config": (_set, _SPECULATIVE),
    "spec_method": (_set, _SPECULATIVE),
    "spec_model": (_set, _SPECULATIVE),
    "spec_tokens": (_set, _SPECULATIVE),
    "diffusion_config": (_set, _GENERATES),
    "async_scheduling": (_on, "an override must replace a token before the next step is scheduled; leave it off"),
    "kv_transfer_config": (_set, _ELSEWHERE),
    "kv_offloading_size": (_on, _OFFLOADED),
    "enable_lora": (_on, "no prompt or arm can name an adapter; merge it into the weights and serve those"),
    "data_parallel_size": (_not_one, _ONE_PROCESS),
    "prefill_context_parallel_size": (_not_one, _ONE_PROCESS),
    "decode_context_parallel_size": (_not_one, _ONE_PROCESS),
    "nnodes": (_not_one, _ONE_PROCESS),
    "enable_dbo": (_on, "a batch cut in two would be matched to the wrong rows; leave it off"),
    "ubatch_size": (lambda v: v > 1, "a batch cut in two would be matched to the wrong rows; leave it out"),
    "kv_sharing_fast_prefill": (_on, "it leaves prompt rows out of later layers; leave it off"),
    "hf_overrides": (_on, f"{_ANOTHER_TREE}; write it into that file"),
    "hf_config_path": (_set, f"{_ANOTHER_TREE}; say the folder as `model.path`"),
    "config_format": (lambda v: v not in ("auto", "hf"), _ANOTHER_TREE),
    "model_class_overrides": (_on, _ANOTHER_TREE),
    "model_impl": (lambda v: v not in ("auto", "vllm"), "locations are those of vLLM's own classes; leave it out"),
    "mm_encoder_only": (_on, _GENERATES),
    "logits_processors": (_on, _AFTER_SAMPLING),
    "watermark_config": (_set, _AFTER_SAMPLING),
    "logprobs_mode": (lambda v: v != "raw_logprobs", _MEANS_LOGPROB),
    "weight_transfer_config": (_set, "weights that change under way make another model of the same run; leave it out"),
    "scheduler_cls": (_set, "rows are those of vLLM's own scheduler; leave it out"),
    "enable_prompt_embeds": (_on, "a prompt of a spec is tokens; leave it off"),
    "runner": (lambda v: v not in ("auto", "generate"), _GENERATES),
    "convert": (lambda v: v not in ("auto", "none"), _GENERATES),
}

# Settings inside mappings that the eager engine takes and the taps engine does not: path → why.
AGAINST_TAPS: dict[tuple[str, ...], str] = {
    ("compilation_config", "pass_config", "enable_sp"): (
        "sequence parallelism leaves each worker a part of the rows between layers"
    ),
}

_UNPROVED = "no test of vtaps shows that rows and values are right under it; `vtaps explain VT506` lists what is served"


def against_taps(vllm: Mapping[str, Any]) -> tuple[tuple[str, ...], str] | None:
    """(path, why) of the first of vLLM's arguments that is on and does not go with the taps engine."""
    for path, why in AGAINST_TAPS.items():
        value: Any = vllm
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value:
            return path, why
    return None


def check(doc: Document, path: NodePath, mapping: Mapping[str, Any]) -> list[Diagnostic]:
    """Hold the engine arguments ``mapping``, which stand at ``path`` of ``doc``, against vLLM's.

    VT501 for a name vLLM does not have, VT502 for a value of the wrong type or outside its choices, VT503 for an
    argument that vtaps sets itself or a setting that this engine does not serve, VT506 for one under which nobody has
    shown that rows are right.
    """
    known = load(ENGINE_ARGS)["properties"]
    out = []
    for name, value in mapping.items():
        here = (*path, name)
        if name in OWNED:
            message = f"`{name}` is not for engine.vllm: vtaps sets it"
            out.append(Diagnostic("VT503", message, doc.key(*here), note=OWNED[name]))
        elif name not in known:
            valid = tuple(k for k in known if k not in OWNED)
            near = close(name, valid)
            message = f"vLLM 0.32 has no engine argument `{short(name)}`"
            note = None if near else "`vllm serve --help` lists them; here they are spelled with underscores"
            # The list of all of them is longer than a screen: show it only through its nearest name.
            out.append(Diagnostic("VT501", message, doc.key(*here), nearest=near, note=note))
        elif finding := _value(doc, here, name, value, known[name]):
            out.append(finding)
    return out


def _value(doc: Document, here: NodePath, name: str, value: Any, rule: Mapping[str, Any]) -> Diagnostic | None:
    span, label = doc.at(*here), f"engine.vllm.{name}"
    if not fits(value, rule["type"]):
        note = type_note(value, rule["type"], None)
        return Diagnostic("VT502", f"{label}: expected {expected(rule['type'])}, found {found(value)}", span, note=note)
    choices = rule.get("enum")
    if choices is not None and value not in choices:
        valid = tuple(c if isinstance(c, str) else shown(c) for c in choices)
        near = close(value, valid) if isinstance(value, str) else None
        message = f"{label}: {shown(value)} is none of vLLM's choices"
        return Diagnostic("VT502", message, span, valid, near)
    if (refused := refusal(name, value)) is not None:
        written = shown(value) if not isinstance(value, dict | list) else found(value)
        code, why = refused
        said = "is not served" if code == "VT503" else "is not proved"
        return Diagnostic(code, f"{label}: {written} {said}", span, note=why)
    return None


def refusal(name: str, value: Any) -> tuple[str, str] | None:
    """``(code, why)`` of a setting that vLLM takes and vtaps does not: VT503 where it is known to be wrong or is not
    served, VT506 where nobody has shown that it is right; None for what is served."""
    if name in REFUSED and REFUSED[name][0](value):
        return "VT503", REFUSED[name][1]
    rule = load(ENGINE_ARGS)["properties"].get(name)
    if rule is None or name in OWNED or name in REFUSED or proved(name, value, rule):
        return None
    return "VT506", _UNPROVED

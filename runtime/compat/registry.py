"""vLLM's registry of text-generation architectures, and the classes of their configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text_generation() -> dict[str, str]:
    """Architecture → ``module.Class`` of the model that vLLM serves it with, as the registry has them."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    return {
        name: f"{module if module.startswith('vllm.') else 'vllm.model_executor.models.' + module}.{cls}"
        for name, (module, cls) in _TEXT_GENERATION_MODELS.items()
    }


def model_type(architecture: str) -> str | None:
    """The ``model_type`` that transformers maps to this class of model; None where it has no such class."""
    from transformers.models.auto import modeling_auto as auto

    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for found, classes in mapping.items():
            if architecture in (classes if isinstance(classes, tuple) else (classes,)):
                return str(found)
    return None


def configuration_fields(model_type: str) -> Sequence[str] | None:
    """The fields of the class that holds configurations of this type, vLLM's or transformers'; None without one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for known in (_CONFIG_REGISTRY, CONFIG_MAPPING):
        if model_type in known:
            return tuple(known[model_type]().to_dict())
    return None


class _Record(dict[str, Any]):
    """A dictionary whose keys are attributes too: what the configurations that come with checkpoints nest."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _records(value: Any) -> Any:
    if isinstance(value, dict):
        return _Record((name, _records(item)) for name, item in value.items())
    return [_records(item) for item in value] if isinstance(value, list) else value


def register_configuration(model_type: str, nested: Sequence[str] = ()) -> None:
    """A class for configurations whose own comes with the checkpoint: it holds whatever ``config.json`` states, the
    fields in ``nested`` with attributes all the way down."""
    from transformers import AutoConfig, PretrainedConfig

    def initialise(self: Any, **fields: Any) -> None:
        PretrainedConfig.__init__(self, **{n: _records(v) if n in nested else v for n, v in fields.items()})

    made = type("Own", (PretrainedConfig,), {"model_type": model_type, "__init__": initialise})
    AutoConfig.register(model_type, made)

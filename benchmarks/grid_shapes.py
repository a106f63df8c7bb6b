"""Models of the grid: a published shape, weights that vLLM makes up, a tokenizer of one token a byte."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.loads import Load

_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class Shape:
    """``shrink`` divides prompt lengths, new tokens and numbers of requests above 32: a rehearsal's loads."""

    name: str
    title: str
    dtype: str
    config: Mapping[str, Any]
    vllm: Mapping[str, Any]
    shrink: int = 1

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])


def _shape(name: str, title: str, dtype: str, vllm: Mapping[str, Any], shrink: int = 1, **config: Any) -> Shape:
    whole = {**_LLAMA, "dtype": dtype, **config}
    return Shape(name, title, dtype, whole, {"load_format": "dummy", "max_model_len": 2048, **vllm}, shrink)


_ON_GPU = {"gpu_memory_utilization": 0.85}
SHAPES = {
    s.name: s
    for s in (
        _shape(
            "llama-8b", "Llama-3.1-8B", "bfloat16", _ON_GPU, hidden_size=4096, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=14336, vocab_size=128256,
            tie_word_embeddings=False,
        ),
        _shape(
            "llama-1b", "Llama-3.2-1B", "bfloat16", _ON_GPU, hidden_size=2048, num_hidden_layers=16,
            num_attention_heads=32, num_key_value_heads=8, head_dim=64, intermediate_size=8192, vocab_size=128256,
            tie_word_embeddings=True,
        ),
        _shape(
            "tiny", "a four-layer Llama", "float32", {"kv_cache_memory_bytes": 256 << 20}, shrink=8, hidden_size=256,
            num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=512,
            vocab_size=1024, tie_word_embeddings=False,
        ),
    )
}  # fmt: skip

_FULL = (
    Load("one", 1, 512, 128),
    Load("eight", 8, 512, 128),
    Load("thirtytwo", 32, 512, 128),
    Load("sweep", 256, 32, 64, same_prompt=True),
    Load("prompts", 1024, 32, 16),
)


def loads_of(shape: Shape) -> dict[str, Load]:
    by = shape.shrink
    small = (
        Load(
            x.name,
            x.requests if x.requests <= 32 else x.requests // by,
            max(x.prompt // by, 4),
            max(x.generated // by, 4),
            x.same_prompt,
        )
        for x in _FULL
    )
    return {load.name: load for load in small}


def work_folder(shape: Shape) -> Path:
    """``${XDG_CACHE_HOME:-~/.cache}/vtaps/grid/SHAPE``: always the same, since vLLM's compile cache hashes the model's
    path."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "vtaps" / "grid" / shape.name


def write_model(shape: Shape, folder: Path) -> Path:
    """A model's folder without weights: ``config.json`` and a tokenizer.  Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(shape.config), indent=1), encoding="utf-8")
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")

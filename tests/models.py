"""Tiny random Hugging Face checkpoints of the families that have an alias table.

Weights are drawn with seed 0 and larger than a fresh model's, so that activations differ from token to token and
a wrong row, layer or head shows. Built once a machine, kept by the hash of this file and the configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "data" / "configs"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2")

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny(family: str, **changes: Any) -> Path:
    """A folder with ``config.json``, float32 safetensors and a byte-level tokenizer with a chat template; ``changes``
    stand in place of what the family's configuration says."""
    config = (CONFIGS / family / "config.json").read_bytes()
    if changes:
        config = json.dumps(json.loads(config) | changes, indent=2).encode()
    key = hashlib.sha256(Path(__file__).read_bytes() + config).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(root) if root else Path.home() / ".cache") / "vtaps" / "tests"
    folder = cache / f"{family}-{key}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{family}-", dir=cache))
    try:
        _checkpoint(json.loads(config), building)
        _tokenizer(building)
        building.chmod(0o755)
        building.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _checkpoint(config: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Columns of unit variance keep the sub-blocks' outputs of the stream's own size.
                parameter.normal_(0.0, 1.0 if "emb" in name or "wte" in name else parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def _tokenizer(folder: Path) -> None:
    """One token a byte, after four special ones: 260 of the 320 rows of the vocabulary."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)

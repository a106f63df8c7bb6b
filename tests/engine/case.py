"""Hand-written locks and blocks around a tiny random Llama, and its Hugging Face twin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vtaps.runtime.records import Finished, Request

WIDTH, LAYERS, HEADS, HEAD_DIM, VOCAB = 128, 4, 4, 32, 320
STRUCTURE = "sha256:" + "5" * 64


def tiny_llama(folder: Path) -> Path:
    """Random float32 weights with a byte-level tokenizer; big enough steps that logits are not tied."""
    if (folder / "config.json").exists():
        return folder
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, head_dim=HEAD_DIM, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def hugging_face(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def stream(layer: int) -> dict[str, Any]:
    return {"module": f"model.layers.{layer}", "output": 0, "residual": 1, "layer": layer, "width": WIDTH}


SITES: dict[str, dict[str, Any]] = {
    **{f"resid_post[{i}]": stream(i) for i in range(LAYERS)},
    "resid_pre[0]": {
        "module": "model.layers.0", "input": "hidden_states", "residual": "residual", "layer": 0, "width": WIDTH,
    },
    "resid_mid[0]": {
        "module": "model.layers.0.post_attention_layernorm", "input": "x", "residual": "residual", "layer": 0,
        "width": WIDTH,
    },
    "z[1]": {"module": "model.layers.1.self_attn.o_proj", "input": "input_", "layer": 1, "width": HEADS * HEAD_DIM},
    "v[1]": {
        "module": "model.layers.1.self_attn.qkv_proj", "output": 0, "columns": [192, 256], "layer": 1, "width": 64,
    },
    "logits": {"module": "logits_processor", "output": None, "width": VOCAB, "rows": "sampled"},
}  # fmt: skip

ON_GPU: dict[str, Any] = (
    # Prompts are longer than the largest captured graph.
    {"gpu_memory_utilization": 0.05, "max_cudagraph_capture_size": 16} if torch.cuda.is_available() else {}
)
ON_GPU_YAML = "".join(f", {name}: {value}" for name, value in ON_GPU.items())
"""Behind another setting in a mapping of YAML."""

CALLS = {
    "rows": "keep", "mean": "mean", "norm": "norm", "project": "project", "probe": "probe", "lens": "lens",
    "features": "features", "python": "python_read",
}  # fmt: skip


def write_case(
    folder: Path,
    model: Path,
    *,
    edits: Mapping[str, Mapping[str, Any]] | None = None,
    reads: Mapping[str, Mapping[str, Any]] | None = None,
    arms: Mapping[str, Mapping[str, Any]],
    vectors: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    vllm: Mapping[str, Any] | None = None,
    broken: str = "",
    mode: str = "eager",
    gates: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[dict[str, Any], Path]:
    """The lock and the block's path.  Reads come before edits where they say ``sees: before_edits``."""
    edits, reads, gates = dict(edits or {}), dict(reads or {}), dict(gates or {})
    looked = {g["site"] for g in gates.values()}
    used = [s for s in SITES if s in looked or any(s in e["sites"] for e in (*edits.values(), *reads.values()))]
    lines = [
        "from vtaps.runtime import block as vt", "",
        f'BLOCK = vt.Block(spec="", tree="", structure="{STRUCTURE}", vllm="0.32.*", architecture="LlamaForCausalLM")',
    ]  # fmt: skip
    for number, name in enumerate(used):
        site = SITES[name]
        where = {k: site[k] for k in ("output", "input", "residual") if site.get(k) is not None}
        if site.get("columns"):
            where["columns"] = tuple(site["columns"])
        told = ", ".join(f"{k}={v!r}" for k, v in where.items())
        lines += ["", "", f'@BLOCK.location("{name}", module="{site["module"]}"' + (f", {told})" if told else ")")]
        pair = site.get("residual") is not None
        values = "hidden, residual" if pair else "x"
        lines.append(f"def at_{number}(t, {values}):")
        early = [r for r, d in reads.items() if name in d["sites"] and d.get("sees") == "before_edits"]
        late = [r for r, d in reads.items() if name in d["sites"] and d.get("sees") != "before_edits"]
        for read in early:
            lines.append(f'    vt.{CALLS[reads[read]["kind"]]}(t, "{read}", {values})')
        lines += [f'    vt.gate(t, "{gate}", {values})' for gate, data in gates.items() if data["site"] == name]
        for edit, data in edits.items():
            if name in data["sites"]:
                columns = "" if data.get("columns") is None else f", columns={data['columns']!r}"
                columns += ", keep_norm=True" if data.get("keep_norm") else ""
                columns += f", when={data['when']!r}" if "when" in data else ""
                lines.append(f"    # edits.{edit}: by hand")
                verb = {"set": "set_"}.get(data["verb"], data["verb"])
                lines.append(f'    vt.{verb}(t, "{edit}", {values}{columns})')
        for read in late:
            lines.append(f'    vt.{CALLS[reads[read]["kind"]]}(t, "{read}", {values})')
        if broken == name:
            lines += ["    # reads.broken: by hand", "    t.nothing()"]
    block = folder / "case.block.py"
    folder.mkdir(parents=True, exist_ok=True)
    block.write_text("\n".join(lines) + "\n")
    lock = {
        "lock": 1,
        "spec": {"file": "case.yaml"},
        "block": {
            "file": block.name,
            "digest": "sha256:" + hashlib.sha256(block.read_bytes()).hexdigest(),
            "structure": STRUCTURE,
        },
        "model": {"path": str(model), "dtype": "float32", "revision": None, "tokenizer": None},
        "engine": {
            "mode": mode,
            "vllm": {
                "max_model_len": 256,
                "max_num_seqs": 8,
                "kv_cache_memory_bytes": 64 << 20,
                **ON_GPU,
                **(vllm or {}),
            },
        },
        "lens": {"norm": "model.norm"},
        "sites": {name: SITES[name] for name in used},
        "edits": edits,
        "gates": gates,
        "reads": reads,
        "overrides": dict(overrides or {}),
        "metrics": dict(metrics or {}),
        "vectors": dict(vectors or {}),
        "arms": dict(arms),
    }
    return lock, block


def arm(
    *edits: Mapping[str, Any], reads: Sequence[str] = (), metrics: Sequence[str] = (), overrides: Sequence[Any] = ()
) -> dict[str, Any]:
    point = {"values": {}, "edits": list(edits), "overrides": list(overrides)}
    return {"reads": list(reads), "metrics": list(metrics), "points": [point]}


def use(edit: str, *sites: str, coefficient: float | None = None, vector: str | None = None) -> dict[str, Any]:
    return {"edit": edit, "sites": list(sites), "coefficient": coefficient, "vector": vector}


def request(key: str, arm: str, ids: Sequence[int], point: int = 0) -> Request:
    return Request(key, arm, point, "group", key, tuple(ids))


def by_key(finished: Sequence[Finished]) -> dict[str, Finished]:
    return {f.request.key: f for f in finished}


Change = Callable[[torch.Tensor], torch.Tensor]


def reference(
    model: Any, ids: Sequence[int], edit: Mapping[str, Change] | None = None
) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Logits ``[rows, vocab]`` and stream after each layer ``[rows, width]`` of one forward over ``ids``, with
    ``edit``: ``resid_post[i]`` or ``z[i]`` → what is done there to ``[rows, width]``."""
    edit = dict(edit or {})
    seen: dict[str, np.ndarray[Any, Any]] = {}
    handles = []
    for i, layer in enumerate(model.model.layers):

        def after(_: Any, __: Any, out: Any, name: str = f"resid_post[{i}]") -> Any:
            x = out[0] if isinstance(out, tuple) else out
            if name in edit:
                x = edit[name](x[0].clone())[None]
            seen[name] = x[0].numpy().copy()
            return (x, *out[1:]) if isinstance(out, tuple) else x

        def before(_: Any, args: Any, name: str = f"z[{i}]") -> Any:
            x = args[0]
            if name in edit:
                x = edit[name](x[0].clone())[None]
            seen[name] = x[0].numpy().copy()
            return (x, *args[1:])

        handles.append(layer.register_forward_hook(after))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(before))
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0].numpy()
    for handle in handles:
        handle.remove()
    return logits, seen

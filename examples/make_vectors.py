"""Makes ``vectors/paris.safetensors``: at three layers, where the stream points when the next token is " Paris".

The mean last-token stream (Hugging Face ``hidden_states``) over prompts that Paris completes, minus the mean over
prompts that other cities complete, scaled to norm 1: ``layer_{i}``, float32 ``[576]``.

    python examples/make_vectors.py models/smollm2-135m-instruct
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

LAYERS = (10, 12, 14)
PARIS = (
    "The capital of France is",
    "The Eiffel Tower is in the city of",
    "The Louvre is a museum in the city of",
    "The 2024 Olympics were held in the city of",
    "Notre-Dame stands in the city of",
    "The river Seine flows through the city of",
)
ELSEWHERE = (
    "The capital of Japan is",
    "The Colosseum is in the city of",
    "The British Museum is a museum in the city of",
    "The 2016 Olympics were held in the city of",
    "The Brandenburg Gate stands in the city of",
    "The river Thames flows through the city of",
)


@torch.no_grad()
def mean_stream(model: torch.nn.Module, tokenizer: object, prompts: tuple[str, ...]) -> dict[int, torch.Tensor]:
    sums = {layer: torch.zeros(model.config.hidden_size) for layer in LAYERS}
    for prompt in prompts:
        hidden = model(**tokenizer(prompt, return_tensors="pt"), output_hidden_states=True).hidden_states
        for layer in LAYERS:
            sums[layer] += hidden[layer + 1][0, -1] / len(prompts)
    return sums


def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    towards, away = mean_stream(model, tokenizer, PARIS), mean_stream(model, tokenizer, ELSEWHERE)
    vectors = {}
    for layer in LAYERS:
        direction = towards[layer] - away[layer]
        print(f"layer {layer}: stream {towards[layer].norm():.1f}, difference {direction.norm():.1f}")
        vectors[f"layer_{layer}"] = (direction / direction.norm()).contiguous()
    target = Path(__file__).parent / "vectors" / "paris.safetensors"
    save_file(vectors, target, metadata={"made_by": "examples/make_vectors.py"})
    print(f"wrote {target}")


if __name__ == "__main__":
    main(sys.argv[1])

"""Makes ``vectors/paris.safetensors``: after every layer, what sets "…, whose capital is Paris" apart in the stream.

The mean last-token stream (Hugging Face ``hidden_states``) over four sentences about France's capital, minus the mean
over the same sentences about six other countries, scaled to norm 1: ``layer_{i}``, float32 ``[576]``. Japan and Italy,
which examples/paris.yaml asks about, are not among the six. The last layer is left out: Hugging Face norms its entry.

    python examples/make_vectors.py models/smollm2-135m-instruct
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SENTENCES = (
    "The capital of {} is",
    "{}'s capital is",
    "The capital city of {} is",
    "The capital of {} is the city of",
)
PARIS = ("France",)
ELSEWHERE = ("Germany", "Spain", "Egypt", "Greece", "Poland", "Peru")


@torch.no_grad()
def mean_stream(model: torch.nn.Module, tokenizer: object, countries: tuple[str, ...]) -> torch.Tensor:
    """``[layers, hidden]``: the stream after each layer but the last, at the last token, averaged over sentences."""
    prompts = [sentence.format(country) for country in countries for sentence in SENTENCES]
    streams = []
    for prompt in prompts:
        hidden = model(**tokenizer(prompt, return_tensors="pt"), output_hidden_states=True).hidden_states
        streams.append(torch.stack([h[0, -1] for h in hidden[1:-1]]))
    return torch.stack(streams).mean(0)


def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    towards, away = mean_stream(model, tokenizer, PARIS), mean_stream(model, tokenizer, ELSEWHERE)
    vectors = {}
    for layer, (one, other) in enumerate(zip(towards, away, strict=True)):
        direction = one - other
        print(f"layer {layer}: stream {one.norm():.1f}, difference {direction.norm():.1f}")
        vectors[f"layer_{layer}"] = (direction / direction.norm()).contiguous()
    target = Path(__file__).parent / "vectors" / "paris.safetensors"
    save_file(vectors, target, metadata={"made_by": "examples/make_vectors.py"})
    print(f"wrote {target}")


if __name__ == "__main__":
    main(sys.argv[1])

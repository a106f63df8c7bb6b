"""Makes ``saes/countries``: a small sparse autoencoder whose feature i is "the capital of the i-th of COUNTRIES".

It is not trained at large but fitted to 32 countries: a feature's decoder row is the unit vector from the
mean last-token stream after layer 24, over four sentences about all of them, to the mean over those about its own; its
encoder is the ridge regression that tells it from the others, scaled so that the feature's activation is how far the
stream has moved along the row. JumpReLU, with a threshold at a quarter of that. Written as SAELens writes its own.

    python examples/make_sae.py models/smollm2-135m-instruct
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

LAYER = 24
RIDGE = 0.3
SENTENCES = (
    "The capital of {} is",
    "{}'s capital is",
    "The capital city of {} is",
    "The capital of {} is the city of",
)
COUNTRIES = (
    "France", "Germany", "Spain", "Italy", "Japan", "China", "India", "Russia", "Brazil", "Mexico", "Canada", "Egypt",
    "Greece", "Poland", "Peru", "Chile", "Argentina", "Portugal", "Sweden", "Norway", "Finland", "Denmark", "Austria",
    "Hungary", "Turkey", "Iran", "Iraq", "Israel", "Thailand", "Vietnam", "Indonesia", "Kenya",
)  # fmt: skip


@torch.no_grad()
def streams(model: torch.nn.Module, tokenizer: object) -> torch.Tensor:
    """``[countries, sentences, hidden]``: the stream after the layer, at the last token."""
    found = []
    for country in COUNTRIES:
        for sentence in SENTENCES:
            prompt = tokenizer(sentence.format(country), return_tensors="pt")
            found.append(model(**prompt, output_hidden_states=True).hidden_states[LAYER + 1][0, -1])
    return torch.stack(found).unflatten(0, (len(COUNTRIES), len(SENTENCES)))


def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = streams(model, tokenizer)
    centre = rows.mean((0, 1))
    moved = rows.mean(1) - centre
    length = moved.norm(dim=-1)
    x = (rows - centre).flatten(0, 1)
    asked = torch.eye(len(COUNTRIES)).repeat_interleave(len(SENTENCES), 0)
    penalty = RIDGE * x.square().sum() / len(x)
    encoder = x.T @ torch.linalg.solve(x @ x.T + penalty * torch.eye(len(x)), asked)
    own = (x @ encoder).unflatten(0, rows.shape[:2]).diagonal(dim1=0, dim2=2).mean(0)
    encoder *= length / own
    for country, size in zip(COUNTRIES, length, strict=True):
        print(f"{country}: activation {size:.1f}")
    target = Path(__file__).parent / "saes" / "countries"
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        "W_enc": encoder.contiguous(), "b_enc": torch.zeros(len(COUNTRIES)), "W_dec": moved / length[:, None],
        "b_dec": centre, "threshold": length / 4,
    }  # fmt: skip
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, target / "sae_weights.safetensors")
    config = {
        "architecture": "jumprelu",
        "d_in": encoder.shape[0],
        "d_sae": len(COUNTRIES),
        "dtype": "bfloat16",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "metadata": {"hook_name": f"blocks.{LAYER}.hook_resid_post", "features": list(COUNTRIES)},
    }
    (target / "cfg.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main(sys.argv[1])

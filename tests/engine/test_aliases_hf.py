"""The alias tables against the Hugging Face forward: every alias of every family, all layers, all rows.

vLLM runs as it is, with plain forward hooks at the places that the tables name; the reference is hooks on the
Hugging Face modules, written down per family below.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import FAMILIES, tiny
from vtaps.spec import aliases
from vtaps.spec.alias_tables import TABLES
from vtaps.spec.snapshot import read_tree
from vtaps.spec.tree import ModelTree, Site

pytestmark = pytest.mark.engine

MORE = ("gemma", "phi3", "ernie4_5", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Families whose forwards are those of others, or with experts: no other test serves them."""
TREES = Path(__file__).parent.parent / "data" / "trees"
PROMPT = [7 + (i * 37) % 250 for i in range(24)]  # longer than the sliding windows of 16
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # plain vLLM: no plug-in, ours included
}
TOLERANCE = 2e-5
"""Of the largest value at the place; float32 against float32 with other kernels."""


def engine(folder: Path) -> Any:
    from vllm import LLM

    return LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=128,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


def wanted(tree: ModelTree) -> list[tuple[str, int | None, Site]]:
    found: list[tuple[str, int | None, Site]] = []
    for alias in aliases.names(tree):
        for layer in range(tree.dimensions.layers) if aliases.layered(tree, alias) else [None]:
            # Of a model with experts, some layers may have none.
            if alias != "router_logits" or aliases.site_or_none(tree, alias, layer) is not None:
                found.append((alias, layer, aliases.site(tree, alias, layer)))
    return found


def hook(model: Any, places: set[tuple[str, str]]) -> tuple[dict[tuple[str, str], Any], list[Any], list[Any]]:
    """Hooks that keep, at each (module, side), a copy and the tensors themselves, of the first call."""
    from vtaps.runtime.compat.abstract_pass import parameter_binder

    copies: dict[tuple[str, str], Any] = {}
    originals: dict[tuple[str, str], Any] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    handles = []

    def keep(key: tuple[str, str], value: Any) -> None:
        if key not in copies:
            copies[key] = clone(value)
            originals[key] = value  # held, so that its memory is not given to another tensor

    for path, side in places:
        module = modules[path]
        if side == "input":
            bind = parameter_binder(module)

            def before(_: Any, args: Any, kwargs: Any, key: Any = (path, side), bind: Any = bind) -> None:
                keep(key, bind(args, kwargs))

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:

            def after(_: Any, args: Any, output: Any, key: Any = (path, side)) -> None:
                keep(key, output)

            handles.append(module.register_forward_hook(after))
    return copies, [originals], handles


def clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: clone(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(clone(v) for v in value)
    return value.clone() if hasattr(value, "clone") else value


def read(copies: dict[tuple[str, str], Any], site: Site) -> Any:
    """``[rows, width]`` by the site's own reading rule."""
    held = copies[site.module, site.side]
    value = held if site.element is None else held[site.element]
    if site.value == "pair":
        other = held[site.residual]
        value = value if other is None else value + other
    return value[:, slice(*site.columns)] if site.columns else value


def reference(family: str, folder: Path) -> tuple[dict[tuple[str, int | None], Any], list[Any]]:
    """``(alias, layer) → [rows, width]`` and ``hidden_states``, from Hugging Face."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found: dict[tuple[str, int | None], Any] = {}

    def output(alias: str, layer: int | None, module: Any, rows: bool = False) -> None:
        """``rows``: the module puts out rows without an axis of requests."""

        def after(_: Any, args: Any, out: Any) -> None:
            value = out[0] if isinstance(out, tuple) else out
            found[alias, layer] = (value if rows else value[0]).clone()

        module.register_forward_hook(after)

    def entry(alias: str, layer: int | None, module: Any) -> None:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            found[alias, layer] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        module.register_forward_pre_hook(before, with_kwargs=True)

    if family == "gpt2":
        trunk = model.transformer
        output("embed", None, trunk.wte)
        output("final_norm", None, trunk.ln_f)
        for i, layer in enumerate(trunk.h):
            entry("resid_pre", i, layer)
            entry("resid_mid", i, layer.ln_2)
            output("resid_post", i, layer)
            output("ln1", i, layer.ln_1)
            output("ln2", i, layer.ln_2)
            output("attn_out", i, layer.attn)
            output("mlp_out", i, layer.mlp)
            output("qkv", i, layer.attn.c_attn)
            entry("z", i, layer.attn.c_proj)
            entry("mlp_post", i, layer.mlp.c_proj)
    else:
        trunk = model.model
        gemma = family in ("gemma2", "gemma3")
        output("final_norm", None, trunk.norm)
        for i, layer in enumerate(trunk.layers):
            entry("resid_pre", i, layer)
            norm = layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm
            entry("resid_mid", i, norm)
            output("resid_post", i, layer)
            output("ln1", i, layer.input_layernorm)
            output("ln2", i, norm)
            output("attn_out", i, layer.post_attention_layernorm if gemma else layer.self_attn)
            output("mlp_out", i, layer.post_feedforward_layernorm if gemma else layer.mlp)
            if family == "phi3":
                output("qkv", i, layer.self_attn.qkv_proj)
            for name in "qkv" if family != "phi3" else "":
                output(name, i, getattr(layer.self_attn, f"{name}_proj"))
            entry("z", i, layer.self_attn.o_proj)
            if (down := getattr(layer.mlp, "down_proj", None)) is not None:
                entry("mlp_post", i, down)
            else:
                output("router_logits", i, layer.mlp.gate, rows=True)
    with rotated(family, found), torch.no_grad():
        done = model(torch.tensor([PROMPT]), output_hidden_states=True)
    for i in range(model.config.num_hidden_layers):
        if (fused := found.pop(("qkv", i), None)) is not None:
            size = model.config
            sizes = [size.num_attention_heads, *2 * [getattr(size, "num_key_value_heads", size.num_attention_heads)]]
            width = fused.shape[-1] // sum(sizes)
            found["q", i], found["k", i], found["v", i] = fused.split([n * width for n in sizes], dim=-1)
    # The embedding as the weights say it: Gemma's module in Hugging Face may hold the scaling too.
    found["embed", None] = model.get_input_embeddings().weight[torch.tensor(PROMPT)].detach()
    return found, [h[0] for h in done.hidden_states]


class rotated:
    """Keeps what the rotary embedding gives to each layer's attention, ``[rows, heads × head_dim]``."""

    def __init__(self, family: str, found: dict[tuple[str, int | None], Any]) -> None:
        self.module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        self.original: Callable[..., Any] | None = getattr(self.module, "apply_rotary_pos_emb", None)
        self.found, self.layer = found, 0

    def __enter__(self) -> None:
        if self.original is None:
            return
        original = self.original

        def apply(*args: Any, **kwargs: Any) -> Any:
            q, k = original(*args, **kwargs)
            for name, value in (("rot_q", q), ("rot_k", k)):
                self.found[name, self.layer] = value[0].transpose(0, 1).flatten(1).clone()
            self.layer += 1
            return q, k

        self.module.apply_rotary_pos_emb = apply  # type: ignore[attr-defined]

    def __exit__(self, *_: Any) -> None:
        if self.original is not None:
            self.module.apply_rotary_pos_emb = self.original  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=(*FAMILIES, *MORE))
def run(request: pytest.FixtureRequest) -> Iterator[tuple[str, ModelTree, Any, Any]]:
    """The family, its tree, and what the hooks kept: copies, and the tensors themselves."""
    family = request.param
    tree = read_tree(TREES / f"{family}.json")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        yield from serve(family, tree)


def serve(family: str, tree: ModelTree) -> Iterator[tuple[str, ModelTree, Any, Any]]:
    llm = engine(tiny(family))
    places = {(site.module, site.side) for _, _, site in wanted(tree)} | {
        (p[0], p[1]) for _, _, spelled in spellings(tree) for p in spelled
    }
    kept: list[Any] = []
    llm.apply_model(lambda model: kept.append(hook(model, places)))
    from vllm import SamplingParams

    llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    copies, (originals,), handles = kept[0]
    for handle in handles:
        handle.remove()
    yield family, tree, copies, originals
    del llm
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def spellings(tree: ModelTree) -> list[tuple[str, int, list[tuple[str, str, int | str | None]]]]:
    """Per alias and layer, every spelling in the table that one call of one module answers for."""
    found = []
    for alias, rule in TABLES[tree.architecture].rules.items():
        for layer in (0, tree.dimensions.layers - 2):
            places = []
            for text in (t for t in (rule.at, *rule.same) if ".source." not in t):
                if alias == "resid_pre" and layer > 0:
                    continue
                module, side, name = aliases.split(text.format(i=layer))
                here = tree.modules.get(module)
                if here is not None and here.calls == 1 and (side == "output" or name in dict(here.inputs)):
                    places.append((module, side, name))
            found.append((alias, layer, places))
    return found


def test_every_alias_equals_hugging_face(run: tuple[str, ModelTree, Any, Any]) -> None:
    import torch

    family, tree, copies, _ = run
    expected, hidden = reference(family, tiny(family))
    worst: dict[str, float] = {}
    for alias, layer, site in wanted(tree):
        got, want = read(copies, site), expected[alias, layer]
        assert got.shape == want.shape == (len(PROMPT), site.width), (alias, layer)
        error = float((got - want).abs().max() / want.abs().max())
        worst[alias] = max(worst.get(alias, 0.0), error)
        if site.hf_index is not None:
            torch.testing.assert_close(got, hidden[site.hf_index], atol=TOLERANCE * float(want.abs().max()), rtol=0)
    print(f"\n{family}: " + ", ".join(f"{a} {e:.1e}" for a, e in worst.items()))
    assert {a: e for a, e in worst.items() if not e < TOLERANCE} == {}


def test_the_sub_blocks_add_up_to_the_stream(run: tuple[str, ModelTree, Any, Any]) -> None:
    import torch

    _, tree, copies, _ = run
    for layer in range(tree.dimensions.layers):
        parts = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        at = {a: read(copies, aliases.site(tree, a, layer)) for a in parts}
        size = float(at["resid_post"].abs().max())
        for before, added, after in (
            ("resid_pre", "attn_out", "resid_mid"),
            ("resid_mid", "mlp_out", "resid_post"),
        ):
            torch.testing.assert_close(at[before] + at[added], at[after], atol=1e-6 * size, rtol=0)


def test_spellings_of_an_alias_are_the_same_memory(run: tuple[str, ModelTree, Any, Any]) -> None:
    _, tree, _, originals = run
    for alias, layer, places in spellings(tree):
        owners = set()
        for module, side, name in places:
            held = originals[module, side]
            value = held[name] if side == "input" else held[0] if isinstance(held, tuple) else held
            owners.add(value.untyped_storage().data_ptr())
        assert len(owners) <= 1, (alias, layer, places)

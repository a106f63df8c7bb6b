"""The Hugging Face forward of ``vtaps verify`` on every family with a table: its places, its edits, its lens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.models import FAMILIES, tiny  # noqa: E402
from vtaps.runtime.reference.forward import Edit, HuggingFace, NoReference, Seen  # noqa: E402
from vtaps.runtime.reference.places import FAMILIES as TABLES  # noqa: E402

IDS = [7 + (i * 37) % 250 for i in range(20)]  # longer than the sliding windows of 16
LAYERS, WIDTH = 4, 128
ALL = (*FAMILIES, "gemma", "phi3", "ernie4_5")


def made(family: str) -> HuggingFace:
    (architecture,) = json.loads((tiny(family) / "config.json").read_text())["architectures"]
    names = TABLES[architecture].places
    one = ("embed", "final_norm")
    sites = [n if n in one else f"{n}[{i}]" for n in names for i in range(LAYERS)]
    return HuggingFace(str(tiny(family)), architecture, sites)


@pytest.fixture(scope="module", params=ALL)
def model(request: pytest.FixtureRequest) -> HuggingFace:
    return made(request.param)


@pytest.fixture(scope="module")
def seen(model: HuggingFace) -> Seen:
    return model.forward(IDS)


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(np.abs(b).max())), rtol=0)


def test_the_parts_add_up_to_the_stream(seen: Seen) -> None:
    for i in range(LAYERS):
        at = {n: seen.after[f"{n}[{i}]"] for n in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")}
        assert min(np.abs(x).max() for x in at.values()) > 1e-2
        close(at["resid_pre"] + at["attn_out"], at["resid_mid"])
        close(at["resid_mid"] + at["mlp_out"], at["resid_post"])
        if i:
            np.testing.assert_array_equal(at["resid_pre"], seen.after[f"resid_post[{i - 1}]"])


def test_streams_are_hugging_face_s_hidden_states(model: HuggingFace, seen: Seen) -> None:
    with torch.no_grad():
        states = model.model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    for i in range(LAYERS):
        np.testing.assert_array_equal(seen.after[f"resid_pre[{i}]"], states[i][0].numpy())


def test_projections_are_the_weights_of_what_they_take_in(model: HuggingFace, seen: Seen) -> None:
    """q, k and v of one layer by its own weights from ``ln1``, whichever module makes them."""
    layer = model.model.get_submodule(model._family.layers)[2]
    x = torch.from_numpy(seen.after["ln1[2]"])
    with torch.no_grad():
        if hasattr(layer, "attn"):
            whole = layer.attn.c_attn.forward(x).numpy()
        elif hasattr(layer.self_attn, "qkv_proj"):
            whole = layer.self_attn.qkv_proj.forward(x).numpy()
        else:
            whole = np.concatenate([getattr(layer.self_attn, f"{p}_proj").forward(x).numpy() for p in "qkv"], 1)
    close(np.concatenate([seen.after[f"{p}[2]"] for p in "qkv"], 1), whole)


def test_the_embedding_is_that_of_the_weights(model: HuggingFace, seen: Seen) -> None:
    close(seen.after["embed"], model.model.get_input_embeddings().weight.detach().numpy()[IDS])


def test_the_lens_of_the_last_stream_is_the_logits(model: HuggingFace, seen: Seen) -> None:
    close(model.lens(seen.after[f"resid_post[{LAYERS - 1}]"]), seen.logits)
    assert seen.logits.shape[0] == len(IDS)


def test_an_edit_is_seen_by_everything_behind_it_and_nothing_before(model: HuggingFace, seen: Seen) -> None:
    for site in ("embed", "resid_pre[1]", "q[1]", "z[1]", "attn_out[1]", "resid_mid[1]", "mlp_post[1]", "mlp_out[1]",
                 "resid_post[1]", "final_norm", *(["rot_k[1]"] if "rot_k[1]" in seen.after else [])):  # fmt: skip
        edited = model.forward(IDS, {site: [Edit("e", [3, 7], lambda x: -0.5 * x)]})
        want = seen.after[site].copy()
        want[[3, 7]] *= -0.5
        close(edited.after[site], want)
        np.testing.assert_array_equal(edited.before[site], seen.after[site])
        assert np.abs(edited.logits - seen.logits).max() > 1e-3, site
        np.testing.assert_array_equal(edited.logits[:3], seen.logits[:3])
        if site not in ("embed", "resid_pre[1]"):
            np.testing.assert_array_equal(edited.after["resid_post[0]"], seen.after["resid_post[0]"])
        assert edited.moved["e", site] == pytest.approx(1.5 * float(np.abs(seen.after[site][[3, 7]]).max()), rel=1e-5)
    again = model.forward(IDS)
    np.testing.assert_array_equal(again.logits, seen.logits)


def test_growth_is_how_much_larger_the_stream_has_been(model: HuggingFace) -> None:
    found = model.forward(IDS, {
        "resid_post[0]": [Edit("up", [4], lambda x: x * 1000)],
        "resid_post[1]": [Edit("down", [4], lambda x: x / 1000)],
        "resid_post[2]": [Edit("new", [5], lambda x: x / 1000, replaces=True)],
    })  # fmt: skip
    assert 100 < found.growth["resid_post[1]"][4] < 10_000
    assert found.growth["resid_post[2]"][5] == 1.0
    assert (found.growth["resid_post[1]"][:4] < 100).all()


def test_what_there_is_no_table_for_is_said() -> None:
    with pytest.raises(NoReference, match="no table"):
        HuggingFace(str(tiny("llama")), "OPTForCausalLM", [])
    with pytest.raises(NoReference, match="makes a LlamaForCausalLM"):
        HuggingFace(str(tiny("llama")), "Qwen3ForCausalLM", [])
    with pytest.raises(NoReference, match="does not load it"):
        HuggingFace("/nowhere", "LlamaForCausalLM", [])


def test_attention_is_kept_where_it_is_asked_for() -> None:
    model = made("llama")
    assert model.forward(IDS).attention == {}
    model.attention = frozenset({1})
    seen = model.forward(IDS)
    assert set(seen.attention) == {1}
    config = model.model.config
    heads, shared = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    q = seen.after["rot_q[1]"].astype(np.float64).reshape(len(IDS), heads, -1)
    k = seen.after["rot_k[1]"].astype(np.float64).reshape(len(IDS), heads // shared, -1).repeat(shared, axis=1)
    logits = np.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    logits[:, np.triu(np.ones((len(IDS), len(IDS)), bool), 1)] = -np.inf
    want = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(seen.attention[1], want / want.sum(-1, keepdims=True), atol=1e-6)

"""Sparse autoencoders on a worker against SAELens's formulas in float64: what reads give, what edits are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.saes import activations, drawn_npz, reconstruction, save_npz, write_sae  # noqa: E402
from vtaps.runtime import sae as runtime  # noqa: E402
from vtaps.runtime.lockfile import parse_program  # noqa: E402
from vtaps.runtime.memory import Limits, predicted  # noqa: E402
from vtaps.runtime.probes import Probe, applied  # noqa: E402
from vtaps.runtime.program import LockError  # noqa: E402
from vtaps.runtime.sae import Encoder, Loaded, autoencoders, encoders  # noqa: E402
from vtaps.spec.saes import open_sae  # noqa: E402
from vtaps.spec.tensor_files import VectorError, file_digest  # noqa: E402

WIDTH, FEATURES, K = 64, 300, 7
KINDS = {
    "standard": {}, "jumprelu": {}, "topk": {"k": K}, "gated": {}, "scope": {},
    "plain": {"apply_b_dec_to_input": False},
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
IDS = (299, 0, 17, 0)


def made(folder: Path, kind: str, dtype: Any, rows: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """The SAE, and its activations of ``rows``."""
    said = KINDS[kind]
    if kind == "scope":
        file = folder / "scope/params.npz"
        # numpy has no bfloat16, and a .npz of Gemma Scope is float32.
        kept = np.float16 if dtype == torch.float16 else np.float32
        tensors = save_npz(file, drawn_npz(WIDTH, FEATURES), kept)
        return open_sae(folder, "scope/params.npz"), activations(tensors, rows.double().numpy(), centred=False)
    architecture = "standard" if kind == "plain" else kind
    tensors = write_sae(folder / kind, architecture, WIDTH, FEATURES, dtype=dtype, **said)
    want = activations(tensors, rows.double().numpy(), k=said.get("k"), centred=kind != "plain")
    return open_sae(folder, kind), want


def drawn(dtype: Any, size: float = 1.0) -> Any:
    return torch.from_numpy(np.random.default_rng(9).normal(size=(40, WIDTH)) * size).to(dtype)


def bound(rows: Any) -> float:
    """Of float32 products over a row."""
    return float(rows.double().norm(dim=-1).max()) * 2.0**-22 * 8 + 2.0**-20


@pytest.mark.parametrize("work", [1 << 20, 4 * WIDTH * 11], ids=["whole", "in parts"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_reads_are_the_encoder(
    kind: str, dtype: Any, work: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "WORK_BYTES", work)
    rows = drawn(dtype)
    sae, want = made(tmp_path, kind, dtype, rows)
    atol = bound(rows)
    chosen = Encoder.load(sae, IDS, CPU).read(rows, top=None)
    assert chosen["ids"].tolist() == [list(IDS)] * len(rows)
    np.testing.assert_allclose(chosen["activations"], want[:, IDS], atol=atol)
    for top in (1, 5, 60):
        found = Encoder.load(sae, None, CPU).read(rows, top=top)
        ids, values = found["ids"].numpy(), found["activations"].numpy()
        assert ids.shape == values.shape == (len(rows), top) and ids.dtype == np.int32 and values.dtype == np.float32
        np.testing.assert_allclose(values, -np.sort(-want, axis=-1)[:, :top], atol=atol)
        assert ((ids == -1) == (values == 0)).all() and (np.diff(values, axis=-1) <= 0).all()
        picked = np.take_along_axis(want, np.maximum(ids, 0), -1)
        np.testing.assert_allclose(picked[ids >= 0], values[ids >= 0], atol=atol)
        if kind == "topk" and top > K:
            assert ((ids >= 0).sum(-1) <= K).all()


@pytest.mark.parametrize("kind", ["standard", "jumprelu", "topk", "gated", "scope"])
def test_streams_of_ten_thousand(kind: str, tmp_path: Path) -> None:
    rows = drawn(torch.bfloat16, 1e4)
    sae, want = made(tmp_path, kind, torch.float32, rows)
    found = Encoder.load(sae, IDS, CPU).read(rows, top=None)["activations"]
    assert torch.isfinite(found).all()
    np.testing.assert_allclose(found, want[:, IDS], atol=bound(rows))


def test_an_sae_in_which_nothing_is_active(tmp_path: Path) -> None:
    sae, _ = made(tmp_path, "jumprelu", torch.float32, drawn(torch.float32))
    encoder = Encoder.load(sae, None, CPU)
    encoder.threshold = torch.full((FEATURES,), 1e9)
    found = encoder.read(drawn(torch.float32), top=FEATURES + 3)
    assert found["ids"].shape == (40, FEATURES + 3) and (found["ids"] == -1).all() and not found["activations"].any()


@pytest.mark.parametrize("kind", ["standard", "jumprelu", "plain", "gated", "scope"])
def test_a_feature_by_itself(kind: str, tmp_path: Path) -> None:
    """What an edit takes: one dot product, its bias and threshold, and a decoder row."""
    rows = drawn(torch.float32)
    sae, want = made(tmp_path, kind, torch.bfloat16, rows)
    for index in (0, 1, 150, FEATURES - 1):
        feature = sae.feature(index)
        p = rows.double().numpy() @ feature.encoder.astype(np.float64) + feature.bias
        np.testing.assert_allclose(np.where(p > feature.threshold, p, 0.0), want[:, index], atol=1e-6)
        decoder = sae.tensors["W_dec"].read(())[index]
        assert np.array_equal(feature.decoder, decoder)
    with pytest.raises(VectorError, match=f"{kind}.* has the features 0 … 299, not -1"):
        sae.feature(-1)


@pytest.mark.parametrize("work", [1 << 20, 4 * WIDTH * 11], ids=["whole", "in parts"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("does", ["to", "by"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_that_drops_the_error(
    kind: str, does: str, dtype: Any, work: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "WORK_BYTES", work)
    rows = drawn(dtype)
    sae, want = made(tmp_path, kind, dtype, rows)
    tensors = {name: t.read(()).astype(np.float64) for name, t in sae.tensors.items()}
    changes = [(7, -1.5), (int(want[0].argmax()), 0.0), (299, 4.0)]
    points = [{"edit": "set", "sites": ["a"], "coefficient": c, "vector": None, "feature": f} for f, c in changes]
    said = {"verb": "reconstruct", "sites": ["a", "b"], "tokens": {"rows": "all"}}
    asked = lock(sae.folder, edits={"set": {**said, "sae": {"dir": sae.folder, "does": does}}})
    asked["arms"] = {"x": {"points": [{"edits": [point]} for point in points]}}
    program = parse_program(asked, tmp_path)
    (edit,) = autoencoders(program, CPU, loaded := {}).values()
    assert runtime.bytes_of(loaded, {("set", "a"): edit}) == sae.whole
    uses = torch.tensor([1 + i % 3 for i in range(len(rows))])
    got = edit(rows.clone(), uses)
    assert got.dtype == dtype and got.shape == rows.shape
    for row, use in enumerate(uses.tolist()):
        index, value = changes[use - 1]
        want[row, index] = value + (want[row, index] if does == "by" else 0.0)
    out = reconstruction(tensors, want)
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    np.testing.assert_allclose(got.double(), out, rtol=rounding, atol=4 * bound(rows))


def test_an_edit_shares_the_encoder_of_a_read(tmp_path: Path) -> None:
    sae, _ = made(tmp_path, "standard", torch.float32, drawn(torch.float32))
    asked = lock("standard")
    asked["edits"]["set"]["verb"] = "reconstruct"
    program = parse_program(asked, tmp_path)
    loaded: Loaded = {}
    reads, edits = encoders(program, CPU, loaded), autoencoders(program, CPU, loaded)
    assert set(edits) == {("set", "a"), ("set", "b")} and edits["set", "a"].encoder is reads["top"]["b"]
    assert edits["set", "a"].decoder is edits["set", "b"].decoder
    taken = runtime.bytes_of(loaded, edits)
    assert taken == sae.whole + sae.held((4, 2))[1] == runtime.predicted(program)
    asked["arms"]["x"]["points"][0]["edits"][0]["feature"] = FEATURES
    with pytest.raises(LockError, match=r"edits.set: standard has the features 0 … 299, not 300 \(at a\)"):
        autoencoders(parse_program(asked, tmp_path), CPU, {})


def test_a_probe_is_rounded_as_if_it_were_alone() -> None:
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(size=(33, 2, WIDTH))).float()
    probes = [Probe(torch.from_numpy(rng.normal(size=(3, WIDTH))).float(), torch.randn(3)) for _ in range(2)]
    found = applied(rows, probes)
    for site, probe in enumerate(probes):
        assert probe.bias is not None
        want = rows[:, site].double() @ probe.weight.double().T + probe.bias.double()
        assert torch.allclose(found[:, site].double(), want, atol=1e-5)
    assert torch.equal(applied(rows[5:6], probes), found[5:6])


def lock(kind: str, **more: Any) -> dict[str, Any]:
    """Reads and edits with an SAE at two sites."""
    tokens = {"rows": "all"}
    sites = {n: {"module": n, "output": 0, "layer": i, "width": WIDTH} for i, n in enumerate("ab")}
    edit = {"verb": "feature", "sites": ["a", "b"], "tokens": tokens, "sae": {"dir": kind, "does": "to"}}
    point = {"edit": "set", "sites": ["a", "b"], "coefficient": 1.0, "vector": None, "feature": 5}
    return {
        "lock": 1,
        "engine": {"mode": "taps"},
        "block": {"digest": "", "structure": ""},
        "sites": sites,
        "edits": {"set": edit},
        "reads": {
            "top": {"kind": "features", "sites": ["a", "b"], "tokens": tokens, "sae": kind, "top": 3},
            "ids": {"kind": "features", "sites": ["a"], "tokens": tokens, "sae": kind, "ids": [4, 2]},
        },
        "arms": {"x": {"reads": ["top", "ids"], "points": [{"edits": [point, {**point, "feature": 6}]}]}},
        **more,
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "item"), [("standard", "float32", 4), ("topk", "bfloat16", 2), ("gated", "float32", 4)]
)
def test_memory_is_what_the_encoders_take(kind: str, dtype: str, item: int, tmp_path: Path) -> None:
    sae, _ = made(tmp_path, kind, getattr(torch, dtype), drawn(torch.float32))
    limits = Limits(rows=8, requests=2, step_rows=8)
    with_saes = parse_program(lock(kind), tmp_path)
    found = encoders(with_saes, CPU, loaded := {})
    assert found["top"]["a"] is found["top"]["b"]
    columns = FEATURES + (FEATURES if kind == "topk" else 2)
    assert runtime.bytes_of(loaded, {}) == columns * (WIDTH * item + (12 if kind == "gated" else 4))
    reads = {n: {"kind": "rows", "sites": r["sites"], "tokens": r["tokens"]} for n, r in lock(kind)["reads"].items()}
    without = parse_program(lock(kind, reads=reads), tmp_path)
    more = predicted(with_saes, limits, "float32") - predicted(without, limits, "float32")
    assert more == runtime.bytes_of(loaded, {}) == sae.held(None)[1] + sae.held((4, 2))[1]
    idle = parse_program(lock(kind, arms={"x": {"points": [{}]}}), tmp_path)
    # Two features, at two sites, each an encoder and a decoder.
    edits = predicted(with_saes, limits, "float32") - predicted(idle, limits, "float32")
    assert edits == 2 * 2 * 2 * 4 * WIDTH


def test_digests_and_widths_are_held(tmp_path: Path) -> None:
    made(tmp_path, "standard", torch.float32, drawn(torch.float32))
    files = ("standard/cfg.json", "standard/sae_weights.safetensors")
    outside = {name: file_digest(tmp_path / name) for name in files}
    assert encoders(parse_program(lock("standard", outside=outside), tmp_path), CPU, {})
    write_sae(tmp_path / "standard", "standard", WIDTH, FEATURES, seed=1)
    with pytest.raises(LockError, match=r"reads.top: standard/sae_weights.safetensors changed since compile"):
        encoders(parse_program(lock("standard", outside=outside), tmp_path), CPU, {})
    narrow = lock("standard")
    narrow["sites"]["b"]["width"] = 32
    with pytest.raises(LockError, match=r"reads.top: standard is 64 wide; 32 is needed at b"):
        encoders(parse_program(narrow, tmp_path), CPU, {})


@pytest.mark.parametrize(
    ("section", "entry", "message"),
    [
        ("edits", {"sae": {"dir": "s", "does": "at"}}, "edits.set: does 'at' is not one of to, by"),
        ("edits", {"sae": None}, "edits.set"),
        ("reads", {"ids": [1]}, "reads.top: features has either top or ids"),
        ("reads", {"kind": "probe", "vectors": []}, "reads.top: a probe has a weight, and a bias or none"),
    ],
)
def test_a_lock_that_cannot_be(section: str, entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    wrong = lock("standard")
    name = next(iter(wrong[section]))
    wrong[section][name] = {**wrong[section][name], **entry}
    with pytest.raises(LockError, match=message):
        parse_program(wrong, tmp_path)

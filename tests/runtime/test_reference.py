"""The reference of ``vtaps verify``: nothing of the language is without one in silence, and its formulas by hand."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch

from tests.saes import activations, save_sae, write_sae
from vtaps.runtime.narrow import narrowed
from vtaps.runtime.program import KINDS, METRICS, VERBS, EditEntry, GateEntry, PointEdit, Program, SiteEntry
from vtaps.runtime.records import ReadRows, Scores
from vtaps.runtime.reference import gates, kinds, known, places, saes, verbs
from vtaps.spec import spec
from vtaps.spec.alias_tables import TABLES
from vtaps.spec.rows import Rows
from vtaps.spec.saes import Feature, open_sae
from vtaps.spec.store import Store
from vtaps.spec.tensor_files import Mapped

SITE = SiteEntry("here", "m", None, None, None, None, 0, 4)


def test_every_verb_has_a_formula_or_a_reason() -> None:
    assert set(verbs.VERBS) == set(VERBS) == {*get_args(spec.Verb), "put", "reconstruct"}
    for formula in verbs.VERBS.values():
        assert callable(formula) or formula.reason


def test_every_read_and_metric_has_a_comparison_or_a_reason() -> None:
    # A pattern is two reads of rows to the worker, and made of what they kept.
    assert set(kinds.READS) == {*KINDS, "pattern"} == set(get_args(spec.ReadKind))
    assert set(kinds.METRICS) == set(METRICS) == set(get_args(spec.MetricKind))
    for comparison in (*kinds.READS.values(), *kinds.METRICS.values()):
        assert callable(comparison) or comparison.reason


def test_every_field_of_an_entry_is_understood_or_has_a_reason() -> None:
    for entry, understood in known.KNOWN.items():
        told = {field for one, field in known.NOT_CHECKED if one is entry}
        assert {f.name for f in fields(entry)} == understood | told, entry
        assert not understood & told
    acting = {*Program.__annotations__} - {"folder", "structure", "block_digest", "block_lines", "spec_file", "mode",
                                           "tap_memory", "forwards", "checked", "compiled",
                                           "outside", "known", "saes"}  # fmt: skip
    assert acting == {
        "sites",
        "edits",
        "reads",
        "overrides",
        "metrics",
        "vectors",
        "arms",
        "lens_norm",
        "gates",
        "patterns",
    }


def test_a_field_that_nobody_knows_is_no_silence() -> None:
    @dataclass(frozen=True)
    class Louder(EditEntry):
        volume: int | None = None

    louder = Louder("zero", ("here",), Rows(), volume=11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known, "KNOWN", {**known.KNOWN, Louder: known.KNOWN[EditEntry]})
        assert known.strange(louder) == "volume is not known to the reference"
        assert known.strange(replace(louder, volume=None)) is None
        # A field that has a reason says it.
        patch.setattr(known, "NOT_CHECKED", {(Louder, "volume"): "it is only loud"})
        assert known.strange(louder) == "it is only loud"


def test_every_alias_of_every_table_has_a_place() -> None:
    assert set(places.FAMILIES) == set(TABLES)
    for architecture, table in TABLES.items():
        for alias, rule in table.rules.items():
            name = f"{alias}[2]" if rule.layered or alias == "resid_pre" else alias
            found = places.place_of(architecture, name)
            assert found is not None and found[1] == (2 if name.endswith("[2]") else None), (architecture, name)


def test_what_is_no_alias_has_no_place() -> None:
    for name in ("model.layers.3.mlp.gate_up_proj", "resid_post", "logits", "resid_post[x]"):
        assert places.place_of("LlamaForCausalLM", name) is None or name == "resid_post"
    assert places.place_of("OPTForCausalLM", "embed") is None


def use(verb: Any, vectors: dict[str, list[float]] | None = None, columns: Any = None, **more: Any) -> verbs.Use:
    """One edit of ``[n, 4]`` whose vectors are these."""

    class Given(Program):
        def load_vector(self, name: str, site: SiteEntry) -> Any:
            return np.array((vectors or {})[name], np.float32)

        def load_affine(self, names: Any, site: SiteEntry) -> Any:
            down, up, *bias = (np.array((vectors or {})[name], np.float32) for name in names)
            return down[None], up[None], bias[0] if bias else np.zeros(1, np.float32)

        def load_sae(self, entry: str, folder: str, site: SiteEntry) -> Any:
            return SAE

    edit = EditEntry(
        verb, ("here",), Rows(), tuple(more.pop("directions", ())), more.pop("keep_norm", False),
        tuple(more.pop("matrices", ())), sae=more.pop("sae", None), value=more.pop("value", False),
    )  # fmt: skip
    point = PointEdit("e", ("here",), more.pop("c", None), more.pop("vector", None), more.pop("low", None),
                      more.pop("high", None), more.pop("feature", None))  # fmt: skip
    program = Given(Path(), "", "", {}, "", {"here": SITE}, {}, {}, {}, {}, {}, {}, None)
    return verbs.Use(program, edit, point, SITE, columns)


class SAE:
    """Feature 7: twice the second column less 1, where that is above 2; it writes the third.  As a whole: two features
    of a jumprelu SAE, the first column above 1, less the first b_dec, and the fourth."""

    architecture, centred, k = "jumprelu", True, None
    tensors: ClassVar[dict[str, Mapped]] = {
        name: Mapped("F32", np.shape(values), np.array(values, np.float32))
        for name, values in {
            "W_enc": [[1, 0], [0, 0], [0, 0], [0, 2]], "b_enc": [0, -1], "threshold": [1, 0.5],
            "W_dec": [[0, 3, 0, 0], [0, 0, 1, 0]], "b_dec": [0.5, 0, 0, 1],
        }.items()
    }  # fmt: skip

    @staticmethod
    def feature(index: int) -> Feature:
        assert index == 7
        return Feature(np.array([0, 2, 0, 0], np.float32), -1.0, 2.0, np.array([0, 0, 1, 0], np.float32))


V = {"v": [0.0, 4.0, 0.0, 0.0], "w": [3.0, 0.0, 4.0, 0.0], "b": [2.0]}
CASES: dict[str, tuple[verbs.Use, list[float], list[float]]] = {
    "add": (use("add", V, c=0.5, vector="v"), [1, 1, 1, 1], [1, 3, 1, 1]),
    "add, some columns": (use("add", V, ((0, 1), (3, 4)), c=1.0, vector="w"), [1, 1, 1, 1], [4, 1, 1, 1]),
    "keep_norm": (use("add", V, c=1.0, vector="v", keep_norm=True), [0, -3, 0, 4], [0, 5 / 17**0.5, 0, 20 / 17**0.5]),
    "keep_norm of a cancelled row": (use("add", V, c=-1.0, vector="v", keep_norm=True), [0, 4, 0, 0], [0, 0, 0, 0]),
    "scale": (use("scale", c=-2.0), [1, 0, -3, 2], [-2, 0, 6, -4]),
    "zero": (use("zero", None, ((1, 3),)), [1, 2, 3, 4], [1, 0, 0, 4]),
    "set": (use("set", V, c=0.25, vector="v"), [9, 9, 9, 9], [0, 1, 0, 0]),
    "project_out": (use("project_out", V, c=1.0, directions=["w"]), [5, 1, 0, 2], [5 - 1.8, 1, -2.4, 2]),
    "project_out of two": (use("project_out", V, c=1.0, directions=["w", "v"]), [5, 1, 0, 2], [3.2, 0, -2.4, 2]),
    "project_out by half": (use("project_out", V, c=0.5, directions=["v"]), [5, 1, 0, 2], [5, 0.5, 0, 2]),
    "project_out in columns": (use("project_out", V, ((0, 2),), c=1.0, directions=["w"]), [5, 1, 7, 2], [0, 1, 7, 2]),
    "clamp below": (use("clamp", V, vector="v", high=0.5), [1, 2, 3, 4], [1, 0.5, 3, 4]),
    "clamp within": (use("clamp", V, vector="v", low=-1.0, high=3.0), [1, 2, 3, 4], [1, 2, 3, 4]),
    "clamp up": (use("clamp", V, vector="w", low=10.0), [0, 0, 0, 0], [6, 0, 8, 0]),
    "affine": (use("affine", V, c=2.0, matrices=["w", "v", "b"]), [1, 0, 1, 0], [1, 2 * (7 + 2) * 4, 1, 0]),
    "add a number": (use("add", None, ((1, 3),), c=0.5, value=True), [1, 1, 1, 1], [1, 1.5, 1.5, 1]),
    "set to a number": (use("set", None, ((0, 1),), c=-2.0, value=True), [1, 1, 1, 1], [-2, 1, 1, 1]),
    "feature to, active": (use("feature", sae=("s", "to"), c=4.0, feature=7), [1, 2, 0, 1], [1, 2, 1, 1]),
    "feature to, idle": (use("feature", sae=("s", "to"), c=4.0, feature=7), [1, 1.5, 0, 1], [1, 1.5, 4, 1]),
    "feature by": (use("feature", sae=("s", "by"), c=4.0, feature=7), [1, 2, 0, 1], [1, 2, 4, 1]),
    # Activations: 2.5 − 0.5 above 1, and 2 · (2 − 1) − 1 above 0.5.
    "reconstruct": (use("reconstruct", sae=("s", "by"), c=0.0, feature=1), [2.5, 9, 9, 2], [0.5, 6, 1, 1]),
    "reconstruct to": (use("reconstruct", sae=("s", "to"), c=4.0, feature=0), [1.5, 9, 9, 1.6], [0.5, 12, 0, 1]),
    "reconstruct by": (use("reconstruct", sae=("s", "by"), c=-3.0, feature=0), [1.4, 9, 9, 2], [0.5, -9, 1, 1]),
    "affine, no bias": (use("affine", V, c=1.0, matrices=["v", "w"]), [0, 1, 0, 0], [12, 1, 16, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_formula_by_hand(name: str) -> None:
    asked, before, after = CASES[name]
    rows = np.array([before, before], np.float32)
    np.testing.assert_allclose(verbs.change(asked)(rows), [after, after], atol=1e-12)


def test_every_formula_is_tried() -> None:
    assert {u.edit.verb for u, _, _ in CASES.values()} == {v for v, f in verbs.VERBS.items() if callable(f)}


def test_a_verb_without_a_formula_is_no_change() -> None:
    with pytest.raises(KeyError):
        verbs.change(use("python"))


def test_errors_are_of_the_size_of_the_row() -> None:
    want = np.array([[100.0, 1.0], [1.0, 0.5]])
    got = want + np.array([[0.0, 1.0], [0.5, 0.0]])
    np.testing.assert_allclose(kinds.apart(got, want, kinds.largest(want)), [0.01, 0.5])
    assert kinds.apart(np.ones((1, 2)), want, kinds.largest(want)).tolist() == [np.inf, np.inf]
    assert kinds.apart(want * np.nan, want, kinds.largest(want)).tolist() == [np.inf, np.inf]
    # A row of zeros has no size: anything else there is wrong.
    assert kinds.apart(np.array([[0.0], [1e-9]]), np.zeros((2, 1)), np.zeros(2)).tolist() == [0, np.inf]


def test_a_lens_that_left_a_token_out_is_off_by_its_lead() -> None:
    logits = np.array([[1.0, 4.0, 3.0, 2.0]])
    read = spec_read("lens", top=2)

    def told(ids: list[int]) -> Any:
        chosen = np.array([ids], np.int32)
        total = np.log(np.exp(logits).sum(1))
        values = {"ids": chosen, "logits": np.take_along_axis(logits, chosen.astype(int), 1), "logsumexp": total}
        return compare(ReadRows(np.array([5]), values, "float32"), logits, read)

    compare: Any = kinds.READS["lens"]
    assert told([1, 2])[0] < 1e-12
    assert told([1, 3])[0] == pytest.approx(1 / 4)


@pytest.mark.parametrize("kind", ["standard", "jumprelu", "topk", "gated"])
def test_features_are_held_against_the_formula_and_what_was_left_out(kind: str, tmp_path: Path) -> None:
    tensors = write_sae(tmp_path / "s", kind, 16, 40, **({"k": 5} if kind == "topk" else {}))
    rows = np.random.default_rng(2).normal(size=(6, 16)).astype(np.float32)
    want = activations(tensors, rows.astype(np.float64), k=5 if kind == "topk" else None)
    order = np.argsort(-want, axis=1)[:, :3]
    compare: Any = kinds.READS["features"]

    def told(given: Any, values: Any, **asked: Any) -> Any:
        entry = replace(spec_read("features", sae="s", **asked).entry, sae="s")
        program = parse_sae(tmp_path)
        context = kinds.Context(program, entry, SITE, lambda x: x, np.ones(len(rows)))
        got = {"ids": np.array(given, np.int32), "activations": np.array(values, np.float32)}
        return compare(ReadRows(np.arange(len(rows)), got, "float32"), rows, context)

    top = np.take_along_axis(want, order, 1)
    assert told(order, top, top=3).max() < 1e-6
    assert told(order, top * 1.01, top=3).min() > 1e-4
    # The second was left out, and the fourth stands in its place.
    other = np.argsort(-want, axis=1)[:, [0, 2, 3]]
    assert told(other, np.take_along_axis(want, other, 1), top=3).max() > 1e-3
    assert told(order[:, [0, 0, 1]], top[:, [0, 0, 1]], top=3).min() == np.inf
    assert told(np.full((6, 3), -1), np.zeros((6, 3)), top=3).min() > 1e-3
    assert told(order[:, :2], top[:, :2], top=3).min() == np.inf
    chosen = (39, 0, 7)
    assert told([chosen] * 6, want[:, chosen], ids=chosen).max() < 1e-6
    assert told([chosen] * 6, want[:, chosen] + 0.5, ids=chosen).min() > 1e-3
    assert told([(0, 39, 7)] * 6, want[:, chosen], ids=chosen).min() == np.inf


def parse_sae(folder: Path) -> Program:
    class Given(Program):
        def load_sae(self, entry: str, path: str, site: SiteEntry) -> Any:
            return open_sae(folder, path)

    return Given(folder, "", "", {}, "", {"here": SITE}, {}, {}, {}, {}, {}, {}, None)


def test_a_feature_on_its_edge_may_stand_on_either_side(tmp_path: Path) -> None:
    tensors = write_sae(tmp_path / "s", "jumprelu", 16, 8)
    row = np.random.default_rng(0).normal(size=16)
    p = (row - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_enc"]
    index = int(p.argmax())
    tensors["threshold"][index] = np.float32(p[index] * (1 - 1e-6))
    save_sae(tmp_path / "s", tensors, {"architecture": "jumprelu"})
    found = saes.encode(open_sae(tmp_path, "s"), row[None])
    for given, off in ((p[index], 1e-4), (0.0, 1e-4)):
        assert found.apart(np.array([[given]]), np.array([[index]]))[0, 0] < off
    assert found.apart(np.array([[0.5 * p[index]]]), np.array([[index]]))[0, 0] > 0.1


GATE_ROWS = np.array([[3.0, 0, 4, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
ALONG = np.array([0.0, 0, 2, 0])


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("reduce", [None, "max", "mean", "last"])
def test_a_gate_by_hand(cosine: bool, reduce: Any) -> None:
    scores = [0.8, 0.0, 0.0] if cosine else [8.0, 0.0, 0.0]
    value = None if reduce is None else {"max": scores[0], "mean": sum(scores) / 3, "last": 0.0}[reduce]
    entry, use_ = GateEntry(cosine, reduce), PointEdit("gates.g", ("here",), None, "v", 0.1)
    passed = [True, False, False] if reduce is None else [reduce != "last"] * 3

    def told(scores: list[float], passed: list[bool], value: float | None = value) -> float:
        given = Scores(np.arange(3), np.array(scores, np.float32), np.array(passed), value)
        return float(gates.off(entry, use_, given, GATE_ROWS, ALONG, np.ones(3)).max())

    assert told(scores, passed) < 1e-6
    assert told([scores[0] * 1.01, 0, 0], passed) == pytest.approx(0.008, rel=1e-3)
    assert told(scores, [not p for p in passed]) == np.inf
    assert told(scores, [passed[0], True, passed[2]]) == np.inf or reduce in ("max", "mean")
    if value is not None:
        assert told(scores, [value + 1 > 0.1] * 3, value + 1.0) > 0.09
        assert told(scores, [False] * 3, None) == np.inf


def test_rows_that_are_stored_in_fewer_bits_may_be_off_by_half_a_step() -> None:
    rng = np.random.default_rng(0)
    want = rng.normal(size=(5, 64)) * 10.0 ** rng.integers(-9, 4, (5, 64))
    want[0, 0], want[1, 1] = 1e6, -1e6
    compare: Any = kinds.READS["rows"]

    def told(dtype: str | None, scaled: bool, change: float = 0.0) -> Any:
        fields, name = narrowed(torch.from_numpy(want * (1 + change)).float()[:, None], Store(dtype, scaled))
        values = {field: v[:, 0].view(torch.uint16).numpy() if v.dtype == torch.bfloat16 else v[:, 0].numpy()
                  for field, v in fields.items()}  # fmt: skip
        return compare(ReadRows(np.arange(5), values, name), want, replace(spec_read("rows"), growth=np.ones(5)))

    for dtype, scaled in ((None, False), ("float16", False), ("float16", True), ("float8_e4m3", True)):
        assert told(dtype, scaled).max() < 1e-6, (dtype, scaled)
        assert told(dtype, scaled, 0.2)[2:].min() > 0.05, (dtype, scaled)
    assert told("bfloat16", False).max() < 2**-8
    # Only what float16 cannot hold may be infinite.
    low = ReadRows(np.arange(1), {"rows": np.array([[np.inf, 1.0]], np.float16)}, "float16")
    assert compare(low, np.array([[1e4, 1.0]]), spec_read("rows")).tolist() == [np.inf]


def test_a_pattern_is_held_to_its_own_position() -> None:
    compare: Any = kinds.READS["pattern"]
    want = np.array([[[1.0, np.nan], [1.0, np.nan]], [[0.25, 0.75], [0.5, 0.5]]])
    context = replace(spec_read("rows"), growth=np.ones(2))

    def told(pattern: Any, keys: list[int]) -> Any:
        return compare(ReadRows(np.arange(2), {"pattern": pattern, "keys": np.array(keys)}, "float32"), want, context)

    assert told(want.astype(np.float32), [1, 2]).max() == 0
    assert told(want, [2, 2]).min() == np.inf
    assert told(np.nan_to_num(want), [1, 2]).min() == np.inf
    off = want.copy()
    off[1, 0] = [0.26, 0.74]
    np.testing.assert_allclose(told(off, [1, 2]), [0, 0.01])
    rows = ReadRows(np.arange(2), {"pattern": want, "keys": np.array([1, 2])}, "float32")
    other = ReadRows(np.arange(2), {"pattern": off, "keys": np.array([1, 2])}, "float32")
    assert kinds.between(rows, rows, np.ones(2)).max() == 0
    np.testing.assert_allclose(kinds.between(rows, other, np.ones(2)), [0, 0.01])


def spec_read(kind: Any, **more: Any) -> kinds.Context:
    from vtaps.runtime.program import ReadEntry

    entry = ReadEntry(kind, ("here",), Rows(), **more)
    return kinds.Context(use("zero").program, entry, SITE, lambda rows: rows, np.ones(1))


@pytest.mark.parametrize("rank, off", [(0, 1.0), (1, 0.0), (3, 2.0)])
def test_a_rank_is_off_by_the_logits_between(rank: int, off: float) -> None:
    from vtaps.runtime.program import MetricEntry

    entry = MetricEntry("rank", (2,), Rows())
    distance: Any = kinds.METRICS["rank"]
    assert distance(np.array([float(rank)]), np.array([[1.0, 4.0, 3.0, 2.0]]), entry).tolist() == [off]

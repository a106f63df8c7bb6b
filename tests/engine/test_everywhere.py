"""Every module output, read, read by a function and edited by one, from a spec's text to the files of its run.

The reference is the same model in Hugging Face with hooks: each location by hand, whole sequences at once.  Prompts
come in pieces beside rows of others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM  # noqa: E402

import vtaps  # noqa: E402
from tests.models import tiny  # noqa: E402
from vtaps.check import check_file  # noqa: E402
from vtaps.cli import main  # noqa: E402
from vtaps.running import run_checked  # noqa: E402

pytestmark = pytest.mark.engine

# On CUDA vLLM's attention multiplies float32 in TF32.
TOLERANCE = 4e-3 if torch.cuda.is_available() else 2e-5
LAYERS = 4
LENGTHS = {"five": 5, "chunks": 37, "one": 1, "some": 18}
PROBES = """\
import pathlib

import torch


def bend(rows, at):
    if at.location == "mlp_out[1]":
        return 0.5 * rows
    if at.layer == 2 and at.module.endswith(("c_attn", "qkv_proj")):
        return 1.25 * rows + torch.from_numpy(at.positions).to(rows)[:, None] / 64
    if at.location == "resid_post[2]":
        rows.neg_()


def felt(rows, at):
    kept = torch.stack([rows.sum(-1), rows.abs().amax(-1), torch.from_numpy(at.positions).to(rows)], -1)
    rows.zero_()
    return kept


def largest(rows):
    return rows.argmax(-1)


def lost(rows):
    return torch.full_like(rows[:, :2], torch.nan)


def broken(rows, at):
    if at.layer == 1 and at.module.endswith("mlp") and pathlib.Path(__file__).with_name("break").exists():
        raise KeyError("nothing")
    return rows[:, 0]
"""
SPEC = """vtaps: 1
model: {{path: {model}, dtype: float32}}
engine: {{vllm: {{max_model_len: 128, max_num_seqs: 8, max_num_batched_tokens: 16, kv_cache_memory_bytes: 67108864}}}}
edits:
  bend: {{at: "**", tokens: all, python: "probes.py:bend"}}
reads:
  every: {{at: "**", tokens: all, sees: after_edits}}
  felt: {{at: "**", tokens: all, sees: before_edits, python: "probes.py:felt"}}
  largest: {{at: ["resid_post[*]", "mlp_out[1]"], tokens: sampling, sees: after_edits, python: "probes.py:largest"}}
  lost: {{at: "embed", tokens: sampling, sees: after_edits, python: "probes.py:lost"}}
  broken: {{at: "**", tokens: all, python: "probes.py:broken"}}
prompts:
  all: {prompts}
  short: [{{id: short, ids: [5, 6]}}]
arms:
{arms}
sampling: {{temperature: 0, max_tokens: 6, ignore_eos: true}}
"""
ARMS = """\
  base: {prompts: [all], reads: [every, felt, largest]}
  bent: {prompts: [all], edits: [bend], reads: [every, felt, largest]}
  lost: {prompts: [short], reads: [lost]}
"""
Site = Callable[[str, Any], None]


def prompts() -> dict[str, list[int]]:
    rng = np.random.default_rng(3)
    return {name: rng.integers(4, 260, size).tolist() for name, size in LENGTHS.items()}


def write(folder: Path, family: str, arms: str) -> Path:
    (folder / "probes.py").write_text(PROBES, encoding="utf-8")
    said = ", ".join(f"{{id: {name}, ids: {ids}}}" for name, ids in prompts().items())
    spec = folder / "spec.yaml"
    spec.write_text(SPEC.format(model=tiny(family), prompts=f"[{said}]", arms=arms), encoding="utf-8")
    return spec


class Twin:
    """Hugging Face's model with a hook at each location; ``before`` and ``after`` its edits, ``[rows, width]``."""

    def __init__(self, family: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            tiny(family), dtype=torch.float32, attn_implementation="eager"
        )
        self.bent = False
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        (self._gpt2 if family == "gpt2" else self._llama)()

    def _bend(self, name: str, x: Any) -> Any:
        self.before[name] = x[0].clone()
        if self.bent and name == "mlp_out[1]":
            x = 0.5 * x
        if self.bent and name.endswith(("2.attn.c_attn.output", "2.self_attn.qkv_proj.output")):
            x = 1.25 * x + torch.arange(x.shape[1])[None, :, None] / 64
        if self.bent and name == "resid_post[2]":
            x = -x
        self.after[name] = x[0].clone()
        return x

    def out(self, name: str, module: Any) -> None:
        def hook(_: Any, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return self._bend(name, output[0]), *output[1:]
            return self._bend(name, output)

        module.register_forward_hook(hook)

    def into(self, name: str, module: Any) -> None:
        module.register_forward_pre_hook(lambda _, args: (self._bend(name, args[0]), *args[1:]))

    def parts(self, name: str, modules: list[Any]) -> None:
        """Side by side in vLLM; each part is edited alike, for the edit is the same in every column."""
        held: list[Any] = []

        def hook(_: Any, __: Any, output: Any) -> Any:
            held.append((output[0].clone(), x := self._bend(name, output)))
            if len(held) == len(modules):
                self.before[name] = torch.cat([before for before, _ in held], -1)
                self.after[name] = torch.cat([after[0] for _, after in held], -1)
                held.clear()
            return x

        for module in modules:
            module.register_forward_hook(hook)

    def _llama(self) -> None:
        trunk = self.model.model
        self.out("embed", trunk.embed_tokens)
        self.out("final_norm", trunk.norm)
        for i, layer in enumerate(trunk.layers):
            attention, mlp = layer.self_attn, layer.mlp
            self.out(f"ln1[{i}]", layer.input_layernorm)
            self.parts(f"model.layers.{i}.self_attn.qkv_proj.output",
                       [attention.q_proj, attention.k_proj, attention.v_proj])  # fmt: skip
            self.into(f"z[{i}]", attention.o_proj)
            self.out(f"attn_out[{i}]", attention)
            self.out(f"ln2[{i}]", layer.post_attention_layernorm)
            self.parts(f"model.layers.{i}.mlp.gate_up_proj.output", [mlp.gate_proj, mlp.up_proj])
            self.into(f"mlp_post[{i}]", mlp.down_proj)
            self.out(f"mlp_out[{i}]", mlp)
            self.out(f"resid_post[{i}]", layer)

    def _gpt2(self) -> None:
        trunk = self.model.transformer
        self.out("embed", trunk.wte)
        self.out("transformer.wpe.output", trunk.wpe)
        self.out("final_norm", trunk.ln_f)
        for i, layer in enumerate(trunk.h):
            self.out(f"ln1[{i}]", layer.ln_1)
            self.out(f"transformer.h.{i}.attn.c_attn.output", layer.attn.c_attn)
            self.into(f"z[{i}]", layer.attn.c_proj)
            self.out(f"attn_out[{i}]", layer.attn)
            self.out(f"ln2[{i}]", layer.ln_2)
            self.out(f"transformer.h.{i}.mlp.c_fc.output", layer.mlp.c_fc)
            self.out(f"mlp_out[{i}]", layer.mlp)
            self.out(f"resid_post[{i}]", layer)

    def run(self, ids: list[int], *, bent: bool) -> Any:
        """Logits ``[rows, vocab]``."""
        self.bent = bent
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_output_is_what_hugging_face_says(family: str, tmp_path: Path) -> None:
    result = check_file(write(tmp_path, family, ARMS))
    assert result.plan is not None and result.plan.mode == "eager", result.diagnostics
    outcome = run_checked(result, tmp_path / "run")
    assert outcome.path is not None
    told = [d for d in outcome.findings if d.severity == "error"]
    assert [(d.code, d.span.line) for d in told] == [("VT609", 10)] and "embed" in told[0].message
    run = vtaps.load(outcome.path)
    twin = Twin(family)
    requests = {(r["arm"], r["prompt"]): r for r in run.requests.to_pylist()}
    for arm in ("base", "bent"):
        for prompt, ids in prompts().items():
            request = requests[arm, prompt]
            rows = [*ids, *request["token_ids"]][:-1]
            logits = twin.run(rows, bent=arm == "bent")
            assert logits[len(ids) - 1 :].argmax(-1).tolist() == list(request["token_ids"]), (arm, prompt)
            every, felt, largest = (run[name].sel(arm=arm, prompt=prompt) for name in ("every", "felt", "largest"))
            assert set(every.sites) == set(twin.after) == set(felt.sites)
            for site in every.sites:
                said = f"{arm} {prompt} {site}"
                after, before = twin.after[site].numpy(), twin.before[site].double().numpy()
                bound = TOLERANCE * max(1.0, float(np.abs(after).max()))
                np.testing.assert_allclose(every.site(site), after, atol=bound, rtol=0, err_msg=said)
                kept = np.stack([before.sum(-1), np.abs(before).max(-1), np.arange(len(rows))], -1)
                bound = TOLERANCE * max(1.0, float(np.abs(before).sum(-1).max()))
                np.testing.assert_allclose(felt.site(site), kept, atol=bound, rtol=0, err_msg=said)
            for site in largest.sites:
                found = largest.site(site)
                assert found.dtype == np.int64
                want = twin.after[site][len(ids) - 1 :]
                chosen = want.gather(1, torch.from_numpy(found.copy())[:, None])[:, 0]
                torch.testing.assert_close(chosen, want.amax(-1), atol=TOLERANCE * 10, rtol=0)
    fired = {(r["arm"], r["prompt"]): r for r in run.fired("bend").to_pylist()}
    assert {key[0] for key in fired} == {"bent"}
    assert lengths(run, "bent") == {name: size + 5 for name, size in LENGTHS.items()}


def lengths(run: Any, arm: str) -> dict[str, int]:
    table = run["every"].sel(arm=arm).rows
    return {name: table["prompt"].to_pylist().count(name) for name in LENGTHS}


def test_a_function_that_raises_fails_its_requests_at_its_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = "  base: {prompts: [all], reads: [every]}\n  broken: {prompts: [short], reads: [broken]}\n"
    spec, out = write(tmp_path, "llama", arms), tmp_path / "run"
    command = ["run", str(spec), "--out", str(out), "--quiet"]
    (tmp_path / "break").touch()
    told = "mlp_out[1]: reads.broken: probes.py:31, in probes.py:broken: KeyError: 'nothing'"

    def run(*more: str) -> tuple[int, str]:
        code = main([*command, *more])
        return code, "".join(capsys.readouterr())

    code, said = run("--fail-fast")
    assert code == 1 and "error[VT620]: request short/short/broken/0: arm broken: " + told in said
    assert "spec.yaml:11:" in said and not (out / "run.json").exists()
    code, said = run()
    assert code == 1 and "error[VT620]: request short/short/broken/0 failed: arm broken: " + told in said
    assert "spec.yaml:11:" in said and "1 of 5 requests failed; the same command tries it again" in said
    failed = json.loads((out / "run.json").read_text())["failed"]
    assert [(f["request"], f["code"]) for f in failed] == [("short/short/broken/0", "VT620")]
    before = vtaps.load(out)
    assert before.requests["arm"].to_pylist() == ["base"] * 4
    rows = {site: before["every"].sel(arm="base").site(site).tobytes() for site in before["every"].sites}
    (tmp_path / "break").unlink()
    assert run()[0] == 0 and not (out / "partial").exists()
    after = vtaps.load(out)
    assert after.requests["arm"].to_pylist() == ["base"] * 4 + ["broken"]
    assert {site: after["every"].sel(arm="base").site(site).tobytes() for site in after["every"].sites} == rows

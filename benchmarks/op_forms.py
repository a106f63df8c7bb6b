"""Two forms of a read inside the compiled model: its buffer behind a number, or its buffer as a declared argument.

    python -m benchmarks.op_forms --out FILE.json [--model FOLDER]

Each form is served twice by vLLM with compilation and CUDA graphs as they come, the second time from the compile cache
with the buffers elsewhere in memory.  For each start: decode tokens/s of one request, kernels in one forward, and
whether the buffers hold what the model computed.  The first form is the one that vtaps uses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FORMS = ("plain", "number", "argument")
PROMPT, NEW, REPEATS = 512, 128, 5

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def child(form: str, start: int, model: str) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
    from torch import Tensor
    from vllm import LLM, SamplingParams
    from vllm.config import CompilationConfig  # noqa: F401
    from vllm.v1.worker.gpu_worker import Worker

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def keep(h, r, o, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        tl.store(o + at, (tl.load(h + at).to(tl.float32) + tl.load(r + at).to(tl.float32)).to(o.dtype.element_ty))

    buffers: list[Tensor] = []
    library = torch.library.Library("op_forms", "DEF")
    library.define("number(Tensor(a!) h, Tensor r, int n) -> ()")
    library.define("argument(Tensor(a!) o, Tensor h, Tensor r) -> ()")

    def number(h: Tensor, r: Tensor, n: int) -> None:
        keep[(h.shape[0],)](h, r, buffers[n], h.shape[1])

    def argument(o: Tensor, h: Tensor, r: Tensor) -> None:
        keep[(h.shape[0],)](h, r, o, h.shape[1])

    library.impl("number", number, "CUDA")
    library.impl("argument", argument, "CUDA")
    torch.library.register_fake("op_forms::number", lambda h, r, n: None, lib=library)
    torch.library.register_fake("op_forms::argument", lambda o, h, r: None, lib=library)
    load = Worker.load_model
    padding: list[Tensor] = []

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        layers = self.get_model().model.layers
        padding.append(torch.empty(1 + start * (7 << 20), device="cuda"))
        for n, layer in enumerate(layers):
            buffers.append(torch.zeros(2048, 2048, dtype=torch.bfloat16, device="cuda"))
            layer.forward = _wrapped(layer.forward, n)

    def _wrapped(forward: Any, n: int) -> Any:
        own = buffers[n]

        def by_number(positions: Any, hidden_states: Any, residual: Any) -> Any:
            h, r = forward(positions, hidden_states, residual)
            torch.ops.op_forms.number(h, r, n)
            return h, r

        def by_argument(positions: Any, hidden_states: Any, residual: Any) -> Any:
            h, r = forward(positions, hidden_states, residual)
            torch.ops.op_forms.argument(own, h, r)
            return h, r

        return by_number if form == "number" else by_argument

    if form != "plain":
        Worker.load_model = load_model
    began = time.monotonic()
    llm = LLM(
        model, skip_tokenizer_init=True, load_format="dummy", max_model_len=2048, max_num_batched_tokens=2048,
        enable_prefix_caching=False, max_num_seqs=64, gpu_memory_utilization=0.5, seed=0,
        additional_config={"op_forms": form},
    )  # fmt: skip
    ready = time.monotonic() - began
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    rates = []
    for repeat in range(REPEATS + 1):
        ids = [(17 * i + 5 * repeat) % 100000 for i in range(PROMPT)]
        began = time.monotonic()
        llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        rates.append(NEW / (time.monotonic() - began))
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        runner._dummy_run(2000)
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if str(e.device_type).endswith("CUDA")]
    copies = [e.name for e in kernels if "copy" in e.name.lower() or "clone" in e.name.lower()]
    return {
        "form": form, "start": start, "ready_s": round(ready, 1), "rates": rates,
        "rate": statistics.median(rates[1:]), "kernels": len(kernels), "copies": len(copies),
        "buffers": [float(b.float().abs().sum()) for b in buffers],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.op_forms", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("op-forms.json"))
    parser.add_argument("--child", nargs=3, metavar=("FORM", "START", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        form, start, model = options.child
        print("ANSWER " + json.dumps(child(form, int(start), model)))
        return
    answers = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "llama-1b"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(LLAMA_1B))
        for start in (0, 1):
            for form in FORMS:
                command = [sys.executable, "-m", "benchmarks.op_forms", "--child", form, str(start), str(model)]
                done = subprocess.run(command, capture_output=True, text=True)
                told = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
                answer = (
                    json.loads(told[-1][7:]) if told else {"form": form, "start": start, "failed": done.stderr[-1500:]}
                )
                answers.append(answer)
                print(json.dumps({k: v for k, v in answer.items() if k != "rates"}), flush=True)
                options.out.write_text(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()

# long because: one file that runs on a GPU machine with nothing else of the project
"""Forms of a break: Python inside the FULL decode CUDA graphs of vLLM 0.32's V2 model runner, see
docs/decisions/0005-breaks.md.

A column is an engine in a process of its own: `plain` (vLLM as it comes), `eager` (enforce_eager, to compare hidden
states with), or DESIGN:SITES, SITES being zero, one (the middle layer) or all, and DESIGN
  none       no torch.compile, FULL_DECODE_ONLY: decode in FULL graphs cut at our breaks only, everything else eager
  breakable  VLLM_USE_BREAKABLE_CUDAGRAPH=1: the same decode; mixed batches PIECEWISE, cut at attention and our breaks
  compiled   torch.compile stays on: the break is an opaque op and a splitting op; decode FULL graphs cut at it alone
One JSON line a column, then a table.  Exit 1 where a column failed, a break did not fire, or a check is off.
"""

import argparse
import contextlib
import fcntl
import functools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import torch

LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_act="silu",
    bos_token_id=0,
    eos_token_id=1,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=131072,
    attention_bias=False,
    mlp_bias=False,
    dtype="bfloat16",
    vocab_size=128256,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
SHAPES = {
    "1b": dict(LLAMA, hidden_size=2048, num_hidden_layers=16, head_dim=64, intermediate_size=8192),
    "8b": dict(LLAMA, hidden_size=4096, num_hidden_layers=32, head_dim=128, intermediate_size=14336),
}
PROMPT, NEW, KEPT, CLOSE = 512, 128, 8, 0.08
SCALES = {"": 0.0, "zero": 0.0, "one": 4.0, "all": 1.0}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}
# Five engines on one card: 2.8 GB are 21,000 tokens of 8B shapes.
TOGETHER = {"gpu_memory_utilization": 0.12, "kv_cache_memory_bytes": 2_800_000_000}
ADD = lambda hidden, residual, layer: (hidden.add_(S.vec[layer]), None)[1]  # noqa: E731
# live: real requests are served; rows: the step's, without padding; active: layers that do something;
# fn(hidden, residual, layer) -> None, or a tensor of hidden's shape that is copied back.
S = types.SimpleNamespace(
    live=False,
    rows=0,
    active=frozenset(),
    fn=None,
    calls={},
    replays=0,
    keep=None,
    spans=None,
    clock=None,
    runner=None,
    base={},
    vec={},
)


def fire(how, hidden, residual, layer):
    """A break at work: Python on the step's rows, at every forward."""
    if not S.live or layer not in S.active or S.fn is None:
        return
    S.calls[how] = S.calls.get(how, 0) + 1
    rows = hidden[: S.rows]
    out = S.fn(rows, residual[: S.rows], layer)
    if out is not None:
        assert out.shape == rows.shape, f"layer {layer}: {list(out.shape)} came back for {list(rows.shape)}"
        rows.copy_(out)


def at(hidden, residual, layer):
    """Called in the model's forward.  In a capture the graph is cut here and the call noted; nothing runs."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
    from vllm.utils.torch_utils import weak_ref_tensor as weak

    segmented, breakable = SegmentedGraph.current, BreakableCUDAGraphCapture.current()
    if segmented is not None:
        segmented.cut(functools.partial(fire, "full", weak(hidden), weak(residual), layer))
    elif breakable is not None and breakable._capturing:  # add_eager calls it once, and nothing is live yet
        breakable.add_eager(functools.partial(fire, "piecewise", weak(hidden), weak(residual), layer))
    else:
        fire("eager", hidden, residual, layer)


class SegmentedGraph:
    """Stands in for one torch.cuda.CUDAGraph: graphs with Python calls between them, on one pool and one stream."""

    current = real = None  # the one in capture; torch.cuda.CUDAGraph

    def capture_begin(self, *args, **kwargs):
        self.begun, self.steps = (args, kwargs), []  # pool and error mode, the same for every segment
        self.begin()
        SegmentedGraph.current = self

    def begin(self):
        self.open, graph = None, SegmentedGraph.real()
        graph.capture_begin(*self.begun[0], **self.begun[1])
        self.open = graph

    def end(self):
        graph, self.open = self.open, None
        graph.capture_end()
        self.steps.append(("graph", graph.replay))

    def cut(self, call):
        self.end()
        self.steps.append(("call", call))
        self.begin()

    def capture_end(self):
        SegmentedGraph.current = None
        if self.open is not None:  # None: a cut failed, and its error is on the way
            self.end()

    def replay(self):
        for kind, step in self.steps:
            began = time.perf_counter()
            step()
            if S.clock is not None:
                S.clock[kind].append(time.perf_counter() - began)


def install(design, sites):  # before an engine is made
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
    from vllm.v1.worker.gpu_worker import Worker

    load, run_full, capture_all = Worker.load_model, ModelCudaGraphManager.run_fullgraph, CudaGraphManager.capture
    split = CompilationConfig.set_splitting_ops_for_v1

    def load_model(self, *args, **kwargs):
        load(self, *args, **kwargs)
        prepare(self.model_runner)
        for i in sites:  # as vtaps does it: on the instance, after the load, before anything is traced or captured
            layer = self.model_runner.model.model.layers[i]
            layer.forward = tapped(layer.forward, torch.ops.vtb.brk.default if design == "compiled" else at, i)

    def tapped(forward, act, i):
        def run(*args, **kwargs):
            hidden, residual = forward(*args, **kwargs)
            act(hidden, residual, i)
            return hidden, residual

        return run

    def run_fullgraph(self, desc):
        S.replays += S.live
        if S.spans is None:
            return run_full(self, desc)
        first, last, began = torch.cuda.Event(True), torch.cuda.Event(True), time.perf_counter()
        first.record()
        out = run_full(self, desc)
        last.record()
        S.spans.append((first, last, time.perf_counter() - began))
        return out

    def set_splitting_ops_for_v1(self, *args, **kwargs):
        split(self, *args, **kwargs)
        self.splitting_ops += ["vtb::brk"] if self.splitting_ops and "vtb::brk" not in self.splitting_ops else []

    def capture(self, create_forward_fn, *args, **kwargs):
        armed = []

        def create(desc, warmup):
            run = create_forward_fn(desc, warmup)
            armed[:] = [desc] if not warmup and desc.cg_mode == CUDAGraphMode.FULL else []
            return run

        def graph(*args_, **kwargs_):  # the first graph made after a FULL capture's inputs are ready is that capture's
            return SegmentedGraph() if armed and armed.pop() else SegmentedGraph.real(*args_, **kwargs_)

        with patch.object(torch.cuda, "CUDAGraph", graph):
            return capture_all(self, create, *args, **kwargs)

    Worker.load_model, ModelCudaGraphManager.run_fullgraph = load_model, run_fullgraph
    if design == "plain":
        return
    SegmentedGraph.real, CudaGraphManager.capture = torch.cuda.CUDAGraph, capture
    if design == "compiled":
        S.library = torch.library.Library("vtb", "DEF")
        S.library.define("brk(Tensor(a!) hidden, Tensor(b!) residual, int layer) -> ()")
        S.library.impl("brk", at, "CUDA")
        torch.library.register_fake("vtb::brk", lambda hidden, residual, layer: None, lib=S.library)
        CompilationConfig.set_splitting_ops_for_v1 = set_splitting_ops_for_v1


def prepare(runner):
    """Weights with which every layer matters, the same in every engine; hooks on the runner."""
    assert hasattr(runner, "cudagraph_manager"), f"{type(runner)} is not vLLM's V2 model runner"
    S.runner, draw, config = runner, torch.Generator("cuda").manual_seed(0), runner.vllm_config.model_config.hf_config
    with torch.no_grad():
        for name, weight in runner.model.named_parameters():
            weight.normal_(0.0, 0.02, generator=draw) if weight.dim() > 1 else weight.fill_(float("norm" in name))
    S.base = {
        i: torch.randn(config.hidden_size, device="cuda", generator=draw) for i in range(config.num_hidden_layers)
    }
    inputs, execute = runner.prepare_inputs, runner.execute_model

    def prepare_inputs(*args, **kwargs):
        batch = inputs(*args, **kwargs)
        S.rows = int(batch.num_tokens)
        return batch

    def execute_model(*args, **kwargs):
        S.rows = 0
        result = execute(*args, **kwargs)
        if S.keep is not None and S.rows and runner.execute_model_state is not None:
            S.keep.append(runner.execute_model_state.hidden_states[: S.rows][-KEPT:].float().cpu())
        return result

    runner.prepare_inputs, runner.execute_model = prepare_inputs, execute_model


def use(active, scale):
    S.active, S.vec = frozenset(active), {i: (S.base[i] * scale).bfloat16() for i in active}


def drawn(count, seed):
    source = random.Random(seed)
    return [[source.randrange(100, 20000) for _ in range(PROMPT)] for _ in range(count)]


def serve(llm, prompts, new=NEW):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    out = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    rate, ids = len(prompts) * new / (time.perf_counter() - began), [list(o.outputs[0].token_ids) for o in out]
    assert all(len(x) == new for x in ids), f"{[len(x) for x in ids]} tokens came, {new} were due"
    return rate, ids


def rates(llm, count, repeats, seed):
    return sorted(round(serve(llm, drawn(count, seed + i))[0], 1) for i in range(repeats))


def speed(llm, count, repeats):
    """Tokens a second, and what proves that each decode step replayed a graph in which every break fired."""
    serve(llm, drawn(count, 0))
    S.calls, S.replays = {}, 0
    found, due = rates(llm, count, repeats, 1), {"replays_due": repeats * (NEW - 1)}
    due["calls_due"] = due["replays_due"] * len(S.active)
    return {
        "tok_s": statistics.median(found),
        "range": [found[0], found[-1]],
        **due,
        "full_replays": S.replays,
        "calls": S.calls,
        "ok": [S.replays, S.calls.get("full", 0)] == list(due.values()),
    }


def final_rows(llm, ids, new):
    """Token ids, and the last rows of the final hidden states of each step, float32 on the host."""
    S.keep = kept = []
    out, S.keep = serve(llm, [ids], new)[1][0], None
    return out, kept


def distance(a, b):
    return round(float(((a - b).norm(dim=1) / b.norm(dim=1)).max()), 5)


def check(llm, path):
    """Rows of decode steps against the same tokens in one prefill: distance of the final hidden states, and the edit's
    effect."""
    ids, active, before = drawn(1, 99)[0], S.active, S.replays
    tokens, kept = final_rows(llm, ids, KEPT)
    assert (len(kept), S.replays - before) == (KEPT, KEPT - 1), f"{len(kept)} steps, {S.replays - before} graph replays"
    got, forced = torch.cat([rows[-1:] for rows in kept]), ids + tokens[: KEPT - 1]
    same, S.active = final_rows(llm, forced, 1)[1][0], frozenset()
    error, effect = distance(got, same), distance(final_rows(llm, forced, 1)[1][0], same)
    S.active = active
    torch.save({"forced": forced, "got": got, "active": sorted(active)}, path)
    return {"error": error, "effect": effect, "ok": error < CLOSE and (not active or effect > 4 * error)}


def profile(llm, count):
    """Where a decode step's time goes: device, host, each break; then other functions at the breaks."""
    S.spans, S.clock = [], {"graph": [], "call": []}
    serve(llm, drawn(count, 7))
    torch.cuda.synchronize()
    spans, clock, S.spans, S.clock = S.spans, S.clock, None, None
    found = {
        "device_forward": [a.elapsed_time(b) / 1e3 for a, b, _ in spans],
        "host_forward": [t for *_, t in spans],
        "host_segment": clock["graph"],
        "host_call": clock["call"],
    }
    out = {f"{name}_us": round(statistics.median(values) * 1e6, 1) for name, values in found.items() if values}
    host = torch.empty(len(S.base), S.base[0].numel(), dtype=torch.bfloat16, pin_memory=True)
    kinds = {
        "off": None,
        "counting": lambda h, r, i: None,
        "returned": lambda h, r, i: h + S.vec[i],
        "row_to_host": lambda h, r, i: (host[i].copy_(h[0], non_blocking=True), None)[1],
        "waiting": lambda h, r, i: (float(h[0, 0]), None)[1],
    }
    for name, S.fn in kinds.items() if len(S.active) > 1 else ():  # noqa: B020
        out["tok_s_" + name] = statistics.median(rates(llm, count, 3, 20))
    S.fn = ADD
    return out


def child(args, result):
    design, _, named = args.child.partition(":")
    layers, work = SHAPES[args.shape]["num_hidden_layers"], Path(args.work)
    sites = range(layers) if design == "eager" or named == "all" else [layers // 2] if named == "one" else []
    settings = {
        "none": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
        "eager": {"enforce_eager": True},
    }.get(design, {})
    began = time.perf_counter()
    install(design, sites)
    from vllm import LLM

    llm = LLM(
        str(work / "model"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        seed=0,
        max_num_batched_tokens=8192,
        max_num_seqs=args.seqs,
        enable_prefix_caching=False,
        **(TOGETHER if args.together else {"gpu_memory_utilization": 0.85}),
        **settings,
    )
    config, manager = S.runner.vllm_config, S.runner.cudagraph_manager
    steps = [kind for graph in list(manager.graphs.values())[:1] for kind, _ in getattr(graph, "steps", ())]
    result |= {
        "start_s": round(time.perf_counter() - began, 1),
        "mode": str(config.compilation_config.mode),
        "cudagraph_mode": str(manager.cudagraph_mode),
        "async": config.scheduler_config.async_scheduling,
        "full_graphs": len(manager.graphs),
        "segments": steps.count("graph"),
        "breaks": steps.count("call"),
    }
    S.live, S.fn = True, ADD
    if design == "eager":
        for path in sorted(work.glob("check-*.pt")):
            saved, name = torch.load(path), path.stem.removeprefix("check-")
            use(saved["active"], SCALES[name.partition("_")[2]])
            error = distance(saved["got"], final_rows(llm, saved["forced"], 1)[1][0])
            result[name] = {"error": error, "ok": error < CLOSE}
        return
    use(sites, SCALES[named])
    with turn(work):
        for count in (1, 8):  # what is found stays found, whatever fails next
            result[f"x{count}"] = speed(llm, count, args.repeats)
        result["check"] = check(llm, work / f"check-{args.child.replace(':', '_')}.pt")
        for count in (1, 8) if args.profile else ():
            result[f"profile_x{count}"] = profile(llm, count)


@contextlib.contextmanager
def turn(work):
    """Alone at work: engines that started together wait for all, then measure one after another."""
    up = work / f"up-{os.getpid()}"
    up.touch()
    due = int((work / "together").read_text()) if (work / "together").exists() else 1
    until = time.monotonic() + 200
    while len(list(work.glob("up-*"))) < due and time.monotonic() < until:
        time.sleep(0.2)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(column, number, work, seconds):  # in a process of its own
    found, log = work / f"{number}.json", work / f"{number}.log"
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_CACHE_ROOT": str(work / f"cache-{number}"),
        "VLLM_USE_BREAKABLE_CUDAGRAPH": str(int(column.startswith("breakable"))),
    }
    command = [
        sys.executable,
        os.path.abspath(__file__),
        *sys.argv[1:],
        "--child",
        column,
        "--work",
        work,
        "--result",
        found,
    ]
    with log.open("w") as out:
        try:
            ended = subprocess.run(command, env=environment, stdout=out, stderr=out, timeout=max(1, seconds)).returncode
        except subprocess.TimeoutExpired:
            ended = "out of time"
    result = json.loads(found.read_text()) if found.exists() else {"column": column, "failed": f"ended: {ended}"}
    result["capture"] = re.findall(r"Graph capturing finished in (.*)", log.read_text(errors="replace"))[-1:]
    print(json.dumps(result), flush=True)
    print(
        "\n".join(log.read_text(errors="replace").splitlines()[-40:] if "failed" in result else ()), end="", flush=True
    )
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--columns", default="plain,none:zero,none:one,none:all,eager")
    parser.add_argument("--together", action="store_true", help="start all columns at once, measure them in turn")
    parser.add_argument(
        "--profile", action="store_true", help="where a step's time goes; other functions at the breaks"
    )
    for name, value, told in (
        ("repeats", 5, "timed batches"),
        ("seqs", 256, "max_num_seqs: capture sizes follow from it"),
        ("limit", 170, "seconds a column"),
        ("budget", 560, "seconds in all"),
    ):
        parser.add_argument("--" + name, type=int, default=value, help=told)
    [parser.add_argument(name, help=argparse.SUPPRESS) for name in ("--child", "--work", "--result")]
    args = parser.parse_args()
    if args.child:
        result = {"column": args.child, "shape": args.shape}
        try:
            child(args, result)
        except BaseException as error:
            traceback.print_exc()
            Path(args.work, f"up-{os.getpid()}").touch()  # nobody waits for it
            result["failed"] = f"{type(error).__name__}: {error}"[:400]
        Path(args.result).write_text(json.dumps(result))
        sys.stderr.flush()
        os._exit("failed" in result)  # an engine's own end can take long
    work, began, results, bad = Path(tempfile.mkdtemp(prefix="proto_break-")), time.monotonic(), [], []
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    columns = args.columns.split(",")
    if args.together:
        (work / "together").write_text(str(len(columns)))
    with ThreadPoolExecutor(len(columns) if args.together else 1) as pool:
        left = lambda: args.budget - (time.monotonic() - began)  # noqa: E731
        limit = args.budget if args.together else args.limit
        started = [pool.submit(lambda n, c: run(c, n, work, min(limit, left())), n, c) for n, c in enumerate(columns)]
        results = [one.result() for one in started]
    plain = next((r for r in results if r["column"] == "plain" and "x8" in r), None)
    for r in results:
        shares = [
            f"{x} {r[x]['tok_s']} ({r[x]['tok_s'] / plain[x]['tok_s'] if plain else 0:.3f})"
            for x in ("x1", "x8")
            if x in r
        ]
        parts = {k: v.get("error", v["ok"]) for k, v in r.items() if isinstance(v, dict) and "ok" in v}
        bad += (
            [r["column"]]
            if "failed" in r or not all(v.get("ok", True) for v in r.values() if isinstance(v, dict))
            else []
        )
        print(f"{r['column']:<16}", *shares, f"start {r.get('start_s')} s,", r.get("failed") or parts)
    print(f"{time.monotonic() - began:.0f} s,", f"NOT well: {bad}" if bad else "all well")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

"""A soak: requests drawn at random, served in whatever company, each held against a forward of its own.

    python -m tests.engine.soak [--requests 2000] [--seed 0] [--mode taps] [--out FILE]

Prompts share beginnings, go on from answers (steered ones too), repeat; batches are given up under way and asked
again; the KV cache is too small for what is alive, and keeps prefixes.  Every row that comes back is compared with what
Hugging Face computes for that request alone: one that is lost, comes twice or is another's ends in exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import numpy as np

from tests.engine.case import ON_GPU
from tests.models import tiny
from vtaps.check import check_file
from vtaps.compiling import compile_plan
from vtaps.runtime.engine import Engine
from vtaps.runtime.records import Finished, Request
from vtaps.runtime.reference.forward import HuggingFace
from vtaps.runtime.reference.holding import Holder, Meant
from vtaps.verification import together
from vtaps.verifying import bound_of

LENGTH, BLOCK, TOKENS = 256, 32, 200
EDITS: dict[str, dict[str, Any]] = {
    "late": {"at": "resid_post[1]", "tokens": "sampling", "add": {"vector": "x", "scale": 1.0}},
    "every": {"at": "resid_mid[0]", "tokens": "all", "add": {"vector": "y", "scale": -1.0}},
    "norm": {"at": "resid_post[2]", "tokens": "generated", "add": {"vector": "x", "scale": 2.0, "keep_norm": True}},
    "head": {"at": "z[1]", "tokens": "all", "zero": {"heads": [2]}},
    "half": {"at": "mlp_out[2]", "tokens": "prompt", "scale": {"by": 0.5}},
    "place": {"at": "resid_post[0]", "tokens": {"positions": [3, "5..6", -1]}, "set": {"vector": "y", "scale": 1.0}},
    "out": {"at": "resid_post[*]", "tokens": {"steps": ["1..9"]}, "project_out": {"vectors": ["x", "y"]}},
    "ids": {"at": "embed", "tokens": {"ids": list(range(10, 40))}, "add": {"vector": "x", "scale": 0.5}},
    "but": {"at": "q[1]", "tokens": {"rows": "all", "except": {"positions": [0]}}, "scale": {"by": 1.5}},
}
READS: dict[str, dict[str, Any]] = {
    "stream": {"at": "resid_post[*]", "tokens": "all"},
    "answer": {"at": "resid_post[1, 3]", "tokens": "sampling"},
    "middle": {"at": "resid_mid[2]", "tokens": {"positions": ["30..50"]}},
    "mean": {"at": "resid_post[3]", "tokens": "prompt", "mean_over": "request"},
    "norms": {"at": "resid_post[*]", "tokens": "generated", "norm": True},
    "dots": {"at": "resid_mid[3]", "tokens": "sampling", "project": {"vectors": ["x", "y"]}},
    "lens": {"at": "resid_post[2]", "tokens": "sampling", "lens": {"top": 3}},
}
COMMON = ("plain", "late_again", "every", "head")
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"reads": ["answer"]},
    "quiet": {},
    "late": {"edits": ["late"], "reads": ["answer", "lens"], "sweep": {"late.add.scale": [0, 0.5, 1, 3]}},
    "late_again": {"edits": ["late"], "reads": ["norms"]},
    "every": {"edits": ["every"], "reads": ["answer"], "sweep": {"every.add.vector": ["x", "y"]}},
    "every_read": {"edits": ["every"], "reads": ["stream"]},
    "norm": {"edits": ["norm"], "reads": ["answer", "norms"]},
    "head": {"edits": ["head"], "reads": ["middle"]},
    "half": {"edits": ["half"], "reads": ["answer"]},
    "place": {"edits": ["place"], "reads": ["mean", "dots"]},
    "out": {"edits": ["out"], "reads": ["answer"]},
    "ids": {"edits": ["ids"], "reads": ["answer"]},
    "but": {"edits": ["but"], "reads": ["answer"]},
    "three": {"edits": ["every", "head", "late"], "reads": ["stream", "dots"]},
    "said": {"overrides": ["say"], "edits": ["late"], "reads": ["answer"]},
}


@dataclass(frozen=True)
class Regime:
    """The model, and what the scheduler is told.  ``pieces``: how many tokens of a prompt go into one step, in turn
    for each batch; 0 for as many as fit.  ``checkpoint``: in place of the tiny one of ``family``."""

    family: str = "llama"
    checkpoint: Path | None = None
    dtype: str = "float32"
    vllm: Mapping[str, Any] = field(default_factory=dict)
    pieces: tuple[int, ...] = (0, 1, 7, 64)

    @property
    def path(self) -> str:
        return str(self.checkpoint or tiny(self.family))


def spec(folder: Path, mode: str, seed: int, regime: Regime) -> Path:
    text = {
        "vtaps": 1,
        "model": {"path": regime.path, "dtype": regime.dtype},
        "engine": {
            "mode": mode,
            "vllm": {
                "max_model_len": LENGTH, "max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": BLOCK,
                "enable_prefix_caching": True, "num_gpu_blocks_override": 18,
                "kv_cache_memory_bytes": 64 << 20, **ON_GPU, **regime.vllm,
            },
        },
        "vectors": {name: {"random": {"seed": seed + i, "norm": 3}} for i, name in enumerate("xy")},
        "reads": {name: {**read, "sees": "after_edits"} for name, read in READS.items()},
        "edits": EDITS,
        "overrides": {"say": {"start": 2, "text": "abc"}},
        "metrics": {"e": {"logprob": "e", "tokens": "sampling"}},
        "prompts": {"any": [{"id": "any", "text": "a test of all that selectors of positions need " * 4}]},
        "arms": {name: {**arm, "metrics": ["e"]} for name, arm in ARMS.items()},
        "sampling": {"temperature": 0, "max_tokens": 24, "ignore_eos": True},
    }  # fmt: skip
    path = folder / f"numbers-{seed}.yaml"
    path.write_text(json.dumps(text))  # JSON is YAML
    return path


@dataclass
class Drawing:
    """Draws requests: prompts grow out of those that were drawn and of what was answered."""

    rng: np.random.Generator
    arms: list[tuple[str, int]]
    pool: list[tuple[int, ...]] = field(default_factory=lambda: [(7,)])
    answers: list[tuple[int, ...]] = field(default_factory=list)
    count: int = 0

    def tokens(self, size: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(4, TOKENS, size).tolist())

    def prompt(self, room: int) -> tuple[int, ...]:
        kind = self.rng.choice(["new", "same", "branch", "turn"], p=[0.15, 0.25, 0.3, 0.3])
        found = self.pool[self.rng.integers(len(self.pool))]
        if kind == "new":
            found = self.tokens(int(self.rng.choice([1, 2, 31, 32, 33, 64, 90, 130, 200])))
        elif kind == "branch":
            found = (*found[: int(self.rng.integers(len(found) + 1))], *self.tokens(int(self.rng.integers(1, 40))))
        elif kind == "turn" and self.answers:
            found = (*self.answers[-1 - int(self.rng.integers(min(len(self.answers), 30)))],
                     *self.tokens(int(self.rng.integers(1, 20))))  # fmt: skip
        found = found[:room]
        self.pool = [*self.pool[-40:], found]
        return found

    def request(self) -> tuple[Request, dict[str, Any]]:
        new = int(self.rng.integers(1, 25))
        n = int(self.rng.choice([1, 2, 3], p=[0.85, 0.1, 0.05]))
        sampling = {"temperature": 0.0 if n == 1 else 1.0, "max_tokens": new, "ignore_eos": True, "n": n, "logprobs": 0}
        # Half of all are of few arms, so that some are edited alike.
        arms = self.arms if self.rng.random() < 0.5 else [a for a in self.arms if a[0] in COMMON]
        arm, point = arms[self.rng.integers(len(arms))]
        self.count += 1
        prompt = self.prompt(LENGTH - new)
        return Request(f"k{self.count}", arm, point, "any", f"k{self.count}", prompt), sampling


@dataclass
class Told:
    """What a soak found; ``wrong`` says what, a line each."""

    requests: int = 0
    completions: int = 0
    rows: int = 0
    cached: int = 0
    given_up: int = 0
    loads: int = 0
    preempted: int = 0
    lost: int = 0
    duplicated: int = 0
    misplaced: int = 0
    worst: float = 0.0
    pieces: Counter[int] = field(default_factory=Counter)
    """How many tokens of an unfinished prompt went into a step → how often."""
    aborted: Counter[str] = field(default_factory=Counter)
    """What a request that was given up was at: ``prompt`` or ``answer``."""
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.misplaced or self.wrong)


@contextmanager
def watched(told: Told) -> Iterator[None]:
    """Count what the scheduler does: a soak that it made easy proves nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, schedule, finish = Scheduler._preempt_request, Scheduler.schedule, Scheduler.finish_requests

    def preempted(self: Any, *args: Any, **kwargs: Any) -> Any:
        told.preempted += 1
        return preempt(self, *args, **kwargs)

    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        for name, count in output.num_scheduled_tokens.items():
            if self.requests[name].num_computed_tokens < self.requests[name].num_prompt_tokens:
                told.pieces[count] += 1
        return output

    def finished(self: Any, names: Any, status: Any) -> Any:
        for name in [names] if isinstance(names, str) else names or ():
            if (request := self.requests.get(name)) is not None and not request.is_finished():
                done = request.num_computed_tokens
                at = "answer" if done >= request.num_prompt_tokens else "prompt" if done else "queue"
                told.aborted[at] += 1
        return finish(self, names, status)

    Scheduler._preempt_request, Scheduler.schedule, Scheduler.finish_requests = preempted, scheduled, finished
    try:
        yield
    finally:
        Scheduler._preempt_request, Scheduler.schedule, Scheduler.finish_requests = preempt, schedule, finish


@dataclass(frozen=True)
class Numbers:
    """A compiled spec, and what holds its requests."""

    lock: dict[str, Any]
    block: Path
    holder: Holder

    @staticmethod
    def of(folder: Path, mode: str, seed: int, regime: Regime, model: HuggingFace | Path | None) -> Numbers:
        """``model``: what the requests are held against, or the folder of it; None for the one that is served."""
        result = check_file(spec(folder, mode, seed, regime))
        assert result.plan is not None, [f"{d.code} {d.message}" for d in result.diagnostics]
        compiled, _ = compile_plan(result.plan)
        assert compiled is not None and result.plan.mode == mode
        block = folder / f"numbers-{seed}.block.py"
        block.write_text(compiled.block.source)
        meant = Meant(compiled.lock, folder)
        twin = model
        if not isinstance(twin, HuggingFace):
            twin = HuggingFace(str(twin or regime.path), meant.architecture, set(meant.placed()))
        return Numbers(compiled.lock, block, Holder(meant, twin))


def soak(
    folder: Path,
    mode: str,
    requests: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
    regime: Regime = Regime(),
) -> Told:
    numbers = Numbers.of(folder, mode, 1, regime, None)
    other = Numbers.of(folder, mode, 5, regime, numbers.holder.model)
    arms = [(name, i) for name, arm in numbers.lock["arms"].items() for i in range(len(arm["points"]))]
    drawing, told, rng = Drawing(np.random.default_rng(seed), arms), Told(), np.random.default_rng(seed + 1)
    came: Counter[str] = Counter()
    pieces, most = cycle(regime.pieces), max(2, min(40, requests // 4))
    with Engine(numbers.lock, folder, numbers.block, folder / "manifest") as engine, watched(told):
        scheduler = engine._frontend.engine.engine_core.engine_core.scheduler
        while told.requests < requests:
            if rng.random() < 0.4:  # the live engine goes on with other vectors under the same names
                numbers, other = other, numbers
                engine.load(numbers.lock, folder, numbers.block)
                told.loads += 1
            wave = dict(_keyed(drawing) for _ in range(min(int(rng.integers(1, most)), requests - told.requests)))
            told.requests += len(wave)
            while wave:
                # vLLM asks for it in each step.
                scheduler.scheduler_config.long_prefill_token_threshold = next(pieces)
                # Some of the batch is given up under way; it is asked again under the same keys.
                given_up = rng.random() < 0.4
                enough = int(rng.integers(1, len(wave) + 1)) if given_up else 0
                for finished, sampling in served(engine, wave, enough):
                    came[finished.request.key] += 1
                    hold(finished, sampling, numbers.holder, told)
                    prompt = finished.request.prompt_token_ids
                    drawing.answers += [(*prompt, *c.token_ids) for c in finished.completions]
                if not given_up:
                    told.wrong += [f"{key}: it never came" for key in wave]
                    break
                told.given_up += len(wave)
            tell(f"{told.requests} requests, {told.misplaced} misplaced")
    told.lost = sum(f"k{i + 1}" not in came for i in range(told.requests))
    told.duplicated = sum(n - 1 for n in came.values())
    return told


Wave = dict[str, tuple[Request, dict[str, Any]]]


def served(engine: Engine, wave: Wave, enough: int) -> Iterator[tuple[Finished, dict[str, Any]]]:
    """What finishes, taken out of the wave; after ``enough`` of it the others are given up."""
    asked = {key: sampling for key, (_, sampling) in wave.items()}
    serving = engine.run([r for r, _ in wave.values()], lambda r: asked[r.key])
    with closing(cast(Generator[Finished], serving)):
        for number, finished in enumerate(serving, 1):
            wave.pop(finished.request.key, None)
            yield finished, asked[finished.request.key]
            if number == enough:
                return


def _keyed(drawing: Drawing) -> tuple[str, tuple[Request, dict[str, Any]]]:
    request, sampling = drawing.request()
    return request.key, (request, sampling)


def hold(
    finished: Finished, sampling: Mapping[str, Any], holder: Holder, told: Told, bound: float | None = None
) -> None:
    """Every row, token and number of a request against the forward of it alone, within ``bound`` of the largest."""
    request = finished.request
    where = f"{request.key} (arm {request.arm}, point {request.point}, {len(request.prompt_token_ids)} tokens)"
    if [c.index for c in finished.completions] != list(range(sampling["n"])):
        told.wrong.append(f"{where}: completions {[c.index for c in finished.completions]}")
    for completion in finished.completions:
        told.completions += 1
        told.cached += sum(b - a for a, b in completion.record.cached)
        if len(completion.token_ids) != sampling["max_tokens"]:
            told.wrong.append(f"{where}: {len(completion.token_ids)} tokens instead of {sampling['max_tokens']}")
    held = holder.hold(finished, sampling)
    told.wrong += [
        f"{where}: {s.what} {s.name} was not compared: {s.reason}" for s in held.skipped if s.what != "tokens"
    ]
    found = together(held.measured, bound or bound_of("float32"))
    told.rows += sum(c.values for c in found)
    told.worst = max([told.worst, *(c.error for c in found if c.ok)])
    past = [f"{where}: {c.what} {c.name} {c.site}: {c.error:.1e}" for c in found if not c.ok]
    past += [
        f"{where}: {c.edit} fired at {c.fired} of {c.expected}" for c in holder.meant.counts(finished) if not c.same
    ]
    told.misplaced += len(past)
    told.wrong += past


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    parser.add_argument("--mode", choices=("eager", "taps"), default="taps", help="the engine (default: taps)")
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    options = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        told = soak(
            Path(folder), options.mode, options.requests, options.seed,
            lambda text: print(f"\r{text}", end="", file=sys.stderr, flush=True),
        )  # fmt: skip
    print(file=sys.stderr)
    summary = {"mode": options.mode, "seed": options.seed, **{k: v for k, v in vars(told).items() if k != "wrong"}}
    summary["pieces"] = dict(sorted(told.pieces.items()))
    summary |= {"seconds": round(time.monotonic() - started), "ok": told.ok}
    print(json.dumps(summary, indent=1))
    for line in told.wrong[:20]:
        print(line)
    if options.out is not None:
        options.out.write_text(json.dumps({**summary, "wrong": told.wrong[:100]}, indent=1) + "\n", encoding="utf-8")
    return 0 if told.ok else 1


if __name__ == "__main__":
    sys.exit(main())

"""A spec on its own engine against an independent reference: the library's side of ``vtaps verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vtaps.check import CheckResult, check_file
from vtaps.codegen import lock as locks
from vtaps.codegen.drift import drift
from vtaps.comparing import compared, compared_metrics, difference, lead
from vtaps.compiling import Compiled, compile_plan
from vtaps.forcing import forced, on_eager
from vtaps.picking import dependent, in_turn
from vtaps.running import requests_of, with_lines
from vtaps.runtime.records import Finished, Request
from vtaps.runtime.reference.holding import Held, Holder, Meant, Measured, Skipped
from vtaps.runtime.reference.kinds import Errors
from vtaps.runtime.reference.places import FAMILIES
from vtaps.spec.diagnostics import Diagnostic, Span, has_errors
from vtaps.spec.document import Document
from vtaps.spec.plan import Plan
from vtaps.spec.resolve import Context, resolve
from vtaps.spec.rows import Rows
from vtaps.spec.spec import Read, Spec
from vtaps.verification import Isolation, Verification, counted, findings, together

Against = Literal["huggingface", "eager"]
REFERENCES: tuple[Against, ...] = ("huggingface", "eager")
LIMIT = 64
"""Requests that are served where nobody says how many."""
ALONE = 4
"""Requests without edits that are served once more, one at a time."""

BOUNDS: Mapping[str, float] = {"float32": 3e-4, "float16": 1e-2, "bfloat16": 6e-2}
"""The largest error, as a share of the row's largest value, by the model's dtype."""
TF32 = 4e-3
"""Of float32 on CUDA, where vLLM's attention multiplies in TF32."""

PROBE = "verify "
"""What the reads of an edit's own location are called by: a name that no spec can give."""


def verify(
    path: str | Path,
    *,
    limit: int = LIMIT,
    bound: float | None = None,
    against: Against | None = None,
    in_process: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Run the spec at ``path`` and hold it against a reference.

    At most ``limit`` requests are served, those of every arm in turn.  ``bound``: the largest error, as a share of the
    row's largest value (default: by dtype, :data:`BOUNDS`).  ``against``: ``huggingface``, the forward of the same
    weights in float32 by transformers on the CPU, or ``eager``, vtaps' own eager engine; default: the first where it
    knows every location.  ``tell`` hears what is being done, in words.  What is wrong is in
    :attr:`Verification.findings`, a spec that does not check and a run that fails too; nothing is raised for those.
    """
    result = check_file(path)
    if result.plan is None or result.doc is None:
        return Verification(str(path), findings=tuple(result.diagnostics), documents=result.documents)
    compiled, found = compile_plan(result.plan)
    block_name, _ = locks.names(result.doc.file)
    if compiled is not None and (result.doc.folder / block_name).exists():
        found = drift(compiled.files, result.doc.folder, result.doc.file)
    if compiled is None or has_errors(found):
        return Verification(str(path), findings=tuple(found), documents=result.documents)
    return _Work(result, result.plan, result.doc, compiled, limit, bound, against, in_process, tell).done()


@dataclass
class _Work:
    result: CheckResult
    plan: Plan
    doc: Document
    compiled: Compiled
    limit: int
    bound: float | None
    against: Against | None
    in_process: bool
    tell: Callable[[str], None]
    skipped: dict[Skipped, None] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    moved: dict[str, float] = field(default_factory=dict)
    isolation: Isolation | None = None

    def done(self) -> Verification:
        from vtaps.runtime.engine import EngineError

        lock = with_lines(self.compiled.lock, self.plan, self.compiled, self.doc.line)
        everything = list(requests_of(self.plan))
        needing = dependent(self.plan)
        for arm, why in needing.items():
            self._skip("arm", arm, why)
        requests = in_turn([request for request in everything if request.arm not in needing], self.limit)
        meant = Meant(lock, self.doc.folder)
        reference, reason = choose(meant, self.plan.mode, self.against)
        told = Verification(
            self.doc.file, self.plan.mode, reference=reference, reason=reason, requests=len(requests),
            total=len(everything), documents=self.result.documents,
        )  # fmt: skip
        if everything and not requests:
            told = replace(told, reference=None, not_checked=tuple(self.skipped))
            return replace(told, findings=tuple(findings(told, self.doc)))
        try:
            with self._engine(self.compiled, lock) as engine:
                finished = self._serve(engine, requests, self._sampling)
                self.tell("isolation")
                again = self._isolated(engine, lock, finished)
                dtype = str(engine.report["dtype"])
            bound = self.bound if self.bound is not None else bound_of(dtype)
            probed, probes = self._probed(finished)
            pieces = self._in_pieces(probed, finished) if probed is not None else []
            growth: dict[str, Mapping[str, Errors]] = {}
            if reference == "huggingface":
                growth, problem = self._hold(meant, finished, probed, probes, pieces)
                if problem is not None:
                    fallback: Against | None = "eager" if self.plan.mode != "eager" and not self.against else None
                    reference, told = fallback, replace(told, reference=fallback, reason=problem)
            if reference == "eager":
                self._hold_eager(meant, lock, finished, probed, pieces)
            if reference is None:
                self._skip("read", "*", told.reason)
        except EngineError as error:
            failed = Diagnostic(error.code, error.message, Span(self.doc.file))
            return replace(told, findings=(failed,))
        chunk = probed.chunk if probed is not None else None
        if chunk is not None:
            for one, other in zip(finished, pieces, strict=True):
                self.measured += compared(other, one, "chunked", growth.get(one.request.key, {}))
        known = {one.request.key: one for one in finished}
        for one in again:
            key = one.request.key
            self.measured += compared(one, known[key], "alone", growth.get(key, {}))
        comparisons = together(self.measured, bound)
        fired = counted((c for one in finished for c in meant.counts(one)), self.moved)
        told = replace(
            told, dtype=dtype, bound=bound, comparisons=comparisons, fired=fired, isolation=self.isolation,
            chunk=chunk, not_checked=tuple(self.skipped),
        )  # fmt: skip
        return replace(told, findings=tuple(findings(told, self.doc)))

    # -- engines

    @contextmanager
    def _engine(self, compiled: Compiled, lock: Mapping[str, Any]) -> Iterator[Any]:
        from tempfile import TemporaryDirectory

        from vtaps.runtime.engine import Engine

        with TemporaryDirectory(prefix="vtaps-") as scratch:
            self._block = Path(scratch) / locks.names(self.doc.file)[0]
            self._block.write_text(compiled.block.source, encoding="utf-8")
            with Engine(
                lock, self.doc.folder, self._block, Path(scratch), self.tell, in_process=self.in_process
            ) as engine:
                yield engine

    def _serve(self, engine: Any, requests: Sequence[Request], sampling: Callable[[Request], Any]) -> list[Finished]:
        """In the order of ``requests``.  Raises EngineError, for a request that is refused too."""
        place = {r.key: i for i, r in enumerate(requests)}
        return sorted(engine.run(requests, sampling), key=lambda one: place[one.request.key])

    def _sampling(self, request: Request) -> Mapping[str, Any]:
        return {**self.plan.arms[request.arm].sampling, "logprobs": 0}

    def _once(self, finished: Sequence[Finished]) -> Callable[[Request], Mapping[str, Any]]:
        """The sampling of requests that repeat ``finished``: one completion each."""
        arm_of = {one.request.key: one.request for one in finished}
        return lambda request: {**self._sampling(arm_of[request.key]), "n": 1}

    def _isolated(self, engine: Any, lock: Mapping[str, Any], finished: list[Finished]) -> list[Finished]:
        """Serve the batch once more with nobody edited, and unedited requests alone; returns the latter."""
        points = [lock["arms"][f.request.arm]["points"][f.request.point] for f in finished]
        plain = [f for f, point in zip(finished, points, strict=True) if not point["edits"]]
        if not plain:
            self._skip("isolation", "*", "no request of the run is without edits")
            return []
        nobody, requests = forced(lock, finished, edits=False)
        engine.load(nobody, self.doc.folder, self._block)
        keys = {f.request.key for f in plain}
        if len(plain) == len(finished):
            self._skip("isolation", "bits", "no request of the run has an edit")
        elif any(len(f.completions) > 1 for f in finished):
            self._skip("isolation", "bits", "several completions of a request (sampling.n)")
        else:
            again = self._serve(engine, requests, self._once(finished))
            pairs = [(a, b) for a, b in zip(finished, again, strict=True) if a.request.key in keys]
            differing = tuple((a.request.key, what) for a, b in pairs if (what := difference(a, b)) is not None)
            self.isolation = Isolation(len(pairs), differing)
        if len(finished) == 1:
            self._skip("isolation", "alone", "the run has one request")
            return []
        chosen = [r for r in requests if r.key in keys][:ALONE]
        return [one for r in chosen for one in self._serve(engine, [r], self._once(finished))]

    def _in_pieces(self, probed: _Probed, finished: list[Finished]) -> list[Finished]:
        """Every request once more with the reads of ``probed``, its prompt in pieces where there is a ``chunk``."""
        lock, requests = forced(probed.lock, finished, edits=True)
        self.tell("again with reads at the edits" if probed.chunk is None else f"in steps of {probed.chunk} tokens")
        with self._engine(probed.compiled, lock) as engine:
            return self._serve(engine, requests, self._once(finished))

    def _eager(
        self, lock: Mapping[str, Any], compiled: Compiled, finished: list[Finished]
    ) -> tuple[list[Finished], list[Finished]]:
        """What the eager engine gives for each of ``finished``: by itself, and with the same tokens."""
        meant, requests = forced(on_eager(lock), finished, edits=True)
        free = [replace(one.request, key=f"{one.request.key} by itself") for one in finished]
        once, own = self._once(finished), {r.key for r in free}
        self.tell("the eager engine")
        with self._engine(compiled, meant) as engine:
            served = self._serve(
                engine, [*free, *requests],
                lambda r: {**self._sampling(r), "n": 1} if r.key in own else once(r),
            )  # fmt: skip
        return served[: len(free)], served[len(free) :]

    # -- the spec with reads at its edits

    def _probed(self, finished: list[Finished]) -> tuple[_Probed | None, tuple[str, ...]]:
        """The spec with a read behind every edit, of all rows, for an engine that takes prompts in pieces."""
        asked = dict(self.plan.spec.engine.vllm)
        chunk = self._chunk(finished, asked)
        if chunk is not None:
            sequences = min(int(asked.get("max_num_seqs") or chunk), chunk)
            asked |= {"max_num_batched_tokens": chunk, "max_num_seqs": sequences}
        assert self.result.tree is not None and self.result.tokens is not None
        spec, names = with_probes(self.plan.spec)
        context = Context(self.doc, self.result.tree, self.result.tokens)
        for candidate, probes in ((spec, names), (self.plan.spec, ())):
            engine = replace(candidate.engine, vllm=asked, mode=self.plan.mode)
            plan, problems = resolve(replace(candidate, engine=engine), context)
            if plan is None:
                why = next(d.message for d in problems if d.severity == "error")
                for name in probes:
                    self._skip("edit", name.removeprefix(PROBE), f"its location cannot be read: {why}")
                continue
            compiled, _ = compile_plan(plan)
            if compiled is not None and (probes or chunk is not None):
                return _Probed(compiled, compiled.lock, chunk), probes
        return None, ()

    def _chunk(self, finished: list[Finished], asked: Mapping[str, Any]) -> int | None:
        """Tokens a step that cut the longest prompt; None where none is to be cut."""
        longest = max((len(f.request.prompt_token_ids) for f in finished), default=0)
        if asked.get("enable_chunked_prefill") is False:
            self._skip("chunked", "*", "engine.vllm.enable_chunked_prefill is false")
            return None
        if longest < 3:
            self._skip("chunked", "*", "no prompt is long enough to be cut")
            return None
        return max(2, min(64, (longest + 1) // 2))

    # -- comparisons

    def _hold(
        self, meant: Meant, finished: list[Finished], probed: _Probed | None, probes: tuple[str, ...],
        pieces: list[Finished],
    ) -> tuple[dict[str, Mapping[str, Errors]], str | None]:  # fmt: skip
        """Against Hugging Face; also how much each request's streams have shrunk."""
        from vtaps.runtime.arguments import resolve_path
        from vtaps.runtime.reference.forward import HuggingFace, NoReference

        self.tell("loading the Hugging Face model")
        path = resolve_path(str(meant.lock["model"]["path"]), self.doc.folder)
        try:
            model = HuggingFace(path, meant.architecture, meant.placed(), meant.lock["model"].get("revision"))
        except NoReference as error:
            return {}, str(error)
        holder, growth = Holder(meant, model), {}
        again: dict[str, Finished] = {}
        behind: Holder | None = None
        if probed is not None and pieces:
            lock, _ = forced(probed.lock, finished, edits=True)
            behind = Holder(Meant(lock, self.doc.folder), model)
            again = {one.request.key: one for one in pieces}
        for number, one in enumerate(finished):
            if number % 16 == 0:
                self.tell(f"Hugging Face's forward: {number} of {len(finished)} requests")
            held = holder.hold(one, self.plan.arms[one.request.arm].sampling)
            growth[one.request.key] = held.growth
            self._take(held)
            self.moved |= {edit: max(size, self.moved.get(edit, 0.0)) for edit, size in held.moved.items()}
            if behind is not None and one.request.key in again:
                self._take(edits_only(behind.hold(again[one.request.key], {}, probes)))
        return growth, None

    def _hold_eager(
        self, meant: Meant, lock: Mapping[str, Any], finished: list[Finished], probed: _Probed | None,
        pieces: list[Finished],
    ) -> None:  # fmt: skip
        """Against the eager engine.  Raises EngineError."""
        asked = (lock, self.compiled) if probed is None else (probed.lock, probed.compiled)
        for number, (one, free, same) in enumerate(zip(finished, *self._eager(*asked, finished), strict=True)):
            for m in compared(one, same, "read", {}):
                if m.name == "logprobs" and m.site == "logits":
                    self.measured.append(replace(m, what="logprobs", name=""))
                elif not m.name.startswith(PROBE):
                    self.measured.append(m)
            if pieces:
                probes = [m for m in compared(pieces[number], same, "edit", {}) if m.name.startswith(PROBE)]
                self.measured += [replace(m, name=m.name.removeprefix(PROBE)) for m in probes]
            self.measured += compared_metrics(one, same)
            why = meant.not_greedy(self.plan.arms[one.request.arm].sampling)
            if why is not None:
                self._skip("tokens", f"arm {one.request.arm}", why)
            else:
                self.measured.append(lead(one, free, same))

    def _take(self, held: Held) -> None:
        self.measured += held.measured
        self.skipped.update(dict.fromkeys(held.skipped))

    def _skip(self, what: str, name: str, reason: str) -> None:
        self.skipped[Skipped(what, name, reason)] = None


@dataclass(frozen=True)
class _Probed:
    """``chunk``: tokens a step, None where prompts are not to be cut."""

    compiled: Compiled
    lock: Mapping[str, Any]
    chunk: int | None


def choose(meant: Meant, mode: str, against: Against | None) -> tuple[Against | None, str]:
    """Which reference, and why."""
    unplaced = meant.unplaced()
    known = meant.architecture in FAMILIES
    if against is not None:
        return against, "asked for"
    if known and not unplaced:
        return "huggingface", f"every location is an alias of {meant.architecture}"
    where = (
        f"{unplaced[0]} is no alias with a place in Hugging Face's model"
        if known and unplaced
        else (f"no table says where Hugging Face holds what {meant.architecture} computes")
    )
    if mode != "eager":
        return "eager", where
    if known and meant.placed():
        return "huggingface", f"for the aliases; {where}"
    return None, f"{where}, and the spec's engine is the eager one itself"


def bound_of(dtype: str) -> float:
    import torch

    if dtype == "float32" and torch.cuda.is_available():
        return TF32
    return BOUNDS.get(dtype, max(BOUNDS.values()))


def with_probes(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """``spec`` with a read of all rows behind each edit of each arm, and the names of those reads."""
    probes = {
        PROBE + name: Read(PROBE + name, edit.where, edit.at, Rows(), sees="after_edits")
        for name, edit in spec.edits.items()
        if edit.verb != "python"
    }
    arms = {
        name: replace(arm, reads=(*arm.reads, *(PROBE + e for e in arm.edits if PROBE + e in probes)))
        for name, arm in spec.arms.items()
    }
    return replace(spec, reads={**spec.reads, **probes}, arms=arms), tuple(probes)


def edits_only(held: Held) -> Held:
    """What the probes measured, as what the edits are."""
    measured = tuple(replace(m, what="edit", name=m.name.removeprefix(PROBE)) for m in held.measured)
    return replace(held, measured=measured, skipped=())

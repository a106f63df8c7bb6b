"""A checked spec → a run folder: the library's side of ``vtaps run``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtaps.check import CheckResult
from vtaps.codegen import lock as locks
from vtaps.codegen.drift import drift
from vtaps.compiling import Compiled, compile_plan
from vtaps.runtime.budgets import Budgets
from vtaps.runtime.errors import RequestError
from vtaps.runtime.records import Failure, Finished, Request
from vtaps.runtime.results.folder import RunFolder, WriteError
from vtaps.runtime.results.reads import ShapeError
from vtaps.spec.arms import points_of
from vtaps.spec.diagnostics import Diagnostic, Span, has_errors
from vtaps.spec.document import Document
from vtaps.spec.pattern import part_of
from vtaps.spec.plan import Plan
from vtaps.spec.selectors import gates_of, match_texts
from vtaps.staging import Sources, batches, key_of, made_vectors

OF_REQUESTS = frozenset({"VT603", "VT606", "VT620", "VT621", "VT622", "VT623"})
"""What one request may fail with, while the others go on."""


@dataclass(frozen=True)
class Watch:
    """Who hears about progress: ``tell`` a phase in words, ``total`` the number of requests and how many were done
    before, ``step`` each that is done, whole or not."""

    tell: Callable[[str], None] = lambda text: None
    total: Callable[[int, int], None] = lambda total, done: None
    step: Callable[[Finished | RequestError], None] = lambda ended: None


@dataclass(frozen=True)
class Outcome:
    """``path`` is None where nothing was run; ``findings`` hold what was wrong; ``not_run`` requests were not started
    because a read's budget was kept; ``failed`` ones have no result."""

    path: Path | None
    findings: list[Diagnostic]
    resumed: int = 0
    served: int = 0
    not_run: int = 0
    failed: int = 0

    @property
    def ok(self) -> bool:
        return self.path is not None and not has_errors(self.findings)

    @property
    def of_requests(self) -> bool:
        """Whether all that is wrong is that single requests failed."""
        return all(d.code in OF_REQUESTS for d in self.findings if d.severity == "error")


def requests_of(plan: Plan) -> Iterator[Request]:
    """Every prompt × arm × sweep point, in the order of the results: group, prompt, arm, point."""
    for group, prompts in plan.prompts.items():
        arms = [(name, arm, _match_texts(plan, name)) for name, arm in plan.arms.items() if group in arm.prompts]
        for prompt in prompts:
            for name, arm, texts in arms:
                for i, _ in points_of(arm, plan.edits, prompt):
                    yield Request(
                        key=key_of(group, prompt.id, name, i),
                        arm=name,
                        point=i,
                        group=group,
                        prompt_id=prompt.id,
                        prompt_token_ids=prompt.ids,
                        matches={t: tuple(prompt.matches(t)) for t in texts},
                        turns=prompt.turns,
                        columns=prompt.columns,
                        prompt_text=prompt.text,
                    )


def _match_texts(plan: Plan, arm: str) -> tuple[str, ...]:
    own = plan.arms[arm].arm
    rows = [plan.edits[n].edit.tokens for n in own.edits]
    rows += [plan.reads[n].read.tokens for n in own.reads]
    rows += [plan.metrics[n].metric.tokens for n in own.metrics]
    rows += [plan.gates[n].gate.tokens for n in gates_of(own, plan.spec)]
    return match_texts(rows)


def with_lines(lock: dict[str, Any], plan: Plan, compiled: Compiled, line: Callable[..., int]) -> dict[str, Any]:
    """The lock with the spec's line beside each definition and under each line of the block: where a fault at work
    points.  Lines are not part of the lock on disk, so that a comment added to a spec changes nothing."""
    told = {**lock, "block": {**lock["block"], "lines": {}}}
    for section in ("edits", "reads", "overrides", "metrics", *(["gates"] if "gates" in lock else [])):
        told[section] = {n: {**d, "line": line(section, part_of(n))} for n, d in lock[section].items()}
    told["block"]["lines"] = {str(at): line(s, part_of(n)) for at, (s, n) in compiled.block.statements.items()}
    return told


def run_checked(
    result: CheckResult,
    out: Path,
    *,
    overwrite: bool = False,
    in_process: bool = True,
    fail_fast: bool = False,
    watch: Watch | None = None,
) -> Outcome:
    """Compile, start the engine, serve every request that is not done yet, write the run folder.

    A request that fails is told among the findings, and the others go on; with ``fail_fast`` it ends the run, which
    goes on from there when it is started again.
    """
    watch = watch or Watch()
    plan, doc = result.plan, result.doc
    if plan is None or doc is None:
        return Outcome(None, result.diagnostics)
    compiled, found = compile_plan(plan)
    if compiled is None:
        return Outcome(None, found)
    block_name, _ = locks.names(doc.file)
    if (doc.folder / block_name).exists():
        found = drift(compiled.files, doc.folder, doc.file)
        if has_errors(found):
            return Outcome(None, found)
    lock = with_lines(compiled.lock, plan, compiled, doc.line)
    requests = list(requests_of(plan))
    folder, found = RunFolder.open(
        out,
        lock,
        order=[r.key for r in requests],
        blocks={block_name: compiled.block.source},
        overwrite=overwrite,
    )
    if folder is None:
        return Outcome(None, found)
    with folder:
        return _serve(result, plan, compiled, lock, requests, folder, in_process, fail_fast, watch)


def _definition(message: str, doc: Document) -> Span:
    """Of the edit or read that a fault at work names, the place in the spec; else the spec."""
    named = re.search(r"\b(edits|reads)\.([A-Za-z_][\w-]*)(?=: )", message)
    known = named is not None and named.groups() in doc.keys
    return doc.key(*named.groups()) if named is not None and known else Span(doc.file)


def _serve(
    result: CheckResult, plan: Plan, compiled: Compiled, lock: Mapping[str, Any], requests: list[Request],
    folder: RunFolder, in_process: bool, fail_fast: bool, watch: Watch,
) -> Outcome:  # fmt: skip
    from tempfile import TemporaryDirectory

    from vtaps.runtime.engine import Engine, EngineError

    assert result.doc is not None and result.tokens is not None
    span = Span(result.doc.file)
    waiting = [r for r in requests if r.key not in folder.done]
    resumed = len(requests) - len(waiting)
    watch.total(len(requests), resumed)
    failed: dict[str, Failure] = {}
    found: list[Diagnostic] = []
    report: Mapping[str, Any] = {"mode": plan.mode, "requests": 0}

    budgets = Budgets(lock, folder.kept)

    arm_of = {r.key: r.arm for r in requests}

    def not_whole(error: RequestError) -> None:
        if fail_fast:
            raise error
        failed[error.key] = Failure(error.reason, error.code, arm_of[error.key], error.line)
        budgets.failed(error.key)
        watch.step(error)

    def sampling_of(request: Request) -> Mapping[str, Any]:
        return plan.arms[request.arm].sampling

    def left(of: list[Request]) -> list[Request]:
        """Those that are still wanted; those on their way may bring fewer rows than they should, by failing."""
        return [r for r in of if r.key not in folder.done and r.key not in failed and not budgets.covered(r)]

    if left(waiting):
        try:
            with TemporaryDirectory(prefix="vtaps-") as scratch:
                block = Path(scratch) / locks.names(result.doc.file)[0]
                block.write_text(compiled.block.source, encoding="utf-8")
                with Engine(
                    lock, result.doc.folder, block, Path(scratch), watch.tell, in_process=in_process, spool=folder.spool
                ) as engine:
                    report = {**engine.report, "requests": len(waiting)}
                    sources = Sources(plan, result.doc.folder, requests, folder, engine, failed)
                    for batch in batches(plan, waiting):
                        while wanted := left(batch):
                            for finished in engine.run(budgets.start(sources.ready(wanted)), sampling_of, not_whole):
                                found += folder.add(finished)
                                budgets.done(finished.request, folder.kept)
                                watch.step(finished)
        except EngineError as error:
            where = _definition(error.message, result.doc)
            told = [*found, Diagnostic(error.code, error.message, where)]
            return Outcome(None, told, resumed, failed=int(isinstance(error, RequestError)))
        except WriteError as error:
            return Outcome(None, [*found, Diagnostic("VT406", error.message, span, note=error.note)], resumed)
        except OSError as error:
            place, why = error.filename or "the temporary folder", error.strerror or error
            return Outcome(None, [*found, Diagnostic("VT404", f"cannot write {place}: {why}", span)], resumed)
    tokens = result.tokens
    watch.tell("writing results")
    try:
        vectors = made_vectors(plan, requests, folder)
        not_run = {r.key for r in waiting if r.key not in folder.done and r.key not in failed}
        findings = folder.finish(
            report, failed=failed, not_run=not_run, token_text=lambda i: tokens.pieces((i,))[0], vectors=vectors
        )
    except WriteError as error:
        return Outcome(None, [*found, Diagnostic("VT406", error.message, span, note=error.note)], resumed)
    except ShapeError as error:
        again = "what its function gives changed between two starts of this run: `--overwrite` starts anew"
        where = result.doc.key("reads", error.read)
        return Outcome(None, [Diagnostic("VT603", str(error), where, note=again)], resumed)
    return Outcome(folder.path, findings, resumed, len(waiting) - len(failed) - len(not_run), len(not_run), len(failed))

"""The driver: starts vLLM with the block in its workers, feeds it requests, brings back what they put out."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors.numpy import save

from vtaps.runtime.arguments import engine_arguments as engine_arguments
from vtaps.runtime.compat.breaks import splitting
from vtaps.runtime.compat.frontend import Frontend, Output, environment, quiet
from vtaps.runtime.errors import EngineError as EngineError
from vtaps.runtime.errors import RequestError as RequestError
from vtaps.runtime.errors import one_line as one_line
from vtaps.runtime.forward_text import changed
from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.manifest import MANIFEST, Manifest
from vtaps.runtime.memory import Limits, TapMemoryError, predicted
from vtaps.runtime.merging import Merging
from vtaps.runtime.pattern import attended, with_patterns
from vtaps.runtime.prefix import Prefix
from vtaps.runtime.program import LockError, Program
from vtaps.runtime.records import Completion, Finished, Request
from vtaps.runtime.spool import machine_memory
from vtaps.runtime.transport import Folders
from vtaps.spec import vllm_version
from vtaps.spec.budget import LARGEST_TOKENS, limits
from vtaps.spec.parts import ranks
from vtaps.spec.pipeline import stages
from vtaps.spec.rows import OPEN
from vtaps.spec.sizes import human, row_counts
from vtaps.spec.slots import ITEM_BYTES

Sampling = Callable[[Request], Mapping[str, Any]]
Progress = Callable[[str], None]
Ended = tuple[str, tuple[Output, ...]]

EXTENSION = "vtaps.runtime.worker.WorkerExtension"


def plain_engine(
    lock: Mapping[str, Any], lock_folder: Path, *, in_process: bool = True, eager: bool = True
) -> Frontend:
    """The same vLLM without vtaps: the reference of tests and benchmarks.  Raises EngineError."""
    quiet()
    return _start(engine_arguments(lock, lock_folder, eager=eager), in_process=in_process)


class Engine:
    """vLLM with a block in every worker.

    ``lock``: the lock's JSON; ``lock_folder``: where its relative names start; ``manifest_dir``: a folder for the
    files that the workers read at start.  ``progress`` hears what is being done, in words.  Rows that reads deliver
    take about ``host_memory`` bytes (default: a quarter of the machine's) until the caller lets go of them; others go
    to files in a folder in ``spool`` (default: ``manifest_dir``), which is gone when the engine is closed.

    Raises EngineError: VT504 (unknown vLLM), VT505 (another text of a forward with taps), VT503 (a setting), VT607
    (vLLM did not start), VT601 (a worker without the block), VT608 (a tap that does not fire).
    """

    def __init__(
        self,
        lock: Mapping[str, Any],
        lock_folder: Path,
        block_path: Path,
        manifest_dir: Path,
        progress: Progress | None = None,
        in_process: bool = True,
        spool: Path | None = None,
        host_memory: int | None = None,
    ) -> None:
        started = time.monotonic()
        _known_vllm()
        quiet()
        self.program = _served(lock, lock_folder)
        self._prefix = Prefix(self.program)
        self._asked, self._loads = (lock["model"], (lock.get("engine") or {}).get("vllm")), 0
        tell = progress or (lambda _: None)
        predicted_bytes = self._predicted(lock) if self.program.mode == "taps" else 0
        if predicted_bytes:
            tell(f"the taps take at most {human(predicted_bytes)} of the device")
        tell("loading vLLM")
        args = engine_arguments(lock, lock_folder, eager=self.program.mode == "eager")
        args["worker_extension_cls"] = EXTENSION
        self._ranks = ranks(args) * stages(args)
        args["additional_config"] = {
            **(args.get("additional_config") or {}),
            "vtaps": self.program.structure,
        }
        manifest_dir.mkdir(parents=True, exist_ok=True)
        own = (spool or manifest_dir).resolve() / f"spool-{secrets.token_hex(8)}"
        self._folders = Folders(own, others=not in_process or self._ranks > 1)
        self._memory = host_memory if host_memory is not None else machine_memory() // 4
        self._manifest = self._write(lock, lock_folder, block_path, manifest_dir / "manifest.json")
        self._faults: Callable[[], list[str]] = lambda: []
        try:
            with environment(**{MANIFEST: str(self._manifest)}):
                # vLLM loads plug-ins once a process; a plain engine may have been first.
                self._faults = _install(self._manifest)
                tell("starting the engine")
                with splitting(any(site.mode == "break" for site in self.program.sites.values())):
                    self._frontend = _start(args, in_process=in_process, faults=self._faults)
            self.workers = self._handshake()
            self._learn(self.program, self.workers)
            self.proof = self._prove(tell) if self.program.mode == "taps" else {}
        except EngineError:
            self.close()
            raise
        self.report: dict[str, Any] = {
            "vllm": (vllm_version.installed() or ("", ""))[1],
            "mode": self.program.mode,
            **self._frontend.report(),
            "locations": len(self.program.sites),
            "tap_bytes": max(told["tap_bytes"] for told in self.workers),
            "predicted_bytes": predicted_bytes,
            "proof": self.proof,
            "compiled": self.compiled(),
            "start_seconds": round(time.monotonic() - started, 2),
        }
        tell("engine ready")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def _handshake(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._call("vtaps_handshake")
        for told in workers:
            who = f"worker {told.get('rank', '?')}"
            if told.get("block") != self.program.block_digest:
                raise EngineError("VT601", f"{who} runs without the block (vLLM's plug-in of vtaps did not load)")
        if not workers:
            raise EngineError("VT601", "no worker answered")
        missing = set(self.program.sites).difference(*(told["locations"] for told in workers))
        if missing:
            raise EngineError("VT601", f"no worker has {', '.join(sorted(missing))}")
        return workers

    def _learn(self, program: Program, workers: list[dict[str, Any]]) -> None:
        widths = {name: site.width for name, site in program.sites.items()}
        self._attention, self._merging = attended(program.patterns, widths, workers), Merging(program, workers)

    def load(self, lock: Mapping[str, Any], lock_folder: Path, block_path: Path) -> None:
        """Go on with another lock of the same structure: other scales, vectors, rows, arms and prompts.

        Nothing is compiled or captured.  Raises EngineError (VT607) for a lock of another structure, another engine or
        another model, and leaves the engine as it was.
        """
        program = _served(lock, lock_folder)
        model, asked = (lock["model"], (lock.get("engine") or {}).get("vllm")), self._asked
        if model != asked:
            raise EngineError("VT607", "the lock is for another model or other arguments of vLLM; start another engine")
        self._loads += 1
        manifest = self._write(lock, lock_folder, block_path, self._manifest.with_name(f"manifest-{self._loads}.json"))
        for rank, answer in enumerate(self._call("vtaps_load", str(manifest))):
            if answer:
                raise EngineError("VT607", f"worker {rank}: {answer}")
        self._learn(program, self._call("vtaps_handshake"))
        self.program, self._prefix = program, Prefix(program)

    def patch(self, edit: str, first: int, rows: Mapping[str, Any]) -> None:
        """Fill the slots ``first …`` that an edit sets rows from; ``rows``: site → ``[n, width]`` in the model's dtype,
        bfloat16 as its bits in uint16.  Raises EngineError (VT603) where they do not fit."""
        self._told("vtaps_patch", edit, first, save({site: np.ascontiguousarray(r) for site, r in rows.items()}))

    def define(self, vector: str, numbers: Mapping[str, Any]) -> None:
        """Give a vector of a read its numbers, site → float32 ``[width]``; nothing is compiled.  Raises EngineError
        (VT603) where they do not fit."""
        self._told("vtaps_define", vector, save({site: np.ascontiguousarray(v) for site, v in numbers.items()}))
        self.program.known.update(((vector, site), v) for site, v in numbers.items())
        self._prefix = Prefix(self.program)

    def _told(self, method: str, *args: Any) -> None:
        for rank, answer in enumerate(self._call(method, *args)):
            if answer:
                raise EngineError("VT603", f"worker {rank}: {answer}")

    def _write(self, lock: Mapping[str, Any], folder: Path, block: Path, path: Path) -> Path:
        """Write what the workers read at start; returns the manifest's absolute path."""
        path = path.resolve()
        lock_path = path.with_name(path.name.replace("manifest", "lock"))
        lock_path.write_text(json.dumps(lock), encoding="utf-8")
        spool = (self._folders.spool, self._memory, self._folders.shared)
        Manifest(block.resolve(), lock_path, folder.resolve(), *spool).write(path)
        return path

    def _predicted(self, lock: Mapping[str, Any]) -> int:
        """Bytes of the device, for the largest batches that vLLM's defaults make where the lock gives none."""
        requests, tokens = limits((lock.get("engine") or {}).get("vllm") or {})
        most = tokens or LARGEST_TOKENS
        dtype = lock["model"].get("dtype")
        try:
            return predicted(self.program, Limits(most, requests, most), dtype if dtype in ITEM_BYTES else "float32")
        except TapMemoryError as error:
            raise EngineError("VT607", f"engine.tap_memory: {error}") from error

    def compiled(self) -> dict[str, int]:
        """Of the first worker's process, so far: models ``traced``, their parts ``compiled`` or ``loaded`` from vLLM's
        compile cache, and CUDA graphs ``captured``."""
        counted: dict[str, int] = self._call("vtaps_handshake")[0]["compiled"]
        return counted

    def _prove(self, tell: Progress) -> dict[str, Any]:
        tell("proving that every tap fires")
        answers: list[dict[str, Any]] = self._call("vtaps_prove")
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise EngineError("VT608", f"worker {rank}: {answer['error']}")
        proof = answers[0]
        shapes = "; ".join(f"{mode} at {row_counts(rows)}" for mode, rows in proof["passes"].items())
        tell(f"{proof['taps']} taps fire in every shape ({shapes or 'none inside the model'})")
        return proof

    def run(
        self,
        requests: Iterable[Request],
        sampling_of: Sampling,
        refused: Callable[[RequestError], None] | None = None,
    ) -> Iterator[Finished]:
        """Serve requests, in the order in which they finish; at most three times ``max_num_seqs`` are alive at once.

        At the end every worker's count of launches must be what its steps needed.

        A request that is refused (VT603, VT606) goes to ``refused``, or is raised where there is no such callback;
        a fault in a worker ends the run (EngineError VT603): nothing goes out unedited.
        """
        waiting = iter(requests)
        # vLLM in this process starts a step and waits for the one before.  While the device computes it, what ended
        # before is collected, and requests are added that have no room in it.
        ahead = self.report["in_process"] and self.report["async_scheduling"]
        step_tokens = self.report["max_num_batched_tokens"] if ahead else OPEN
        window = (3 if ahead else 2) * int(self.report["max_num_seqs"])
        live: dict[str, tuple[Request, str]] = {}
        ended: list[Ended] = []
        exhausted = False
        try:
            while True:
                added, due = 0, ended
                try:
                    while not exhausted and len(live) < window and added < step_tokens:
                        request = next(waiting, None)
                        if request is None:
                            exhausted = True
                            break
                        try:
                            if request.key in live:
                                raise RequestError("VT606", "its key is alive already", request.key)
                            live[request.key] = (request, self._add(request, sampling_of(request)))
                            added += len(request.prompt_token_ids)
                        except RequestError as error:
                            if refused is None:
                                raise
                            refused(error)
                    if not live:
                        self._call("vtaps_verify")
                        return
                    ended = self._guard(self._frontend.step)
                except Exception:
                    with suppress(EngineError):  # what ended before is whole
                        yield from self._delivered(due, live)
                    raise
                if not (ahead and self._frontend.busy()):
                    due, ended = due + ended, []
                yield from self._delivered(due, live)
        finally:
            if live:
                self._give_up(live)

    def _delivered(self, ended: list[Ended], live: dict[str, tuple[Request, str]]) -> Iterator[Finished]:
        for done in self._collect([(live[key][0], outputs) for key, outputs in ended]) if ended else ():
            del live[done.request.key]
            yield done

    def _add(self, request: Request, sampling: Mapping[str, Any]) -> str:
        asked: dict[str, Any] = {"key": request.key, "arm": request.arm, "point": request.point}
        if request.matches:
            asked["matches"] = {text: [list(s) for s in spans] for text, spans in request.matches.items()}
        if request.turns:
            asked["turns"] = [list(turn) for turn in request.turns]
        if request.patches:
            told = request.patches.items()
            asked["patches"] = {n: {"first": at, "positions": [list(r) for r in ranges]} for n, (at, ranges) in told}
        try:
            # What the worker would refuse is refused here, where it costs one request and not the engine.
            compiled = self.program.compile(request.arm, request.point, len(request.prompt_token_ids), asked)
            if self.report["prefix_caching"]:
                asked["kv"] = self._prefix.said(compiled, request.prompt_token_ids, secrets.token_hex(8))
            return self._frontend.add(request.key, request.prompt_token_ids, sampling, asked)
        except (LockError, ValueError, TypeError) as error:
            raise RequestError("VT603", one_line(error), request.key) from error

    def _collect(self, finished: list[tuple[Request, tuple[Output, ...]]]) -> list[Finished]:
        wanted = [(r.key, o.index, len(o.token_ids)) for r, outputs in finished for o in outputs]
        answers = self._call("vtaps_collect", wanted, os.getpid(), self._folders.held)
        records = self._merging.records([self._guard(partial(self._folders.records, one)) for one in answers])
        records = {k: with_patterns(r, self.program.patterns, self._attention) for k, r in records.items()}
        return [
            Finished(
                request,
                tuple(
                    Completion(
                        index=o.index,
                        token_ids=o.token_ids,
                        text=o.text,
                        finish_reason=o.finish_reason,
                        record=records[request.key, o.index],
                        logprobs=o.logprobs,
                    )
                    for o in outputs
                ),
            )
            for request, outputs in finished
        ]

    def _give_up(self, live: Mapping[str, tuple[Request, str]]) -> None:
        try:
            self._frontend.abort([internal for _, internal in live.values()])
            self._frontend.call("vtaps_forget", list(live))
        except Exception:
            return  # the engine is gone, and what ended it is on its way to the caller

    def _call(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = self._guard(lambda: self._frontend.call(method, *args))
        return answers

    def _guard(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            told = self._faults()
            raise EngineError("VT603", told[0] if told else one_line(error)) from error

    def close(self) -> None:
        """Stop the engine and its workers.  Safe to call twice."""
        frontend: Frontend | None = self.__dict__.pop("_frontend", None)
        if frontend is not None:
            with suppress(Exception):  # the engine may be gone already
                frontend.call("vtaps_close")
            frontend.close()
        self._folders.close()


def _known_vllm() -> None:
    found = vllm_version.installed()
    if found is None:
        raise EngineError("VT504", "vLLM is not installed; `vtaps doctor` says how to")
    if not vllm_version.supported(found[1]):
        raise EngineError("VT504", f"{found[0]} {found[1]} is not known; {vllm_version.VLLM_RANGE} is")


def _served(lock: Mapping[str, Any], folder: Path) -> Program:
    try:
        program = parse_program(lock, folder)
    except LockError as error:
        raise EngineError("VT607", f"the lock cannot be served: {error}") from error
    if (told := changed(program)) is not None:
        raise EngineError("VT505", told)
    return program


def _install(manifest: Path) -> Callable[[], list[str]]:
    from vtaps.runtime.compat import vllm_0_32

    vllm_0_32.faults(manifest)
    try:
        vllm_0_32.install()
    except RuntimeError as error:
        raise EngineError("VT504", str(error)) from error
    return lambda: vllm_0_32.faults(manifest)


def _start(args: Mapping[str, Any], *, in_process: bool, faults: Callable[[], list[str]] = lambda: []) -> Frontend:
    try:
        return Frontend(args, in_process=in_process)
    except Exception as error:
        told = faults()
        raise EngineError("VT607", told[0] if told else one_line(error)) from error

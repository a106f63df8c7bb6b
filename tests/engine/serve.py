"""Engines in a process of their own, driven below the command line: plain vLLM, or a compiled spec.

    python -m tests.engine.serve FOLDER

reads ``FOLDER/jobs.json`` and writes ``FOLDER/answers.json``: for each job, request key → tokens, text and logprobs.
A job has ``lock``, ``base`` (the folder that the lock's names start from) and ``requests``; each gets an engine, which
serves ``then`` once it has served them.  A plain one is compiled as vLLM comes where the lock's mode is taps.  With
``block``, the path of a block, the engine serves it: requests then name their arm and point, ``alone`` holds requests
that are served last, one after another, and ``nan`` lists vectors that are replaced by NaN in the worker.  What the
reads of job N kept goes to ``FOLDER/reads-N.npz``, as ``"KEY READ SITE FIELD"``, with the positions as a field; what
torch had compiled when the engine had started and after all requests, and the engine's report, to
``FOLDER/engine-N.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from vtaps.runtime.engine import Engine, plain_engine
from vtaps.runtime.program import Program, SiteEntry
from vtaps.runtime.records import Finished, Request

Answer = dict[str, dict[str, Any]]


def told(output: Any) -> dict[str, Any]:
    return {"token_ids": list(output.token_ids), "text": output.text, "logprobs": output.logprobs}


def counted() -> dict[str, int]:
    """What torch has compiled in this process and what it found in its caches, by its own counters."""
    groups = ("stats", "frames", "aot_autograd", "inductor")
    found = {
        f"{group}.{name}": count for group in groups for name, count in torch._dynamo.utils.counters[group].items()
    }
    return dict(sorted(found.items()))


def plain(job: Mapping[str, Any]) -> Answer:
    frontend = plain_engine(job["lock"], Path(job["base"]), eager=job["lock"]["engine"]["mode"] == "eager")
    done: Answer = {}
    for batch in (job["requests"], job.get("then", ())):
        for request in batch:
            frontend.add(request["key"], request["ids"], request["sampling"], None)
        while frontend.busy():
            done.update({key: told(outputs[0]) for key, outputs in frontend.step()})
    frontend.close()
    return done


def finished(engine: Engine, job: Mapping[str, Any]) -> Iterator[Finished]:
    for batch in (job["requests"], job.get("then", ()), *([r] for r in job.get("alone", ()))):
        yield from served(engine, batch)


def served(engine: Engine, batch: Sequence[Mapping[str, Any]]) -> Iterator[Finished]:
    sampling = {r["key"]: r["sampling"] for r in batch}
    requests = [Request(r["key"], r["arm"], r["point"], "group", "", tuple(r["ids"])) for r in batch]
    yield from engine.run(requests, lambda request: sampling[request.key])


def compiled(job: Mapping[str, Any], folder: Path, number: int) -> Answer:
    load = Program.load_vector

    def poisoned(self: Program, name: str, site: SiteEntry) -> Any:
        return np.full(site.width, np.nan, np.float32) if name in job.get("nan", ()) else load(self, name, site)

    done: Answer = {}
    kept: dict[str, Any] = {}
    with (
        mock.patch.object(Program, "load_vector", poisoned),
        Engine(job["lock"], Path(job["base"]), Path(job["block"]), folder / f"manifest-{number}") as engine,
    ):
        started = counted()
        for answer in finished(engine, job):
            key, completion = answer.request.key, answer.completions[0]
            done[key] = {**told(completion), "fired": completion.record.fired}
            for (read, site), found in completion.record.reads.items():
                for field, values in {"positions": found.positions, **found.values}.items():
                    kept[f"{key} {read} {site} {field}"] = values
        report = {"started": started, "served": counted(), "report": engine.report}
    (folder / f"engine-{number}.json").write_text(json.dumps(report), encoding="utf-8")
    np.savez(folder / f"reads-{number}.npz", **kept)
    return done


def main(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    answers = [compiled(job, folder, n) if "block" in job else plain(job) for n, job in enumerate(jobs)]
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

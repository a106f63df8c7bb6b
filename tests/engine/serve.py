"""An engine in a process of its own, driven below the command line: plain vLLM, or a compiled spec.

    python -m tests.engine.serve FOLDER

reads ``FOLDER/job.json`` and writes ``FOLDER/answer.json``: per batch, request key → its tokens, text and logprobs.
A job has ``lock``, ``base`` (the folder that the lock's names start from) and ``batches`` of requests.  With
``block``, the path of a block, the engine serves it: requests then name their arm, ``nan`` lists vectors that are
replaced by NaN in the worker, and what the reads kept goes to ``FOLDER/reads-N.npz``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from vtaps.runtime.engine import Engine, plain_engine
from vtaps.runtime.program import Program, SiteEntry
from vtaps.runtime.records import Request

Answer = dict[str, dict[str, Any]]


def told(output: Any) -> dict[str, Any]:
    return {"token_ids": list(output.token_ids), "text": output.text, "logprobs": output.logprobs}


def plain(lock: Mapping[str, Any], base: Path, batches: Sequence[Sequence[Mapping[str, Any]]]) -> list[Answer]:
    frontend = plain_engine(lock, base)
    answers: list[Answer] = []
    for batch in batches:
        for request in batch:
            frontend.add(request["key"], request["ids"], request["sampling"], None)
        done: Answer = {}
        while frontend.busy():
            done.update({key: told(outputs[0]) for key, outputs in frontend.step()})
        answers.append(done)
    frontend.close()
    return answers


def compiled(
    lock: Mapping[str, Any],
    base: Path,
    block: Path,
    batches: Sequence[Sequence[Mapping[str, Any]]],
    nan: Sequence[str],
    folder: Path,
) -> list[Answer]:
    load = Program.load_vector

    def poisoned(self: Program, name: str, site: SiteEntry) -> Any:
        return np.full(site.width, np.nan, np.float32) if name in nan else load(self, name, site)

    answers: list[Answer] = []
    with mock.patch.object(Program, "load_vector", poisoned), Engine(lock, base, block, folder) as engine:
        for number, batch in enumerate(batches):
            sampling = {r["key"]: r["sampling"] for r in batch}
            wanted = [Request(r["key"], r["arm"], r.get("point", 0), "group", "", tuple(r["ids"])) for r in batch]
            done: Answer = {}
            reads: dict[str, Any] = {}
            for finished in engine.run(wanted, lambda request, table=sampling: table[request.key]):
                completion = finished.completions[0]
                key = finished.request.key
                done[key] = {**told(completion), "fired": completion.record.fired}
                for (read, site), kept in completion.record.reads.items():
                    reads[f"{key} {read} {site}"] = kept.values["rows"]
            np.savez(folder / f"reads-{number}.npz", **reads)
            answers.append(done)
    return answers


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    base = Path(job["base"])
    if "block" in job:
        answers = compiled(job["lock"], base, Path(job["block"]), job["batches"], job.get("nan", []), folder)
    else:
        answers = plain(job["lock"], base, job["batches"])
    (folder / "answer.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

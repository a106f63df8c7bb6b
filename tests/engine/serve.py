"""Engines in a process of their own, driven below the command line: plain vLLM, or a compiled spec.

    python -m tests.engine.serve FOLDER

reads ``FOLDER/jobs.json`` and writes ``FOLDER/answers.json``: for each job, request key → tokens, text and logprobs.
A job has ``lock``, ``base`` (the folder that the lock's names start from) and ``requests``; each gets an engine, and a
plain one serves ``then`` once it has served them.  With ``block``, the path of a block, the engine serves it: requests
then name their arm and point, ``nan`` lists vectors that are replaced by NaN in the worker, and the rows that the
reads of job N kept go to ``FOLDER/reads-N.npz``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
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


def plain(job: Mapping[str, Any]) -> Answer:
    frontend = plain_engine(job["lock"], Path(job["base"]))
    done: Answer = {}
    for batch in (job["requests"], job.get("then", ())):
        for request in batch:
            frontend.add(request["key"], request["ids"], request["sampling"], None)
        while frontend.busy():
            done.update({key: told(outputs[0]) for key, outputs in frontend.step()})
    frontend.close()
    return done


def compiled(job: Mapping[str, Any], folder: Path, reads: Path) -> Answer:
    load = Program.load_vector

    def poisoned(self: Program, name: str, site: SiteEntry) -> Any:
        return np.full(site.width, np.nan, np.float32) if name in job.get("nan", ()) else load(self, name, site)

    sampling = {r["key"]: r["sampling"] for r in job["requests"]}
    requests = [Request(r["key"], r["arm"], r["point"], "group", "", tuple(r["ids"])) for r in job["requests"]]
    done: Answer = {}
    kept: dict[str, Any] = {}
    with (
        mock.patch.object(Program, "load_vector", poisoned),
        Engine(job["lock"], Path(job["base"]), Path(job["block"]), folder) as engine,
    ):
        for finished in engine.run(requests, lambda request: sampling[request.key]):
            key, completion = finished.request.key, finished.completions[0]
            done[key] = {**told(completion), "fired": completion.record.fired}
            for (read, site), found in completion.record.reads.items():
                if "rows" in found.values:
                    kept[f"{key} {read} {site}"] = found.values["rows"]
    np.savez(reads, **kept)
    return done


def main(folder: Path) -> None:
    answers = []
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text(encoding="utf-8"))):
        if "block" in job:
            answers.append(compiled(job, folder / f"engine-{number}", folder / f"reads-{number}.npz"))
        else:
            answers.append(plain(job))
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The prefix cache on: what a request takes out of it was made as the request itself would have made it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engine.case import LAYERS, arm, hugging_face, reference, request, tiny_llama, use, write_case  # noqa: E402
from vtaps.runtime.engine import Engine  # noqa: E402
from vtaps.runtime.records import Completion, Finished, Request  # noqa: E402
from vtaps.spec.vectors import draw  # noqa: E402

pytestmark = pytest.mark.engine

MID, LAST = "resid_post[1]", f"resid_post[{LAYERS - 1}]"
BLOCK = 32
# On CUDA vLLM's attention multiplies float32 in TF32.
TOLERANCE = 4e-3 if torch.cuda.is_available() else 2e-5
# arm → (coefficient, the first row that is edited, counted from the prompt's last one or from 0)
EDITED: dict[str, tuple[float, str]] = {
    "sampling": (1.5, "sampling"),
    "more": (2.5, "sampling"),
    "all": (1.5, "all"),
    "same": (1.5, "all"),
    "stronger": (2.5, "all"),
    "whole": (1.5, "all"),
    "some": (1.5, "sampling"),
}
NEW = 40


def write(folder: Path, model: Path, mode: str, **vllm: Any) -> tuple[dict[str, Any], Path]:
    def added(name: str) -> dict[str, Any]:
        coefficient, rows = EDITED[name]
        return use({"all": "every", "sampling": "late"}[rows], MID, coefficient=coefficient, vector="r")

    return write_case(
        folder,
        model,
        edits={
            "late": {"verb": "add", "sites": [MID], "tokens": {"rows": "sampling"}},
            "every": {"verb": "add", "sites": [MID], "tokens": {"rows": "all"}},
        },
        reads={
            "out": {"kind": "rows", "sites": [LAST], "tokens": {"rows": "sampling"}},
            "stream": {"kind": "rows", "sites": [MID, LAST], "tokens": {"rows": "all"}},
            "from_70": {"kind": "rows", "sites": [LAST], "tokens": {"rows": "all", "positions": [[70, 90]]}},
        },
        vectors={"r": {"random": {"seed": 1, "norm": 6.0}}},
        arms={
            "plain": arm(reads=["out"]),
            **{name: arm(added(name), reads=["out"]) for name in ("sampling", "more", "all", "same", "stronger")},
            "whole": arm(added("whole"), reads=["out", "stream"]),
            "some": arm(added("some"), reads=["out", "from_70"]),
        },
        vllm={"enable_prefix_caching": True, "block_size": BLOCK, **vllm},
        mode=mode,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def twin(model: Path) -> Any:
    return hugging_face(model)


@pytest.fixture(scope="module", params=["eager", "taps"])
def engine(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp(f"prefix-{request.param}")
    lock, block = write(folder, model, request.param, num_gpu_blocks_override=20, max_num_batched_tokens=64)
    with Engine(lock, folder, block, folder / "manifest") as engine:
        assert engine.report["prefix_caching"] is True
        yield engine


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> list[int]:
    """107 tokens that no other test has."""
    drawn: list[int] = np.random.default_rng(abs(hash(request.node.name)) % 2**32).integers(4, 260, 107).tolist()
    return drawn


class Served:
    """Serves requests and holds each against a forward of Hugging Face with the same edit on the same rows."""

    def __init__(self, engine: Engine, twin: Any) -> None:
        self.engine, self.twin, self.count = engine, twin, 0

    def __call__(self, *asked: tuple[str, Sequence[int]], new: int = NEW, n: int = 1) -> list[Finished]:
        requests = []
        for name, ids in asked:
            self.count += 1
            requests.append(request(f"r{self.count}", name, ids))
        sampling = {"temperature": 0.0 if n == 1 else 1.0, "max_tokens": new, "ignore_eos": True, "n": n}
        found = {f.request.key: f for f in self.engine.run(requests, lambda _: sampling)}
        for finished in found.values():
            for completion in finished.completions:
                self.hold(finished.request, completion, greedy=n == 1)
        return [found[r.key] for r in requests]

    def one(self, name: str, ids: Sequence[int], new: int = NEW) -> tuple[int, list[int]]:
        """(how many rows came from the cache, the text that the next turn goes on with)."""
        [finished] = self((name, ids), new=new)
        [completion] = finished.completions
        return cached(completion), [*ids, *completion.token_ids]

    def hold(self, request: Request, completion: Completion, greedy: bool) -> None:
        ids, name = [*request.prompt_token_ids, *completion.token_ids][:-1], request.arm
        last = len(request.prompt_token_ids) - 1
        coefficient, rows = EDITED.get(name, (0.0, "sampling"))
        first = 0 if rows == "all" else last
        r = torch.from_numpy(draw(1, 6.0, 1, 128))

        def push(x: Any) -> Any:
            x[first:] += coefficient * r
            return x

        logits, seen = reference(self.twin, ids, {MID: push})
        if greedy:
            assert list(completion.token_ids) == logits[last:].argmax(-1).tolist(), name
        record = completion.record
        for (read, site), found in record.reads.items():
            want = {"out": range(last, len(ids)), "stream": range(len(ids)), "from_70": range(70, 91)}[read]
            assert found.positions.tolist() == list(want), (name, read)
            np.testing.assert_allclose(found.values["rows"], seen[site][list(want)], atol=TOLERANCE)
        edited = [p for a, b in record.fired.get("late", record.fired.get("every", ())) for p in range(a, b)]
        held = {p for a, b in record.cached for p in range(a, b)}
        assert edited == [p for p in range(first, len(ids)) if p not in held and name in EDITED], name


def cached(completion: Completion) -> int:
    return sum(b - a for a, b in completion.record.cached)


@pytest.fixture
def served(engine: Engine, twin: Any) -> Iterator[Served]:
    yield Served(engine, twin)


def whole(rows: int) -> int:
    """As many of some rows as fill blocks."""
    return rows // BLOCK * BLOCK


def test_leading_rows_that_nobody_edits_are_shared_with_plain_requests(served: Served, prompt: list[int]) -> None:
    assert served.one("sampling", prompt)[0] == 0
    assert served.one("plain", prompt)[0] == whole(106) == 96
    assert served.one("more", prompt)[0] == 96


def test_the_next_turn_takes_no_steered_answer_for_its_own(served: Served, prompt: list[int]) -> None:
    _, turn = served.one("sampling", prompt)
    longer = [*turn, *prompt[:9]]
    # Rows of the answer were edited when it was sampled; in the next prompt nobody edits them.
    assert served.one("sampling", longer, new=4)[0] == 96
    for name in ("plain", "more", "sampling"):
        assert served.one(name, longer, new=4)[0] == whole(len(longer) - 1)


def test_requests_that_are_edited_alike_share_what_they_generate(served: Served, prompt: list[int]) -> None:
    none, turn = served.one("all", prompt)
    assert none == 0 and served.one("plain", prompt)[0] == 0
    assert served.one("same", prompt)[0] == 96
    longer = [*turn, *prompt[:9]]
    # The last token of the answer has no row.
    assert served.one("all", longer, new=4)[0] == whole(len(turn) - 1) == 128
    assert served.one("stronger", longer, new=4)[0] == 0
    assert served.one("plain", longer, new=4)[0] == 96


def test_rows_that_a_read_needs_are_computed(served: Served, prompt: list[int]) -> None:
    served.one("all", prompt)
    assert served.one("whole", prompt)[0] == 0
    served.one("sampling", prompt)
    assert served.one("some", prompt)[0] == whole(70) == 64


def test_one_batch_of_everything(served: Served, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than the cache has room for: chunks, preemption, and blocks that are given away under way."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    preempt = Scheduler._preempt_request

    def watch(self: Any, victim: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(victim.request_id)
        return preempt(self, victim, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", watch)
    asked = [(name, prompt[: 107 - 3 * i]) for i in range(5) for name in ("plain", *EDITED)]
    found = served(*asked, new=30)
    assert preempted and sum(cached(f.completions[0]) for f in found) > 0


def test_children_of_one_prompt(served: Served, prompt: list[int]) -> None:
    [found] = served(("sampling", prompt), new=30, n=3)
    assert len({c.token_ids for c in found.completions}) == 3
    assert served.one("all", prompt)[0] == 0


def test_what_an_aborted_request_edited_is_dropped(served: Served, prompt: list[int]) -> None:
    going = served.engine.run(
        [request("given up", "all", prompt), request("short", "plain", [5, 6])],
        lambda r: {"temperature": 0, "max_tokens": 60 if r.arm == "all" else 8, "ignore_eos": True},
    )
    assert next(going).request.key == "short"
    going.close()
    assert served.one("all", prompt)[0] == 0

"""Every verb and read on the device against the same steps on the CPU, with no engine around them.

The steps follow one another without a wait, through rings that they fill many times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.runtime import schedules as sch  # noqa: E402
from tests.runtime import toy  # noqa: E402
from vtaps.runtime import ops  # noqa: E402
from vtaps.runtime.memory import Limits  # noqa: E402
from vtaps.runtime.records import Record  # noqa: E402
from vtaps.runtime.session import Session  # noqa: E402
from vtaps.spec import slots  # noqa: E402

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CHUNK, SEATS, DECODED = 12, 4, 80
ASKS = [
    sch.Ask("look", 0, prompt=17, generated=DECODED),
    sch.Ask("edit", 0, prompt=5, generated=DECODED // 2),
    sch.Ask("edit", 1, prompt=9, generated=DECODED + 30),
    sch.Ask("plain", 0, prompt=3, generated=DECODED),
    sch.Ask("some", 0, prompt=1, generated=DECODED),
    sch.Ask("look", 0, prompt=6, generated=20),
]
LIMITS = Limits(rows=CHUNK, requests=SEATS, step_rows=CHUNK)


@pytest.fixture(autouse=True)
def nobody_is_served_after() -> Iterator[None]:
    yield
    ops.serve(None)


@pytest.fixture(scope="module", autouse=True)
def small_rings() -> Iterator[None]:
    with patch.object(slots, "GATHERED_STEPS", 1):
        yield


def schedule() -> list[sch.Event]:
    """The requests take their seats in order, prefill in chunks beside those that decode, and leave a step after their
    stop, when the engine has run ahead."""
    waiting, batch = list(range(len(ASKS))), list[int]()
    done, known = [0] * len(ASKS), [ask.prompt for ask in ASKS]
    events: list[sch.Event] = []
    while waiting or batch:
        if waiting and len(batch) < SEATS:
            batch.append(waiting.pop(0))
        shares, left = list[sch.Share](), CHUNK
        for i in batch:
            count = min(known[i] - done[i], left - (len(batch) - len(shares) - 1))
            sampled = done[i] + count == known[i]
            shares.append(sch.Share(i, done[i], count, sampled))
            done[i], known[i], left = done[i] + count, known[i] + sampled, left - count
        events.append(sch.Step(tuple(shares)))
        for i in [i for i in batch if known[i] > ASKS[i].prompt + ASKS[i].generated]:
            batch.remove(i)
            events += [sch.Collect(i), sch.Finish(i)]
    return events


def captured(worker: toy.Worker) -> Callable[[Any], Any]:
    """The model's forward as one CUDA graph over as many rows as a step can have."""
    x = torch.zeros((CHUNK, toy.WIDTH), dtype=worker.dtype, device=worker.device)
    with torch.inference_mode():
        worker.session.neutral()
        worker.model(x.clone())  # compiles
        torch.cuda.synchronize()
        graph, fixed = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            # Edits at the first location write their input.
            out = worker.model(fixed.clone())
        worker.session.counts.rebase()

    def forward(rows: Any) -> Any:
        fixed[: len(rows)] = rows
        graph.replay()
        return out[: len(rows)].clone()

    return forward


def serve(folder: Path, mode: str, device: str, dtype: Any, *, graph: bool = False) -> dict[int, Record]:
    """The records of all requests: the eager engine steps as the V1 runner, the other as V2."""
    session = Session(toy.write(folder, mode))
    worker = toy.Worker(session, ASKS, LIMITS, dtype, device, toy.compiled if mode == "taps" else None)
    forward = captured(worker) if graph else None
    events = schedule()
    # All inputs lie ready, so that no step waits for one.
    inputs = iter([worker.rows(event.shares) for event in events if isinstance(event, sch.Step)])
    records, sampled = {}, []
    for event in events:
        match event:
            case sch.Step(shares):
                sampled.append((shares, worker.step(shares, next(inputs), forward, late=mode == "taps")))
            case sch.Finish(i):
                session.table.finish(f"r{i}")
            case sch.Collect(i) if ASKS[i].arm != "plain":
                [(_, records[i])] = session.collect([(f"k{i}", 0, ASKS[i].generated)])
    session.harvest.close()
    for shares, tokens in sampled:
        for share, token in zip(shares, tokens.tolist(), strict=True):
            ask = ASKS[share.request]
            step = share.start + share.count - ask.prompt - sch.SAY_AT
            speaks = "overrides" in toy.ARMS[ask.arm]["points"][ask.point] and share.sampled
            assert token == (sch.SAY[step] if speaks and 0 <= step < len(sch.SAY) else -1)
    counted = session.boards.seen.cpu().numpy()[session.counts.in_graph]
    assert (counted == len(sampled) + graph).all()
    return records


def widened(value: Any) -> Any:
    return (value.astype(np.uint32) << 16).view(np.float32) if value.dtype == np.uint16 else value


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], dict[int, Record]]:
    """The records by dtype, from hooks that Python calls."""
    return functools.cache(lambda dtype: serve(tmp_path_factory.mktemp("cpu"), "eager", "cpu", dtype))


@pytest.mark.parametrize(
    ("device", "way"),
    [
        pytest.param("cpu", "operations", id="operations on the CPU"),
        *(pytest.param("cuda", way, marks=GPU, id=f"{way} on CUDA") for way in ("hooks", "operations", "graph")),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_device_puts_out_what_the_cpu_does(
    dtype: Any, tolerance: float, device: str, way: str, on_the_cpu: Callable[[Any], dict[int, Record]], tmp_path: Path
) -> None:
    here = on_the_cpu(dtype)
    there = serve(tmp_path, "eager" if way == "hooks" else "taps", device, dtype, graph=way == "graph")
    assert here.keys() == there.keys() == {i for i, ask in enumerate(ASKS) if ask.arm != "plain"}
    for i, expected in here.items():
        got = there[i]
        assert got.fired == expected.fired and got.overridden == expected.overridden
        assert got.reads.keys() == expected.reads.keys()
        for where, read in expected.reads.items():
            said = f"request {i}, {' at '.join(where)}"
            assert got.reads[where].positions.tolist() == read.positions.tolist(), said
            assert got.reads[where].dtype == read.dtype and got.reads[where].values.keys() == read.values.keys()
            for name, value in read.values.items():
                found = got.reads[where].values[name]
                if name == "count":
                    assert found == value
                elif name == "rows" and where[1] != "logits":
                    # No sum of many numbers is in them: the same to the bit.
                    assert found.tobytes() == value.tobytes(), said
                elif name != "ids":
                    np.testing.assert_allclose(
                        widened(found), widened(value), rtol=tolerance, atol=tolerance * 10, err_msg=f"{said}: {name}"
                    )
        assert got.metrics.keys() == expected.metrics.keys()
        for name, (positions, values) in expected.metrics.items():
            assert got.metrics[name][0].tolist() == positions.tolist()
            if name != "rank":
                np.testing.assert_allclose(got.metrics[name][1], values, rtol=tolerance, atol=tolerance * 10)


def test_the_steps_fill_their_rings_many_times_over() -> None:
    steps = [event.shares for event in schedule() if isinstance(event, sch.Step)]
    rows = sum(share.count for shares in steps for share in shares)
    steady = sum(
        [(s.request, s.start + 1, 1) for s in before] == [(s.request, s.start, s.count) for s in after]
        for before, after in itertools.pairwise(steps)
    )
    assert rows > 10 * slots.slot_count(LIMITS.step_rows, 1) and steady > 60

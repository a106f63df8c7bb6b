"""nnsight as a column of the grid, for three of its rows and one request at a time.

Written after nnsight's documented interface; the grid's other columns need another vLLM than nnsight does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.grid_rows import Row, sampling
from benchmarks.grid_shapes import Shape

if TYPE_CHECKING:
    from benchmarks.grid_child import Batch, Tally

SERVED = ("generate", "one_layer", "every_layer")


def installed() -> bool:
    return importlib.util.find_spec("nnsight") is not None


def layers_read(row: Row, shape: Shape) -> list[int]:
    """Raises SystemExit for a row that this adapter does not serve."""
    if row.name not in SERVED:
        raise SystemExit(f"nnsight: the adapter serves {', '.join(SERVED)}, not {row.name}")
    if row.name == "every_layer":
        return list(range(shape.layers))
    return [shape.layers // 2] if row.name == "one_layer" else []


@contextmanager
def serving(
    model: str, settings: Mapping[str, Any], shape: Shape
) -> Iterator[tuple[Callable[[Batch], Tally], dict[str, Any]]]:
    """Raises SystemExit where nnsight is not installed."""
    if not installed():
        raise SystemExit("nnsight: not installed")
    from nnsight.modeling.vllm import VLLM  # type: ignore[import-not-found,unused-ignore]

    peer = VLLM(model, dispatch=True, dtype=shape.dtype, enable_prefix_caching=False, **settings)

    def serve(given: Batch) -> Tally:
        from benchmarks.grid_child import Tally

        assert given.row is not None
        tally, chosen = Tally(), layers_read(given.row, shape)
        for i, ids in enumerate(given.prompts):
            with peer.trace(list(ids), **{**sampling(given.load), "temperature": 0.0}) as tracer:
                tokens, kept = [].save(), [].save()  # type: ignore[attr-defined]
                for _ in tracer.iter[0 : given.load.generated]:
                    for layer in chosen:
                        hidden, residual = peer.model.layers[layer].output
                        kept.append((hidden + residual)[-1:].float().cpu())
                    tokens.append(peer.samples.output.item())
            tally.take_tokens(given.key(i), tuple(tokens))
            tally.keys += len(chosen)
            for value in kept:
                tally.rows += len(value)
                tally.take_values(value.numpy(), len(value))
        return tally

    yield serve, {"in_process": None}

"""What failed of one request while it was served.  It travels as data: an exception that crosses vLLM's step ends the
engine, with everybody's requests.

What concerns no request of its own (the device, a location that is not called) is raised and does end it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

PYTHON, PLANNED, DELIVERED, SHARED, DEVICE = "VT620", "VT621", "VT622", "VT623", "VT624"

_DEVICE_CLASSES = ("AcceleratorError", "DistBackendError")
_DEVICE_WORDS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "CUSOLVER_STATUS", "Triton Error [CUDA]", "NCCL error")


@dataclass(frozen=True)
class Fault:
    """``code`` is one of the run-time diagnostics; ``message`` one line; ``definition`` the edit or read that it came
    from, ``edits.NAME`` or ``reads.NAME``, where one is known."""

    code: str
    message: str
    definition: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fault:
        return cls(**json.loads(text))


def said(error: BaseException) -> str:
    """An exception in one line."""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_words(error: Exception, *own: type[Exception]) -> str:
    """What an exception says, where it is of ``own``, whose messages name their place; else :func:`said`.  Raises what
    is the device's."""
    if of_device(error):
        raise error
    return str(error) if isinstance(error, own) else said(error)


def of_device(error: BaseException) -> bool:
    """Whether the device failed: what it computes from then on is nobody's.  Memory that is refused is not of these."""
    return any(
        type(e).__name__ in _DEVICE_CLASSES or (type(e).__name__ == "RuntimeError" and device_words(str(e)))
        for e in _chain(error)
    )


def device_words(text: str) -> bool:
    """Whether a message is of a device that failed, as torch, Triton and NVIDIA's libraries write it."""
    return any(words in text for words in _DEVICE_WORDS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__

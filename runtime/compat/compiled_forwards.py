"""Modules whose class is under vLLM's ``@support_torch_compile``: another forward for vLLM to compile."""

from __future__ import annotations

from types import FunctionType
from typing import Any


class AlreadyTraced(RuntimeError):
    """The module's forward has been compiled."""


def is_compiled(module: Any) -> bool:
    """Whether vLLM compiles this module's forward by itself."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    return isinstance(module, TorchCompileWithNoGuardsWrapper) and not getattr(module, "do_not_compile", True)


def replace_forward(module: Any, forward: FunctionType, path: str) -> None:
    """Let vLLM compile ``forward`` for the ``module`` at ``path``, and for no other of its class.

    vLLM binds the forward when it builds the module, and finds its code again at the class, whose code it exchanges for
    what the compiler made of it.  So the module gets a class of its own, and is bound once more as
    ``reset_compile_wrapper`` does it.  Its compiled model has a key of its own too: vLLM's has the function's name and
    line in it, which another module of the class shares.  Raises AlreadyTraced where the compiler has been at work.
    """
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.config import set_current_vllm_config

    if module.compiled or getattr(module, "aot_compiled_fn", None) or getattr(module, "_compiled_bytecode", None):
        raise AlreadyTraced(f"vLLM has compiled {type(module).__name__}.forward already")
    kind = type(module)
    forward.__qualname__ += f"@{path}"
    own = {
        "forward": forward,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    module.__class__ = type(kind.__name__, (kind,), own)
    module.cleanup()
    with set_current_vllm_config(module.vllm_config):
        TorchCompileWithNoGuardsWrapper.__init__(module, f"{module._compile_tag}@{path}", module._is_encoder)

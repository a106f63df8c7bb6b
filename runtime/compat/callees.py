"""What an op of a forward calls, found without running anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from vtaps.spec.source import Op

RECURSIVE, DECORATED, COMPILED = "recursive", "decorated", "compiled on its own"
_GENERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class Callee:
    """``found`` is what stands under the name, ``function`` the Python function whose text it has, where it has one;
    ``reason`` says why a copy of that cannot be called instead."""

    found: Any
    function: FunctionType | None
    reason: str

    def adapted(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        """``copy`` as a forward with taps calls it: one that is called on the module gets that first."""
        if isinstance(self.found, staticmethod):
            return lambda _, *args, **kwargs: copy(*args, **kwargs)
        if isinstance(self.found, classmethod):
            return lambda module, *args, **kwargs: copy(type(module), *args, **kwargs)
        return copy

    def is_called_by(self, module: Any, op: Op) -> bool:
        """Whether ``module`` itself has no other function under that name."""
        root, _, name = op.text.partition(".")
        return root != "self" or name not in module.__dict__


def callee(op: Op, function: Callable[..., Any], kind: type) -> Callee | None:
    """What ``op`` of ``function``, a forward of modules of class ``kind``, calls: a method of the class other than
    ``forward``, or what the forward's globals hold.  None where that is another value: a module, a local one."""
    root, *names = op.text.split(".")
    if op.kind != "call" or not all(name.isidentifier() for name in (root, *names)):
        return None
    found: Any = None
    if root == "self":
        found = inspect.getattr_static(kind, names[0], None) if len(names) == 1 else None
    elif root not in _local(function):
        found = getattr(function, "__globals__", {}).get(root)
        for name in names:
            found = getattr(found, name, None) if isinstance(found, ModuleType) else None
    plain = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    if not callable(plain) or isinstance(plain, type) or getattr(plain, "__name__", "") == "forward":
        return None
    if not isinstance(plain, FunctionType):
        return Callee(found, None, _no_function(plain))
    called = inspect.unwrap(plain)
    if not isinstance(called, FunctionType):
        return Callee(found, None, _no_function(called))
    return Callee(found, called, _reason(plain, called, function))


def _local(function: Callable[..., Any]) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))


def _no_function(found: Any) -> str:
    if isinstance(found, (OpOverload, OpOverloadPacket)):
        return "a custom op"
    if isinstance(found, BuiltinFunctionType):
        return "a C function"
    return f"no function but {type(found).__name__}"


def _reason(plain: FunctionType, called: FunctionType, caller: Any) -> str:
    if not str(called.__module__).startswith("vllm."):
        return "not vLLM's own"
    if plain is not called:
        return DECORATED
    if called.__code__.co_flags & _GENERATES:
        return "a generator"
    if called is caller:
        return RECURSIVE
    return ""

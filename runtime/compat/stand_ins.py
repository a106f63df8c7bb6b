"""What a model asks of its platform while it is built, or run on fake tensors, answered without a kernel.

A tree says what a model is, not what this machine can serve: where vLLM refuses a layer because the platform has no
kernel for it, the layer is built all the same.  Nothing here changes which modules there are or what they compute.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@cache
def import_without_kernels() -> None:
    """Let every model's file be imported; before any of them is, in a process that only builds trees."""
    from vllm.triton_utils import HAS_TRITON, triton

    if not HAS_TRITON:
        # vLLM's placeholder for triton decorates, but cannot launch: what is launched writes into tensors that are
        # there already.
        triton.jit = triton.autotune = triton.heuristics = _decorate
        type(triton.language).__getattr__ = _nothing
        triton.set_allocator = _idle
        triton.next_power_of_2 = lambda n: 1 << max(int(n) - 1, 0).bit_length()
    if not torch.cuda.is_available():
        torch.cuda.Event = torch.cuda.Stream = _Idle
        torch.accelerator.empty_cache = _idle
        torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=1)  # for a grid
        # A kernel for one card that sums over the ranks, whose file cannot be imported elsewhere.
        os.environ.setdefault("VLLM_KIMI_K3_GEMM_AR", "0")
    if find_spec("torchvision") is None:
        from transformers.utils import is_torchvision_available

        is_torchvision_available()  # no, and it will not ask again: the other backend prepares images
        sys.meta_path.append(_Placeholders("torchvision"))


def _idle(*args: Any, **kwargs: Any) -> None:
    """In the place of what acts on tensors that are there already, or on the device alone."""


def _nothing(_: Any, name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


class _Kernel:
    """A kernel that can be called and launched, and does nothing."""

    def __init__(self, function: Any) -> None:
        wraps(function)(self)
        self.arg_names = list(inspect.signature(function).parameters)

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def _decorate(*args: Any, **kwargs: Any) -> Any:
    return _Kernel(args[0]) if args and callable(args[0]) else _Kernel


class _Idle:
    """A stream, or an event in one, where there are none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _idle


class _Placeholders(MetaPathFinder, Loader):
    """Empty modules for a package that prepares images: vLLM's files of text models import it by way of their
    siblings that see, and its builds do not load beside the CPU's torch."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        inside = name == self.package or name.startswith(self.package + ".")
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _Names.named(name)


def placeholders() -> tuple[str, ...]:
    """The packages of which this process imported a placeholder."""
    return tuple(sorted({n.partition(".")[0] for n, module in sys.modules.items() if isinstance(module, _Placeholder)}))


class _Names(type):
    """Classes whose every attribute is one more."""

    def __getattr__(cls, name: str) -> Any:
        return _Names.named(name)

    @staticmethod
    def named(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


@cache
def build_without_kernels() -> None:
    """Let every layer be built, whichever kernels the platform has; in a process that only builds trees."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("meta"))
    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for name in ("moe_align_block_size", "moe_sum"):
        if not hasattr(torch.ops._moe_C, name):
            setattr(_custom_ops, name, _idle)  # they fill tensors that are there already
    CPUUnquantizedExperts.is_supported_config = staticmethod(lambda *of: (True, None))
    FusedMoEConfig.__post_init__ = _past_the_gate(FusedMoEConfig.__post_init__)
    if (qsa := sys.modules.get("vllm.models.qwen4_exp.nvidia.qsa")) is not None:
        vars(qsa)["is_flash_attn_varlen_func_available"] = lambda: True
    kind = type(current_platform)
    kind.get_attn_backend_cls = classmethod(_any_attention(kind.get_attn_backend_cls.__func__))


@contextmanager
def second_runner() -> Iterator[None]:
    """vLLM's second model runner needs triton; a model that only it can serve is built all the same.  While a
    configuration is made, it would be refused."""
    from vllm.config import VllmConfig

    found = VllmConfig.use_v2_model_runner
    VllmConfig.use_v2_model_runner = property(lambda _: True)
    try:
        yield
    finally:
        VllmConfig.use_v2_model_runner = found


def _past_the_gate(check: Any) -> Any:
    """``FusedMoEConfig`` ends its checks by refusing experts without a gate on a CPU."""

    @wraps(check)
    def checked(self: Any) -> None:
        try:
            check(self)
        except NotImplementedError as fault:
            if "is_act_and_mul" not in str(fault):
                raise

    return checked


def _any_attention(select: Any) -> Any:
    """The CPU's attention for sparse layers too, and for layers whose kernels take arguments that it does not know."""

    @wraps(select)
    def selected(cls: Any, backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        dense = replace_field(attn_selector_config, use_sparse=False)
        path: str = select(cls, backend, dense, num_heads)
        attention = resolve_obj_by_qualname(path)
        attention.supports_alibi_sqrt = classmethod(lambda _: True)
        implementation = attention.get_impl_cls()
        if not getattr(implementation, "takes_any", False):
            implementation.__init__ = _tolerant(implementation.__init__)
            implementation.takes_any = True
        if attn_selector_config.use_sparse:
            implementation.record_logical_topk_ready = _idle
        return path

    return selected


def replace_field(record: Any, **changes: Any) -> Any:
    """A changed copy of a named tuple or a dataclass: vLLM has used both for the same record."""
    return record._replace(**changes) if hasattr(record, "_replace") else replace(record, **changes)


def _tolerant(init: Any) -> Any:
    names = inspect.signature(init).parameters
    if any(p.kind is p.VAR_KEYWORD for p in names.values()):
        return init

    @wraps(init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{name: value for name, value in kwargs.items() if name in names})

    return initialise


class WithoutData(TorchFunctionMode):
    """While a model is built: no storage where a layer names a device for an empty tensor, and zeros for the numbers
    that it reads from a tensor without data, slopes and scales that it hands to a kernel (ALiBi, xIELU)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is not None:
            return func(*args, **(kwargs | {"device": "meta"}))
        tensor = args[0] if args else None
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            if func is torch.Tensor.cpu:
                return tensor
            if func in (torch.Tensor.item, torch.Tensor.tolist):
                return getattr(torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"), func.__name__)()
        return func(*args, **kwargs)


@contextmanager
def autocast_off() -> Iterator[None]:
    """Autocasting knows no fake device and raises; nothing autocasts in an abstract pass."""
    asked, scope = torch.is_autocast_enabled, torch.amp.autocast

    def enabled(*device_type: str) -> bool:
        return False if device_type == ("meta",) else asked(*device_type)

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else scope(device_type, *args, **kwargs)

    torch.is_autocast_enabled, torch.amp.autocast = enabled, autocast
    try:
        yield
    finally:
        torch.is_autocast_enabled, torch.amp.autocast = asked, scope

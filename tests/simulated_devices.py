"""Two simulated GPUs for machines without one, by a backend of PyTorch in Python.

A tensor there has the values of a tensor on the CPU. As on GPUs, an operation takes tensors of one device, apart from scalars
and indices, and a copy that does not block is done only after its device is synchronized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch.utils import backend_registration as backend
from torch.utils._pytree import tree_leaves, tree_map

NAME = "simulated"
DEVICES = [f"{NAME}:0", f"{NAME}:1"]
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
LOWERED = ("linear", "matmul", "addmm", "bmm", "conv2d", "scaled_dot_product_attention")  # by autocast
RAISED = ("softmax.int", "log_softmax.int", "layer_norm")  # to float32

_active = False
_libraries: list[torch.library.Library] = []
_copies: dict[torch.device, list[Callable[[], Any]]] = {}  # that wait for a synchronization


class Simulated(torch.Tensor):
    """A tensor on a simulated GPU.

    Attributes:
        on_cpu: its values.
    """

    on_cpu: torch.Tensor
    is_cuda = True

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: Any = None, requires_grad: bool = False) -> Any:
        if isinstance(values, cls):  # as Accelerate makes a parameter of any class
            return torch.nn.Parameter(values, requires_grad)
        sizes = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        device = torch.device(NAME, device.index or 0)
        tensor = torch.Tensor._make_wrapper_subclass(cls, values.shape, device=device, **sizes)
        tensor.on_cpu = values
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self, **kwargs: Any) -> str:
        return f"{self.on_cpu!r} on {self.device}"

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Runs an operation on the values, and puts the results to the device."""
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
            return result  # autograd decomposes it otherwise
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if func not in COPIES:
            _require_one_device(func, tensors[:1] if func in INDEXING else tensors)
        outer = {id(tensor.on_cpu): tensor for tensor in tensors if isinstance(tensor, cls)}
        device = args[0].device if func is aten.copy_.default else kwargs.get("device", next(iter(outer.values())).device)
        inner, options = tree_map(lambda value: value.on_cpu if isinstance(value, cls) else value, (args, kwargs))
        options |= {"device": "cpu"} if "device" in options else {}
        if func is aten.copy_.default and device.type == "cpu" and args[2:] == (True,):
            _copies.setdefault(args[1].device, []).append(lambda: inner[0].copy_(inner[1]))
            return args[0]

        def on_the_device(value: Any) -> Any:
            is_new = isinstance(value, torch.Tensor) and id(value) not in outer
            return cls(value, device) if is_new and device.type == NAME else outer.get(id(value), value)

        return tree_map(on_the_device, func(*inner, **options))


def _require_one_device(func: object, tensors: list[torch.Tensor]) -> None:
    devices = {str(tensor.device) for tensor in tensors if tensor.dim() or tensor.is_cuda}
    if len(devices) > 1:
        raise RuntimeError(f"{func} takes tensors on {' and '.join(sorted(devices))}")


def synchronize(device: torch.device) -> None:
    """Does the copies from a device that have not been waited for."""
    for copy in _copies.pop(device, []):
        copy()


class _Hook(backend._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _active


class _Module(backend._DummyBackendModule):
    """`torch.simulated`. Outside of simulations, the process has no accelerator."""

    def is_available(self) -> bool:
        return _active

    is_initialized = is_available

    def device_count(self) -> int:
        return len(DEVICES) * _active

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> torch.Tensor:
    return Simulated(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format), device)


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None) -> torch.Tensor:
    return Simulated(torch.empty_strided(size, stride, dtype=dtype), device)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    target.on_cpu.copy_(source)
    return target


def _in_precision(func: Callable[..., torch.Tensor], raised: bool) -> Callable[..., torch.Tensor]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.get_autocast_dtype(NAME))
        return value.to(torch.float32 if raised else torch.get_autocast_dtype(NAME)) if is_float else value

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return func(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def _register() -> None:
    # The first backward pass starts a thread for each device, after which no fork of the process can run one.
    torch.ones(1, requires_grad=True).backward()
    backend._setup_privateuseone_for_python_backend(NAME, _Module(), _Hook())
    tensors, others, casts = (
        torch.library.Library(name, "IMPL", key)
        for name, key in (("aten", "PrivateUse1"), ("_", "AutocastPrivateUse1"), ("aten", "AutocastPrivateUse1"))
    )
    tensors.impl("empty.memory_format", _empty)
    tensors.impl("empty_strided", _empty_strided)
    tensors.impl("_copy_from", _copy_from)  # by torch.tensor
    others.fallback(torch.library.fallthrough_kernel)
    for name in (*LOWERED, *RAISED):
        casts.impl(name, _in_precision(attrgetter(name)(aten), name in RAISED))
    _libraries.extend((tensors, others, casts))


@contextmanager
def simulation() -> Iterator[None]:
    """Provides the devices within the block."""
    global _active
    if not _libraries:
        _register()
    with torch.device("cpu"):
        torch.empty(0)  # the first such block collects the functions that all later ones redirect: not a replaced one
    empty, generator = torch.empty, torch.Generator
    with (
        mock.patch.object(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options)),
        mock.patch.object(torch, "Generator", lambda device="cpu": generator()),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        torch.autograd.set_multithreading_enabled(False),  # there are no threads for these devices
    ):
        _active = True
        try:
            yield
        finally:
            _active = False
            _copies.clear()

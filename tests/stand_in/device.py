"""A device that torch has no word for, in Python alone: for those that this project cannot run on.

To import this registers it, for good, so only processes of their own do (``cases.py``). Its memory
is the host's and its numbers are the CPU's, but for torch it is another device: it has a generator,
an autocast and a dispatch key of its own ("PrivateUse1"), takes no tensors of the CPU along with
its own, and, like MPS, has no float64.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "stand_in"

_KEYS = torch._C.DispatchKeySet
_CPU = _KEYS(torch._C.DispatchKey.CPU)
_AUTOCAST = _KEYS(torch._C.DispatchKey.AutocastPrivateUse1)
_SET = torch.ops.aten.set_.source_Storage_storage_offset
_WIDE = (torch.float64, torch.complex128)
# Which take tensors of the CPU too: indices and scalars of a device's operators.
_MIXED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}


class DeviceModule:
    """What torch calls ``torch.stand_in``.

    Attributes:
        float64: whether the device has it.
        product_dtype: what it rounds factors of products to.
        one_by_one: whether sums along a dimension add one number after the other.
        operators: names of those that ran here.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.float64 = False
        self.product_dtype: torch.dtype | None = None
        self.one_by_one = False
        self.operators: set[str] = set()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


module = DeviceModule()
_setup_privateuseone_for_python_backend(NAME, module)
PLACE = torch.device(NAME, 0)

_storages: dict[int, Any] = {}  # by those of the host whose memory they are


def _storage(memory: torch.UntypedStorage) -> Any:
    """The device's storage over the memory of one of the host, which it keeps."""
    known = _storages.get(memory._cdata, lambda: None)()
    if known is not None and (known.data_ptr(), known.nbytes()) == (
        memory.data_ptr(),
        memory.nbytes(),
    ):
        return known
    made = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), PLACE, memory.nbytes())
    made.memory = memory
    _storages[memory._cdata] = weakref.ref(made)
    return made


def _refuse_float64(dtype: Any) -> None:
    if dtype in _WIDE and not module.float64:
        raise TypeError(f"{NAME} has no float64 ({dtype})")


def _there(x: torch.Tensor) -> bool:
    return x.device.type == NAME


def _point_at(x: torch.Tensor, host: torch.Tensor) -> None:
    place = host.storage_offset(), host.shape, host.stride()
    _SET.redispatch(_CPU, x, _storage(host.untyped_storage()), *place)


def _to_device(host: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the device."""
    _refuse_float64(host.dtype)
    made = torch._C._acc.create_empty_tensor([0], host.dtype)
    _point_at(made, host)
    return made


def _to_host(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    memory: Any = x.untyped_storage()
    host = torch.empty(0, dtype=x.dtype)
    return host.set_(memory.memory, x.storage_offset(), x.shape, x.stride())


def _added_one_by_one(x: torch.Tensor, dims: list[int], *_: Any, out: Any, **__: Any) -> Any:
    return out.copy_(functools.reduce(torch.add, x.unbind(dims[0])))


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator of the CPU on the memory of the device's tensors."""
    name = op._schema.name
    module.operators.add(name)
    mixed = name in _MIXED
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def host(x: torch.Tensor) -> torch.Tensor:
        if not _there(x):
            if x.dim() and not mixed:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device")
            return x
        _refuse_float64(x.dtype)
        found = _to_host(x)
        known[id(found)] = x, found
        return found

    _refuse_float64(kwargs.get("dtype"))
    args, kwargs = tree_map_only(torch.Tensor, host, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    if module.product_dtype is not None and ("mm" in name or "convolution" in name):
        args = tree_map_only(torch.Tensor, lambda x: x.to(module.product_dtype).to(x.dtype), args)
    if module.one_by_one and name == "aten::sum" and len(args) > 1:
        op = _added_one_by_one
    outside = torch.get_rng_state()
    torch.set_rng_state(module.generator.get_state())
    try:
        found = op(*args, **kwargs)
    finally:
        module.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(outside)
    for x, own in known.values():  # of which some were resized
        if (x.shape, x.stride(), x.data_ptr()) != (own.shape, own.stride(), own.data_ptr()):
            _point_at(x, own)
    return tree_map_only(
        torch.Tensor, lambda y: known[id(y)][0] if id(y) in known else _to_device(y), found
    )


def _copy(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The one operator that goes from one device to the other."""
    mine, others = (_to_host(x) if _there(x) else x for x in (to, source))
    mine.copy_(others)
    return to


def _set(x: torch.Tensor, source: Any, *place: Any) -> torch.Tensor:
    place = place or (0, (source.nbytes() // x.element_size(),), (1,))
    _SET.redispatch(_CPU, x, source, *place)
    return x


def _convolution_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *rest: Any) -> Any:
    transposed, groups = rest[3], rest[5]
    bias = [w.shape[1] * groups if transposed else w.shape[0]]
    return _run(torch.ops.aten.convolution_backward.default, g, x, w, bias, *rest)


def _under_autocast(function: Any, *, half: bool) -> Any:
    """The function on tensors of the dtype that autocast wants for it."""

    def cast(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if half else torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return function(*tree_map_only(torch.Tensor, lambda x: x.to(dtype), args))

    return cast


_ALL, _ATEN = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_ALL.fallback(_run, "PrivateUse1")
_ALL.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_linear, _norm = torch.nn.functional.linear, torch.layer_norm
_ATEN.impl("linear", _under_autocast(_linear, half=True), "AutocastPrivateUse1")
_ATEN.impl("layer_norm", _under_autocast(_norm, half=False), "AutocastPrivateUse1")
for _name, _kernel in {
    "_copy_from": _copy,
    "_local_scalar_dense": lambda x: _to_host(x).item(),
    "set_.source_Storage": _set,
    "set_.source_Storage_storage_offset": _set,
    "convolution_overrideable": lambda *args: _run(torch.ops.aten.convolution.default, *args),
    "convolution_backward_overrideable": _convolution_backward,
}.items():
    _ATEN.impl(_name, _kernel, "PrivateUse1")


def _without_an_allocator(storage: Any) -> None:
    """Have storages copied without the allocator of C++ that a device usually has."""
    clone, to = storage.clone, storage.to

    def cloned(self: Any) -> Any:
        return _storage(self.memory.clone()) if self.device.type == NAME else clone(self)

    def moved(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != NAME:
            return to(self, device=device, non_blocking=non_blocking)
        return self if self.device.type == NAME else _storage(clone(self))

    storage.clone, storage.to = cloned, moved


_without_an_allocator(torch.UntypedStorage)

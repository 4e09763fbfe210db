"""A device that no machine needs to have: the CPU's numbers, and no other device's in one sum.

What runs on a GPU fails there where a tensor was made without a device, or moved to the wrong one.
``Elsewhere`` is a tensor that says it lies on another device (torch's "meta", which has no memory
of its own), holds its numbers on the CPU, and refuses an operation with a tensor of the CPU, as a
GPU does. So rules can be run as on a GPU, with numbers that can be compared.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

PLACE = torch.device("meta")
# Which take tensors of several devices on a GPU too: copies, and indices on the CPU.
_MIXED = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_"}


class Elsewhere(torch.Tensor):
    """Numbers of the CPU that say they are on ``PLACE``."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=PLACE,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.inner})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with Imagined():
            copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Imagined(TorchDispatchMode):
    """Within it, what is made on ``PLACE`` is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = [x for x in given if isinstance(x, Elsewhere)]
    here = [x for x in given if not isinstance(x, Elsewhere) and x.dim() > 0]
    if there and here and func._schema.name not in _MIXED:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    to = kwargs.get("device")
    stays = bool(there) if to is None else torch.device(to) == PLACE
    if func._schema.name == "aten::copy_":
        stays = isinstance(args[0], Elsewhere)
    kwargs = {**kwargs, "device": torch.device("cpu")} if to is not None else kwargs
    known = {id(x.inner): x for x in there}

    def unwrapped(x: Any) -> Any:
        return x.inner if isinstance(x, Elsewhere) else x

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, Elsewhere):
            return x
        return known.get(id(x)) if id(x) in known else Elsewhere(x)

    found = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
    return tree_map(wrapped, found) if stays else found


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters and buffers on ``PLACE``."""
    for layer in module.modules():
        for name, p in list(layer._parameters.items()):
            if p is not None:
                there = Elsewhere(p.detach().clone())
                layer._parameters[name] = torch.nn.Parameter(there, requires_grad=p.requires_grad)
        for name, b in list(layer._buffers.items()):
            if b is not None:
                layer._buffers[name] = Elsewhere(b.clone())
    return module


@contextlib.contextmanager
def on_the_imagined_device(monkeypatch: pytest.MonkeyPatch):
    """``PLACE`` is a device like any other; torch knows no autocast for it."""
    with monkeypatch.context() as patch, Imagined():
        patch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
        patch.setattr(torch, "is_autocast_enabled", lambda *_: False)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # p.data= has no numbers
        try:
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)

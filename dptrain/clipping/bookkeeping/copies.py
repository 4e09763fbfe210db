"""Copies of what gradients are made of, in memory that nobody else has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class _Copy(NamedTuple):
    """A copy, and what it was made of: memory that is no other's while the reference is held."""

    of: StorageWeakRef
    version: int
    copied: torch.Tensor


class Copies:
    """One copy of each tensor, however many layers read it.

    Dimensions that repeat the same memory (``expand``) repeat it in the copy too.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], _Copy] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers, as they are now or as they were when the copy was made."""
        if tensor.layout != torch.strided or tensor.is_inference():
            return tensor.clone()
        shape, strides, repeated = [], [], []
        for size, by in zip(tensor.shape, tensor.stride(), strict=True):
            repeated.append(size if by else 1)
            if size != 1 and by:
                shape.append(size)
                strides.append(by)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.dtype, *shape, *strides)
        found = self._made.get(key)
        if found is None or found.of.expired() or found.version != tensor._version:
            copied = tensor.detach().as_strided(shape, strides).clone()
            self._made[key] = found = _Copy(StorageWeakRef(storage), tensor._version, copied)
        return found.copied.view(repeated).expand(tensor.shape)

    def clear(self) -> None:
        """Drop all copies."""
        self._made.clear()

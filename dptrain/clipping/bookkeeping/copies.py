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
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        apart = [(size, by) for size, by in sizes if size != 1 and by != 0]
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.dtype, *apart)
        found = self._made.get(key)
        if found is None or found.of.expired() or found.version != tensor._version:
            shape, strides = [size for size, _ in apart], [by for _, by in apart]
            copied = tensor.detach().as_strided(shape, strides).clone()
            self._made[key] = found = _Copy(StorageWeakRef(storage), tensor._version, copied)
        repeated = [
            1 if by == 0 else size for size, by in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        return found.copied.view(repeated).expand(tensor.shape)

    def clear(self) -> None:
        """Drop all copies."""
        self._made.clear()

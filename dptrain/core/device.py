"""Where work is done: on a processor, in parts that fit its caches, or on a device, at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_forced = False


def on_processor(tensor: torch.Tensor) -> bool:
    """True where small parts pay, since memory is slow and a call is cheap."""
    return tensor.device.type == "cpu" and not _forced


def sent(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of the host on the device of another tensor, which is not waited for."""
    if like.is_cuda:
        values = values.pin_memory()  # what is not pinned is copied when the device is idle
    return values.to(device=like.device, dtype=like.dtype, non_blocking=True)


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Context in which a processor takes the ways of a device, so that their calls are counted."""
    global _forced
    before, _forced = _forced, True
    try:
        yield
    finally:
        _forced = before

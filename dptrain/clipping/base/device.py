"""Where work is done: on a processor, in parts that fit its caches, or on a device, at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_forced = False


def on_processor(tensor: torch.Tensor) -> bool:
    """True where small parts pay, since memory is slow and a call is cheap."""
    return tensor.device.type == "cpu" and not _forced


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Context in which a processor takes the ways of a device, so that their calls are counted."""
    global _forced
    before, _forced = _forced, True
    try:
        yield
    finally:
        _forced = before

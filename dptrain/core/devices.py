"""Where work is done: on a processor or a device, and where it has the numbers that are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_forced = False
_EXACT = ("cpu", "cuda", "meta")  # the last has no numbers at all


def exact_device(device: torch.device) -> torch.device:
    """Where float64 and 64-bit integers of a device are computed: there, or on the CPU.

    Of the CPU and of CUDA devices it is known what they compute with such numbers. Others have no
    float64 (MPS, some XPU), or integers of which not all 64 bits are added up.
    """
    return device if device.type in _EXACT else torch.device("cpu")


def in_float64(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in float64, on the ``exact_device`` of its own."""
    return x.to(exact_device(x.device)).double()


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what its current stream was given."""
    torch.empty(1, device=device).cpu()


def on_processor(where: torch.Tensor | torch.device) -> bool:
    """True where small parts pay, since memory is slow and a call is cheap."""
    device = where.device if isinstance(where, torch.Tensor) else where
    return device.type == "cpu" and not _forced


def sent(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of the host on the device of another tensor, which is not waited for."""
    if like.is_cuda:
        values = values.pin_memory()  # what is not pinned is copied when the device is idle
    return values.to(device=like.device, dtype=like.dtype, non_blocking=like.is_cuda)


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Context in which a processor takes the ways of a device, so that their calls are counted."""
    global _forced
    before, _forced = _forced, True
    try:
        yield
    finally:
        _forced = before

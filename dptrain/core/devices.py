"""Where exact numbers are computed, for devices that have them and for those that may not."""

from __future__ import annotations

import torch

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

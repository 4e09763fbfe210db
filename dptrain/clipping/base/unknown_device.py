"""What is asked of a device of which nothing is known: whether float32 products keep their bits."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from dptrain.clipping.base.precision import in_full_float32
from dptrain.core import exact_device

_SIZE = 256
_LEAST = 2.0**-15  # that products may be off by; those of TensorFloat32 are by 2^-12


@functools.cache
def check_products(device: torch.device) -> None:
    """Refuse a device whose float32 products are of numbers with fewer bits.

    Norms and sums of gradients would then differ from what they are taken for, where positions
    cancel by far more than themselves. Of the CPU and CUDA the switches are known that
    ``in_full_float32`` sets; other devices are asked, once a process.

    Raises:
        RuntimeError: naming the device and what to do.
    """
    if exact_device(device) == device:
        return
    off = _largest_errors(device)
    if not all(each <= _LEAST for each in off):  # NaN is not
        raise RuntimeError(
            f"device={device}: products of float32 numbers are off by {max(off):.0e} of themselves "
            "there, so gradients would not be clipped to max_grad_norm. Switch off reduced "
            "precision on this device, or train on the CPU or on CUDA"
        )


@in_full_float32
def _largest_errors(device: torch.device) -> list[float]:
    with torch.no_grad():
        return [float(each.max()) for each in _errors(device)]


def _errors(device: torch.device) -> Iterator[torch.Tensor]:
    """Relative errors of products of positive numbers, by each kind of operator."""
    x = 1.0 + torch.rand(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0))
    for y in (torch.eye(_SIZE), x.T):  # one number each, which shows its bits; and long sums
        here, other = x.to(device), y.to(device)
        expected = x.double() @ y.double()
        for found in (
            here @ other,
            torch.bmm(here[None], other[None])[0],
            F.conv2d(here.T[None, :, :, None], other.T[:, :, None, None])[0, :, :, 0].T,
        ):
            yield (found.cpu().double() - expected).abs() / expected

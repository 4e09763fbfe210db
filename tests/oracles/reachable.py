"""Attacks on released numbers: could a number have come out at all, for what one supposes?

What is released is a function of the noise that rises or falls, number by number, and noise comes
in codes: float32 numbers, or whole numbers of a grid. A number that no code is mapped to refutes
what was supposed of the data, with certainty. Nothing here imports the library.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import norm

Forward = Callable[[torch.Tensor], torch.Tensor]
"""From noise, in standard deviations or in whole numbers, to what is seen, entry by entry."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """All numbers that noise can be, in their order, counted from -``last`` to ``last``.

    Attributes:
        last: of the codes.
        number: the noise of codes.
        fraction: bits to which a number is told from its neighbors, for ``slack``.
    """

    last: int
    number: Callable[[torch.Tensor], torch.Tensor]
    fraction: int = 62


def _float32(codes: torch.Tensor) -> torch.Tensor:
    size = codes.abs().to(torch.int32).view(torch.float32)
    return torch.where(codes < 0, -size, size)


FLOAT32 = Codes(int(np.array(64.0, np.float32).view(np.int32)), _float32)
"""Float32 numbers up to 64: their bits are in the order of their sizes."""


def _float64(codes: torch.Tensor) -> torch.Tensor:
    size = codes.abs().view(torch.float64)
    return torch.where(codes < 0, -size, size)


FLOAT64 = Codes(int(np.array(64.0).view(np.int64)), _float64)
"""Float64 numbers up to 64."""


def whole(bits: int) -> Codes:
    """Whole numbers of 2^-``bits`` up to 64: integers, in float64."""
    return Codes(64 << bits, lambda codes: codes.double(), 24)


def unreachable(seen: torch.Tensor, forward: Forward, codes: Codes, slack: int = 0) -> torch.Tensor:
    """True where no noise is mapped to what is seen.

    By bisection over the codes, which finds the first one that is mapped as far as ``seen``.

    Args:
        seen: what was released.
        forward: takes and gives tensors of its shape; it rises everywhere or falls everywhere.
        codes: of the noise.
        slack: neighbors to try too, on either side, where it rises or falls but for its last bits;
            they are float32 numbers, or about as far apart.
    """
    low = torch.full(seen.shape, -codes.last, dtype=torch.int64)
    high = torch.full(seen.shape, codes.last, dtype=torch.int64)
    sign = torch.where(forward(codes.number(high)) >= forward(codes.number(low)), 1.0, -1.0)
    target = sign * seen.double()
    while bool((low + 1 < high).any()):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, which does not overflow
        reached = sign * forward(codes.number(middle)).double() >= target
        high = torch.where(reached, middle, high)
        low = torch.where(reached, low, middle)
    missed = torch.ones(seen.shape, dtype=torch.bool)
    stride = (high.abs() >> codes.fraction).clamp(min=1)
    for offset in range(-slack, slack + 1):
        tried = (high + offset * stride).clamp(-codes.last, codes.last)
        missed &= forward(codes.number(tried)) != seen
    return missed


def noisy_sum(total: torch.Tensor, deviation: float, divisor: float = 1.0) -> Forward:
    """(S + σR·z) / B, in floating point, with the operations of torch.

    Args:
        total: S, in the dtype that is released.
        deviation: σR.
        divisor: B.
    """
    return lambda z: total.clone().add_(z.to(total.dtype), alpha=deviation).div_(divisor)


def sum_of_noise(total: torch.Tensor, deviation: float) -> Forward:
    """S + (σR·z), rounded twice: as Opacus has it."""
    return lambda z: total + z.to(total.dtype).mul_(deviation)


def sum_on_grid(total: torch.Tensor, deviation: float, bits: int, divisor: float = 1.0) -> Forward:
    """h·(⌊S/h⌉ + n) / B with h = σR·2^-``bits``: rounded to the dtype of S, then divided."""
    grid = math.ldexp(deviation, -bits)
    k = (total.double() / grid).round()
    return lambda n: ((k + n) * grid).to(total.dtype).div_(divisor)


def stepped(
    release: Forward, before: torch.Tensor, optimizer: Callable[[list[torch.Tensor]], object]
) -> Forward:
    """The weights after a step of an optimizer without a state, by the optimizer itself.

    Args:
        release: from the noise to the gradient that the optimizer is given.
        before: the weights before.
        optimizer: made for weights, as torch's are.
    """

    def forward(z: torch.Tensor) -> torch.Tensor:
        weights = before.clone().requires_grad_()
        weights.grad = release(z).to(before.dtype)
        optimizer([weights]).step()  # type: ignore[attr-defined]
        return weights.detach()

    return forward


def off_grid(seen: torch.Tensor, deviation: float, bits: int) -> torch.Tensor:
    """True where a sum is no whole number of σR·2^-``bits``, rounded to its dtype."""
    return unreachable(seen, sum_on_grid(torch.zeros_like(seen), deviation, bits), whole(bits))


def share_unreachable(deviation: float) -> float:
    """The share of numbers S + σR·z that no float32 z brings about for another S, to first order.

    Let σR = m·2^e with 1 ≤ m < 2. Products of z with 1 ≤ |z| < 2 lie m units of the last place
    apart as long as they are below 2, as |z| < 2/m: they meet one number of m. Above, they lie m/2
    units apart, and meet all. So it is the share of |z| whose significand is below 2/m, times
    1 - 1/m. S counts for little where it is less than σR and its last bits are of no pattern.
    """
    m = math.frexp(deviation)[0] * 2
    exponents = np.arange(-40, 6)
    share = 2 * (norm.sf(2.0**exponents) - norm.sf(2.0 / m * 2.0**exponents)).sum()
    return float((1 - 1 / m) * share)


def last_bits(seen: torch.Tensor) -> torch.Tensor:
    """Exponent of the lowest bit that is set; of a sum of floats it tells how coarse these were."""
    fraction, exponent = np.frexp(seen.double().abs().numpy())
    significand = np.ldexp(fraction, 53).astype(np.int64)
    lowest = np.log2((significand & -significand).clip(min=1).astype(np.float64))
    return torch.from_numpy((exponent - 53 + lowest.astype(np.int64)).astype(np.int64))


@dataclasses.dataclass(frozen=True)
class LastBits:
    """An attacker who has learned at home how often last bits are zero, with a sum and without.

    Attributes:
        table: log of the ratio of the two chances, by exponent of the number and of its last bit.
    """

    table: torch.Tensor

    @classmethod
    def learn(cls, without: torch.Tensor, among: torch.Tensor) -> LastBits:
        """From numbers that are noise alone, and from noisy sums: as many of each as one likes."""
        counts = [_cells(each).bincount(minlength=_SIDE**2).double() for each in (without, among)]
        # Among numbers of one size: sizes tell of the sum what a Gaussian tells, and no more.
        sized = [c.view(_SIDE, _SIDE) + 1.0 for c in counts]
        shares = [c / c.sum(dim=1, keepdim=True) for c in sized]
        return cls((shares[1] / shares[0]).log().flatten())

    def score(self, seen: torch.Tensor) -> torch.Tensor:
        """The more, the likelier there is a sum: of every number of ``seen``, in its shape."""
        return self.table[_cells(seen.flatten())].view(seen.shape)


_SIDE = 64


def _cells(seen: torch.Tensor) -> torch.Tensor:
    exponent = torch.from_numpy(np.frexp(seen.double().abs().numpy())[1].astype(np.int64))
    sizes = (exponent + 40).clamp(0, _SIDE - 1)
    zeros = (exponent - last_bits(seen)).clamp(0, _SIDE - 1)  # bits down to the last one
    return sizes * _SIDE + zeros

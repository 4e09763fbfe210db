"""Noise must not grow so large that the grid of the release becomes coarse."""

from __future__ import annotations

import numpy as np

from dptrain.strategies import Strategy

LARGEST_GROWTH = 100.0
"""Standard deviation of a step's noise over that of uncorrelated noise. The optimized families and
the closed forms stay below 3; the bound on trees is 2 sqrt(log2(n) + 1) at most."""


def check_growth(strategy: Strategy, steps: int) -> None:
    """Refuse a strategy whose noise would leave the sum of the gradients a coarse grid.

    Number formats hold noise of s times the usual size in units that are s times as large
    (docs/theory/noise.md#thm-release); rounding the sum to them, which clipping pays for, then
    takes s times as large a share of R.

    Args:
        strategy: bound to ``steps``.
        steps: n.

    Raises:
        ValueError: naming the first step (from 0) at which the noise is too large.
    """
    growth = strategy.noise_growth(steps)
    # The negation also catches NaN, which compares false with everything.
    large = np.flatnonzero(~(growth <= LARGEST_GROWTH))
    if large.size:
        t = int(large[0])
        raise ValueError(
            f"strategy={type(strategy).__name__}: at step {t} its noise has {growth[t]:.3g} times "
            f"the standard deviation of uncorrelated noise, more than {LARGEST_GROWTH:g}: sums "
            "would have to be rounded so coarsely that little of max_grad_norm is left; use "
            "coefficients that fall from c_0 on, or a run that ends before"
        )

"""Noise must not grow so large that its float32 grid shows what it was added to."""

from __future__ import annotations

import numpy as np

from dptrain.strategies import Strategy

LARGEST_GROWTH = 100.0
"""Standard deviation of a step's noise over that of uncorrelated noise. The optimized families and
the closed forms stay below 3; the bound on trees is 2 sqrt(log2(n) + 1) at most."""


def check_growth(strategy: Strategy, steps: int) -> None:
    """Refuse a strategy whose guarantee float32 noise could not keep.

    Noise of s times the usual size moves the sum of the gradients to a grid of about 2^-23 s σ R,
    on which one example shows as if μ² = 1/σ² were larger by about √d·s·2^-23/σ: with σ = 1 and
    d = 10^7 entries 4 % at s = 100, and more than all the rest at s = 10^4
    (docs/theory/noise.md#thm-float-grid). The accountants, which speak of real numbers, do not see
    it.

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
            f"the standard deviation of uncorrelated noise, more than {LARGEST_GROWTH:g}: sums in "
            "float32 would be rounded so coarsely that the guarantee does not hold; use "
            "coefficients that fall from c_0 on, or a run that ends before"
        )

"""The correlation of the noise of different steps."""

from __future__ import annotations

import numpy as np

from dptrain.core import Array
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz.toeplitz import Toeplitz


def noise_autocorrelation(strategy: Strategy, steps: int, lags: int) -> Array:
    """Correlation of the noise of two steps k apart, averaged over the run.

    ρ_k = Σ_t Cov(y_t, y_{t-k}) / Σ_t Var(y_t) for the noise y = W Z. Negative values at small k are
    what makes noise cancel in sums.

    Returns:
        Shape (min(lags, n - 1) + 1,), ρ_0 = 1.
    """
    bound = strategy.bind(steps)
    lags = min(lags, steps - 1)
    total = np.zeros(lags + 1)
    if isinstance(bound, Toeplitz):
        g = bound.inverse_column(steps)
        for k in range(min(lags, g.size - 1) + 1):
            # g_s g_{s+k} is part of Cov(y_t, y_{t-k}) for every t from s + k to n - 1.
            total[k] = (g[: g.size - k] * g[k:]) @ (steps - k - np.arange(g.size - k))
        total /= total[0]
        return total
    rows = bound.rows(steps)
    width = max(1, min(rows, (1 << 22) // rows))
    for start in range(0, rows, width):
        w = bound.solve(np.eye(rows, min(width, rows - start), -start))
        for k in range(lags + 1):
            total[k] += np.vdot(w[k:], w[: steps - k])
    total /= total[0]
    return total

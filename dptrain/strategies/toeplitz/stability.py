"""Checks that the noise of a strategy stays in range over the whole run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dptrain.core import Array
from dptrain.strategies.toeplitz.toeplitz import impulse_response

# |g_t| / |g_0| at which C^-1 counts as blown up. For the families of the literature the ratio stays
# below 1; at 10^6 the noise is useless and float32 streams have lost all digits to cancellation.
_LARGEST_GROWTH = 1e6


def check_stable(owner: str, inverse_column: Array) -> None:
    """Refuse a Toeplitz C^-1 that blows up within the run.

    That is at the first step t (from 0) where g_t is not finite or |g_t| > 10^6·|g_0|.

    Args:
        owner: what the message calls the strategy, e.g. ``"BandMF(bands=3)"``.
        inverse_column: first column g of C^-1, shape (n,) or shorter (zeros left out), g_0 ≠ 0.
    """
    g = np.abs(np.asarray(inverse_column, dtype=np.float64))
    # The negation also catches NaN, which compares false with everything.
    blown = np.flatnonzero(~(g <= _LARGEST_GROWTH * g[0]) | ~np.isfinite(g))
    if blown.size:
        t = int(blown[0])
        raise ValueError(
            f"C^-1 of {owner} blows up: at step {t} its coefficient is {inverse_column[t]:.3g}, "
            f"more than {_LARGEST_GROWTH:.0e} times the one at step 0, and the noise with it; use "
            "coefficients that fall from c_0 on, or fewer bands, or a run that ends before"
        )


def check_stable_filter(owner: str, coefficients: npt.ArrayLike, steps: int) -> None:
    """``check_stable`` for a Toeplitz C given by its first column.

    Coefficients c_0 > 0 that never rise and are not negative need no check: then |g_t| ≤ g_0
    (docs/theory/strategies.md#thm-stability; ``test_filters_that_fall_stay_in_range``). Otherwise
    C^-1 is computed, in O(n·bands).

    Args:
        owner: what the message calls the strategy.
        coefficients: c, shape (bands,), c_0 > 0.
        steps: n.
    """
    c = np.asarray(coefficients, dtype=np.float64)
    if np.all(np.diff(c, append=0.0) <= 0):
        return
    check_stable(owner, impulse_response(c, steps))

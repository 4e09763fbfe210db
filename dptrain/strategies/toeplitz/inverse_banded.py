"""The base of Toeplitz strategies with a banded C^-1: both directions are short filters."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from dptrain.core import Array, checks
from dptrain.strategies.binding import Bindable, check_bands_fit
from dptrain.strategies.toeplitz.toeplitz import Toeplitz, checked_vector, impulse_response

_LARGEST_GROWTH = 1e6  # c_t / c_0 at which C counts as blown up; families of the paper stay ≤ 1


class InverseBandedToeplitz(Bindable, Toeplitz, ABC):
    """Mixin: C^-1 has ``inverse_bands`` coefficients g, with g_0 > 0 and C ≥ 0 for the n bound to.

    So it is for every n where g_k ≤ 0 for k ≥ 1, in floating point too
    (docs/theory/strategies.md#thm-inverse-signs). C itself is dense, so ``bands`` is n however
    short g is: participations are never orthogonal (Kalinin, McKenna, Upadhyay & Lampert 2025,
    arXiv 2505.12128). The noise of a step needs only the last ``inverse_bands`` rows of Z.

    A family has the fields ``inverse_bands`` and ``steps`` and says what ``filter`` is.
    """

    inverse_bands: int

    @abstractmethod
    def filter(self) -> Array:
        """g, shape (inverse_bands,)."""

    @property
    def bands(self) -> int:  # type: ignore[override]
        """n, or 1 where ``inverse_bands = 1`` makes C a multiple of the identity."""
        steps = self.bound_steps
        return 1 if self.inverse_bands == 1 else steps

    def check_fits(self, steps: int) -> int:
        """``steps``, if C^-1 has room for the bands."""
        steps = checks.steps(steps)
        check_bands_fit(self.inverse_bands, steps, name="inverse_bands")
        return steps

    def first_column(self, steps: int) -> Array:
        """Impulse response of 1/g(x), in O(n·inverse_bands): shape (steps,), or (1,) for C ∝ I."""
        steps = self.check_bound(steps)
        return impulse_response(self.filter(), min(steps, self.bands))

    def inverse_column(self, steps: int) -> Array:
        """g, shape (inverse_bands,)."""
        self.check_bound(steps)
        return self.filter()

    def apply(self, x: npt.ArrayLike) -> Array:
        """``C @ x`` by the recursion 1/g, O(n·inverse_bands) per column of x."""
        x = checked_vector(x)
        return np.asarray(lfilter([1.0], self.inverse_column(x.shape[0]), x, axis=0))


def check_bounded(owner: str, g: Array, steps: int) -> None:
    """Refuse a C^-1 whose C grows beyond use, or becomes negative, within the run.

    That is where some c_t is negative, not finite or above 10^6·c_0; g has g_0 > 0.
    """
    if np.all(g[1:] <= 0) and -g[1:].sum() <= g[0]:
        return  # every c_t is at most a weighted mean of earlier ones
    c = impulse_response(g, steps)
    negative = np.flatnonzero(c < 0)
    if negative.size:
        t = int(negative[0])
        raise ValueError(
            f"C of this {owner} is negative at step {t} of {steps}, {c[t]:.3g}, but its "
            "sensitivity requires C ≥ 0; use coefficients of C^-1 that are not positive after the "
            "first, or fewer steps"
        )
    blown = np.flatnonzero(~(c <= _LARGEST_GROWTH * c[0]))
    if blown.size:
        t = int(blown[0])
        raise ValueError(
            f"C of this {owner} diverges: at step {t} its coefficient is {c[t]:.3g}, more than "
            f"{_LARGEST_GROWTH:.0e} times the one at step 0, and the sensitivity grows with it; "
            f"use coefficients of C^-1 whose tail adds up to at most coefficients[0]={g[0]}"
        )

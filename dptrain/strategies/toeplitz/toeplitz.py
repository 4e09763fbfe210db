"""The base of every Toeplitz strategy: columns, norms, sensitivity and error."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
from scipy.signal import fftconvolve, lfilter

from dptrain.core import Array, checks
from dptrain.strategies.binding import checked_columns, participations, regular_pattern
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.workloads import PREFIX_SUMS, Workload

_DIRECT_UP_TO = 64  # coefficients; a longer filter goes through the FFT
# |g_t| / |g_0| at which C^-1 counts as blown up. For the families of the literature the ratio stays
# below 1; at 10^6 the noise is useless and float32 streams have lost all digits to cancellation.
_LARGEST_GROWTH = 1e6
_ROUNDING = 1e-13  # relative gap between two bounds below which they count as equal


def checked_vector(x: npt.ArrayLike) -> Array:
    """``x`` as float64 of shape (n,) or (n, k), n ≥ 1."""
    x = np.asarray(x, dtype=np.float64)
    if x.ndim not in (1, 2) or x.shape[0] < 1:
        raise ValueError(f"x has the shape {x.shape}: must be (steps,) or (steps, k)")
    return x


def convolve(c: Array, x: Array) -> Array:
    """The first n rows of the convolution of c with every column of x, shape of x."""
    c = c[: x.shape[0]]
    if c.size <= _DIRECT_UP_TO:
        return np.asarray(lfilter(c, [1.0], x, axis=0))
    kernel = c if x.ndim == 1 else c[:, None]
    return np.asarray(fftconvolve(kernel, x, axes=0)[: x.shape[0]])


def impulse_response(c: Array, count: int) -> Array:
    """First ``count`` coefficients of 1/c(x), in O(count·len(c))."""
    impulse = np.zeros(count)
    impulse[0] = 1.0
    return np.asarray(lfilter([1.0], c, impulse))


def autocorrelation(c: Array) -> Array:
    """r(d) = Σ_k c_k c_{k+d} for d = 0, …, len(c) - 1."""
    if c.size <= _DIRECT_UP_TO:
        return np.correlate(c, c, mode="full")[c.size - 1 :]
    return np.asarray(fftconvolve(c, c[::-1])[c.size - 1 :])


def envelope(c: Array, b: int) -> Array:
    """The least sequence above c that does not increase from lag b on, shape of c.

    Equal to c before lag b, to max_{j≥k} c_j at k ≥ b.
    """
    above = c.copy()
    above[b:] = np.maximum.accumulate(c[b:][::-1])[::-1]
    return above


class Toeplitz(Strategy, ABC):
    """C_{t,j} = c_{t-j} with c ≥ 0 and c_0 > 0, and C^-1 Toeplitz with first column g.

    A family says what its ``first_column`` and ``inverse_column`` are, and overrides
    ``apply`` and ``solve`` where it knows a recursion; nothing here forms an n×n matrix.
    """

    @abstractmethod
    def first_column(self, steps: int) -> Array:
        """Coefficients c of C for n = ``steps``, trailing zeros left out: shape (min(bands, n),).

        Raises:
            ValueError: if the strategy is not bound, or is bound to another n.
        """

    @abstractmethod
    def inverse_column(self, steps: int) -> Array:
        """Coefficients g of C^-1, trailing zeros may be left out: shape (at most n,)."""

    def columns(self, steps: int, indices: npt.ArrayLike) -> Array:
        """Columns ``indices`` of C for n = ``steps``: shape (steps, len(indices))."""
        c = self.first_column(steps)
        j = checked_columns(steps, indices)
        padded = np.zeros(steps + 1)  # the last entry stands for everything outside the band
        padded[: c.size] = c
        lag = np.arange(steps)[:, None] - j[None, :]
        return padded[np.where(lag >= 0, lag, steps)]

    def apply(self, x: npt.ArrayLike) -> Array:
        """``C @ x`` for x of shape (n,) or (n, k), without forming C."""
        x = checked_vector(x)
        return convolve(self.first_column(x.shape[0]), x)

    def solve(self, z: npt.ArrayLike) -> Array:
        """``C^-1 @ z`` for z of shape (n,) or (n, k), without forming C^-1."""
        z = checked_vector(z)
        return convolve(self.inverse_column(z.shape[0]), z)

    def column_norms(self, steps: int) -> Array:
        """Euclidean norm of every column of C, shape (steps,); the last ones are cut at row n."""
        partial = np.sqrt(np.cumsum(self.first_column(steps) ** 2))
        entries = np.minimum(partial.size, steps - np.arange(steps))
        return np.asarray(partial[entries - 1])

    def errors(self, steps: int, workload: Workload = PREFIX_SUMS) -> Array:
        """Standard deviation of the error of every query, per unit of σ: row norms of A C^-1.

        For a Toeplitz A the product is Toeplitz too, with first column w = A g, and row t has the
        squared norm Σ_{s≤t} w_s².
        """
        if not workload.is_toeplitz:
            return super().errors(steps, workload)
        workload.check(steps)
        g = self.inverse_column(steps)
        w = workload.apply(np.pad(g, (0, steps - g.size)))
        return np.sqrt(np.cumsum(w * w))

    def noise_growth(self, steps: int) -> Array:
        """Standard deviation of the noise of every step over that of uncorrelated noise, 1/c_0.

        sqrt(Σ_{s≤t} g_s²)/g_0, shape (steps,).
        """
        g = self.inverse_column(steps)
        growth = np.sqrt(np.cumsum((g / g[0]) ** 2))
        return np.pad(growth, (0, steps - g.size), mode="edge")

    def sensitivity_is_exact(self, *, steps: int, max_participations: int, min_sep: int) -> bool:
        """True if ``sensitivity`` is the maximum itself rather than an upper bound on it.

        Also where the bound exceeds what one pattern reaches by less than one part in 10^13, which
        is what coefficients that rise by rounding alone lead to.
        """
        m, b = participations(steps, max_participations, min_sep)
        c = self.first_column(steps)
        if m == 1 or np.array_equal(envelope(c, b), c):
            return True
        reached = float(np.linalg.norm(self.apply(regular_pattern(steps, m, b))))
        return self._upper_bound(c, steps, m, b) <= reached * (1 + _ROUNDING)

    def sensitivity(self, *, steps: int, max_participations: int, min_sep: int) -> float:
        """max ‖C x‖₂ over x in {0, 1}^n with at most m ones, any two at least b apart.

        Exact, and reached at x = 0, b, 2b, … with min(m, ceil(n/b)) ones, if m = 1 or c does not
        increase from lag b on: c_k ≥ c_{k+1} for k ≥ b (so also if bands ≤ b, where c is 0 there).
        This widens Kalinin & Lampert 2024 (arXiv 2405.13763), Theorem 2, which asks for it at every
        lag (docs/theory/strategies.md#thm-toeplitz-sensitivity;
        ``test_order_matters_from_min_sep_on_only``). Otherwise the smaller of two upper bounds, one
        by the least sequence above c that does not increase from lag b on, one by the
        autocorrelation of c (docs/theory/strategies.md#thm-toeplitz-bounds;
        ``test_never_below_the_worst_pattern``).

        Args:
            steps: n.
            max_participations: m ≥ 1.
            min_sep: b ≥ 1.

        Raises:
            ValueError: if one of them is not a positive integer.
        """
        m, b = participations(steps, max_participations, min_sep)
        c = self.first_column(steps)
        if m == 1 or np.array_equal(envelope(c, b), c):
            return float(np.linalg.norm(self.apply(regular_pattern(steps, m, b))))
        return self._upper_bound(c, steps, m, b)

    @staticmethod
    def _upper_bound(c: Array, steps: int, m: int, b: int) -> float:
        r = autocorrelation(c)
        r = np.maximum.accumulate(r[::-1])[::-1]
        s = np.arange(1, m)
        s = s[s * b < c.size]
        squared = m * r[0] + 2 * np.sum((m - s) * r[s * b])
        # One part in 10^12 for the rounding of the sums, so that the bound stays one.
        bound = np.sqrt(squared) * (1 + 1e-12)
        covered = np.linalg.norm(convolve(envelope(c, b), regular_pattern(steps, m, b)))
        return float(min(bound, covered))


class BandedToeplitz(Toeplitz, ABC):
    """Mixin: c has few coefficients, so that C and C^-1 are filters of O(n·bands)."""

    def inverse_column(self, steps: int) -> Array:
        """Impulse response of 1/c(x): shape (steps,)."""
        return impulse_response(self.first_column(steps), checks.steps(steps))

    def apply(self, x: npt.ArrayLike) -> Array:
        """``C @ x`` by the filter c."""
        x = checked_vector(x)
        return np.asarray(lfilter(self.first_column(x.shape[0]), [1.0], x, axis=0))

    def solve(self, z: npt.ArrayLike) -> Array:
        """``C^-1 @ z`` by back-substitution."""
        z = checked_vector(z)
        return np.asarray(lfilter([1.0], self.first_column(z.shape[0]), z, axis=0))


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
            f"C^-1 of {owner} diverges: at step {t} its coefficient is {inverse_column[t]:.3g}, "
            f"more than {_LARGEST_GROWTH:.0e} times the one at step 0, and the noise grows with "
            "it; use coefficients that decrease from c_0 on, fewer bands, or a shorter run"
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

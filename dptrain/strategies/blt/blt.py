"""Buffered linear Toeplitz strategies: a dense C whose noise needs only a few buffers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from dptrain.core import Array, checks
from dptrain.strategies.binding import Bindable, participations, unoptimized
from dptrain.strategies.blt.forms import (
    inverse_column,
    inverse_poles,
    powers_error,
    prefix_weights,
    regular_norm,
    sum_of_powers,
)
from dptrain.strategies.blt.optimization import optimal_buffers
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.error_loss import checked_objective
from dptrain.strategies.toeplitz.toeplitz import Toeplitz, checked_vector
from dptrain.strategies.workloads import PREFIX_SUMS, PrefixSums, Workload, checked_workload

_SMALLEST = 2.0**-53  # θ below this counts as this: C ≥ 0 only grows, by less than its rounding
_MOST_OPTIMIZED = 32  # buffers; bind takes a quarter of a second for each and for each start
_LARGEST_GROWTH = 1e6  # |g_t| / g_0 at which C^-1 counts as blown up, as for other families


@register_strategy(planned=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class BLT(Bindable, Toeplitz):
    """c_0 = 1 and c_t = Σ_j ω_j θ_j^{t-1} (Dvijotham, McMahan, Pillutla, Steinke & Thakurta 2024).

    The noise takes one buffer s_j for each j: y_t = z_t - Σ_j ω_j s_j, then s_j ← θ_j s_j + y_t.
    C is dense, so participations are never orthogonal. All ω ≥ 0, hence C ≥ 0.

    ``BLT(buffers=3)`` is a declaration; ``bind(steps)`` chooses θ and ω of least error ×
    sensitivity for that many steps and the given participations (McMahan, Xu & Zhang 2024), among
    those with Σω ≤ 1, and returns them in the value. For prefix sums that takes closed forms only,
    whose cost does not depend on n; for another Toeplitz workload O(n·buffers) an evaluation; for
    one that is not Toeplitz n×n matrices and at most 4000 steps. Explicit ``theta`` and ``omega``
    are kept as they are.

    The sensitivity is exact for any θ and ω and any schedule: see ``sensitivity``.

    Args:
        buffers: d, number of terms.
        objective: ``"mean"`` minimizes the error of all queries, ``"max"`` that of the worst one.
        workload: A; ``None`` for prefix sums.
        max_participations: how often one example takes part, for the optimization.
        min_sep: least number of steps between two participations; needed if there are several.
        theta: θ, different numbers in (0, 1); shape (buffers,).
        omega: ω ≥ 0, finite; shape (buffers,).
        steps: the n that the value is bound to; set by ``bind``.

    Raises:
        ValueError: if one of them is out of range, ``theta`` and ``omega`` do not belong together,
            or C^-1 of a bound value blows up within ``steps``.

    Example:
        >>> BLT(buffers=1, theta=(0.5,), omega=(0.25,)).bind(4).first_column(4).tolist()
        [1.0, 0.25, 0.125, 0.0625]
    """

    buffers: int = 3
    objective: str = "mean"
    workload: Workload = PREFIX_SUMS
    max_participations: int = 1
    min_sep: int | None = None
    theta: tuple[float, ...] | None = None
    omega: tuple[float, ...] | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        checked_objective(self.objective)
        if self.workload is None:
            self._settle(workload=PREFIX_SUMS)
        checked_workload(self.workload)
        buffers = checks.integer("buffers", self.buffers)
        m = checks.integer("max_participations", self.max_participations)
        self._settle(buffers=buffers, max_participations=m)
        if self.min_sep is not None:
            self._settle(min_sep=checks.integer("min_sep", self.min_sep))
        elif m > 1:
            raise ValueError(
                f"min_sep is missing: with max_participations={m}, set the least number of steps "
                "between two participations (min_sep=1 for no restriction)"
            )
        self._check_coefficients()
        if self.steps is None:
            return
        self._settle(steps=checks.steps(self.steps))
        if self.theta is None:
            raise unoptimized(self.steps, "theta and omega")
        self._check_stable()

    def _check_coefficients(self) -> None:
        if self.theta is None and self.omega is None:
            if self.buffers > _MOST_OPTIMIZED:
                raise ValueError(
                    f"buffers={self.buffers}: at most {_MOST_OPTIMIZED} can be optimized, and more "
                    "than about 5 improve almost nothing; use fewer, or give theta and omega"
                )
            return
        if self.theta is None or self.omega is None:
            missing = "theta" if self.theta is None else "omega"
            raise ValueError(f"{missing} is missing: give both theta and omega, or neither")
        theta, omega = checks.numbers("theta", self.theta), checks.numbers("omega", self.omega)
        for name, values in (("theta", theta), ("omega", omega)):
            if len(values) != self.buffers:
                raise ValueError(
                    f"{name} has {len(values)} entries, buffers={self.buffers}: make them equal"
                )
        if not all(0 < value < 1 for value in theta):
            raise ValueError(f"theta={theta}: all entries must lie strictly between 0 and 1")
        if len({1 - value for value in theta}) < len(theta):
            raise ValueError(
                f"theta={theta}: all entries must differ, also 1 - theta after rounding; merge "
                "equal ones into one buffer and add up their omega"
            )
        if not all(0 <= value < math.inf for value in omega):
            raise ValueError(f"omega={omega}: all entries must be finite and not negative")
        self._settle(theta=theta, omega=omega)

    def _check_stable(self) -> None:
        """Refuse a C^-1 with |g_t| > 10^6 g_0 within the run, as ``check_stable`` of the others.

        Only θ̂_d can be at -1 or below. The other θ̂_i lie in (-1, 1), so that |g_t| is within
        Σ_{i<d} ω̂_i of ω̂_d |θ̂_d|^(t-1): only where that leaves it open are entries looked at.
        """
        assert self.steps is not None
        q, weights = self._inverse
        if q.size == 0 or q[-1] < 2:  # then |g_t| ≤ Σω̂ = Σω = Σ(q - p) < 2
            return
        weight, growth, rest = float(weights[-1]), math.log(q[-1] - 1), float(weights[:-1].sum())

        def reaches(limit: float) -> float:
            """The t from which on ω̂_d |θ̂_d|^(t-1) is above the limit."""
            if limit <= weight:
                return 1.0
            return 1 + math.log(limit / weight) / growth if growth else math.inf

        if self.steps - 1 < reaches(_LARGEST_GROWTH - rest):
            return
        count = math.ceil(min(self.steps, 2 + reaches(_LARGEST_GROWTH + rest)))
        g = inverse_column(q, weights, count)
        blown = np.flatnonzero(np.abs(g) > _LARGEST_GROWTH)
        if blown.size:
            t = int(blown[0])
            raise ValueError(
                f"omega={self.omega}: C^-1 diverges, since its coefficients grow as "
                f"({1 - q[-1]:.6g})^t and at step {t} exceed {_LARGEST_GROWTH:.0e}; lower omega (a "
                "sum of at most 1 is always stable) or use a shorter run"
            )

    @functools.cached_property
    def _distances(self) -> tuple[Array, Array]:
        """1 - θ and ω, shape (d,)."""
        return np.minimum(1 - np.array(self.theta), 1 - _SMALLEST), np.array(self.omega)

    @functools.cached_property
    def _inverse(self) -> tuple[Array, Array]:
        """1 - θ̂ and ω̂ of C^-1, without buffers of no weight."""
        return inverse_poles(*self._distances)

    @property
    def bands(self) -> int:  # type: ignore[override]
        """n, or 1 where all ω are zero.

        Raises:
            ValueError: if the value is not bound.
        """
        steps = self.bound_steps
        return steps if self._inverse[0].size else 1

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """One with the buffers asked for, optimized for the run."""
        if run.buffers == 0:
            return ()
        return (
            cls(
                buffers=run.buffers,
                workload=run.workload,
                max_participations=run.max_participations,
                min_sep=run.min_sep,
            ),
        )

    def _optimized(self, steps: int) -> dict[str, Any]:
        """θ and ω, unless they were given."""
        if self.theta is not None:
            return {}
        m, b = participations(steps, self.max_participations, self.min_sep or steps)
        theta, omega = optimal_buffers(
            buffers=self.buffers,
            steps=steps,
            objective=self.objective,
            workload=self.workload,
            max_participations=m,
            min_sep=b,
        )
        return {"theta": tuple(theta.tolist()), "omega": tuple(omega.tolist())}

    def prefix(self, steps: int) -> BLT:
        """The same θ and ω."""
        steps = checks.integer("steps", steps, maximum=self.steps)
        return dataclasses.replace(self, workload=PREFIX_SUMS, steps=steps)

    def first_column(self, steps: int) -> Array:
        """c: shape (steps,), or (1,) where all ω are zero.

        Raises:
            ValueError: if the value is not bound, or is bound to another n.
        """
        self.check_bound(steps)
        p, omega = self._distances
        return np.concatenate([[1.0], sum_of_powers(p, omega, self.bands - 1)])

    def inverse_column(self, steps: int) -> Array:
        """g_0 = 1, g_t = -Σ_i ω̂_i θ̂_i^{t-1}: shape (steps,)."""
        self.check_bound(steps)
        return inverse_column(*self._inverse, steps)

    def apply(self, x: npt.ArrayLike) -> Array:
        """``C @ x`` by d parallel one-pole filters."""
        x = checked_vector(x)
        self.check_bound(x.shape[0])
        return x + _one_pole_filters(*self._distances, x)

    def solve(self, z: npt.ArrayLike) -> Array:
        """``C^-1 @ z`` by d parallel one-pole filters."""
        z = checked_vector(z)
        self.check_bound(z.shape[0])
        return z - _one_pole_filters(*self._inverse, z)

    def rmse(self, steps: int, workload: Workload = PREFIX_SUMS) -> float:
        """Root mean square of ``errors``; for prefix sums a closed form of O(d²)."""
        if not isinstance(workload, PrefixSums):
            return super().rmse(steps, workload)
        return math.sqrt(self._prefix_error(steps, "mean") / steps)

    def max_error(self, steps: int, workload: Workload = PREFIX_SUMS) -> float:
        """The largest of ``errors``; for prefix sums a closed form of O(d²)."""
        if not isinstance(workload, PrefixSums):
            return super().max_error(steps, workload)
        return math.sqrt(self._prefix_error(steps, "max"))

    def _prefix_error(self, steps: int, objective: str) -> float:
        self.check_bound(steps)
        ratios, weights = prefix_weights(*self._distances, *self._inverse)
        return powers_error(ratios, weights, steps, objective)[0]

    def sensitivity_is_exact(self, *, steps: int, max_participations: int, min_sep: int) -> bool:
        """Always."""
        self.check_bound(steps)
        participations(steps, max_participations, min_sep)
        return True

    def sensitivity(self, *, steps: int, max_participations: int, min_sep: int) -> float:
        """max ‖C x‖₂ over x in {0, 1}^n with at most m ones, any two at least b apart.

        Exact, a closed form whose cost grows with √m only: the maximum is at x = 0, b, 2b, … with
        min(m, ceil(n/b)) ones. That is the argument of Kalinin & Lampert 2024 (arXiv 2405.13763),
        Theorem 2, which does not need c_0 ≥ c_1, hence no Σω ≤ 1
        (docs/theory/strategies.md#thm-blt-sensitivity; ``test_norm_of_the_regular_pattern``).

        Args:
            steps: n.
            max_participations: m ≥ 1.
            min_sep: b ≥ 1.

        Raises:
            ValueError: if one of them is not a positive integer, or n is not the bound one.
        """
        self.check_bound(steps)
        m, b = participations(steps, max_participations, min_sep)
        return math.sqrt(regular_norm(*self._distances, steps, m, b)[0])


def _one_pole_filters(p: Array, weights: Array, x: Array) -> Array:
    """Σ_j w_j Σ_{k<t} (1 - p_j)^{t-1-k} x_k, row by row, the shape of x."""
    total = np.zeros_like(x)
    for distance, weight in zip(p.tolist(), weights.tolist(), strict=True):
        total += lfilter([0.0, weight], [1.0, distance - 1.0], x, axis=0)
    return total

"""Pairs of laws that dominate: Gaussian mixtures with a common part, one direction at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from scipy.special import expit, ndtr

from dptrain.accounting.losses.composition import LossDistribution, connect_the_dots
from dptrain.accounting.losses.subsampled_gaussian import TAIL, Spread, interval_masses
from dptrain.core import Array, checks

_TABLE = 4096


@dataclasses.dataclass(frozen=True)
class ShiftedMixtures:
    """P = (1-q) N(0, σ²) + q N(v, σ²) against Q = (1-q) N(0, σ²) + q N(w, σ²), v > w, v + w ≥ 0.

    With A = 1 - q + q exp((vx - v²/2)/σ²) and B the same with w, the loss is log A - log B. It is 0
    at x = (v+w)/2 and above that it grows: there A's exponent is at least B's, hence the posterior
    of the shift is larger in P than in Q, and v > w. Below, it is not positive: A's exponent is at
    most B's. So the positive losses are those of x > (v+w)/2, and only they are described here;
    ``TwoSidedLosses`` puts both directions together.

    Args:
        probability: q in (0, 1].
        right: v.
        left: w.
        sigma: σ > 0.
    """

    probability: float
    right: float
    left: float
    sigma: float

    def __post_init__(self) -> None:
        checks.probability("probability", self.probability)
        if not (self.right > self.left and self.right + self.left >= 0.0):
            raise ValueError(
                f"right={self.right}, left={self.left}: must satisfy right > left and right + left "
                ">= 0"
            )

    @property
    def ends(self) -> tuple[float, float]:
        """The x at which the loss is 0, and an x beyond which both laws have mass under 1e-40."""
        return 0.5 * (self.right + self.left), max(self.right, 0.0) + TAIL * self.sigma

    def loss(self, x: Array) -> Array:
        """log dP/dQ at x."""
        return self._log_mean(self._exponent(x, self.right)) - self._log_mean(
            self._exponent(x, self.left)
        )

    def _exponent(self, x: Array, shift: float) -> Array:
        return (shift * x - 0.5 * shift**2) / self.sigma**2

    def _log_mean(self, exponent: Array) -> Array:
        """log(1 - q + q e^exponent), with relative precision where it is near 0."""
        q = self.probability
        if q == 1.0:
            return exponent
        small = np.log1p(q * np.expm1(np.minimum(exponent, 1.0)))
        large = np.logaddexp(math.log1p(-q), math.log(q) + exponent)
        return np.where(exponent > 1.0, large, small)

    def _slope(self, x: Array) -> Array:
        """Derivative of the loss; the posteriors of the shifted components appear in it."""
        q, slope = self.probability, np.zeros_like(x)
        odds = math.log(q) - math.log1p(-q) if q < 1.0 else math.inf
        for sign, shift in ((1.0, self.right), (-1.0, self.left)):
            slope += sign * shift * expit(odds + self._exponent(x, shift))
        return slope / self.sigma**2

    def _rounding(self, x: Array) -> Array:
        """Bound on the error of ``loss`` at x: no x can be told by its loss any finer."""
        q, error = self.probability, np.zeros_like(x)
        odds = math.log(q) - math.log1p(-q) if q < 1.0 else math.inf
        for shift in (self.right, self.left):
            exponent = self._exponent(x, shift)
            parts = (np.abs(shift * x) + 0.5 * shift**2) / self.sigma**2
            parts += np.where(exponent > 1.0, abs(math.log(q)) + exponent, 0.0)
            error += expit(odds + exponent) * parts + np.abs(self._log_mean(exponent))
        return np.asarray(8.0 * np.finfo(float).eps * error)

    def where_loss_is(self, losses: Array) -> Array:
        """The x of the given losses, cut to the ends: Newton's steps within shrinking brackets.

        An x is left alone once its loss is as wanted up to rounding: Newton's steps would be
        rounding over slope from there on, which a flat loss (a large σ) makes as long as you like.
        Every third step halves the bracket, so that there is an end.
        """
        table = np.linspace(*self.ends, _TABLE + 1)
        values = self.loss(table)
        wanted = np.clip(losses, values[0], values[-1])
        cell = np.clip(np.searchsorted(values, wanted) - 1, 0, _TABLE - 1)
        low, high = table[cell], table[cell + 1]
        x = 0.5 * (low + high)
        precise = 4.0 * np.finfo(float).eps * (1.0 + abs(self.ends[1]))
        left = np.arange(x.size)
        for step in itertools.count(1):
            gap = self.loss(x[left]) - wanted[left]
            apart = (np.abs(gap) > self._rounding(x[left])) & (high[left] - low[left] > precise)
            left, gap = left[apart], gap[apart]
            if left.size == 0:
                break
            at = x[left]
            low[left] = np.where(gap <= 0, at, low[left])
            high[left] = np.where(gap >= 0, at, high[left])
            below, above = low[left], high[left]
            with np.errstate(divide="ignore", invalid="ignore"):
                newton = at - gap / self._slope(at)
            # Comparisons with nan are false: the bracket's middle is taken.
            inside = (newton >= below) & (newton <= above) & (step % 3 > 0)
            x[left] = np.where(inside, newton, 0.5 * (below + above))
        return x

    def masses(self, x: Array) -> tuple[Array, Array]:
        """P- and Q-mass between neighboring x, shape (len(x) - 1,) each."""
        q = self.probability
        plain = (1.0 - q) * interval_masses(x / self.sigma)
        moved = [interval_masses((x - shift) / self.sigma) for shift in (self.right, self.left)]
        return plain + q * moved[0], plain + q * moved[1]

    def discretized(self, *, spacing: float) -> LossDistribution:
        """The losses ≥ 0 of (P, Q), rounded up; those over the grid count as infinite."""
        zero, end = self.ends
        highest = max(1, math.ceil(float(self.loss(np.array([end]))[0]) / spacing))
        x = self.where_loss_is(np.asarray(spacing * np.arange(highest + 1), np.float64))
        # The last cell may be cut short by the end; its losses stay within it.
        x[0], x[-1] = zero, end
        upper, lower = self.masses(x)
        q, sigma = self.probability, self.sigma
        beyond = (1.0 - q) * ndtr(-end / sigma) + q * ndtr((self.right - end) / sigma)
        return connect_the_dots(
            spacing=spacing, lowest=0, upper=upper, lower=lower, below=0.0, above=float(beyond)
        )


@dataclasses.dataclass(frozen=True)
class TwoSidedLosses:
    """The losses of a pair (P, Q) with δ_{P,Q} = f and δ_{Q,P} = b on ε ≥ 0.

    f(ε) and b(ε), ε ≥ 0, are the divergences of the two arguments, which must agree at ε = 0 (the
    total variation has no direction). The pair dominates every mechanism whose own divergences are
    at most f and b, and its losses are rounded so that they still do
    (docs/theory/poisson.md#thm-two-sided-losses;
    ``test_two_full_steps_bound_every_choice_of_the_gradients``).
    """

    forward: ShiftedMixtures
    backward: ShiftedMixtures

    def _ordered(self, remove: bool) -> tuple[ShiftedMixtures, ShiftedMixtures]:
        return (self.forward, self.backward) if remove else (self.backward, self.forward)

    def discretized(self, *, spacing: float, remove: bool) -> LossDistribution:
        """The losses of (P, Q) (remove) or (Q, P) (add), rounded up."""
        forward, backward = self._ordered(remove)
        ahead = forward.discretized(spacing=spacing)
        back = ahead if backward == forward else backward.discretized(spacing=spacing)
        up, down = np.exp(ahead.log_mass[1:]), np.exp(back.log_mass[1:])
        up_losses, down_losses = ahead.losses[1:], back.losses[1:]
        missing = _at_zero(down, down_losses, back.infinity) - _at_zero(
            up, up_losses, ahead.infinity
        )
        if backward != forward:
            # Sums of up to 2^18 terms that add up to at most 1 are off by less than 1e-13.
            up[0] += (max(missing, 0.0) + 1e-13) / -math.expm1(-spacing)
        mirrored = (down * np.exp(-down_losses))[::-1]
        rest = 1.0 + 1e-13 - ahead.infinity - float(up.sum()) - float(mirrored.sum())
        mass = np.concatenate([mirrored, [max(rest, 0.0)], up])
        with np.errstate(divide="ignore"):
            log_mass = np.log(mass)
        return LossDistribution(spacing, -down.size, log_mass, ahead.infinity)

    def spread(self, *, remove: bool) -> Spread:
        """Mean, variance and ends, roughly: for choosing a grid."""
        values, weights = [], []
        for index, pair in enumerate(self._ordered(remove)):
            x = np.linspace(*pair.ends, 4001)
            # A positive loss of (P, Q) counts by its P-mass, one of (Q, P) by its Q-mass.
            weights.append(pair.masses(x)[index])
            values.append((1.0, -1.0)[index] * pair.loss(0.5 * (x[1:] + x[:-1])))
        losses, mass = np.concatenate(values), np.concatenate(weights)
        mean = float(mass @ losses)
        variance = max(float(mass @ losses**2) - mean**2, 0.0)
        return Spread(mean, variance, float(losses.min()), float(losses.max()))


def _at_zero(mass: Array, losses: Array, infinity: float) -> float:
    """δ at ε = 0 of positive losses."""
    return float(mass @ -np.expm1(-losses)) + infinity

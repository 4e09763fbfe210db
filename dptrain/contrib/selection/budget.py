"""A budget over releases that are chosen one after the other, each by what came out before."""

from __future__ import annotations

import fractions
import math

import numpy as np
import numpy.typing as npt

from dptrain.accounting import TradeOff
from dptrain.accounting.losses import gaussian
from dptrain.contrib.selection.charge import Charge, least_mu
from dptrain.core import Array, Kind, checks

_DOWN, _UP = 1.0 - 4.0 * np.finfo(float).eps, 1.0 + 4.0 * np.finfo(float).eps
_SHARE_OF_LEFT = 0.1  # of the slack that is left: a release may take so much unless it is told


class BudgetFilter:
    """Lets releases pass while Σ μ² ≤ B² and Σ d ≤ Δ; together they keep δ_B(ε) + Δ.

    Composition needs noise that was fixed beforehand. A filter does not: the next release, its
    noise included, may be any function of what came out before, as long as it is charged in full
    before it begins, what does not fit is not made, and a release is over before the next is
    chosen (docs/theory/selection.md#thm-budget-filter;
    ``test_no_adaptive_tree_that_passes_exceeds_the_budget``). Sums are exact.

    Args:
        mu: B > 0, the μ of all releases together.
        slack: Δ in [0, 1), what is added to every δ.

    Raises:
        TypeError: if an argument is no number.
        ValueError: if an argument is out of range.
    """

    def __init__(self, *, mu: float, slack: float) -> None:
        self.mu = checks.number("mu", mu, above=0)
        self.slack = checks.number("slack", slack, minimum=0, below=1)
        self._charges: list[Charge] = []
        self._square = self._sum = fractions.Fraction(0)

    @classmethod
    def of(cls, *, epsilon: float, delta: float, share: float = 0.5) -> BudgetFilter:
        """The filter of a total (ε, δ): Δ is a share of δ, and B the largest μ for what is left.

        Args:
            epsilon: ε > 0 of all releases together.
            delta: δ in (0, 1) of all releases together.
            share: Δ/δ in (0, 1).

        Raises:
            TypeError: if an argument is no number.
            ValueError: if an argument is out of range.
        """
        epsilon = checks.number("epsilon", epsilon, above=0)
        delta = checks.number("delta", delta, above=0, below=1)
        slack = delta * checks.number("share", share, above=0, below=1)
        return cls(mu=gaussian.largest_mu(epsilon, (delta - slack) * _DOWN), slack=slack)

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges so far, in order."""
        return tuple(self._charges)

    @property
    def spent(self) -> Charge:
        """√Σμ² and Σd so far, rounded up."""
        return Charge(mu=math.sqrt(self._square) * _UP, slack=min(float(self._sum) * _UP, 1.0))

    @property
    def left(self) -> Charge:
        """The largest μ and the largest d that still fit, rounded down."""
        square = fractions.Fraction(self.mu) ** 2 - self._square
        slack = fractions.Fraction(self.slack) - self._sum
        return Charge(mu=math.sqrt(square) * _DOWN, slack=float(slack) * _DOWN)

    def price(self, release: TradeOff, *, slack: float | None = None) -> Charge:
        """The least μ that a release is charged with d.

        Args:
            release: what is known of it, under its full plan.
            slack: d; by default a tenth of what is left, or the least that is possible at all.
                Of a sampled mechanism a smaller d takes a larger μ.

        Returns:
            The charge, which may not fit.

        Raises:
            TypeError: if an argument is of another type.
            ValueError: if ``slack`` is out of range or less than what the release takes at least,
                or if the release is an estimate.
        """
        checks.instance("release", release, TradeOff)
        if release.kind is Kind.ESTIMATE:
            raise ValueError(
                "release: it is an estimate, which proves nothing and cannot be charged; use an "
                "accountant with a proven bound"
            )
        least = max(float(release.sides[1][-1]), float(release.sides[2][-1]))
        least = least * (1.0 + 1e-6) + 2e-15
        if slack is None:
            slack = max(self.left.slack * _SHARE_OF_LEFT, least)
        slack = checks.number("slack", slack, minimum=0, maximum=1)
        mu = least_mu(release, slack)
        if not math.isfinite(mu):
            raise ValueError(
                f"slack={slack:g} is too small for this release: beyond its largest known ε, δ is "
                f"{least:.6g}; allow at least that"
            )
        return Charge(mu=mu, slack=slack)

    def fits(self, charge: Charge) -> bool:
        """True if the sums, computed exactly, stay within the budget with one more charge."""
        return self._square + fractions.Fraction(charge.mu) ** 2 <= fractions.Fraction(
            self.mu
        ) ** 2 and self._sum + fractions.Fraction(charge.slack) <= fractions.Fraction(self.slack)

    def spend(self, charge: Charge) -> None:
        """Charge a release, before it begins.

        Raises:
            TypeError: if it is no charge.
            ValueError: if it does not fit, saying what would; nothing is charged then.
        """
        checks.instance("charge", charge, Charge)
        if not self.fits(charge):
            left = self.left
            raise ValueError(
                f"a charge of μ = {charge.mu:.6g}, d = {charge.slack:.6g} does not fit: μ = "
                f"{left.mu:.6g} and d = {left.slack:.6g} are left; do not make this release, or "
                "give it more noise or fewer steps"
            )
        self._charges.append(charge)
        self._square += fractions.Fraction(charge.mu) ** 2
        self._sum += fractions.Fraction(charge.slack)

    def charge(self, release: TradeOff, *, slack: float | None = None) -> Charge:
        """``price`` a release and ``spend`` that.

        Raises:
            TypeError: as ``price``.
            ValueError: as both.
        """
        found = self.price(release, slack=slack)
        self.spend(found)
        return found

    def delta(self, epsilon: npt.ArrayLike) -> Array:
        """δ at every ε ≥ 0 of all that passes, however it was chosen; its shape."""
        return np.minimum(gaussian.delta(epsilon, self.mu) + self.slack, 1.0) * _UP

    def epsilon(self, delta: float) -> float:
        """Least ε ≥ 0 at δ in (0, 1) of all that passes; ∞ where δ is not above Δ."""
        delta = checks.number("delta", delta, above=0, below=1)
        return epsilon_of(Charge(mu=self.mu, slack=self.slack), delta)


def epsilon_of(charge: Charge, delta: float) -> float:
    """Least ε ≥ 0 of a charge at δ, rounded up; ∞ where δ is not above its d."""
    rest = (delta - charge.slack) * _DOWN
    return gaussian.epsilon(rest, charge.mu) if rest > 0.0 else math.inf

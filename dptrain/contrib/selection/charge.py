"""The charge for a release: a Gaussian's μ, and how far its curve may lie above that curve."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import ndtr, ndtri

from dptrain.accounting import TradeOff
from dptrain.accounting.losses import gaussian, least_true
from dptrain.core import Array, checks

_PAD = 16.0 * np.finfo(float).eps
_ROUNDING = 1e-15  # of differences of numbers up to 1
_SMALLEST_MU, _LARGEST_MU = 1e-6, 1e3  # between which the Gaussian's δ was checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Charge:
    """A pair (μ, d): δ(ε) is at most that of N(μ, 1) against N(0, 1) plus d, in both directions.

    Attributes:
        mu: μ ≥ 0 of Gaussian differential privacy.
        slack: d in [0, 1], what is added to every δ.

    Raises:
        TypeError: if a field is no number.
        ValueError: if a field is out of range.
    """

    mu: float
    slack: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", checks.number("mu", self.mu, minimum=0))
        slack = checks.number("slack", self.slack, minimum=0, maximum=1)
        object.__setattr__(self, "slack", slack)


def least_slack(release: TradeOff, mu: float) -> float:
    """The least d with which μ is a charge of the release, rounded up; in [0, 1].

    The greatest difference, over e^ε ≥ 1 and both directions, of the chords of the release and
    the Gaussian's δ, which for μ in [1e-6, 1e3] is rounded down here, and is left out for others.
    On a chord of slope -s the difference is concave in e^ε, and stationary at
    ε = -μ(Φ⁻¹(s) + μ/2); beyond the last ε the release's δ stays, and the Gaussian's vanishes
    (docs/theory/selection.md#thm-charge; ``test_the_slack_is_that_of_a_dense_grid``).

    Args:
        release: what is known of it.
        mu: μ ≥ 0.
    """
    at, remove, add = release.sides
    sides = np.stack([remove, add])
    worst = float(sides[:, -1].max())
    if at.size == 1 or not _SMALLEST_MU <= mu <= _LARGEST_MU:
        worst = float(sides[:, 0].max())
    else:
        worst = max(worst, _most_above(at, sides, mu))
    return min(worst * (1.0 + _PAD) + _ROUNDING, 1.0)


def _most_above(at: Array, sides: Array, mu: float) -> float:
    """The greatest difference of chords and the Gaussian's δ, rounded up.

    ``sides`` has shape (2, n). Wherever in its cell the place is: a concave function lies below its
    tangent.
    """
    left, right, fall = at[:-1], at[1:], np.maximum(sides[:, :-1] - sides[:, 1:], 0.0)
    fall = fall / -np.expm1(left - right)
    place = -mu * (ndtri(np.minimum(fall * np.exp(-right), 1.0)) + 0.5 * mu)
    place = np.clip(place, left, right)
    chord = sides[:, 1:] + fall * -np.expm1(place - right)
    lower = np.exp(gaussian.log_delta(place, mu) - 3.0 * gaussian.DELTA_PAD)
    steep = ndtr(-place / mu - 0.5 * mu) * np.exp(place) - fall * np.exp(place - right)
    tangent = np.maximum(steep * np.expm1(right - place), steep * np.expm1(left - place))
    return float(np.max(chord * (1.0 + _PAD) - lower + np.maximum(tangent, 0.0)))


def least_mu(release: TradeOff, slack: float) -> float:
    """The least μ that is a charge of the release with this d; ∞ if there is none.

    Rounded up, to a relative 1e-9.

    Args:
        release: what is known of it.
        slack: d in [0, 1].
    """

    def enough(log_mu: float) -> bool:
        return least_slack(release, math.exp(log_mu)) <= slack

    if least_slack(release, 0.0) <= slack:
        return 0.0
    low, high = math.log(_SMALLEST_MU), math.log(_LARGEST_MU) * (1.0 - 1e-12)
    if not enough(high):
        return math.inf
    return math.exp(least_true(enough, low=low, high=high, tolerance=1e-9))

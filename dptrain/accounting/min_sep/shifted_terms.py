"""Samples of the remove direction from shifted noise, of whose squares the mean is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.min_sep.moments import NO_WORK, log_moment, most_copies
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import column_products
from dptrain.core import Array

_LITTLE_WORK = 5 * 10**7  # values of the program that bounds squares in the end
_FIRST, _NEXT = 1.7, 1.15  # times the order of the divergence, and from an order to the next one
_MORE = 0.7  # what one copy more takes off the logarithm of the root at most, as a rule
_UNIT, _ROUNDING = 2.0**-53, 1e-9
_LARGEST_EXPONENT, _REJECTED = 300.0, 1e130  # of a term, and a term that nothing accepts


class Shift(NamedTuple):
    """Noise of the law N(τd, I) in place of N(0, I).

    Attributes:
        tau: τ.
        log_root: log of the bound on the root of the terms' mean square; δ(ε) is no larger.
        worth: what 2 ``log_root`` is to be below for the shift to pay.
    """

    tau: float
    log_root: float
    worth: float


def direction(law: MinSepLaw) -> Array:
    """The unit vector d along C1, which the outputs move along if all steps are as likely."""
    c = law.coefficients
    found = np.full(law.steps, float(c.sum()))
    found[: law.bands] = np.cumsum(c)
    return found / float(np.linalg.norm(found))


def _costs(law: MinSepLaw) -> Array:
    """<d, c_t> of all columns, rounded down, and the same at all homogeneous steps."""
    found = column_products(law, direction(law)[:, None])[:, 0]
    found *= 1.0 - 4.0 * (law.steps + law.bands + 16) * _UNIT
    inner = found[law.bands - 1 : law.steps - law.bands + 1]
    inner[:] = inner.min(initial=math.inf)
    return found


def best_shift(
    law: MinSepLaw, sigma: float, epsilon: float, *, order: float, mu: float, worth: float
) -> Shift:
    """A shift and an order β for which the bound on squares is small.

    It is c_β e^{τ² - (β-2)ε} G^{β/k}, with G the moment of k copies at a cost τ<d, c_t>/σ and noise
    σ√((k-1)/(β-1)) (docs/theory/certification.md#thm-weighted-shift;
    ``test_squares_of_shifted_terms_stay_below_their_bound``). All β ≥ max(k, 3) hold.

    Args:
        law: the sampling law.
        sigma: σ > 0.
        epsilon: ε ≥ 0.
        order: about the order of the Rényi divergence that shows most.
        mu: about how far an example moves the outputs, in units of their noise.
        worth: the logarithm of the largest mean square that is of use.
    """
    costs = _costs(law) / sigma * (1.0 - 8.0 * _UNIT)

    def shift(beta: int, copies: int) -> Shift:
        tau, less = 0.5 * beta * mu, sigma * math.sqrt((copies - 1) / (beta - 1))
        moment = log_moment(law, less * (1.0 - 4.0 * _UNIT), copies, cost=tau * costs)
        factor = 2.0 * math.log(2.0 / beta) + (beta - 2) * math.log1p(-2.0 / beta)
        square = factor - (beta - 2) * epsilon + tau**2 + beta / copies * moment
        root = 0.5 * square + _ROUNDING * (1.0 + beta * epsilon + tau**2)
        return Shift(tau, root, worth)

    copies, most = most_copies(law, NO_WORK), most_copies(law, _LITTLE_WORK)
    beta = max(most, 3, round(_FIRST * order))
    best = shift(beta, copies)
    for factor in (_NEXT, 1.0 / _NEXT):
        start = beta
        while (further := round(factor * beta)) >= max(most, 3) and further != beta:
            found = shift(further, copies)
            if not found.log_root < best.log_root:
                break
            beta, best = further, found
        if beta != start:
            break
    if most > copies and 2.0 * (best.log_root - _MORE) < worth:
        best = min(best, shift(beta, most), key=lambda each: each.log_root)
    return best


def shifted_draws(
    losses: Callable[[Array, np.random.Generator, Array], Array],
    law: MinSepLaw,
    epsilon: float,
    tau: float,
    *,
    remove: bool = True,
) -> Callable[[np.random.Generator, int], Array]:
    """Draws (dP/dR)(1 - e^{ε-L})_+ of y = σz, z ~ N(τd, I): of mean δ(ε), of any size.

    Args:
        losses: ``losses(unit, rng, along)`` draws normals z with these products with a unit vector
            and gives the direction's privacy losses at σz from above, ∞ where there is none.
        law: the sampling law.
        epsilon: ε, lowered by what covers rounding.
        tau: τ.
        remove: whether L is log P/Q; else it is log Q/P, and Q takes the place of P.
    """
    unit = direction(law)

    def draw(rng: np.random.Generator, size: int) -> Array:
        along = tau + rng.standard_normal(size)
        loss = losses(unit, rng, along)
        exponent = 0.5 * tau**2 - tau * along + (loss if remove else 0.0)
        terms = np.exp(np.minimum(exponent, _LARGEST_EXPONENT)) * hockey_stick(loss, epsilon)
        return np.where(exponent > _LARGEST_EXPONENT, _REJECTED, terms)

    return draw

"""Bounds on posterior hazards: how certain earlier steps can make an observer of the bin."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.special import expit, ndtr, ndtri

from dptrain.core import Array

Mask = npt.NDArray[np.bool_]

# Temperatures of the variational weights, in units of σ²; ∞ is the uniform one.
_TEMPERATURES = (math.inf, 10.0, 10.0**0.5, 1.0, 10.0**-0.5, 0.1)
# Means this close to the least of a step (relative to the largest of all) count as the least.
_LEVEL = 1e-9
# Halvings of the bracket of a quantile; its lower end is returned.
_HALVINGS = 16
# Relative rounding of Gram matrices and what is computed from them.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step of P = (1/b) Σ_i N(m_i, σ²I), with what earlier steps say about the bins.

    Attributes:
        means: m_{i,n} of every bin, shape (b,), those of the lowest level raised to its top.
        gram: <μ_i, μ_j> of the bins' earlier means, shape (b, b); overwritten by the next step.
        rows: the r bins strictly above the lowest level, ascending in their means.
        equal: bins of lower rank with the same earlier means as row i, shape (r, b).
        other: bins of lower rank with other earlier means, shape (r, b).
    """

    means: Array
    gram: Array
    rows: npt.NDArray[np.intp]
    equal: Mask
    other: Mask

    @property
    def uncertain(self) -> Mask:
        """Rows whose hazard depends on what was released before, shape (r,)."""
        return np.asarray(self.other.any(axis=1), bool)


def steps(means: Array) -> Iterator[Step]:
    """Every step of the means of shape (b, n), ≥ 0; the Gram matrix is kept up, O(n b²) in all."""
    bins = means.shape[0]
    gram, same = np.zeros((bins, bins)), np.ones((bins, bins), bool)
    slack = _LEVEL * float(means.max())
    for column in means.T:
        lowest = column <= column.min() + slack
        raised = np.where(lowest, column[lowest].max(), column)
        # The lowest level comes first, whatever its order.
        order = np.argsort(np.where(lowest, -1.0, column), kind="stable")
        rank = np.empty(bins, np.intp)
        rank[order] = np.arange(bins)
        rows = order[int(lowest.sum()) :]
        before = rank[None, :] < rank[rows, None]
        yield Step(raised, gram, rows, before & same[rows], before & ~same[rows])
        gram += np.outer(column, column)
        same &= column[:, None] == column


def event_count(means: Array) -> int:
    """Number of (step, bin) pairs whose posterior hazard needs a bound."""
    return sum(int(step.uncertain.sum()) for step in steps(means))


def mixture_weights(log_odds: Array) -> Array:
    """Weights, shape (1 + r,), of the lowest level and of every row; they sum to 1.

    They belong to a law that is stochastically larger than the posterior of the bin, made of bounds
    on the reverse hazards λ_i = Pr[z = i | z ≤ i] of the bins above the lowest level
    (docs/theory/balls-in-bins.md#thm-posterior-hazards;
    ``test_weights_dominate_the_posterior_whatever_the_order_of_ties``).

    Args:
        log_odds: log λ̄/(1-λ̄) of the rows of a step (``hazard_log_odds``), shape (r,).
    """
    hazard, left = expit(log_odds), expit(-log_odds)
    above = np.append(np.cumprod(left[::-1])[::-1], 1.0)
    return np.append(above[0], hazard * above[1:])


def hazard_log_odds(step: Step, *, sigma: float, failure: float, remove: bool) -> Array:
    """Bounds on the log odds of every row's reverse hazard, shape (r,).

    Each holds but for a probability of ``failure`` under P (remove) or Q (add); that of a row with
    the same earlier means as all lower ones is exact.
    """
    count = step.equal.sum(axis=1) + step.other.sum(axis=1)
    log_odds = -np.log(count)
    if step.uncertain.any():
        log_odds = log_odds - lower_quantiles(step, sigma=sigma, failure=failure, remove=remove)
    return np.asarray(log_odds)


def lower_quantiles(step: Step, *, sigma: float, failure: float, remove: bool) -> Array:
    """τ_i with Pr[L_i < τ_i] ≤ ``failure`` for every row, shape (r,).

    L_i = log (1/c) Σ_j N(y; μ_j)/N(y; μ_i) over the c bins of lower rank, y ~ P (remove) or Q
    (add), and λ_i = 1/(1 + c e^{L_i}). Terms with μ_j = μ_i are 1 and can be kept apart or not; the
    larger bound is taken, which one is known beforehand
    (docs/theory/balls-in-bins.md#thm-hazard-quantiles;
    ``test_each_hazard_exceeds_its_bound_no_more_often_than_stated``).
    """
    zeros, others = step.equal.sum(axis=1), step.other.sum(axis=1)
    uncertain = step.uncertain
    rows, gram = step.rows[uncertain], step.gram
    n0, n1 = zeros[uncertain], others[uncertain]
    law = (gram, rows, sigma, failure, remove)
    separate = _quantiles(*law, step.other[uncertain], _TEMPERATURES)
    with np.errstate(divide="ignore"):
        separate = np.logaddexp(np.log(n0), np.log(n1) + separate) - np.log(n0 + n1)
    if (n0 > 0).any():
        together = _quantiles(*law, (step.other | step.equal)[uncertain], (math.inf,))
        separate = np.maximum(separate, together)
    result = np.zeros(step.rows.size)
    result[uncertain] = separate
    return result


def _quantiles(
    gram: Array,
    rows: npt.NDArray[np.intp],
    sigma: float,
    failure: float,
    remove: bool,
    terms: Mask,
    temperatures: tuple[float, ...],
) -> Array:
    """Lower quantiles of log (1/c) Σ_j N(y; μ_j)/N(y; μ_i) over the ``terms`` j of row i.

    By Jensen it is at least Σ_j ψ_j log(N(y; μ_j)/N(y; μ_i)) - KL(ψ, uniform) for every law ψ on
    the terms. That is linear in y, so for y ~ N(ρ, σ²I) it is normal, with the deviation
    ξ = ‖μ_i - Σ ψ_j μ_j‖/σ and the mean
    ν = <ρ, Σ ψ_j μ_j - μ_i>/σ² + (‖μ_i‖² - Σ ψ_j ‖μ_j‖²)/(2σ²) - KL.
    Add: ρ = 0, the quantile is ν + ξ Φ^{-1}(failure), and the best ψ counts. Remove: ρ is each of
    the b means with probability 1/b (all of them: Theorem D.3 of Schuchardt & Kalinin 2026, arXiv
    2601.21636, not the listing of their Algorithm 4), each may have a ψ of its own, and the
    quantile of the mixture of normals is bisected from below. ψ: softmax(-‖μ_i - μ_j‖²/(tσ²)) at
    several t; for ρ = 0 softmax(-‖μ_j‖²/(2σ²)), and for ρ = μ_k with k a term the point at k.
    """
    squares = np.diag(gram) / sigma**2
    gram = gram / sigma**2
    own = squares[rows]
    distance = np.maximum(own[:, None] + squares - 2.0 * gram[rows], 0.0)
    slack = _ROUNDING * (float(squares.max()) + 1.0)
    log_count = np.log(terms.sum(axis=1))
    scores = [-distance / t for t in temperatures]
    if not remove and len(temperatures) > 1:
        scores.append(np.broadcast_to(-0.5 * squares, distance.shape))
    nus, xis = [], []
    for score in scores:
        psi, divergence = _softmax(score, terms)
        moved = psi @ gram
        spread = own - 2.0 * moved[np.arange(rows.size), rows] + (moved * psi).sum(axis=1)
        nu = 0.5 * (own - psi @ squares) - divergence - log_count - slack
        nus.append(nu[:, None] + (moved - gram[rows]) if remove else nu[:, None])
        xis.append(np.sqrt(np.maximum(spread, 0.0) + slack)[:, None])
    if remove and len(temperatures) > 1:
        nus.append(np.where(terms, 0.5 * distance - log_count[:, None] - slack, -np.inf))
        xis.append(np.sqrt(distance + slack))
    nu, xi = np.stack(nus), np.stack([np.broadcast_to(x, nus[0].shape) for x in xis])
    z = float(ndtri(failure))
    if not remove:
        return np.asarray((nu + z * xi).max(axis=0)[:, 0])
    best = (nu + z * xi).argmax(axis=0)[None]
    return _mixture_quantiles(
        np.take_along_axis(nu, best, 0)[0], np.take_along_axis(xi, best, 0)[0], failure
    )


def _softmax(score: Array, terms: Mask) -> tuple[Array, Array]:
    """ψ ∝ exp(score) on the terms of each row, and Σ ψ log ψ."""
    score = np.where(terms, score, -np.inf)
    score = score - score.max(axis=1, keepdims=True)
    psi = np.exp(score)
    total = psi.sum(axis=1, keepdims=True)
    psi /= total
    entropy = (psi * np.where(terms, score, 0.0)).sum(axis=1) - np.log(total[:, 0])
    return psi, entropy


def _mixture_quantiles(nu: Array, xi: Array, failure: float) -> Array:
    """Lower ends of brackets of the quantiles of (1/b) Σ_k N(ν_ik, ξ_ik²), shape (r,)."""
    bins = nu.shape[1]
    # Every term is at most ``failure`` at the one end; a single one exceeds b times it beyond the
    # other.
    low = (nu + float(ndtri(failure)) * xi).min(axis=1)
    high = (nu + float(ndtri(min(bins * failure, 0.999))) * xi).min(axis=1)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        fits = ndtr((middle[:, None] - nu) / xi).mean(axis=1) <= failure * (1.0 - _ROUNDING)
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return low

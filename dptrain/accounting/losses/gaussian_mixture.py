"""Privacy losses of many Gaussian mixtures with means ≥ 0 against one Gaussian at 0.

The loss grows with x, and more weight on larger means only raises δ
(docs/theory/composition.md#thm-monotone-mixture; ``test_larger_means_cost_more``; Choquette-Choo et
al. 2024, Corollary 4.4, arXiv 2310.15526).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from scipy.special import ndtr

from dptrain.accounting.losses.loss_distribution import LossDistribution, split_cells
from dptrain.accounting.losses.subsampled_gaussian import TAIL, Spread, interval_masses
from dptrain.core import Array

# Cells of x per standard deviation: a cell's losses span a hundredth of the step's deviation, so
# rounding to cells adds at most 1e-4 / 4 of its variance.
_CELLS = 100
_COARSE_CELLS = 8
# Larger means get wider cells: rounding stays upwards.
_MOST_CELLS = 1 << 16
# Entries of a temporary table.
_BLOCK = 1 << 20
# exp() neither overflows nor vanishes within this distance of the largest exponent.
_EXPONENT_RANGE = 600.0
# Cells at either end that hold less than this between them count as infinite losses.
_NEGLIGIBLE = 1e-41
# Covers the rounding of the losses at the cells' edges (sums of thousands of positive terms).
_LOSS_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class GaussianMixtures:
    """K pairs P_k = Σ_i weights[k, i] N(means[k, i], σ²) against Q = N(0, σ²).

    As all means are ≥ 0, the loss log dP_k/dQ = log Σ_i w_ki exp((x m_ki - m_ki²/2)/σ²) grows with
    x. The line is cut into cells of x; the losses in a cell lie between those at its edges, its
    masses under P_k and Q are differences of Φ, and ``split_cells`` rounds up from there. No
    inversion is needed, and nothing depends on how fine the cells are but tightness.

    Attributes:
        weights: shape (K, m), not negative; every row sums to 1 (to 1e-12; it is then scaled).
            Round a weight up by taking from one with a smaller mean: that only raises δ.
        means: shape (K, m), or (m,) if the K mixtures share them (much faster), finite, ≥ 0.
    """

    weights: Array
    means: Array

    def __post_init__(self) -> None:
        weights = np.asarray(self.weights, float)
        means = np.asarray(self.means, float)
        if weights.ndim != 2 or 0 in weights.shape:
            raise ValueError(f"weights: must have the shape (K, m), got {weights.shape}")
        if means.shape not in (weights.shape, weights.shape[1:]):
            raise ValueError(
                f"means: must have the shape of weights, {weights.shape}, or {weights.shape[1:]}, "
                f"got {means.shape}"
            )
        if not (np.isfinite(means).all() and means.min() >= 0.0):
            raise ValueError(
                f"means: must be finite and not negative, but the smallest is {means.min()}"
            )
        totals = weights.sum(axis=1)
        if not (weights.min() >= 0.0 and np.abs(totals - 1.0).max() <= 1e-12):
            raise ValueError(
                "weights: must not be negative and every row must sum to 1, but the smallest is "
                f"{weights.min()} and the sums lie in [{totals.min()}, {totals.max()}]; add the "
                "missing weight to the largest mean"
            )
        object.__setattr__(self, "weights", weights / totals[:, None])
        object.__setattr__(self, "means", means)

    def discretized(
        self, *, sigma: float, spacing: float, remove: bool
    ) -> Iterator[LossDistribution]:
        """The K losses of (P_k, Q) (remove) or (Q, P_k) (add), rounded up, one after the other.

        Each is a dense array; a composition keeps less of it, so do not hold a thousand of them.
        """
        for means, weights in self._groups():
            edges = _edges(means[-1] / sigma, _CELLS)
            for block in _blocks(weights, edges.size):
                losses, p = _evaluate(edges, means / sigma, block, masses=True)
                q = interval_masses(edges)
                ends = _outside(edges, means / sigma, block, remove=remove)
                moved = block[:, means > 0.0].sum(axis=1) > 0.0
                for loss, mass, outside, moves in zip(losses, p, ends, moved, strict=True):
                    if not moves:
                        yield LossDistribution(spacing, 0, np.zeros(1), 0.0)
                    elif remove:
                        yield _rounded(loss, mass, q, spacing, outside)
                    else:
                        yield _rounded(-loss[::-1], q[::-1], mass[::-1], spacing, outside)

    def spread(self, *, sigma: float, remove: bool) -> list[Spread]:
        """The spread of log dP_k/dQ under P_k (remove) or under Q (add)."""
        result = []
        for means, weights in self._groups():
            edges = _edges(means[-1] / sigma, _COARSE_CELLS)
            for block in _blocks(weights, edges.size):
                losses, _ = _evaluate(edges, means / sigma, block, masses=False)
                log_density = losses - 0.5 * edges**2 if remove else -0.5 * edges[None, :] ** 2
                density = np.broadcast_to(np.exp(log_density), losses.shape)
                result += [Spread.of(*pair) for pair in zip(losses, density, strict=True)]
        return result

    def _groups(self) -> Iterator[tuple[Array, Array]]:
        """Ascending means of positive weight in some mixture, (m',), and weights, (K', m')."""
        if self.means.ndim == 1:
            yield _merged(self.means, self.weights)
        else:
            for means, weights in zip(self.means, self.weights, strict=True):
                yield _merged(means, weights[None, :])


def common_spacing(spreads: list[Spread], counts: list[int]) -> float:
    """A grid for the losses of all steps: a 200th of their root mean square deviation.

    Rounding to it adds at most 6e-6 of the variance of the sum. It is coarser where memory demands
    it, and at most 1.
    """
    most = 1 << 18
    total = math.fsum(n * part.variance for part, n in zip(spreads, counts, strict=True))
    deviation = math.sqrt(total / sum(counts))
    span = max(part.high - part.low for part in spreads)
    if span == 0.0:
        return 1.0
    return max(min(deviation / 200.0, 1.0), span / most, 20.0 * math.sqrt(total) / most)


def _merged(means: Array, weights: Array) -> tuple[Array, Array]:
    used = weights.max(axis=0) > 0.0
    levels, place = np.unique(means[used], return_inverse=True)
    if levels.size == used.sum() and (place == np.arange(levels.size)).all():
        return levels, weights[:, used]
    merged = np.zeros((weights.shape[0], levels.size))
    np.add.at(merged.T, place, weights[:, used].T)
    return levels, merged


def _edges(top: float, cells: int) -> Array:
    """Edges of the cells, in standard deviations: from -TAIL to the largest mean + TAIL."""
    count = min(math.ceil((top + 2.0 * TAIL) * cells), _MOST_CELLS)
    return np.linspace(-TAIL, top + TAIL, count + 1)


def _blocks(weights: Array, points: int) -> Iterator[Array]:
    rows = max(1, 8 * _BLOCK // points)
    for first in range(0, weights.shape[0], rows):
        yield weights[first : first + rows]


def _evaluate(edges: Array, means: Array, weights: Array, *, masses: bool) -> tuple[Array, Array]:
    """Losses at the edges, (K, n + 1), and P_k-masses of the cells, (K, n), by tables over means.

    ``edges`` and ``means`` are in standard deviations. Without ``masses`` these are left 0.
    """
    count = weights.shape[0]
    losses = np.empty((count, edges.size))
    p = np.zeros((count, edges.size - 1))
    rows = max(2, _BLOCK // means.size)
    for first in range(0, edges.size, rows - 1):
        x = edges[first : first + rows]
        exponent = x[:, None] * means - 0.5 * means**2
        losses[:, first : first + rows] = _log_sums(exponent, weights)
        if masses and x.size > 1:
            table = _cell_masses(x[:, None] - means)
            p[:, first : first + rows - 1] = weights @ table.T
    return losses, p


def _cell_masses(edges: Array) -> Array:
    """``interval_masses`` along the first axis with a single Φ an edge, most of the work."""
    tail = ndtr(-np.abs(edges))
    low, high = tail[:-1], tail[1:]
    across = (edges[:-1] < 0.0) & (edges[1:] > 0.0)
    return np.asarray(np.where(across, 1.0 - low - high, np.abs(high - low)))


def _log_sums(exponent: Array, weights: Array) -> Array:
    """log Σ_i w_ki e^{a_ji}, shape (K, n)."""
    top = exponent.max(axis=1)
    if float((top - exponent.min(axis=1)).max()) <= _EXPONENT_RANGE:
        sums = weights @ np.exp(exponent - top[:, None]).T
        if sums.min() > 1e-290:
            return np.asarray(np.log(sums) + top)
    result = np.empty((weights.shape[0], exponent.shape[0]))
    for k, row in enumerate(weights):
        used = row > 0.0
        terms = exponent[:, used] + np.log(row[used])
        top = terms.max(axis=1)
        result[k] = np.log(np.exp(terms - top[:, None]).sum(axis=1)) + top
    return result


def _outside(edges: Array, means: Array, weights: Array, *, remove: bool) -> Array:
    """Mass of every P_k (remove) or of Q (add) beyond the edges, shape (K,)."""
    if not remove:
        return np.full(weights.shape[0], float(ndtr(edges[0]) + ndtr(-edges[-1])))
    return np.asarray(weights @ (ndtr(edges[0] - means) + ndtr(means - edges[-1])))


def _rounded(
    losses: Array, upper: Array, lower: Array, spacing: float, outside: float
) -> LossDistribution:
    """The cells with the losses of their edges (ascending) snapped outwards to the grid."""
    from_below, from_above = np.cumsum(upper), np.cumsum(upper[::-1])[::-1]
    kept = (from_below > _NEGLIGIBLE) & (from_above > _NEGLIGIBLE)
    infinity = float(outside) + float(upper[~kept].sum())
    pad = _LOSS_ROUNDING * (1.0 + np.abs(losses))
    low = np.floor((losses - pad) / spacing)[:-1][kept].astype(np.int64)
    high = np.ceil((losses + pad) / spacing)[1:][kept].astype(np.int64)
    return split_cells(
        spacing=spacing,
        low=low,
        high=np.maximum(high, low + 1),
        upper=upper[kept],
        lower=lower[kept],
        above=infinity,
    )

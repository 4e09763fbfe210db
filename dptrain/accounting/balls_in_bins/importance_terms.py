"""Weighted samples of balls-in-bins with any C: terms below Rényi divergences of small orders."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from dptrain.accounting.balls_in_bins.bins_losses import LARGEST_NORMAL, UNIT, BallsInBinsLosses
from dptrain.accounting.balls_in_bins.renyi import log_delta_add
from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.simulation.terms import (
    WeightedTerms,
    below_linear_loss,
    noise_along,
)
from dptrain.core import Array

# Multisets of bins that are tabulated, and the largest order; a larger one gains little.
_MOST_STATES = 5_000_000
_LARGEST_ORDER = 12
_CHUNK_BYTES = 32 << 20
_LEAST_SLACK = 1e-9
_DRAWN = 1e-8  # distance of the law of the multisets drawn from their weights
_ROUNDING = 1e-9  # of a logarithm of a sum of positive terms, far above what it is


class Multisets(NamedTuple):
    """All multisets of α bins.

    Attributes:
        bins: shape (multisets, α), ascending in each row.
        overlap: Σ_{k<l} <m_{i_k}, m_{i_l}>.
        log_count: logarithm of the number of tuples with this multiset.
    """

    bins: npt.NDArray[np.int32]
    overlap: Array
    log_count: Array


def larger_multisets(smaller: Multisets, gram: Array) -> Multisets:
    """The multisets of one bin more, each from the multiset without its last bin."""
    count, order = smaller.bins.shape
    bins = gram.shape[0]
    last = smaller.bins[:, -1]
    following = bins - last
    parent = np.repeat(np.arange(count), following)
    offset = np.arange(parent.size) - np.repeat(np.cumsum(following) - following, following)
    added = (last[parent] + offset).astype(np.int32)
    overlap = smaller.overlap[parent]
    for column in range(order):
        overlap += gram[smaller.bins[parent, column], added]
    found = np.column_stack((smaller.bins[parent], added))
    run = (found == added[:, None]).sum(axis=1)
    log_count = smaller.log_count[parent] + math.log(order + 1) - np.log(run)
    return Multisets(found, overlap, log_count)


class TiltedBallsInBins:
    """Importance sampling of both directions of balls-in-bins, at any σ.

    What is drawn is the pair P = (1/b) Σ_i N(m̃_i, σ²I), Q = N(0, σ²I) in R^b of
    ``BallsInBinsLosses``, which is at most as private as the true one.

    *Remove.* With A = E_Q[(P/Q)^α] = b^{-α} Σ e^{Σ_{k<l} <m̃_{i_k}, m̃_{i_l}>/σ²} over all α-tuples
    of bins (Schuchardt & Kalinin 2026, Lemma 3.2, arXiv 2601.21636), R = (P/Q)^α Q/A is the mixture
    of the N(Σ_k m̃_{i_k}, σ²I) with weights in proportion to these terms. δ(ε) is the mean under R
    of A e^{-(α-1)L} (1 - e^{ε-L})_+ ∈ [0, A e^{-(α-1)ε} (1-1/α)^α/(α-1)]: see ``TiltedMinSep``. The
    best of the orders whose multisets fit a table is taken.

    *Add.* By Jensen's inequality the loss is at most ν - <Σ_i m̃_i/b, z>/σ, ν = tr(G̃)/(2bσ²), for
    y = σz (Lemma 3.4 there): see ``below_linear_loss``.

    *Rounding.* As in ``BallsInBinsLosses``, with up to α shifts instead of one; losses are
    taken that much to the side that makes terms larger. The states of a mixture are drawn through
    a cumulative sum of N ≤ 5·10^6 weights. A partial sum adds an error of u = 2^-53 of the total to
    the weight of its state and a uniform number as much: in total variation, less than 10^-8. So
    much of the ceiling is added to every term.
    """

    def __init__(self, losses: BallsInBinsLosses) -> None:
        self._losses, self._gram = losses, losses.gram
        self._bins = losses.bins
        self._half = self._gram.diagonal() / 2.0
        self._center = losses.factor.mean(axis=0)
        self.lanes = max(64, min(4096, _CHUNK_BYTES // (32 * self._bins)))

    @functools.cached_property
    def orders(self) -> tuple[int, ...]:
        """Orders whose multisets fit the table."""
        return tuple(
            order
            for order in range(2, _LARGEST_ORDER + 1)
            if math.comb(self._bins + order - 1, order) <= _MOST_STATES
        )

    @functools.cached_property
    def _tables(self) -> dict[int, Multisets]:
        zero = np.zeros(self._bins)
        table = Multisets(np.arange(self._bins, dtype=np.int32)[:, None], zero, zero)
        found = {}
        for order in self.orders:
            table = found[order] = larger_multisets(table, self._gram)
        return found

    def slack(self, sigma: float, order: int) -> float:
        """Covers the rounding of a loss of a sum of ``order`` means."""
        ratio = self._losses.sensitivity / sigma
        reach = ratio * LARGEST_NORMAL * math.sqrt(self._bins) + (order + 1.0) * ratio * ratio
        bound = 2.0 * UNIT * ((self._bins + order + 12.0) * reach + 2.0 * self._bins + 40.0)
        return max(_LEAST_SLACK, bound)

    def overlap_error(self, sigma: float, order: int) -> float:
        """Covers the rounding of a multiset's overlap over σ²: α²/2 products of b terms each."""
        ratio = self._losses.sensitivity / sigma
        return 2.0 * UNIT * (self._bins + 16.0) * (order * ratio) ** 2

    def log_moment(self, sigma: float, order: int) -> float:
        """log E_Q[(P/Q)^α], rounded up."""
        table = self._tables[order]
        exponent = table.log_count + table.overlap / sigma**2
        pad = _ROUNDING + self.overlap_error(sigma, order)
        return float(logsumexp(exponent)) - order * math.log(self._bins) + pad

    def _loss(self, products: Array, sigma: float) -> Array:
        """log P/Q from <m̃_j, y>, bins on the last axis."""
        exponents = products - self._half
        exponents /= sigma**2
        top = exponents.max(axis=-1)
        exponents -= top[:, None]
        np.exp(exponents, out=exponents)
        return np.asarray(top + np.log(exponents.sum(axis=-1)) - math.log(self._bins))

    def at(self, sigma: float) -> TiltedAtSigma:
        """The terms at one σ."""
        return TiltedAtSigma(self, sigma)

    def plain(self, sigma: float, epsilon: float) -> WeightedTerms:
        """Terms in [0, 1] of the remove direction, drawn from P itself."""

        def draw(rng: np.random.Generator, size: int) -> Array:
            losses = self._losses.draw([sigma], "remove", rng, size)
            return hockey_stick(losses[0], epsilon - self._losses.slack)

        return WeightedTerms(1.0, self.lanes, draw)

    def remove(
        self, sigma: float, epsilon: float, order: int, log_moment: float, cumulative: Array
    ) -> WeightedTerms:
        """Terms of one order; ``cumulative`` sums the weights of its multisets."""
        slack, members = self.slack(sigma, order), self._tables[order].bins
        # A multiset's share of the mixture errs by twice its exponent's error: itself and the sum.
        pad = 2 * _ROUNDING + order * slack + 2 * self.overlap_error(sigma, order)
        ceiling = math.exp(log_range(log_moment, order, epsilon) + pad + order * slack)

        def draw(rng: np.random.Generator, size: int) -> Array:
            at = np.searchsorted(cumulative, rng.random(size) * cumulative[-1], side="right")
            chosen = members[np.minimum(at, cumulative.size - 1)]
            products = sigma * (rng.standard_normal((size, self._bins)) @ self._losses.factor.T)
            for column in range(order):
                products += self._gram[chosen[:, column]]
            loss = self._loss(products, sigma)
            weight = np.exp(log_moment + pad - (order - 1) * np.maximum(loss, epsilon - 1.0))
            return np.asarray(weight * hockey_stick(loss, epsilon - slack) + _DRAWN * ceiling)

        return WeightedTerms(ceiling * (1.0 + _DRAWN), self.lanes, draw)

    def weights(self, sigma: float, order: int) -> Array:
        """Cumulative weights of the multisets of an order, up to a factor."""
        table = self._tables[order]
        exponent = table.log_count + table.overlap / sigma**2
        return np.cumsum(np.exp(exponent - exponent.max()))

    def add(self, sigma: float, epsilon: float) -> WeightedTerms:
        """Terms of the add direction."""
        slack = self.slack(sigma, 1)
        near = np.array([max(epsilon - slack, 0.0)])

        def losses(unit: Array, rng: np.random.Generator, along: Array) -> Array:
            noise = noise_along(unit, rng, along)
            return -self._loss(sigma * (noise.T @ self._losses.factor.T), sigma)

        return below_linear_loss(
            losses,
            epsilon,
            nu=float(self._half.mean()) / sigma**2,
            direction=self._center / sigma,
            log_mean=float(log_delta_add(self._gram, sigma, near)[0]) + 2 * _ROUNDING,
            slack=slack,
            lanes=self.lanes,
        )


def log_range(log_moment: float, order: int, epsilon: float) -> float:
    """Logarithm of the largest A e^{-(α-1)L} (1 - e^{ε-L})_+."""
    conversion = order * math.log1p(-1.0 / order) - math.log(order - 1.0)
    return log_moment - (order - 1) * epsilon + conversion


class TiltedAtSigma:
    """``TiltedBallsInBins`` at one σ, with what does not depend on ε remembered."""

    def __init__(self, tilted: TiltedBallsInBins, sigma: float) -> None:
        self._tilted, self._sigma = tilted, sigma
        self._weights: dict[int, Array] = {}

    @functools.cached_property
    def _moments(self) -> dict[int, float]:
        tilted = self._tilted
        return {order: tilted.log_moment(self._sigma, order) for order in tilted.orders}

    def both(self, epsilon: float) -> dict[str, WeightedTerms]:
        """Terms of either direction at ε ≥ 0, by its name."""
        return {"remove": self._remove(epsilon), "add": self._tilted.add(self._sigma, epsilon)}

    def _remove(self, epsilon: float) -> WeightedTerms:
        ranges = {
            order: log_range(moment, order, epsilon) for order, moment in self._moments.items()
        }
        order = min(ranges, key=lambda each: ranges[each], default=0)
        if order == 0 or ranges[order] > 0.0:
            return self._tilted.plain(self._sigma, epsilon)
        if order not in self._weights:
            self._weights = {order: self._tilted.weights(self._sigma, order)}
        return self._tilted.remove(
            self._sigma, epsilon, order, self._moments[order], self._weights[order]
        )

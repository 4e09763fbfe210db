"""Exact likelihood ratios of the one-example game, written from the definition.

P is the law of y = M x + σ z with x drawn as the sampling scheme draws, Q that of σ z. Nothing here
knows an accountant: a bug that is shared would not be seen (import-linter holds it).
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod

import numpy as np
from scipy.special import logsumexp

from dptrain.core import Array

MOST_STATES = 4096
_ORTHOGONAL = 1e-12  # of the largest squared column norm: products below are rounding


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Likelihood(ABC):
    """log dP/dQ for one law of the participations.

    Args:
        matrix: M, shape (n, n), lower triangular.
        sigma: σ > 0.
    """

    matrix: Array
    sigma: float

    @abstractmethod
    def log_ratio(self, outputs: Array, scale: float = 1.0) -> Array:
        """log (P/Q)(y) of the law of ``scale``·M x + σ z.

        y has shape (samples, n), the result (samples,).
        """

    def exponents(self, outputs: Array, scale: float) -> Array:
        """log of the ratio of taking part in step t alone to not at all; shape (samples, n)."""
        norms = np.sum(self.matrix**2, axis=0)
        return (scale * (outputs @ self.matrix) - scale**2 * norms / 2) / self.sigma**2

    def pattern_exponents(self, patterns: Array, outputs: Array, scale: float) -> Array:
        """log of the ratio for known patterns of shape (k, n); shape (samples, k)."""
        means = scale * patterns @ self.matrix.T
        return (outputs @ means.T - np.sum(means**2, axis=1) / 2) / self.sigma**2


def orthogonal_from(matrix: Array, distance: int) -> bool:
    """True if columns that are at least ``distance`` steps apart are orthogonal."""
    gram = np.abs(matrix.T @ matrix)
    far = np.subtract.outer(np.arange(len(gram)), np.arange(len(gram))) >= distance
    return bool(np.max(gram, where=far, initial=0.0) <= _ORTHOGONAL * gram.max())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PatternMixture(Likelihood):
    """x is one of a few patterns: log Σ_k w_k exp((⟨M x_k, y⟩ - ‖M x_k‖²/2)/σ²).

    Args:
        patterns: shape (k, n).
        weights: w, shape (k,), adding up to 1.
    """

    patterns: Array
    weights: Array

    def log_ratio(self, outputs: Array, scale: float = 1.0) -> Array:
        """log of the ratio, by the sum over all patterns."""
        terms = self.pattern_exponents(self.patterns, outputs, scale)
        return np.asarray(logsumexp(terms, axis=1, b=self.weights))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Coins(Likelihood):
    """Step t is taken part in with probability p_t, independently; columns are orthogonal.

    Args:
        probabilities: p, shape (n,).
    """

    probabilities: Array

    def log_ratio(self, outputs: Array, scale: float = 1.0) -> Array:
        """Σ_t log(1 - p_t + p_t e^{a_t})."""
        tossed = np.flatnonzero(self.probabilities)
        p = self.probabilities[tossed]
        a = self.exponents(outputs, scale)[:, tossed]
        with np.errstate(divide="ignore"):
            return np.asarray(np.logaddexp(np.log1p(-p), np.log(p) + a).sum(axis=1))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ages(Likelihood):
    """A coin of probability p unless one of the last b-1 steps was taken part in.

    For matrices whose columns are orthogonal from b steps apart on: the ratio of a pattern is then
    the product of those of its steps. Forwards in time, v_t is the ratio's part of all histories in
    which the example is available at step t; of them p e^{a_t} v_t take part and come back at
    t + b.

    Args:
        probability: p.
        min_sep: b.
        warm: whether the first state is drawn from the stationary law.
    """

    probability: float
    min_sep: int
    warm: bool

    def log_ratio(self, outputs: Array, scale: float = 1.0) -> Array:
        """log of the sum over all histories, rescaled at every step."""
        steps, p, b = outputs.shape[1], self.probability, self.min_sep
        a = self.exponents(outputs, scale)
        available = np.ones(len(outputs))
        waiting = np.zeros((steps + b + 1, len(outputs)))  # by the step at which they come back
        if self.warm:
            whole = 1.0 + (b - 1) * p
            available /= whole
            waiting[1:b] = p / whole
        log_scale = np.zeros(len(outputs))
        for t in range(steps):
            with np.errstate(divide="ignore"):
                log_part = np.log(p * available) + a[:, t]
            rise = np.maximum(log_part, 0.0)
            shrink = np.exp(-rise)
            waiting[t + 1 : t + b] *= shrink
            waiting[t + b] = np.exp(log_part - rise)
            available = (1.0 - p) * available * shrink + waiting[t + 1]
            log_scale += rise
        return np.asarray(np.log(available + waiting[steps + 1 :].sum(axis=0)) + log_scale)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subsets(Likelihood):
    """k of the t steps of every epoch, each k-subset as likely; columns are orthogonal.

    Args:
        picks: k.
        epoch: t.
    """

    picks: int
    epoch: int

    def log_ratio(self, outputs: Array, scale: float = 1.0) -> Array:
        """For every epoch, the elementary symmetric polynomial of e^{a_t} over its number of terms.

        With r picks made in s steps, the next is one with probability (k - r)/(t - s).
        """
        a = self.exponents(outputs, scale)
        found = np.zeros(len(outputs))
        for start in range(0, outputs.shape[1], self.epoch):
            parts = np.full((self.picks + 1, len(outputs)), -np.inf)
            parts[0] = 0.0
            for s in range(self.epoch):
                for r in range(min(self.picks, s + 1), -1, -1):
                    with np.errstate(divide="ignore"):
                        stay = np.log(max(0.0, 1.0 - (self.picks - r) / (self.epoch - s)))
                        take = np.log(max(0.0, (self.picks - r + 1) / (self.epoch - s)))
                    kept = parts[r] + stay
                    if r:
                        kept = np.logaddexp(kept, parts[r - 1] + take + a[:, start + s])
                    parts[r] = kept
            found += parts[self.picks]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trellis(Likelihood):
    """Coins with a separation under a banded matrix of any overlap, as a hidden Markov chain.

    Its state are the participations of the last max(bands, b) - 1 steps, and y_t given the state is
    N(Σ_k M_{t,t-k} x_{t-k}, σ²): the forward algorithm, of as many states as patterns fit there.

    Args:
        probability: p.
        min_sep: b.
        warm: whether the first state is drawn from the stationary law.
        bands: number of leading diagonals of M that are not zero.
    """

    probability: float
    min_sep: int
    warm: bool
    bands: int

    def log_ratio(self, outputs: Array, scale: float = 1.0) -> Array:
        """log of the sum over all paths."""
        states = window_patterns(max(self.bands, self.min_sep) - 1, self.min_sep)
        index = {state: i for i, state in enumerate(states)}
        edges = []
        for i, state in enumerate(states):
            barred = any(state[: self.min_sep - 1])
            for taken in (0,) if barred else (0, 1):
                chance = 1.0 if barred else self.probability if taken else 1.0 - self.probability
                after = (taken, *state)[: len(state)]
                edges.append((index[after], i, taken, chance))
        edges.sort()
        target, source, _, chances = (np.array(column) for column in zip(*edges, strict=True))
        recent = np.array([(e[2], *states[e[1]]) for e in edges])[:, : self.bands]
        starts = np.flatnonzero(np.diff(target, prepend=-1))
        weights = np.zeros((len(outputs), len(states)))
        weights[:, index[(0,) * len(states[0])]] = 1.0
        if self.warm:
            whole = 1.0 + (self.min_sep - 1) * self.probability
            weights /= whole
            for ago in range(self.min_sep - 1):
                state = tuple(int(k == ago) for k in range(len(states[0])))
                weights[:, index[state]] = self.probability / whole
        log_scale = np.zeros(len(outputs))
        for t in range(outputs.shape[1]):
            lags = min(self.bands, t + 1)  # what was taken part in before the start adds nothing
            row = self.matrix[t, t - np.arange(lags)]
            means = scale * recent[:, :lags] @ row
            exponent = (np.multiply.outer(outputs[:, t], means) - means**2 / 2) / self.sigma**2
            top = exponent.max(axis=1)
            moved = weights[:, source] * chances * np.exp(exponent - top[:, None])
            new = np.zeros_like(weights)
            new[:, target[starts]] = np.add.reduceat(moved, starts, axis=1)
            total = new.sum(axis=1)
            weights = new / total[:, None]
            log_scale += top + np.log(total)
        return log_scale


def window_patterns(length: int, min_sep: int) -> list[tuple[int, ...]]:
    """Participations in ``length`` steps, no two of them less than ``min_sep`` apart."""
    found: list[tuple[int, ...]] = []
    for count in range(-(-length // min_sep) + 1):
        for at in itertools.combinations(range(length), count):
            if all(late - early >= min_sep for early, late in itertools.pairwise(at)):
                found.append(tuple(int(k in at) for k in range(length)))
                if len(found) > MOST_STATES:
                    return found
    return found


def bandwidth(matrix: Array) -> int:
    """Number of leading diagonals of a lower triangular matrix that are not zero."""
    rows, columns = np.nonzero(np.abs(matrix) > 0)
    return int(np.max(rows - columns)) + 1

"""The laws of participation and the densities of tiny runs, by summation over all patterns.

Nothing here imports the library: every function is written from the definition of the scheme or
of (P, Q), so that the code under test cannot lend it its mistakes. Everything is exponential in n.

P is the law of C x + σ z with x drawn from the scheme, Q that of σ z; L = log P/Q.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Law:
    """Every participation pattern that can occur (rows of ``patterns``) and its probability."""

    patterns: Array
    probabilities: Array

    def __post_init__(self) -> None:
        assert math.isclose(math.fsum(self.probabilities), 1.0, rel_tol=1e-12)
        assert (self.probabilities > 0).all()
        assert len(np.unique(self.patterns, axis=0)) == len(self.patterns)

    @property
    def steps(self) -> int:
        return self.patterns.shape[1]

    def of(self, pattern: npt.ArrayLike) -> float:
        """The probability of one pattern, 0 if it cannot occur."""
        same = (self.patterns == np.asarray(pattern, dtype=np.float64)).all(axis=1)
        return float(self.probabilities[same].sum())


def _law(probability_of: dict[tuple[int, ...], float]) -> Law:
    possible = {x: q for x, q in probability_of.items() if q > 0}
    return Law(np.array(list(possible), dtype=np.float64), np.array(list(possible.values())))


def _every_pattern(steps: int) -> itertools.product[tuple[int, ...]]:
    return itertools.product((0, 1), repeat=steps)


def poisson(steps: int, p: float) -> Law:
    """An independent coin of probability p at every step."""
    return _law({x: math.prod(p if hit else 1 - p for hit in x) for x in _every_pattern(steps)})


def _walk(x: tuple[int, ...], p: float, b: int, barred: int) -> float:
    """P(pattern x | barred for the next ``barred`` steps), one step after the other."""
    probability = 1.0
    for hit in x:
        if barred > 0:
            probability *= 0.0 if hit else 1.0
            barred -= 1
        else:
            probability *= p if hit else 1 - p
            barred = b - 1 if hit else 0
    return probability


def min_sep_cold(steps: int, p: float, b: int) -> Law:
    """b-min-sep with every example available at the first step (Dong & Ganesh 2026, Alg. 1)."""
    return _law({x: _walk(x, p, b, barred=0) for x in _every_pattern(steps)})


def stationary_bars(p: float, b: int) -> Array:
    """Stationary law of "barred for the next s steps", s = 0..b-1, solved from the chain itself."""
    move = np.zeros((b, b))  # move[s, s'] = P(s' after one step | s before it)
    move[0, b - 1] += p
    move[0, 0] += 1 - p
    for s in range(1, b):
        move[s, s - 1] += 1.0
    balance = np.vstack([move.T - np.eye(b), np.ones(b)])
    law, *_ = np.linalg.lstsq(balance, np.append(np.zeros(b), 1.0), rcond=None)
    assert np.allclose(law @ move, law, atol=1e-13)
    return np.asarray(law)


def min_sep_warm(steps: int, p: float, b: int) -> Law:
    """b-min-sep whose chain has run for ever before the first step (Alg. 2)."""
    start = stationary_bars(p, b)
    return _law(
        {
            x: math.fsum(start[s] * _walk(x, p, b, barred=s) for s in range(b))
            for x in _every_pattern(steps)
        }
    )


def balls_in_bins(bins: int, epochs: int) -> Law:
    """A uniform bin i; the example takes part at i, i + bins, i + 2·bins, …"""
    steps = bins * epochs
    return _law({tuple(int(t % bins == i) for t in range(steps)): 1 / bins for i in range(bins)})


def toeplitz(coefficients: npt.ArrayLike, steps: int) -> Array:
    """Dense lower-triangular C, entry by entry; the last columns lose what falls below row n."""
    c = np.atleast_1d(np.asarray(coefficients, dtype=np.float64))
    dense = np.zeros((steps, steps))
    for column in range(steps):
        for lag in range(len(c)):
            if column + lag < steps:
                dense[column + lag, column] = c[lag]
    return dense


def log_sum_exp(exponents: Array) -> Array:
    """Over the last axis, of which the largest must be finite: scipy's, in a quarter of the time.

    The oracles spend most of their time here. ``exponents`` is overwritten.
    """
    top = exponents.max(axis=-1, keepdims=True)
    exponents -= top
    np.exp(exponents, out=exponents)
    return np.asarray(np.log(exponents.sum(axis=-1)) + top[..., 0])


def log_ratio(law: Law, matrix: Array, sigma: float, y: Array) -> Array:
    """log P/Q at every row of y (..., n): the log of Σ_x P(x) exp((<Cx, y> - ‖Cx‖²/2)/σ²)."""
    means = law.patterns @ matrix.T
    exponents = (y @ means.T - (means**2).sum(axis=1) / 2) / sigma**2
    return log_sum_exp(exponents + np.log(law.probabilities))


def sample_p(law: Law, matrix: Array, sigma: float, rng: np.random.Generator, size: int) -> Array:
    """``size`` rows of C x + σ z."""
    drawn = rng.choice(len(law.probabilities), size=size, p=law.probabilities)
    means = law.patterns @ matrix.T
    return np.asarray(means[drawn] + sigma * rng.standard_normal((size, law.steps)))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A Monte Carlo mean and its standard error."""

    mean: float
    error: float


def _estimate(values: Array) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(values.size)))


def monte_carlo_delta(
    law: Law, matrix: Array, sigma: float, epsilon: float, *, size: int, seed: int
) -> tuple[Estimate, Estimate]:
    """δ(ε) of (P, Q) and of (Q, P): the mean of (1 - e^{ε - loss})_+ under the first law."""
    rng = np.random.default_rng(seed)
    remove = log_ratio(law, matrix, sigma, sample_p(law, matrix, sigma, rng, size))
    noise = sigma * rng.standard_normal((size, law.steps))
    add = -log_ratio(law, matrix, sigma, noise)
    return (
        _estimate(-np.expm1(np.minimum(epsilon - remove, 0.0))),
        _estimate(-np.expm1(np.minimum(epsilon - add, 0.0))),
    )


def renyi_moment(law: Law, matrix: Array, sigma: float, order: int) -> float:
    """log E_Q[(P/Q)^α] for integer α, by expanding the power over multisets of patterns.

    E_Q of the product of the ratios of components i_1 … i_α is exp(Σ_{j<k} <m_{i_j}, m_{i_k}>/σ²).
    """
    means = law.patterns @ matrix.T
    gram = means @ means.T / sigma**2
    log_weight = np.log(law.probabilities)
    terms = []
    for chosen in itertools.combinations_with_replacement(range(len(means)), order):
        counts = [chosen.count(i) for i in set(chosen)]
        log_orderings = math.lgamma(order + 1) - sum(math.lgamma(r + 1) for r in counts)
        pairs = sum(gram[i, j] for i, j in itertools.combinations(chosen, 2))
        terms.append(log_orderings + sum(log_weight[i] for i in chosen) + pairs)
    return float(logsumexp(terms))

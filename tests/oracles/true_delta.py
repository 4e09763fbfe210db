"""δ(ε) of the pair of laws that a tiny run really releases: from below, by summing over everything.

Nothing here imports the library. A world is a law of noiseless releases: P of the run on the data,
Q of the run on the neighboring data, and y = release + σ z is what is published. A public coin
(``Branch.weight``) may be tossed before, with the same law in both worlds.

Runs of one or two numbers are integrated; longer ones are simulated, with a lower confidence limit
that fails with the chance of 6 standard deviations: whoever states less than it states too little.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tests.oracles.batch_sequences import RunLaw
from tests.oracles.enumeration import Law, log_sum_exp, stationary_bars

Array = npt.NDArray[np.float64]

# One-sided chance of 6 standard deviations of a normal.
LOG_CHANCE = -math.log(9.87e-10)
REACH = 9.0  # integrals stop this many σ beyond the outermost means
# Trapezoids per σ, and the relative error that they may leave, for one and for two numbers. The
# integrand has a kink; where δ is about 1e-8 it falls by e^7 per σ beyond it.
FINE = {1: (1500, 1e-5), 2: (14, 1e-2)}
CHUNK = 1 << 18  # numbers in one array of exponents


@dataclasses.dataclass(frozen=True)
class World:
    """A finite law: ``means`` of shape (k, m), ``weights`` of shape (k,)."""

    weights: Array
    means: Array

    @classmethod
    def of(cls, law: Mapping[tuple[int, ...], float] | Mapping[tuple[float, ...], float]) -> World:
        """Of a dictionary from noiseless releases to their probabilities."""
        possible = {x: q for x, q in law.items() if q > 0}
        assert math.isclose(math.fsum(possible.values()), 1.0, rel_tol=1e-9)
        weights = np.array(list(possible.values()))
        return cls(weights / weights.sum(), np.array(list(possible), dtype=np.float64))

    def seen_through(self, matrix: Array) -> World:
        """Every release multiplied by C ⊗ I; equal ones are put together."""
        dimension = self.means.shape[1] // matrix.shape[1]
        moved = self.means @ np.kron(matrix, np.eye(dimension)).T
        law: defaultdict[tuple[float, ...], float] = defaultdict(float)
        for mean, weight in zip(moved.round(12).tolist(), self.weights, strict=True):
            law[tuple(mean)] += float(weight)
        return World.of(law)

    def log_density(self, y: Array, sigma: float) -> Array:
        """Up to the constant and the -|y|²/2σ² that all worlds share; y of shape (k, m)."""
        values = np.empty(len(y))
        size = max(1, CHUNK // len(self.weights))
        for first in range(0, len(y), size):
            part = slice(first, first + size)
            inner = y[part] @ self.means.T - (self.means**2).sum(axis=1) / 2
            values[part] = log_sum_exp(inner / sigma**2 + np.log(self.weights))
        return values

    def sample(self, rng: np.random.Generator, sigma: float, size: int) -> Array:
        """Noisy releases, shape (size, m)."""
        picked = rng.choice(len(self.weights), size=size, p=self.weights)
        return self.means[picked] + sigma * rng.standard_normal((size, self.means.shape[1]))


@dataclasses.dataclass(frozen=True)
class Branch:
    """What is released if the public coin falls this way: with the data, and without."""

    weight: float
    p: World
    q: World


@dataclasses.dataclass(frozen=True)
class TruePair:
    """P and Q of a run, at noise σ."""

    branches: tuple[Branch, ...]
    sigma: float

    def swapped(self) -> TruePair:
        """The other direction as a pair of its own: (Q, P)."""
        turned = tuple(Branch(each.weight, each.q, each.p) for each in self.branches)
        return TruePair(turned, self.sigma)

    def with_noise(self, sigma: float) -> TruePair:
        """The same run at another σ."""
        return TruePair(self.branches, sigma)

    @property
    def numbers(self) -> int:
        """How many numbers are released."""
        return self.branches[0].p.means.shape[1]

    def evidence(self, *, size: int, seed: int) -> Evidence:
        """What is known about δ in both directions; ``size`` draws if it has to be simulated."""
        sides = []
        for number, pair in enumerate((self, self.swapped())):
            if self.numbers in FINE:
                sides.append(pair._integrand())
            else:
                losses = pair.losses(np.random.default_rng([seed, number]), size)
                sides.append(Side(losses, None))
        return Evidence(*sides)

    def lower(self, epsilons: npt.ArrayLike, *, size: int, seed: int) -> tuple[Array, Array]:
        """Lower limits of δ(ε) of (P, Q) and of (Q, P)."""
        return self.evidence(size=size, seed=seed).lower(epsilons)

    def _integrand(self) -> Side:
        """log P/Q at the points of a grid, and the P-mass that each stands for."""
        fine, error = FINE[self.numbers]
        losses, masses = [], []
        for branch in self.branches:
            means = np.vstack([branch.p.means, branch.q.means]) / self.sigma
            axes = [
                self.sigma * np.arange((low - REACH) * fine, (high + REACH) * fine + 1) / fine
                for low, high in zip(means.min(axis=0), means.max(axis=0), strict=True)
            ]
            y = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, self.numbers)
            log_cell = -self.numbers * math.log(fine * math.sqrt(2 * math.pi))
            log_p = branch.p.log_density(y, self.sigma)
            losses.append(log_p - branch.q.log_density(y, self.sigma))
            log_mass = log_p - (y**2).sum(axis=1) / (2 * self.sigma**2) + log_cell
            masses.append(branch.weight * np.exp(log_mass))
        return Side(np.concatenate(losses), np.concatenate(masses), error)

    def losses(self, rng: np.random.Generator, size: int) -> Array:
        """``size`` draws of log P/Q under P."""
        share = np.array([branch.weight for branch in self.branches])
        counts = rng.multinomial(size, share / share.sum())
        drawn = []
        for branch, count in zip(self.branches, counts, strict=True):
            if count:
                y = branch.p.sample(rng, self.sigma, int(count))
                drawn.append(
                    branch.p.log_density(y, self.sigma) - branch.q.log_density(y, self.sigma)
                )
        return np.concatenate(drawn)


@dataclasses.dataclass(frozen=True)
class Side:
    """One direction: losses and their masses (integrated), or losses that were drawn."""

    losses: Array
    masses: Array | None
    error: float = 0.0

    def value(self, epsilon: float) -> float:
        """About δ(ε)."""
        values = self._terms(epsilon)
        return float(values.mean() if self.masses is None else self.masses @ values)

    def lower(self, epsilon: float) -> float:
        """At most δ(ε)."""
        if self.masses is None:
            return _lower_limit(self._terms(epsilon))
        return self.value(epsilon) * (1 - self.error) - 1e-14

    def _terms(self, epsilon: float) -> Array:
        return np.asarray(-np.expm1(np.minimum(epsilon - self.losses, 0.0)))


class Limits(Protocol):
    """What is known of δ(ε) in one direction."""

    def value(self, epsilon: float) -> float: ...

    def lower(self, epsilon: float) -> float: ...


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Both directions: (P, Q) and (Q, P)."""

    remove: Limits
    add: Limits

    def lower(self, epsilons: npt.ArrayLike) -> tuple[Array, Array]:
        """Lower limits at every ε, of both directions."""
        at = np.atleast_1d(np.asarray(epsilons, dtype=np.float64))
        remove, add = (np.array([side.lower(e) for e in at]) for side in (self.remove, self.add))
        return remove, add

    def where(self, deltas: Sequence[float]) -> Array:
        """Ascending ε ≥ 0 at which the larger δ is roughly each of ``deltas``."""
        low, high = np.zeros(len(deltas)), np.full(len(deltas), 60.0)
        for _ in range(16):
            middle = (low + high) / 2
            value = [max(side.value(e) for side in (self.remove, self.add)) for e in middle]
            above = np.array(value) > np.asarray(deltas)
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.unique(low.round(6))


def _lower_limit(values: Array) -> float:
    """Empirical Bernstein bound (Maurer and Pontil 2009, Theorem 4) on a mean of values in [0, 1].

    It fails with a chance of e^-LOG_CHANCE.
    """
    size, log_term = values.size, LOG_CHANCE + math.log(2.0)
    slack = math.sqrt(2 * float(values.var(ddof=1)) * log_term / size)
    return float(values.mean()) - slack - 7 * log_term / (3 * (size - 1))


def of_patterns(law: Law, matrix: Array, sigma: float) -> TruePair:
    """One example, gradients of norm 1 along one line: C x + σ z against σ z."""
    p = World(np.asarray(law.probabilities), np.asarray(law.patterns, dtype=np.float64))
    return TruePair((Branch(1.0, p.seen_through(matrix), _silent(len(matrix))),), sigma)


def of_mixtures(
    mixtures: Sequence[tuple[float, Mapping[tuple[int, ...], float]]], matrix: Array, sigma: float
) -> TruePair:
    """A public pattern, and the law of x given it (``user_level.revealed_mixtures``)."""
    silent = _silent(len(matrix))
    branches = [Branch(w, World.of(x).seen_through(matrix), silent) for w, x in mixtures]
    return TruePair(tuple(branches), sigma)


def _silent(numbers: int) -> World:
    return World(np.ones(1), np.zeros((1, numbers)))


def of_runs(
    runs: tuple[RunLaw, RunLaw], gradients: tuple[Array, Array], matrix: Array, sigma: float
) -> TruePair:
    """Whole runs: sums of fixed gradients, shape (examples, d), of the batches of both worlds."""
    worlds = []
    for law, vectors in zip(runs, gradients, strict=True):
        sums: defaultdict[tuple[float, ...], float] = defaultdict(float)
        for run, q in law.items():
            sums[tuple(np.concatenate([vectors[list(b)].sum(axis=0) for b in run]).tolist())] += q
        worlds.append(World.of(sums).seen_through(matrix))
    return TruePair((Branch(1.0, *worlds),), sigma)


def truncated_min_sep(
    size: int, steps: int, p: float, b: int, largest: int, *, warm: bool
) -> RunLaw:
    """b-min-sep draws of ``size`` examples, cut to ``largest``; who is cut stays barred."""
    bars = stationary_bars(p, b) if warm else np.eye(b)[0]
    states: dict[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], float] = {
        (start, ()): math.prod(bars[s] for s in start)
        for start in itertools.product(range(b), repeat=size)
    }
    for _ in range(steps):
        after: defaultdict[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], float]
        after = defaultdict(float)
        for (barred, run), weight in states.items():
            free = [i for i in range(size) if barred[i] == 0]
            for coins in itertools.product((0, 1), repeat=len(free)):
                drawn = [i for i, hit in zip(free, coins, strict=True) if hit]
                chance = p ** len(drawn) * (1 - p) ** (len(free) - len(drawn)) * weight
                if chance > 0:
                    following = tuple(
                        b - 1 if i in drawn else max(barred[i] - 1, 0) for i in range(size)
                    )
                    kept = list(itertools.combinations(drawn, min(largest, len(drawn))))
                    for batch in kept:
                        after[following, (*run, batch)] += chance / len(kept)
        states = dict(after)
    law: defaultdict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    for (_, run), weight in states.items():
        law[run] += weight
    return dict(law)

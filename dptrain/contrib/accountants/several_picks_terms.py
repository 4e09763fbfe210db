"""Weighted samples of k picks out of t steps, from a law with more of what large losses have."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, logsumexp, ndtri_exp

from dptrain.accounting.balls_in_bins import UNIT, AllocationCurve, log_subset_means
from dptrain.accounting.losses import hockey_stick
from dptrain.accounting.simulation import WeightedTerms
from dptrain.contrib.accountants.several_picks import SubsetLosses
from dptrain.core import Array

# Of log w: the width of h's steps, and where the first of them lies.
_WIDTH, _BOTTOM = 0.004, -4.0
# The values of log τ and log λ that are tried, and the largest λτ.
_LOG_CAPS, _LOG_RATES = np.linspace(0.7, 8.0, 24), np.linspace(-7.0, 1.5, 48)
_LARGEST_TILT = 200.0
# What a normal drawn by inversion may be off by, and the relative error of a tail's probability.
_MISPLACED, _RELATIVE = 1e-9, 1e-12
_LEAST_SLACK = 1e-9


class RoundedTilt(NamedTuple):
    """h(y) = e^{λ min(w, τ)}, w = e^{κy - κ²/2}, rounded up to a step function.

    Attributes:
        edges: where steps begin, ascending at equal distances, shape (m,).
        top: y at which w = τ, where the next step would begin.
        levels: log h up to the first edge and beyond each of them: λw at the next edge, shape
            (m+1,).
    """

    edges: Array
    top: float
    levels: Array

    @classmethod
    def of(cls, ratio: float, log_cap: float, rate: float) -> RoundedTilt:
        """The tilt for κ, log τ and λ."""
        count = math.ceil((log_cap - _BOTTOM) / _WIDTH)
        logs = log_cap - _WIDTH * np.arange(count, -1.0, -1.0)
        places = logs / ratio + ratio / 2.0
        return cls(places[:-1], float(places[-1]), rate * np.exp(logs))

    def log_rises(self) -> Array:
        """log of what h gains at every edge."""
        return np.asarray(self.levels[:-1] + np.log(np.expm1(np.diff(self.levels))))

    def log_h(self, y: Array) -> Array:
        """log h from below: at a y that is smaller by what it may be off."""
        place = y - (self.edges[0] + _MISPLACED)
        place *= self.edges.size / (self.top - self.edges[0])
        np.ceil(place, out=place)
        np.clip(place, 0.0, self.edges.size, out=place)
        return self.levels[place.astype(np.int32)]


def _log_share(steps: RoundedTilt, log_tails: Array) -> tuple[Array, float]:
    """log of the weight of every tail, and log E[h], from those of the normal's tails."""
    logs = steps.log_rises() + log_tails
    return logs, float(np.logaddexp(steps.levels[0], logsumexp(logs)))


class TailMixture:
    """N(s, 1) tilted by h: a mixture of the normal itself and of its tails.

    Attributes:
        log_total: log E[h].
        log_top: log Pr[y > top].
    """

    def __init__(self, steps: RoundedTilt, shift: float) -> None:
        self._log_tails = log_ndtr(shift - steps.edges)
        logs, self.log_total = _log_share(steps, self._log_tails)
        self._cumulative = np.cumsum(np.exp(logs - self.log_total))
        self.log_top = float(log_ndtr(shift - steps.top))

    def replace_some(self, normals: Array, rng: np.random.Generator) -> None:
        """Turn standard normals into y - s for y of the mixture, in place."""
        share = self._cumulative[-1]
        chosen = rng.random(normals.shape) < share
        uniform = share * rng.random(int(chosen.sum()))
        tail = np.minimum(np.searchsorted(self._cumulative, uniform), self._log_tails.size - 1)
        normals[chosen] = -ndtri_exp(self._log_tails[tail] - rng.standard_exponential(tail.size))

    def beyond_top(self, rng: np.random.Generator, size: int) -> Array:
        """y - s given y > top."""
        return np.asarray(-ndtri_exp(self.log_top - rng.standard_exponential(size)))


class TiltedSubsets:
    """Terms in [0, M] whose mean is δ(ε) of ``SubsetLosses``, or a bound on it; M decays in ε.

    *Remove.* By Maclaurin's inequality dP/dQ = A > e^ε only where the sum of all E·t numbers w_i is
    at least X (A e^{-ε})^{1/(kE)}, X = tE e^{ε/(kE)}. Put s = λX/(kE), c = s^s/(1+s)^{1+s} and
    g = e^{-λX} Π_i h(w_i) + #{w_i > τ}/c with h ≥ e^{λ min(w, τ)}. Then (1 - e^ε/A)_+ ≤ c g. So
    under R of density g/N against P, N = E_P[g], δ(ε) is the mean of
    N (1 - e^ε/A)_+/g ∈ [0, cN] (docs/theory/random-allocation.md#thm-allocation-terms;
    ``test_terms_stay_below_their_ceiling_and_have_the_true_mean``). With a step function h, R is a
    mixture of normals and their tails. λ and τ are those of the least cN on a grid; where none is
    below 1, terms in [0, 1] are drawn from P itself.

    *Add.* The bound by blocks, without a sample: terms that are all equal to it. It is the other
    direction that decides where sampling amplifies.

    *Rounding.* As in ``SubsetLosses``. Besides, normals drawn by inversion may be off by 1e-9: g is
    evaluated that much lower, and losses are taken kEκ times as much higher. That makes terms
    larger, as does a pad for the rounding of N and of the tails' probabilities, and so much of the
    ceiling as a mixture drawn through rounded partial sums is off in total variation.
    """

    def __init__(self, losses: SubsetLosses, curve: AllocationCurve) -> None:
        self.losses, self._curve = losses, curve

    def at(self, sigma: float) -> TiltedSubsetsAtSigma:
        """The terms at one σ."""
        return TiltedSubsetsAtSigma(self, sigma)

    def add(self, sigma: float, epsilon: float) -> WeightedTerms:
        """Terms that all are the deterministic bound."""
        bound = float(self._curve.delta(sigma, np.array([epsilon]))[1][0])
        return WeightedTerms(bound, self.losses.lanes, lambda rng, size: np.full(size, bound))

    def plain(self, sigma: float, epsilon: float) -> WeightedTerms:
        """Terms in [0, 1] of the remove direction, drawn from P."""

        def draw(rng: np.random.Generator, size: int) -> Array:
            losses = self.losses.draw([sigma], "remove", rng, size)
            return hockey_stick(losses[0], epsilon - self.losses.slack)

        return WeightedTerms(1.0, self.losses.lanes, draw)


class _Candidates(NamedTuple):
    """Pairs of λ and τ, and what they make of one coordinate: all of shape (pairs,)."""

    log_cap: Array
    rate: Array
    log_total: Array  # log E[h] where the coordinate is not picked
    log_total_picked: Array
    log_top: Array  # log Pr[w > τ], likewise
    log_top_picked: Array


class TiltedSubsetsAtSigma:
    """``TiltedSubsets`` at one σ, with what does not depend on ε remembered."""

    def __init__(self, tilted: TiltedSubsets, sigma: float) -> None:
        self._tilted, self._sigma = tilted, sigma
        self._ratio = tilted.losses.norm / sigma

    def both(self, epsilon: float) -> dict[str, WeightedTerms]:
        """Terms of either direction at ε ≥ 0, by its name."""
        return {"remove": self.remove(epsilon), "add": self._tilted.add(self._sigma, epsilon)}

    @functools.cached_property
    def _candidates(self) -> _Candidates:
        rows = []
        for log_cap in _LOG_CAPS:
            steps = RoundedTilt.of(self._ratio, log_cap, 1.0)
            tails = [log_ndtr(shift - steps.edges) for shift in (0.0, self._ratio)]
            tops = [float(log_ndtr(shift - steps.top)) for shift in (0.0, self._ratio)]
            for rate in np.exp(_LOG_RATES):
                if rate * math.exp(log_cap) <= _LARGEST_TILT:
                    scaled = steps._replace(levels=rate * steps.levels)
                    totals = [_log_share(scaled, each)[1] for each in tails]
                    rows.append((log_cap, rate, *totals, *tops))
        return _Candidates(*np.array(rows).T)

    def remove(self, epsilon: float) -> WeightedTerms:
        """Terms of the remove direction."""
        law, among = self._tilted.losses, self._candidates
        ceilings = _log_ceiling(
            law, epsilon, among.rate, (among.log_total, among.log_total_picked),
            (among.log_top, among.log_top_picked),
        )[0]  # fmt: skip
        best = int(np.argmin(ceilings))
        if ceilings[best] >= -1e-3:
            return self._tilted.plain(self._sigma, epsilon)
        return self.of(epsilon, float(among.log_cap[best]), float(among.rate[best]))

    def of(self, epsilon: float, log_cap: float, rate: float) -> WeightedTerms:
        """Terms of the remove direction for given τ and λ."""
        law, ratio = self._tilted.losses, self._ratio
        steps = RoundedTilt.of(ratio, log_cap, rate)
        mixtures = (TailMixture(steps, 0.0), TailMixture(steps, ratio))
        return _Tilt(law, ratio, epsilon, rate, steps, mixtures).terms()


def _log_ceiling(
    law: SubsetLosses,
    epsilon: float,
    rate: Array | float,
    log_total: tuple[Array | float, Array | float],
    log_top: tuple[Array | float, Array | float],
) -> tuple[Array, Array, Array, Array]:
    """log cN, log c, and the logarithms of the two parts of N.

    Pairs are of a coordinate that is not picked and of one that is.
    """
    coordinates, picked = law.bins * law.epochs, law.picks * law.epochs
    others = coordinates - picked
    rest = math.log(others) if others else -math.inf
    reach = np.asarray(rate) * coordinates * math.exp(epsilon / picked)
    share = reach / picked
    log_c = share * np.log(share / (1.0 + share)) - np.log1p(share)
    first = picked * np.asarray(log_total[1]) + others * np.asarray(log_total[0]) - reach
    second = np.logaddexp(math.log(picked) + log_top[1], rest + log_top[0]) - log_c
    return log_c + np.logaddexp(first, second), log_c, first, second


class _Tilt:
    """R for one (σ, ε, λ, τ)."""

    def __init__(
        self,
        law: SubsetLosses,
        ratio: float,
        epsilon: float,
        rate: float,
        steps: RoundedTilt,
        mixtures: tuple[TailMixture, TailMixture],
    ) -> None:
        self._law, self._ratio, self._epsilon = law, ratio, epsilon
        self._steps, (self._other, self._picked) = steps, mixtures
        totals = (self._other.log_total, self._picked.log_total)
        tops = (self._other.log_top, self._picked.log_top)
        parts = _log_ceiling(law, epsilon, rate, totals, tops)
        log_ceiling, self._log_c, first, second = (float(each) for each in parts)
        coordinates, picked = law.bins * law.epochs, law.picks * law.epochs
        self._reach = rate * coordinates * math.exp(epsilon / picked)
        self._slack = max(_LEAST_SLACK, law.rounding(ratio, 2) + picked * ratio * _MISPLACED)
        pad = _LEAST_SLACK + coordinates * (_RELATIVE + 4.0 * UNIT * (self._reach + 10.0))
        pad += (1.0 + self._reach / picked) * self._slack
        self._log_mean = float(np.logaddexp(first, second)) + pad
        self._plain_share = math.exp(first - float(np.logaddexp(first, second)))
        # In total variation: a partial sum of m weights adds an error of u of the total to its own
        # weight, a uniform number as much, and so does the choice of a part.
        self._drawn = coordinates * (steps.edges.size + 4.0) * 4.0 * UNIT
        self._ceiling = math.exp(log_ceiling + 2.0 * pad)
        log_picked = math.log(law.picks) + self._picked.log_top
        rest = law.bins - law.picks
        log_other = (math.log(rest) + self._other.log_top) if rest else -math.inf
        self._jump_picked = math.exp(log_picked - float(np.logaddexp(log_picked, log_other)))

    def terms(self) -> WeightedTerms:
        """The weighted terms that are drawn."""
        law = self._law

        def draw(rng: np.random.Generator, size: int) -> Array:
            parts = [self._draw(rng, part.stop - part.start) for part in law.rows(size)]
            return np.concatenate(parts)

        return WeightedTerms(self._ceiling * (1.0 + self._drawn), law.lanes, draw)

    def _normals(self, rng: np.random.Generator, size: int) -> Array:
        """y under R less its mean under P, shape (E, t, size)."""
        law = self._law
        z = rng.standard_normal((law.epochs, law.bins, size))
        tilted = int(rng.binomial(size, self._plain_share))
        self._picked.replace_some(z[:, : law.picks, :tilted], rng)
        self._other.replace_some(z[:, law.picks :, :tilted], rng)
        jumps = size - tilted
        picked = rng.random(jumps) < self._jump_picked
        for mixture, low, high, at in (
            (self._picked, 0, law.picks, tilted + np.nonzero(picked)[0]),
            (self._other, law.picks, law.bins, tilted + np.nonzero(~picked)[0]),
        ):
            if at.size:
                epochs = rng.integers(law.epochs, size=at.size)
                where = rng.integers(low, high, size=at.size)
                z[epochs, where, at] = mixture.beyond_top(rng, at.size)
        return z

    def _draw(self, rng: np.random.Generator, size: int) -> Array:
        law, ratio = self._law, self._ratio
        y = self._normals(rng, size)
        y[:, : law.picks] += ratio
        log_g = self._steps.log_h(y).sum(axis=(0, 1)) - self._reach
        beyond = (y > self._steps.top + _MISPLACED).sum(axis=(0, 1))
        with np.errstate(divide="ignore"):
            log_g = np.logaddexp(log_g, np.log(beyond) - self._log_c)
        y *= ratio
        y -= 0.5 * ratio * ratio
        loss = np.sum([log_subset_means(each, law.picks) for each in y], axis=0)
        # A log g that is far too small belongs to a term that is 0.
        weight = np.exp(np.minimum(self._log_mean - log_g, 600.0))
        found = weight * hockey_stick(loss, self._epsilon - self._slack)
        return np.asarray(np.minimum(found, self._ceiling) + self._drawn * self._ceiling)

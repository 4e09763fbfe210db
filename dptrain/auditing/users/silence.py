"""The score of a reader who looks which neighbors of a user are missing.

Others who share a user with an example of u's are left out for b - 1 steps after it came up (or was
used), so their sums tell when that was. This is the attack on the bound of the literature
(docs/theory/users.md#thm-users-attack), for any graph, with the noise that the sums have.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from scipy.special import logsumexp
from scipy.stats import binom

from dptrain.auditing.draws import key
from dptrain.auditing.users.members import Lookup, Members
from dptrain.core import Array
from dptrain.sampling import UserMinSep

_MOST_MOVES = 4096  # (state, subset) pairs of a step
_SUMMED = 40  # neighbors of a group up to which their number is summed over
_PILOT = 200  # streams from which numbers of neighbors are taken where no formula has them
_LEAST = 1e-300


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Silence:
    """A hidden chain: for how many steps each of u's examples bars its neighbors still.

    The chain is that of u's coins. Emissions are the groups' sums: noise where a group is barred,
    else a binomial number with the group's usual mean, plus noise. That the noise of several steps
    is correlated and that others bar each other is left out, so it is a score, no likelihood.
    Counting is sound with any score.

    Attributes:
        matrix: M.
        sigma: σ.
        probability: p.
        min_sep: b.
        by_sampling: True if coins that came up in vain bar as well.
        places: for each group, the examples of u that it is near to.
        sizes: number of examples of each group.
        usual: mean number of a group in a batch if u does not bar it, shape (groups, n).
        examples: k.
    """

    matrix: Array
    sigma: float
    probability: float
    min_sep: int
    by_sampling: bool
    places: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    usual: Array
    examples: int

    @classmethod
    def of(cls, scheme: UserMinSep, members: Members, matrix: Array, sigma: float) -> Silence:
        """The score for a user of the scheme, whose chain is small enough (``check_states``)."""
        k, b = len(members.examples), scheme.min_sep
        return cls(
            matrix=matrix,
            sigma=sigma,
            probability=scheme.probability,
            min_sep=b,
            by_sampling=scheme.exclusion == "sampling",
            places=tuple(places for places, _ in members.groups),
            sizes=tuple(len(rows) for _, rows in members.groups),
            usual=_usual(scheme, members),
            examples=k,
        )

    def scores(self, outputs: Array, others: Array) -> Array:
        """log of the chain's likelihood with u's gradients over that without; larger if u is in.

        Args:
            outputs: y of u's direction, shape (samples, n).
            others: released sums of the groups' directions, shape (samples, groups, n).

        Returns:
            Shape (samples,).
        """
        silent, loud, present = self._emissions(others)
        barred = self._barred(present)
        inner = outputs @ self.matrix / self.sigma**2
        norms = np.sum(self.matrix**2, axis=0) / self.sigma**2
        states = list(itertools.product(range(self.min_sep), repeat=self.examples))
        heard = [self._heard(state) for state in states]
        moves = [self._moves(state, states) for state in states]
        masses = []
        for signal in (1.0, 0.0):
            law = np.full((len(outputs), len(states)), -np.inf)
            law[:, 0] = 0.0
            for t in range(outputs.shape[1]):
                weights = self._weights(signal * inner[:, t], signal * norms[t], barred[:, :, t])
                after: list[list[Array]] = [[] for _ in states]
                for number in range(len(states)):
                    chosen = np.where(heard[number], loud[:, :, t], silent[:, :, t]).sum(axis=1)
                    here = law[:, number] + chosen
                    for target, subset, free in moves[number]:
                        kind = "used" if free else "idle"
                        after[target].append(here + weights[kind][subset])
                law = np.stack(
                    [
                        logsumexp(each, axis=0) if each else np.full(len(outputs), -np.inf)
                        for each in after
                    ],
                    axis=1,
                )
            masses.append(logsumexp(law, axis=1))
        return np.asarray(masses[0] - masses[1])

    def _emissions(self, others: Array) -> tuple[Array, Array, Array]:
        """log densities of silence and of what is usual, and the chance that somebody is there."""
        inverse = np.linalg.inv(self.matrix)
        spread = self.sigma**2 * np.sum(inverse**2, axis=1)
        silent = -(others**2) / (2 * spread) - np.log(spread) / 2
        loud, present = np.empty_like(silent), np.empty_like(silent)
        for g, size in enumerate(self.sizes):
            share = np.minimum(self.usual[g] / size, 1.0)
            none = np.maximum(binom.pmf(0, size, share), _LEAST)
            if size <= _SUMMED:
                j = np.arange(size + 1)[:, None]
                chances = np.maximum(binom.pmf(j, size, share), _LEAST)
                gap = others[:, g, None, :] - j
                terms = np.log(chances) - gap**2 / (2 * spread) - np.log(spread) / 2
                loud[:, g] = logsumexp(terms, axis=1)
            else:
                wide = spread + size * share * (1 - share)
                gap = others[:, g] - self.usual[g]
                loud[:, g] = -(gap**2) / (2 * wide) - np.log(wide) / 2
            # Silence by bad luck, or because somebody barred it, against what is usual.
            doubt = np.logaddexp(np.log(none), np.log(self.probability))
            present[:, g] = 1.0 / (
                1.0 + np.exp(np.clip(silent[:, g] + doubt - loud[:, g], -50, 50))
            )
        return silent, loud, present

    def _barred(self, present: Array) -> Array:
        """The chance that a neighbor of the last b - 1 batches bars each of u's; (., k, n)."""
        samples, _, steps = present.shape
        free = np.ones((samples, self.examples, steps))
        for g, places in enumerate(self.places):
            for lag in range(1, min(self.min_sep, steps)):
                for place in places:
                    free[:, place, lag:] *= 1.0 - present[:, g, :-lag]
        return 1.0 - free

    def _heard(self, state: tuple[int, ...]) -> list[bool]:
        """True for each group that is not barred."""
        return [not any(state[place] for place in places) for places in self.places]

    def _moves(
        self, state: tuple[int, ...], states: list[tuple[int, ...]]
    ) -> list[tuple[int, tuple[int, ...], bool]]:
        """For every subset of u's coins, the next state, and True if the subset may be used."""
        index = {each: number for number, each in enumerate(states)}
        rest = tuple(max(0, left - 1) for left in state)
        free, found = not any(state), []
        for size in range(self.examples + 1):
            for subset in itertools.combinations(range(self.examples), size):
                if subset and not free and not self.by_sampling:
                    continue
                after = tuple(
                    self.min_sep - 1 if place in subset else left for place, left in enumerate(rest)
                )
                found.append((index[after], subset, free))
        return found

    def _weights(
        self, inner: Array, norm: float, barred: Array
    ) -> dict[str, dict[tuple[int, ...], Array]]:
        """log of chance and likelihood of every subset, where u is free and where it is not."""
        used: dict[tuple[int, ...], Array] = {}
        idle: dict[tuple[int, ...], Array] = {}
        samples, k = barred.shape
        if not self.by_sampling:
            # Only what is used bars: a subset is what is used.
            idle[()] = np.zeros(samples)
        for size in range(k + 1):
            exponents = np.stack([j * inner - j**2 * norm / 2 for j in range(size + 1)])
            for subset in itertools.combinations(range(k), size):
                others = [place for place in range(k) if place not in subset]
                p = self.probability
                if not self.by_sampling:
                    chances = p * (1.0 - barred)
                    chance = np.prod(chances[:, list(subset)], axis=1)
                    chance = chance * np.prod(1.0 - chances[:, others], axis=1)
                    used[subset] = np.log(np.maximum(chance, _LEAST)) + exponents[size]
                    continue
                law = np.zeros((size + 1, samples))  # of how many are not barred by others
                law[0] = 1.0
                for place in subset:
                    free = 1.0 - barred[:, place]
                    law[1:] = law[1:] * (1.0 - free) + law[:-1] * free
                    law[0] *= 1.0 - free
                chance = p**size * (1.0 - p) ** len(others)
                log_chance = np.log(max(chance, _LEAST))
                idle[subset] = np.full(samples, log_chance)
                terms = np.log(np.maximum(law, _LEAST)) + exponents
                used[subset] = log_chance + logsumexp(terms, axis=0)
        return {"used": used, "idle": idle}


def check_states(scheme: UserMinSep, members: Members) -> None:
    """Refuse users whose chain has too many states."""
    k, b = len(members.examples), scheme.min_sep
    if (2 * b) ** k > _MOST_MOVES:
        raise ValueError(
            f"user {members.user} has {k} examples, and with min_sep={b} its chain has {b}^{k} "
            "states, too many for the audit; choose a user with fewer examples, or bound the graph"
        )


def _usual(scheme: UserMinSep, members: Members) -> Array:
    """Mean numbers of the groups in a batch if u bars nobody, shape (groups, n).

    Under exclusion by sampled examples f is there with chance p (1-p)^(w m), of m neighbors that
    are not u's and w earlier steps that bar. Under the other rule by runs of the sampler in which
    u took no part in these steps.
    """
    if scheme.exclusion == "sampling":
        lookup, p = Lookup(scheme.graph), scheme.probability
        window = np.minimum(scheme.min_sep - 1, np.arange(scheme.steps) + scheme.burn_in)
        found = np.zeros((len(members.groups), scheme.steps))
        for g, (_, rows) in enumerate(members.groups):
            for other in rows.tolist():
                m = len(np.setdiff1d(lookup.near(other), members.examples))
                found[g] += p * (1.0 - p) ** (window * m)
        return found
    place = np.zeros(scheme.dataset_size, dtype=np.int64)
    place[members.examples] = 1
    for g, (_, rows) in enumerate(members.groups):
        place[rows] = 2 + g
    total = np.full((len(members.groups), scheme.steps), 1e-3)
    runs = np.full(scheme.steps, 2e-3)
    for run in range(_PILOT):
        last = -scheme.min_sep
        for t, batch in enumerate(scheme.stream(key(0, run))):
            counts = np.bincount(place[batch], minlength=2 + len(members.groups))
            if t - last >= scheme.min_sep:
                total[:, t] += counts[2:]
                runs[t] += 1
            if counts[1]:
                last = t
    return total / runs

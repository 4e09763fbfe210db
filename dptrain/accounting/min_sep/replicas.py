"""Moments E_Q[(P/Q)^α] of b-min-sep sampling, and draws from the law that they tilt to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.core import Array, checks

Indices = npt.NDArray[np.int64]

_MOST_COPIES = 8
_MOST_STATES = 60_000  # a message each for some hundred steps: half a gigabyte at most
_MOST_ENTRIES = 1 << 23  # of the table of ages
# Weights e^{α(α-1)‖c‖²/(2σ²)} and far beyond leave float64: such orders are not offered.
_LARGEST_EXPONENT = 300.0
# Backward messages are called settled when a step changes none by more than this (relatively).
_SETTLED = 1e-14
# Relative rounding of A and of the drawn law's density: n steps of a few 1e-15, and the settling.
ROUNDING = 1e-9


def largest_order(law: MinSepLaw, sigma: float) -> int:
    """The largest α ≤ 8 whose states fit into memory and whose weights fit into float64.

    It is 1 (no order) where not even α = 2 does.
    """
    scaled = float(law.squared_norms[0]) / sigma**2
    order = 1
    for trial in range(2, _MOST_COPIES + 1):
        states = math.comb(law.min_sep + trial - 1, trial)
        # j copies that act meet each other and the rest: (j(j-1)/2 + j(α-j))‖c‖²/σ² at most.
        exponent = trial * (trial - 1) * scaled
        if states > _MOST_STATES or states * law.min_sep > _MOST_ENTRIES:
            break
        if exponent > _LARGEST_EXPONENT:
            break
        order = trial
    return order


class Replicas:
    """α independent copies x¹, …, x^α of one example's participations, weighted by their overlaps.

    Their weights Pr[x¹]…Pr[x^α]·e^{Σ_{k<l} <Cx^k, Cx^l>/σ²} add up to A = E_Q[(P/Q)^α], and with
    them (P/Q)^α Q/A is a mixture of the N(C Σ_k x^k, σ²I). The state before step t is the multiset
    of the copies' ages: steps since the last participation, b-1 for an available copy. A is a
    backward program over the states, and the mixture can be drawn from, forwards
    (docs/theory/min-sep.md#thm-min-sep-moments;
    ``test_moment_equals_the_sum_over_all_tuples_of_patterns``).

    ``order`` is α ≥ 2, an integer.
    """

    def __init__(self, law: MinSepLaw, sigma: float, order: int) -> None:
        checks.invariant(order >= 2, "the moment is of order 2 or higher")
        checks.invariant(
            order <= largest_order(law, sigma),
            "the moment is of an order above the largest that the draws can be tilted by",
        )
        self._law, self._sigma, self._order = law, sigma, order
        ages = np.array(
            list(itertools.combinations_with_replacement(range(law.min_sep), order)), dtype=np.int64
        )
        position = {tuple(row): index for index, row in enumerate(ages.tolist())}
        self._free = (ages == law.min_sep - 1).sum(axis=1)
        self._barred = np.zeros((len(ages), max(law.min_sep - 1, 1)))
        for age in range(law.min_sep - 1):
            self._barred[:, age] = (ages == age).sum(axis=1)
        self._next = self._successors(ages, position)
        self._start = self._initial(ages)
        self._common: list[Array] | None = None  # weights of every homogeneous step
        self._messages, self._settled, self.log_moment = self._backward()

    def _successors(self, ages: Indices, position: dict[tuple[int, ...], int]) -> list[Indices]:
        """Entry j: the state after j of the available copies took part (-1: fewer are)."""
        last = self._law.min_sep - 1
        after = np.minimum(ages + 1, last)
        found = []
        for taking in range(self._order + 1):
            index = np.full(len(ages), -1, dtype=np.int64)
            moved = after.copy()
            # Ages ascend, so the available copies are the last ones.
            moved[:, self._order - taking :] = 0
            moved.sort(axis=1)
            for row in np.flatnonzero(self._free >= taking):
                index[row] = position[tuple(moved[row].tolist())]
            found.append(index)
        return found

    def _initial(self, ages: Indices) -> Array:
        """Probability of each state before the first step; copies are independent."""
        b, p = self._law.min_sep, self._law.probability
        single = np.zeros(b)
        single[b - 1] = 1.0
        if self._law.warm_start:
            # Barred for s more steps, s = 1..b-1, is age b-1-s; each has the weight p.
            single[: b - 1] = p
            single /= single.sum()
        chance = single[ages].prod(axis=1)
        orderings = math.factorial(self._order) / np.array(
            [
                math.prod(math.factorial(len(list(group))) for _, group in itertools.groupby(row))
                for row in ages.tolist()
            ]
        )
        return np.asarray(chance * orderings)

    def _gram(self, t: int) -> Array:
        """<c_t, c_{t-d}>/σ² for d = 0..b-1; 0 for participations before the first step."""
        return self._law.overlaps(t) / self._sigma**2

    def _weights(self, t: int) -> list[Array]:
        """Entry j: weight of j participations at step t in each state (0 if fewer are free)."""
        if not self._homogeneous(t):
            return self._computed_weights(t)
        if self._common is None:
            self._common = self._computed_weights(t)
        return self._common

    def _computed_weights(self, t: int) -> list[Array]:
        p, gram = self._law.probability, self._gram(t)
        overlap = self._barred[:, : max(gram.size - 1, 0)] @ gram[1:]
        weights = []
        for taking in range(self._order + 1):
            resting = np.maximum(self._free - taking, 0)
            choices = np.array([math.comb(int(m), taking) for m in range(self._order + 1)], float)
            chance = choices[self._free] * p**taking * (1.0 - p) ** resting
            exponent = taking * (taking - 1) / 2.0 * gram[0] + taking * overlap
            weights.append(np.where(self._free >= taking, chance * np.exp(exponent), 0.0))
        return weights

    def _homogeneous(self, t: int) -> bool:
        """True if the weights of step t are those of every step away from both ends."""
        return self._law.bands - 1 <= t <= self._law.steps - self._law.bands

    def _backward(self) -> tuple[dict[int, Array], Array | None, float]:
        """Messages (up to factors) that are not the settled one, that one, and log A."""
        message, scale = np.ones(len(self._free)), 0.0
        messages: dict[int, Array] = {self._law.steps: message}
        settled: Array | None = None
        growth = 0.0
        for t in range(self._law.steps - 1, -1, -1):
            if settled is not None and self._homogeneous(t):
                scale += growth
                continue
            weights = self._weights(t)
            new = np.zeros_like(message)
            for weight, successor in zip(weights, self._next, strict=True):
                new += weight * message[successor]
            top = float(new.max())
            new /= top
            scale += math.log(top)
            if self._homogeneous(t) and float(np.abs(new / message - 1.0).max()) < _SETTLED:
                settled, growth = message, math.log(top)
            else:
                messages[t] = new
            message = new
        log_moment = scale + math.log(float(self._start @ message))
        return messages, settled, log_moment

    def _message(self, t: int) -> Array:
        found = self._messages.get(t, self._settled)
        assert found is not None
        return found

    def _kernels(self) -> Iterator[tuple[int, list[Array]]]:
        """For each step the cumulated probabilities of 0, 1, … participations in each state."""
        settled: list[Array] | None = None
        for t in range(self._law.steps):
            usual = t not in self._messages and t + 1 not in self._messages
            usual = usual and self._homogeneous(t)
            if not usual or settled is None:
                after = self._message(t + 1)
                joint = [w * after[s] for w, s in zip(self._weights(t), self._next, strict=True)]
                kernel = list(np.cumsum(joint, axis=0) / np.sum(joint, axis=0))
                settled = kernel if usual else settled
            else:
                kernel = settled
            yield t, kernel

    def draw(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int16]:
        """Numbers of copies that take part, shape (steps, size)."""
        first = self._start * self._message(0)
        cumulated = np.cumsum(first / first.sum())
        cumulated[-1] = 1.0
        state = np.searchsorted(cumulated, rng.random(size), side="right")
        counts = np.zeros((self._law.steps, size), dtype=np.int16)
        for t, kernel in self._kernels():
            u = rng.random(size)
            taking = np.flatnonzero(u >= kernel[0][state])
            quiet = self._next[0][state]
            if taking.size:
                before, chance = state[taking], u[taking]
                number = np.ones(taking.size, dtype=np.int64)
                for j in range(1, self._order):
                    number += (chance >= kernel[j][before]).astype(np.int64)
                # Rounding of a cumulated 1 must not make more copies act than are available.
                number = np.minimum(number, self._free[before])
                counts[t, taking] = number
                after = np.stack(self._next)[number, before]
                quiet[taking] = after
            state = quiet
        return counts

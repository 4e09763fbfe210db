"""Tools of streams: coins over a long row, a pool that examples return to, truncation.

Coins cost as much as there are successes, the pool as much as there are examples that move.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from dptrain.sampling.scheme import Indices


def move_last(entries: npt.NDArray[Any], positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Reorder ``entries`` in place so that those at ``positions`` come last; returns a copy.

    The work is proportional to the number of positions: the entries among the last ones that stay
    move into the holes before them. The order of the others changes, which carries no meaning
    where every entry has the same chance.

    Args:
        entries: a contiguous row, or a view of a part of one.
        positions: distinct, ascending, each below ``len(entries)``.
    """
    taken = entries[positions]
    kept = len(entries) - len(positions)
    split = int(np.searchsorted(positions, kept))
    holes, gone = positions[:split], positions[split:]
    survives = np.ones(len(positions), dtype=bool)
    survives[gone - kept] = False
    entries[holes] = entries[kept:][survives]
    entries[kept:] = taken
    return taken


class Pool:
    """The examples that may be drawn, in an order that carries no meaning."""

    def __init__(self, members: npt.NDArray[Any], capacity: int | None = None) -> None:
        size = len(members)
        self._entries = np.empty(size if capacity is None else capacity, dtype=members.dtype)
        self._entries[:size] = members
        self._size = size

    def __len__(self) -> int:
        return self._size

    @property
    def members(self) -> npt.NDArray[Any]:
        """The members by position: a view that the next change of the pool invalidates."""
        return self._entries[: self._size]

    def take(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Remove and return the members at distinct ascending ``positions``."""
        taken = move_last(self.members, positions)
        self._size -= len(positions)
        return taken

    def put(self, examples: npt.NDArray[Any]) -> None:
        """Add examples that are not members."""
        end = self._size + len(examples)
        if end > len(self._entries):
            raise ValueError(f"the pool holds at most {len(self._entries)} examples, not {end}")
        self._entries[self._size : end] = examples
        self._size = end


def successes(rng: np.random.Generator, trials: int, probability: float) -> npt.NDArray[np.int64]:
    """Ascending positions of the successes among ``trials`` i.i.d. Bernoulli(``probability``).

    The distances between successes of a Bernoulli sequence are i.i.d. Geometric(probability)
    (Devroye 1986, chapter X.2), so drawing those has exactly the law of a coin per trial in
    O(trials · probability) expected work.
    """
    if trials == 0:
        return np.empty(0, dtype=np.int64)
    mean = trials * probability
    block = int(mean + 4 * math.sqrt(mean)) + 8  # one block suffices nearly always
    found: list[npt.NDArray[np.int64]] = []
    last = -1
    while last < trials:
        # A distance beyond the end ends the row whatever its size: cutting it there keeps the
        # sum of a block far from the end of int64 when the probability is tiny.
        distances = np.minimum(rng.geometric(probability, size=block), trials + 1)
        positions = last + np.cumsum(distances, dtype=np.int64)
        found.append(positions)
        last = int(positions[-1])
    row = np.concatenate(found)
    return row[: np.searchsorted(row, trials)]


def truncate(rng: np.random.Generator, batch: Indices, largest: int | None) -> Indices:
    """A uniformly random subset of ``largest`` of the batch if it has more, in its order.

    ``None`` keeps the whole batch, and draws nothing.
    """
    if largest is None or len(batch) <= largest:
        return batch
    kept = rng.choice(len(batch), size=largest, replace=False, shuffle=False)
    return batch[np.sort(kept)]


def inclusion_probability(
    trials: npt.ArrayLike, probability: float, largest: int
) -> npt.NDArray[np.float64]:
    """E[min(X, B)]/m: one example's chance to be drawn and kept, for X ~ Bin(m, p).

    It is p·P(Bin(m-1, p) ≤ B-1) + (B/m)·P(X > B) (docs/theory/sampling.md#thm-truncated-rate;
    ``test_mean_of_a_truncated_binomial``).

    Args:
        trials: m ≥ 1, the examples that toss a coin; one number or an array of them.
        probability: p.
        largest: B ≥ 1.
    """
    m = np.asarray(trials)
    below = probability * binom.cdf(largest - 1, m - 1, probability)
    return np.asarray(below + largest / m * binom.sf(largest, m, probability), dtype=np.float64)


def mean_truncated_binomial(trials: int, probability: float, largest: int) -> float:
    """E[min(X, B)] for X ~ Bin(``trials``, ``probability``) and B = ``largest``."""
    return trials * float(inclusion_probability(trials, probability, largest))

"""Independent Bernoullis over a long row, at the cost of the successes only."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


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

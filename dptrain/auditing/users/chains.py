"""The exact likelihood ratio of a user whose coins show in nobody else's batches."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from dptrain.auditing.likelihood import Likelihood, PatternMixture
from dptrain.core import Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UserCoins:
    """The law of x, the number of a user's examples in every batch, from the user's coins alone.

    At step t each of ``examples[t]`` examples comes up with probability ``probabilities[t]``,
    independently. They are used unless one of the user's coins came up (``by_sampling``), or one of
    its examples was used, in one of the last ``min_sep`` - 1 steps.

    Attributes:
        examples: shape (n,).
        probabilities: shape (n,).
        min_sep: b; 1: nobody is barred.
        by_sampling: True if coins that came up in vain bar as well.
        burn_in: steps of the same kind before the first, from an empty past.
    """

    examples: npt.NDArray[np.int64]
    probabilities: Array
    min_sep: int = 1
    by_sampling: bool = True
    burn_in: int = 0

    @property
    def steps(self) -> int:
        """Number n of steps."""
        return len(self.examples)

    def counts(self, step: int) -> Array:
        """The law of the number of examples that come up, shape (k + 1,)."""
        k = int(self.examples[step])
        return np.asarray(binom.pmf(np.arange(k + 1), k, self.probabilities[step]))

    def move(self, barred: list[Array], none: float, used: Array) -> list[Array]:
        """One step of the chain of barred steps.

        Args:
            barred: the mass of histories that are barred for so many steps more, b of them.
            none: chance that no coin comes up.
            used: the mass of histories in which examples are used at this step.
        """
        b = self.min_sep
        after = [np.zeros_like(barred[0]) for _ in range(b)]
        after[0] = after[0] + none * barred[0]
        after[b - 1] = after[b - 1] + used
        for left in range(1, b):
            if self.by_sampling:
                after[left - 1] = after[left - 1] + none * barred[left]
                after[b - 1] = after[b - 1] + (1.0 - none) * barred[left]
            else:
                after[left - 1] = after[left - 1] + barred[left]
        return after

    def start(self, size: int) -> list[Array]:
        """The law of the number of barred steps after the burn-in, as columns of ``size`` rows."""
        law = [np.full(size, float(left == 0)) for left in range(self.min_sep)]
        none = float(self.counts(0)[0])
        for _ in range(self.burn_in if self.min_sep > 1 else 0):
            law = self.move(law, none, (1.0 - none) * law[0])
        return law

    def rates(self) -> Array:
        """The chance of x_t > 0, shape (n,)."""
        law, found = self.start(1), np.zeros(self.steps)
        for t in range(self.steps):
            none = float(self.counts(t)[0])
            found[t] = (1.0 - none) * law[0][0]
            law = self.move(law, none, (1.0 - none) * law[0])
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UserChain(Likelihood):
    """Columns of M at steps of two participations are orthogonal: ratios of steps multiply.

    Forwards in time, by the number of steps that the user is still barred: j examples at step t
    weigh exp((j ⟨M_t, y⟩ - j² ‖M_t‖²/2)/σ²). The accountants' recursion goes backwards.
    """

    coins: UserCoins

    def log_ratio(self, outputs: Array, scale: float = 1.0) -> Array:
        """log of the sum over all histories, rescaled at every step."""
        inner = outputs @ self.matrix / self.sigma**2
        norms = np.sum(self.matrix**2, axis=0) / self.sigma**2
        law = self.coins.start(len(outputs))
        log_scale = np.zeros(len(outputs))
        for t in range(self.coins.steps):
            counts = self.coins.counts(t)
            j = scale * np.arange(1, len(counts))
            exponents = np.multiply.outer(inner[:, t], j) - j**2 * norms[t] / 2
            top = np.maximum(exponents.max(axis=1, initial=0.0), 0.0)
            some = np.exp(exponents - top[:, None]) @ counts[1:]
            # All shrinks by e^-top, so that no exponential overflows.
            idle = [each * np.exp(-top) for each in law]
            moved = self.coins.move(idle, float(counts[0]), some * law[0])
            total = np.sum(moved, axis=0)
            law = [each / total for each in moved]
            log_scale += top + np.log(total)
        return log_scale


def enumerated(coins: UserCoins, matrix: Array, sigma: float, most: int) -> PatternMixture | None:
    """The ratio by all values that x can have, for any matrix; ``None`` if there are too many.

    Only where nobody is barred, whose steps are independent.
    """
    choices = [np.flatnonzero(coins.counts(t)) for t in range(coins.steps)]
    if coins.min_sep > 1 or np.prod([float(len(each)) for each in choices]) > most:
        return None
    patterns = np.array(list(itertools.product(*choices)), dtype=np.float64)
    laws = [coins.counts(t) for t in range(coins.steps)]
    weights = np.ones(len(patterns))
    for t, law in enumerate(laws):
        weights *= law[patterns[:, t].astype(np.int64)]
    return PatternMixture(matrix=matrix, sigma=sigma, patterns=patterns, weights=weights)

"""Squared norms of C x on a grid, for programs over what a user's draws add up to."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from dptrain.core import Array

Levels = npt.NDArray[np.int64]

# Probability (log) that may exceed the grid. That mass is counted at the largest norm that can
# occur at all: this bounds how loose δ can get far down its tail, never whether it is valid.
_LOG_BEYOND = -100.0 * math.log(10.0)
# Levels up to the largest squared column norm, where the norms differ: no more than this.
_FINEST = 64


def binomial(trials: int, probability: float) -> Array:
    """P(Bin(k, p) = j) for j = 0..k, to a relative (k + 800) ulp or better."""
    j = np.arange(trials + 1)
    if probability == 1.0:
        return (j == trials).astype(float)
    ways = np.array([float(math.comb(trials, int(i))) for i in j])
    return np.asarray(ways * probability**j * np.exp((trials - j) * math.log1p(-probability)))


@dataclasses.dataclass(frozen=True)
class SquaredNormGrid:
    """Level i stands for a squared norm of at most i·``unit``; all sums are rounded up.

    Attributes:
        unit: the spacing.
        added: shape (steps, k): levels that j = 1..k examples at step t add.
        size: number of levels; whatever lies beyond is counted at ``most``.
        most: largest squared norm that any pattern of participations reaches.
    """

    unit: float
    added: Levels
    size: int
    most: float

    @classmethod
    def of(
        cls,
        squared_norms: Array,
        *,
        examples: int,
        probability: float,
        most: float,
        operations: float,
    ) -> SquaredNormGrid:
        """The grid of columns with these squared norms; without rounding if they are all equal.

        Args:
            squared_norms: ‖C_{:,t}‖², shape (steps,), positive.
            examples: k, the most that are drawn at a step.
            probability: p of each of them.
            most: an upper bound on ‖C x‖².
            operations: where norms differ, the grid is as fine as steps times levels times counts
                stay below this, or as coarse as for equal norms.
        """
        heaviest = float(squared_norms.max())
        share, finest = squared_norms / heaviest, 1
        if share.min() < 1.0:
            level = min(_hardly_exceeded(share, examples, probability), most / heaviest)
            cost = max(level, 1.0) * len(share) * (examples + 4)
            finest = int(np.clip(operations / cost, 1, _FINEST))
        unit = heaviest / finest
        counts = np.arange(1, examples + 1) ** 2
        # A product may come out an ulp low; squared() makes up for it.
        added = np.ceil(share[:, None] * counts * finest).astype(np.int64)
        # Rounded shares: sums of them are what must hardly ever exceed the grid.
        level = finest * _hardly_exceeded(np.ceil(share * finest) / finest, examples, probability)
        # All that is above the largest norm is counted at it, so levels need not go further.
        size = math.ceil(max(1.0, min(level, most / unit * (1.0 + 1e-12)))) + 1
        return cls(unit, added, size, most)

    def squared(self) -> Array:
        """Squared norms, rounded up: shape (size + 1,), the last one for what lies beyond."""
        inside = np.minimum(self.unit * np.arange(self.size), self.most)
        return np.append(inside, self.most) * (1.0 + 1e-12)


def _hardly_exceeded(share: Array, examples: int, probability: float) -> float:
    """S with P(Σ_t share_t X_t² > S) ≤ 1e-100 for independent X_t ~ Bin(k, p), by Chernoff.

    Exclusion, by whatever rule, only turns some X_t into 0, so the same holds for what is left.
    """
    squares = np.arange(examples + 1) ** 2
    log_mass = np.log(np.maximum(binomial(examples, probability), 1e-300))
    best = float(examples**2 * share.sum())
    for tilt in np.geomspace(1e-4, 100.0, 60):
        cumulant = float(np.logaddexp.reduce(log_mass + tilt * squares))
        # log E exp(tilt·share·X²) is convex in share and 0 at 0: at most share times that at 1.
        best = min(best, (float(share.sum()) * cumulant - _LOG_BEYOND) / tilt)
    return best

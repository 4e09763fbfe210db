"""Privacy losses of k picks out of t steps with independent noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dptrain.accounting import Cost
from dptrain.accounting.balls_in_bins import LARGEST_NORMAL, log_subset_means, rounding
from dptrain.accounting.simulation import DIRECTIONS, Direction, Simulation
from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import RandomAllocation

_EASY = 16.0  # ratio c/σ up to which the slack covers the rounding
_BLOCK_BYTES = 1 << 21  # of a block's normals
_MINUTES = 50_000  # t·k·E at which δ = 1e-5 still takes minutes


@dataclasses.dataclass(frozen=True)
class SubsetLosses(Simulation):
    """E independent copies of P, uniform over k-subsets S of N(c·1_S, σ²I_t), against N(0, σ²I_t).

    dP/dQ of a copy is the mean over all k-subsets of Π_{i∈S} w_i, w_i = e^{c y_i/σ² - c²/(2σ²)}
    (docs/theory/random-allocation.md#thm-allocation-pair): O(tk) a sample by ``log_subset_means``.
    By symmetry S may be the first k steps under P, and both directions and all σ share their
    normals.

    ``slack`` covers the rounding while c ≤ 16σ; below that σ every loss is reported as ∞.

    Attributes:
        bins: t.
        picks: k in 1..t.
        epochs: E.
        norm: c > 0, the norm of every column of C.
    """

    bins: int
    picks: int
    epochs: int
    norm: float

    @classmethod
    def of(cls, mechanism: MatrixMechanism) -> SubsetLosses:
        """The losses of a mechanism that ``picks_refusal`` does not refuse."""
        scheme = mechanism.scheme
        assert isinstance(scheme, RandomAllocation)
        norm = float(mechanism.strategy.column_norms(scheme.steps).max())
        return cls(scheme.steps_per_epoch, scheme.participations, scheme.epochs, norm)

    @property
    def sensitivity(self) -> float:
        """√(kE)·c."""
        return math.sqrt(self.picks * self.epochs) * self.norm * (1.0 + 1e-15)

    @property
    def work(self) -> int:
        """t·E."""
        return self.bins * self.epochs

    @property
    def lanes(self) -> int:
        """Samples a chunk."""
        return 4096

    def rounding(self, ratio: float, shifts: int = 1) -> float:
        """Bound on the rounding of a loss where c/σ = ``ratio``, with means of ``shifts``·c."""
        largest = ratio * LARGEST_NORMAL + (shifts + 0.5) * ratio * ratio
        return self.epochs * rounding(self.bins, self.picks, largest)

    @property
    def slack(self) -> float:
        """Covers ``rounding`` up to c = 16σ; at least 1e-9."""
        return max(1e-9, self.rounding(_EASY))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: t, k, E and c."""
        return {"law": "random-allocation", **dataclasses.asdict(self)}

    def rows(self, size: int) -> list[slice]:
        """Blocks of so many samples whose normals fit a cache."""
        step = max(16, _BLOCK_BYTES // (8 * self.work))
        return [slice(start, min(start + step, size)) for start in range(0, size, step)]

    def draw(
        self,
        sigmas: Sequence[float],
        direction: Direction | Literal["both"],
        rng: np.random.Generator,
        size: int,
    ) -> Array:
        """Draw losses, every σ by itself."""
        directions = DIRECTIONS if direction == "both" else (direction,)
        losses = np.zeros((len(directions), len(sigmas), size))
        for part in self.rows(size):
            for _ in range(self.epochs):
                normals = rng.standard_normal((self.bins, part.stop - part.start))
                for at, sigma in enumerate(sigmas):
                    ratio = self.norm / sigma
                    if ratio > _EASY:
                        losses[:, at, part] = math.inf
                        continue
                    numbers = ratio * normals - 0.5 * ratio * ratio
                    # The remove direction last: it shifts the numbers in place.
                    for side in sorted(range(len(directions)), key=lambda s: directions[s]):
                        if directions[side] == "add":
                            losses[side, at, part] -= log_subset_means(numbers, self.picks)
                        else:
                            numbers[: self.picks] += ratio * ratio
                            losses[side, at, part] += log_subset_means(numbers, self.picks)
        return losses if direction == "both" else losses[0]


def cost_of_samples(mechanism: MatrixMechanism) -> Cost:
    """Minutes, or hours where a loss takes many steps."""
    law = SubsetLosses.of(mechanism)
    work = law.work * min(law.picks, law.bins - law.picks + 1)
    return Cost.MINUTES if work <= _MINUTES else Cost.HOURS

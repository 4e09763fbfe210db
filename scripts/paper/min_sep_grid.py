"""Least prefix-sum MSE of b-min-sep, cyclic Poisson and balls-in-bins sampling over a grid.

MSE = (1/n)‖A C^-1‖_F² σ(C)² with A the prefix sums and σ(C) the noise that the scheme's accountant
certifies for (ε, δ). Cyclic Poisson sampling is accounted deterministically; the other two by the
certificate of Dong & Ganesh's Appendix A (threshold δ/2, powers of 1.01) or importance sampling.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm

from dptrain.accounting import Accountant
from dptrain.accounting.balls_in_bins import BallsInBinsImportance
from dptrain.accounting.min_sep import MinSepImportance
from dptrain.accounting.poisson import PoissonPLD
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, CyclicPoisson, MinSep, Scheme
from dptrain.strategies import BandMF

# Accounting needs N/B̄ only.
_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Grid:
    """The parameters that are varied: those of the paper's section 7.1, or scaled down."""

    steps: int
    epoch_lengths: tuple[int, ...]
    bands: tuple[int, ...]
    epsilons: tuple[float, ...]
    delta: float = 1e-3


EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
PAPER = Grid(1024, (128, 256, 512, 1024), (2, 4, 8, 16, 32), EPSILONS)
QUARTER = Grid(256, (32, 64, 128, 256), (2, 4, 8), EPSILONS)


class Best(NamedTuple):
    """The setting of least MSE: bands of C, the scheme's b, its σ and the MSE."""

    bands: int
    min_sep: int
    sigma: float
    mse: float


@functools.cache
def _strategy(bands: int, steps: int) -> tuple[BandMF, float]:
    """The strategy and its MSE at σ = 1."""
    strategy = BandMF(bands=bands).bind(steps)
    return strategy, float(np.mean(strategy.errors(steps) ** 2))


class Search:
    """Least MSE at one epoch length and ε.

    Args:
        grid: what the search ranges over.
        length: the epoch length N/B̄.
        epsilon: the target.
        seed: of simulations.
        exhaustive: whether to try every pair of bands and b; else neighbors (halves and doubles)
            are followed downhill.
    """

    def __init__(
        self, grid: Grid, length: int, epsilon: float, *, seed: int, exhaustive: bool
    ) -> None:
        self._grid, self._length, self._epsilon = grid, length, epsilon
        self._seed, self._exhaustive = seed, exhaustive
        self._known: dict[tuple[int, int], Best] = {}

    def cyclic(self) -> Best:
        """Cyclic Poisson sampling whose cycle is the number of bands."""
        found = [
            self._best(self._cyclic(bands), bands, PoissonPLD())
            for bands in self._grid.bands
            if bands <= self._length
        ]
        return min(found, key=lambda each: each.mse)

    def balls_in_bins(self, start: int) -> Best:
        """Balls-in-bins with N/B̄ bins, from a first guess of the bands."""
        return self._descend((start, self._length), periodic=True)

    def min_sep(self, start: tuple[int, int]) -> Best:
        """b-min-sep with b ≥ bands up to N/B̄, which is balls-in-bins; from a first guess."""
        found = self._descend(start, periodic=False)
        return min([found, *self._known.values()], key=lambda each: each.mse)

    def by_importance(self, best: Best) -> Best:
        """The same setting certified by importance sampling."""
        accountant = MinSepImportance(seed=self._seed)
        return self._best(self._min_sep(best.min_sep), best.bands, accountant)

    def _descend(self, start: tuple[int, int], *, periodic: bool) -> Best:
        allowed = [
            (bands, b)
            for bands in self._grid.bands
            for b in (self._length >> k for k in range(self._length.bit_length() - 1))
            if bands <= b and (b == self._length or not periodic)
        ]
        if self._exhaustive:
            return min(map(self._simulated, allowed), key=lambda each: each.mse)
        # The nearest allowed pair: bands and b may not exceed the epoch length.
        at = min(allowed, key=lambda each: _distance(each, start))
        while True:
            near = [each for each in allowed if _distance(each, at) <= 1]
            best = min(near, key=lambda each: self._simulated(each).mse)
            if best == at:
                return self._simulated(at)
            at = best

    def _simulated(self, pair: tuple[int, int]) -> Best:
        if pair not in self._known:
            bands, b = pair
            accountant: Accountant = MinSepImportance(seed=self._seed)
            if b == self._length:
                accountant = BallsInBinsImportance(seed=self._seed)
            self._known[pair] = self._best(self._min_sep(b), bands, accountant)
        return self._known[pair]

    def _best(self, scheme: Scheme, bands: int, accountant: Accountant) -> Best:
        strategy, error = _strategy(bands, self._grid.steps)
        mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
        with warnings.catch_warnings():
            # The paper's δ = 1e-3 is above 1/N, and says so itself.
            warnings.filterwarnings("ignore", message="delta=.* is not below 1/N")
            sigma = accountant.calibrate(
                mechanism, epsilon=self._epsilon, delta=self._grid.delta
            ).noise_multiplier
        return Best(bands, scheme.min_sep, sigma, error * sigma**2)

    def _cyclic(self, bands: int) -> Scheme:
        return CyclicPoisson.for_batch_size(
            batch_size=_BATCH,
            dataset_size=_BATCH * self._length,
            cycle=bands,
            steps=self._grid.steps,
        )

    def _min_sep(self, b: int) -> Scheme:
        size = _BATCH * self._length
        if b == self._length and self._grid.steps % b == 0:
            return BallsInBins(bins=b, epochs=self._grid.steps // b, dataset_size=size)
        return MinSep.for_batch_size(
            batch_size=_BATCH, dataset_size=size, min_sep=b, steps=self._grid.steps
        )


def _distance(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Doublings between two pairs, the larger of both numbers."""
    return max(abs(float(np.log2(a / b))) for a, b in zip(one, other, strict=True))


class Row(NamedTuple):
    """One setting of the grid: the best of every scheme."""

    length: int
    epsilon: float
    cyclic: Best
    balls_in_bins: Best
    min_sep: Best

    def ratio(self, other: str) -> float:
        """MSE of b-min-sep over that of ``"cyclic"`` or ``"balls_in_bins"``."""
        return self.min_sep.mse / float(getattr(self, other).mse)


def compute(
    grid: Grid,
    *,
    seed: int,
    exhaustive: bool = False,
    importance: bool = False,
    finished: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Every setting of the grid; ``finished`` sees each row as it is done."""
    rows = []
    with tqdm(total=len(grid.epoch_lengths) * len(grid.epsilons), desc="settings") as bar:
        for length in grid.epoch_lengths:
            start = (grid.bands[len(grid.bands) // 2], 4 * grid.bands[len(grid.bands) // 2])
            bands = grid.bands[-1]
            for epsilon in grid.epsilons:
                search = Search(grid, length, epsilon, seed=seed, exhaustive=exhaustive)
                cyclic, bins = search.cyclic(), search.balls_in_bins(bands)
                best = search.min_sep(start)
                start, bands = (best.bands, best.min_sep), bins.bands
                if importance:
                    same = best == bins
                    bins = search.by_importance(bins)
                    best = bins if same else search.by_importance(best)
                rows.append(Row(length, epsilon, cyclic, bins, best))
                finished(rows[-1])
                bar.update()
    return rows

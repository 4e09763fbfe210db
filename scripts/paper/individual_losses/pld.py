"""Individual ε of many examples from counts of their gradient norms."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from dptrain.accounting.losses import gaussian
from dptrain.accounting.poisson import poisson_curve
from dptrain.contrib.individual import NormGrid
from dptrain.core import Adjacency, Array, checks
from scripts.paper.individual_losses.arguments import (
    Counts,
    check_step,
    checked_counts,
    checked_deltas,
    one_each,
)
from scripts.paper.individual_losses.tilted_totals import TiltedTotals


class IndividualPLD:
    """δ_x(ε) and ε_x(δ) of Poisson-sampled steps whose norms an example has shown.

    An example whose norm ratio is r spends at a step what a Poisson-sampled Gaussian with noise σ/r
    does. Norms are rounded up to a grid and counted; the example's loss is a sum of independent
    losses, one for each count.

    Koskela, Tobaben & Honkela 2023 (arXiv 2209.15596, section 5 and App. D) multiply discrete
    Fourier transforms of losses on a lattice. Here no loss is put on a lattice: the transforms are
    those of the continuous losses, under an exponential tilt that centers the total where δ is
    wanted, at about ten frequencies; what they leave out, and wrapping around, can only raise δ
    (docs/theory/composition.md#thm-periodic; ``test_brute_force_of_two_steps``). δ keeps its
    relative precision however small it is, and the answer is never below the truth, up to rounding
    that is estimated and added. It is at most about 1e-4 of ε above, besides the rounding of norms,
    where there are more than a few steps.

    The numbers are an example's own guarantee only for steps that did not depend on the outputs:
    for adaptive training they are an estimate (docs/theory/individual.md#thm-pld-filter). They are
    private data.

    Args:
        probability: Poisson rate q in (0, 1].
        noise_multiplier: σ > 0, over the clipping norm.
        grid: of norm ratios.

    Raises:
        ValueError: if a value is out of range.
    """

    def __init__(
        self, *, probability: float, noise_multiplier: float, grid: NormGrid | None = None
    ) -> None:
        check_step(probability, noise_multiplier)
        self.probability = float(probability)
        self.noise_multiplier = float(noise_multiplier)
        self.grid = grid if grid is not None else NormGrid()
        self._worst_cases: dict[tuple[int, float], float] = {}

    @functools.cached_property
    def _directions(self) -> tuple[TiltedTotals, ...]:
        """Remove and add, of the columns with a positive norm."""
        shifts = self.grid.values[1:] / self.noise_multiplier
        return tuple(
            TiltedTotals(shifts, probability=self.probability, remove=remove)
            for remove in (True, False)
        )

    def delta(
        self, counts: npt.ArrayLike, epsilon: npt.ArrayLike, *, progress: bool = False
    ) -> Array:
        """δ_x(ε), the larger of both directions, rounded up.

        Args:
            counts: how often each value of the grid occurred, whole numbers, shape (N, grid).
            epsilon: one ε ≥ 0, or one for each example.
            progress: show a bar when it takes over two seconds.

        Returns:
            Shape (N,).

        Raises:
            TypeError: for counts that are not whole numbers.
            ValueError: for counts of another shape, or a negative ε.
        """
        checked = checked_counts(counts, self.grid)
        wanted = one_each("epsilon", epsilon, len(checked))
        if not np.all((wanted >= 0) & (wanted < math.inf)):
            raise ValueError("epsilon: must be at least 0 and finite (0 gives the total variation)")
        if self.probability == 1.0:
            return gaussian.delta(wanted, self._unsampled_mu(checked))
        positive = np.flatnonzero(checked[:, 1:].any(axis=1))
        result = np.zeros(len(checked))
        spent = checked[positive, 1:]
        with self._bar(len(positive), progress) as bar:
            for direction in self._directions:
                found = direction.log_delta(spent, wanted[positive], bar.update)
                result[positive] = np.maximum(result[positive], np.exp(found))
        return np.minimum(result, 1.0)

    def epsilon(
        self, counts: npt.ArrayLike, delta: npt.ArrayLike, *, progress: bool = True
    ) -> Array:
        """Least ε_x ≥ 0 at δ for both directions, rounded up; never above the worst case.

        The worst case is ``PoissonPLD`` of as many steps as
        the example of the most steps has. It caps answers at one δ.

        Args:
            counts: how often each value of the grid occurred, whole numbers, shape (N, grid).
            delta: one δ in (0, 1), or one for each example.
            progress: show a bar when it takes over two seconds.

        Returns:
            Shape (N,).

        Raises:
            TypeError: for counts that are not whole numbers.
            ValueError: for counts of another shape, or δ out of range.
        """
        checked = checked_counts(counts, self.grid)
        wanted = checked_deltas(delta, len(checked))
        if self.probability == 1.0:
            mus = self._unsampled_mu(checked)
            if np.ndim(delta) == 0:
                return gaussian.epsilons(float(wanted[0]), mus) if len(mus) else mus
            return np.array(
                [gaussian.epsilon(float(d), float(m)) for d, m in zip(wanted, mus, strict=True)]
            )
        positive = np.flatnonzero(checked[:, 1:].any(axis=1))
        result = np.zeros(len(checked))
        if positive.size == 0:
            return result
        spent = checked[positive, 1:]
        with self._bar(len(positive), progress) as bar:
            for direction in self._directions:
                # Where remove needs a larger ε, add need not be known: that it suffices is seen.
                result[positive] = direction.epsilon(
                    spent, np.log(wanted[positive]), result[positive], bar.update
                )
        if np.ndim(delta) == 0:
            result = np.minimum(result, self._worst(int(spent.sum(axis=1).max()), float(wanted[0])))
        return result

    def gaussian_mu(
        self, counts: npt.ArrayLike, *, floor: float, levels: int = 16, progress: bool = False
    ) -> Array:
        """Least μ with δ_x(ε) ≤ GDP_μ(ε) for ε ≥ 0 down to δ_x = ``floor``: an estimate.

        Both directions at ε ≥ 0 are both at all real ε. The comparison is made at ε = 0 and at the
        ε of ``levels`` values of δ, even in the logarithm; what happens below ``floor`` is left
        out: for all ε whatever μ would be the √(Σ r²)/σ of no sampling
        (docs/theory/individual.md#thm-pld-filter).

        Args:
            counts: how often each value of the grid occurred, whole numbers, shape (N, grid).
            floor: least δ that is looked at, in (0, 1).
            levels: values of δ from δ_x(0) to ``floor``.
            progress: show a bar for each level that takes over two seconds.

        Returns:
            Shape (N,).

        Raises:
            TypeError: for counts that are not whole numbers.
            ValueError: for counts of another shape, or a floor out of range.
        """
        checked = checked_counts(counts, self.grid)
        checks.number("floor", floor, above=0, below=1, remedy="e.g. 1e-8")
        checks.integer("levels", levels)
        if self.probability == 1.0:
            return self._unsampled_mu(checked)
        result = np.zeros(len(checked))
        start = self.delta(checked, 0.0, progress=progress)
        rows = np.flatnonzero(start > 0)
        start = np.minimum(start[rows], 1.0 - 1e-12)
        result[rows] = _least_mus(0.0, start)
        rows, start = rows[start > floor], start[start > floor]
        for level in range(1, levels + 1):
            wanted = start ** (1.0 - level / levels) * floor ** (level / levels)
            found = self.epsilon(checked[rows], wanted, progress=progress)
            result[rows] = np.maximum(result[rows], _least_mus(found, wanted))
        return result

    def _unsampled_mu(self, counts: Counts) -> Array:
        """√(Σ n_j r_j²)/σ, shape (N,): without sampling the Gaussian composes exactly."""
        return np.sqrt(counts @ self.grid.values**2) / self.noise_multiplier

    def _worst(self, steps: int, delta: float) -> float:
        """ε of so many steps at the clipping norm."""
        if (steps, delta) in self._worst_cases:
            return self._worst_cases[steps, delta]
        curve = poisson_curve(
            Adjacency.ZERO_OUT, probability=self.probability, steps=steps, sensitivity=1.0
        )
        found = float(curve.epsilon(self.noise_multiplier, delta))
        self._worst_cases[steps, delta] = found
        return found

    def _bar(self, examples: int, progress: bool) -> tqdm:
        return tqdm(
            desc="Individual privacy", total=2 * examples, unit="example", delay=2, leave=False,
            disable=not progress,
        )  # fmt: skip


def _least_mus(epsilon: npt.ArrayLike, delta: npt.ArrayLike) -> Array:
    """Least μ with δ(ε) ≥ δ for ε ≥ 0 and δ in (0, 1) that broadcast: rounded up, relative 1e-8."""
    at, log_target = np.broadcast_arrays(
        np.asarray(epsilon, float), np.log(np.asarray(delta, float))
    )

    def enough(mu: Array) -> npt.NDArray[np.bool_]:
        # log δ is rounded up, which must not lower μ.
        return gaussian.log_delta(at, mu) - 3.0 * gaussian.DELTA_PAD >= log_target

    high = np.ones(at.shape)
    while not (reached := enough(high)).all():
        high = np.where(reached, high, 2.0 * high)
    low = np.full(at.shape, -800.0)  # of log μ
    high = np.log(high)
    for _ in range(48):
        middle = 0.5 * (low + high)
        reached = enough(np.exp(middle))
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    return np.exp(high)

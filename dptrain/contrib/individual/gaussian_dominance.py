"""A test that one Gaussian dominates many totals of sampled Gaussian losses, on a grid of ε."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from dptrain.accounting.losses import gaussian
from dptrain.contrib.per_example import (
    TILTS,
    NormGrid,
    TiltedLosses,
    TiltPlanner,
    kernel_transform,
)
from dptrain.core import Array

Single = npt.NDArray[np.float32]

LEVELS = 12  # values of δ, besides that at ε = 0
# Times the smoothing of the plan. With the first the total's μ² grows by about 0.1 %; the others
# are for few steps of large losses, which need many frequencies otherwise.
_SMOOTHERS, _ENOUGH = (2.5, 4.0), 64
_LEFT_OUT = 1e-4  # share of δ that frequencies left out may make, for the reference
_BLOCK_RATIO = 2.0
_MORE = 1.4  # frequencies than the reference needs
_MOST_FREQUENCIES = 1 << 11
# Of log δ: what single precision can lose; the smoothing adds far more.
_ROUNDING = 1e-4
# The levels that decide for the reference: so near the largest ratio, and not more than these.
_NEAR, _LEADING = 0.5, 4


@dataclasses.dataclass(frozen=True)
class _Level:
    """δ at one ε in one direction: tilt λ, step h of frequency, smoothing τ."""

    losses: TiltedLosses
    epsilon: float
    log_target: float  # log δ of the Gaussian at ε
    tilt: float
    step: float
    smoothing: float

    @property
    def constant(self) -> float:
        """The part of log(M e^{-λε}/δ_target) that does not depend on the counts."""
        added = 0.5 * self.smoothing**2 * self.tilt * (self.tilt + 1.0)
        return added - self.tilt * self.epsilon - self.log_target

    def kernel(self, last: int) -> npt.NDArray[np.complex128]:
        """Weights of the frequencies 0 to ``last``."""
        weights = kernel_transform(self.tilt, self.step * np.arange(last + 1)) * self.step / math.pi
        weights[0] *= 0.5
        return weights

    @property
    def last(self) -> int:
        """The last frequency, at which the smoothing has ended the transform."""
        return min(math.ceil(5.0 / (self.smoothing * self.step)), _MOST_FREQUENCIES)


class GaussianDominance:
    """log(δ_x(ε)/δ_μ(ε)), rounded up, for ε = 0 and the ε of even log δ_μ(ε) down to a floor.

    As ``IndividualPLD``, with the tilt, the frequencies and
    the smoothing of each ε chosen once, for a reference total, because the answer matters only
    where δ_x is near δ_μ. Then everything is a fixed linear function of the counts, followed by an
    exponential and a cosine: some 50 µs for an example at all ε and in both directions. Totals
    unlike the reference get a larger δ at worst: wrapping around adds to it, and for frequencies
    that are left out a bound is added.

    Args:
        probability: q in (0, 1).
        noise_multiplier: σ.
        grid: of norm ratios.
        mu: of the Gaussian.
        floor: least δ_μ(ε) that is looked at.
        reference: steps of the full norm whose total is about as large as μ allows.
    """

    def __init__(
        self, *, probability: float, noise_multiplier: float, grid: NormGrid, mu: float,
        floor: float, reference: int,
    ) -> None:  # fmt: skip
        shifts = grid.values[1:] / noise_multiplier
        start = float(gaussian.delta(0.0, mu))
        targets = np.geomspace(start, floor, LEVELS + 1) if floor < start else np.array([start])
        epsilons = np.array([0.0, *(gaussian.epsilon(float(d), mu) for d in targets[1:])])
        self.epsilons = epsilons  # shape (levels,)
        log_targets = gaussian.log_delta(epsilons, mu)
        levels = []
        for remove in (True, False):
            planner = TiltPlanner(shifts[-1:], probability=probability, remove=remove)
            full = np.full((epsilons.size, 1), float(max(reference, 1)))
            # The best tilt for ε = 0 is so flat that the period is long; the next one does.
            plan = planner.plan(full, epsilon=np.maximum(epsilons, epsilons[1 % epsilons.size]))
            for j, tilt in enumerate(TILTS[plan.tilt].tolist()):
                level = _Level(
                    TiltedLosses(shifts, probability=probability, tilt=tilt, remove=remove),
                    float(epsilons[j]),
                    float(log_targets[j]),
                    tilt,
                    2.0 * math.pi / float(plan.period[j]),
                    float(plan.smoothing[j]),
                )
                levels.append(_smoothed(level, full[0, 0]))
        self._build(levels, full[0, 0])

    def _build(self, levels: list[_Level], reference: float) -> None:
        edges = [_edges(level, reference) for level in levels]
        kept = max(each[0] for each in edges) + 1
        blocks = max(len(each) for each in edges)
        self._kept, norms = kept, levels[0].losses.shifts.size
        width = 2 * kept + blocks + 1
        table = np.zeros((norms + 1, len(levels), width))  # row 0: norm 0 costs nothing
        offset = np.zeros((len(levels), width))
        offset[:, 2 * kept : -1] = -np.inf
        self._sums = np.empty(len(levels), dtype=np.float32)
        for index, level in enumerate(levels):
            losses, omega = level.losses, level.step * np.arange(kept)
            transform, errors = losses.log_transform(level.step, kept - 1)
            mean = losses.mean[:, None] * omega
            cumulant = (losses.cumulant + losses.error)[:, None]
            table[1:, index, :kept] = transform.real + cumulant
            table[1:, index, kept : 2 * kept] = transform.imag + mean
            table[1:, index, -1] = errors
            weights = level.kernel(kept - 1)
            decay, added = -0.5 * (level.smoothing * omega) ** 2, level.smoothing**2
            offset[index, :kept] = np.log(np.abs(weights)) + decay + level.constant
            offset[index, kept : 2 * kept] = np.angle(weights) - omega * (
                level.epsilon - 0.5 * added * (2.0 * level.tilt + 1.0)
            )
            self._sums[index] = float(np.abs(weights).sum() / abs(weights[0]))
            low, high, logs = _tail(level, kept - 1)
            columns = slice(2 * kept, 2 * kept + low.size)
            table[1:, index, columns] = losses.log_envelope(low, high) + cumulant
            offset[index, columns] = logs + level.constant
            beyond = 2 * kept + low.size
            table[1:, index, beyond] = cumulant[:, 0]
            offset[index, beyond] = _log_beyond(level) + level.constant
        self._table, self._offset = table.astype(np.float32), offset.astype(np.float32)
        full = np.zeros((1, norms + 1), dtype=np.int64)
        full[0, -1] = reference
        ratios = self.log_ratios(self.exponents(full))[0]
        order = np.argsort(-ratios)[:_LEADING]
        self.leading = self._of(order[ratios[order] >= ratios.max() - _NEAR])

    def _of(self, levels: npt.NDArray[np.intp]) -> GaussianDominance:
        """The same test at some ε and directions only."""
        part = copy.copy(self)
        part._table = np.ascontiguousarray(self._table[:, levels])
        part._offset, part._sums = self._offset[levels], self._sums[levels]
        return part

    @property
    def cells(self) -> int:
        """Numbers in the linear part of one example."""
        return self._offset.size

    def exponents(self, counts: npt.NDArray[Any]) -> Single:
        """The linear part, shape (n, directions × levels, parts), of counts (n, grid)."""
        table = self._table.reshape(len(self._table), self._offset.size)
        # Sparse, as an example has few norms; and BLAS's threads wait for each other wherever a
        # core is busy, which made a call of 100 rows take ten times as long.
        total = csr_array(counts.astype(np.float32, copy=False)) @ table
        return total.reshape(len(counts), *self._offset.shape) + self._offset

    def charges(self, buckets: npt.NDArray[np.intp]) -> Single:
        """The summands that one step at these norms adds to the linear part; as ``exponents``."""
        return self._table[buckets]

    def log_ratios(self, exponents: Single) -> Single:
        """log(δ_x/δ_μ) of totals with this linear part, shape (n, directions × levels)."""
        kept = self._kept
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            sizes = np.exp(exponents[..., :kept])
            value = np.sum(sizes * np.cos(exponents[..., kept : 2 * kept]), axis=-1)
            value += np.exp(exponents[..., 2 * kept : -1]).sum(axis=-1)
            value += sizes[..., 0] * self._sums * np.expm1(exponents[..., -1])
            found = np.log(np.maximum(value, 1e-30)) + _ROUNDING
        return np.where(np.isnan(value), np.inf, found).astype(np.float32)

    @staticmethod
    def slopes(charges: Single) -> Single:
        """The most that one more step raises log δ_x, roughly: its cumulant."""
        return charges[..., 0]


def _smoothed(level: _Level, reference: float) -> _Level:
    """The level with as little smoothing as needs few frequencies."""
    for times in _SMOOTHERS:
        trial = dataclasses.replace(level, smoothing=times * level.smoothing)
        if _edges(trial, reference)[0] <= _ENOUGH:
            break
    return trial


def _edges(level: _Level, reference: float) -> list[int]:
    """The last frequency to keep, and what is beyond in blocks."""
    edges = [4]
    while edges[-1] < level.last:
        edges.append(min(max(edges[-1] + 1, math.ceil(edges[-1] * 1.1)), level.last))
    low, high = level.step * (np.array(edges[:-1]) + 1), level.step * np.array(edges[1:])
    losses = level.losses
    envelope = reference * losses.log_envelope(low, high)[-1] - 0.5 * (level.smoothing * low) ** 2
    sums = np.cumsum(np.abs(level.kernel(level.last)))
    shares = np.exp(envelope) * (sums[edges[1:]] - sums[edges[:-1]])
    log_moment = reference * losses.cumulant[-1] + level.constant
    after = np.cumsum(shares[::-1])[::-1] * math.exp(min(log_moment, 700.0))
    enough = np.flatnonzero(after <= _LEFT_OUT)
    kept = edges[int(enough[0])] if enough.size else level.last
    kept = min(math.ceil(_MORE * kept), level.last)
    return [kept, *_blocks(kept, level.last)]


def _blocks(kept: int, last: int) -> list[int]:
    edges: list[int] = []
    while (at := edges[-1] if edges else kept) < last:
        edges.append(min(max(at + 1, math.ceil(at * _BLOCK_RATIO)), last))
    return edges


def _tail(level: _Level, kept: int) -> tuple[Array, Array, Array]:
    """Blocks of frequencies left out: both ends, and the log of the weights' sum times decay."""
    edges = np.array([kept, *_blocks(kept, level.last)])
    low, high = level.step * (edges[:-1] + 1), level.step * edges[1:]
    sums = np.cumsum(np.abs(level.kernel(max(level.last, kept))))
    blocks = (sums[edges[1:]] - sums[edges[:-1]]) * (1.0 + 1e-9)
    return low, high, np.log(blocks) - 0.5 * (level.smoothing * low) ** 2


def _log_beyond(level: _Level) -> float:
    """The log of what lies beyond all blocks: τω ≥ 5 is the decay of the smoothing alone."""
    end, smoothing = level.step * level.last, level.smoothing
    least = min(1.0 / end, 1.0 / (smoothing**2 * end**3))
    return -0.5 * (smoothing * end) ** 2 + math.log(least / math.pi)

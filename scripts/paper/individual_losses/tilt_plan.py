"""The tilt, period and smoothing for a sum of sampled Gaussian losses, from its moments."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

from dptrain.core import Array
from scripts.paper.individual_losses.loss_transform import TiltedLosses
from scripts.paper.individual_losses.periodic_hockey_stick import log_kernel_maximum

TILTS = np.geomspace(1e-4, 1e7, 182)
"""Tilts at which totals of losses may be discretized."""

_EVERY = 2  # of which totals are tilted by these: the fewer, the more share a transform
_FLATTER = (1, 2, 3, 5, 8)  # how many of those to go back where it pays
# Largest product of the tilt and r/σ: beyond it the tilted law spreads over too many deviations.
_STEEPEST = 60.0
_ABSENT = 1e290  # log moment of a tilt that is not available
# Every total has one more release composed to it, of a Gaussian with μ = τ. Privacy can only get
# worse, by about τ²(λ+1)/2 in ε, and the transform ends at a few 1/τ. τ² is this share of ε/(λ+1),
# which is the variance of the total where it is nearly normal.
_SMOOTHING = 2e-4
# log of the share of δ that wrapping around may add, roughly.
_ALIAS = -11.0


@dataclasses.dataclass(frozen=True)
class TiltPlan:
    """Settings for each of n totals. Only ``chernoff`` and ``log_moment`` need to be right.

    Args:
        tilt: index into ``TILTS``.
        period: of the periodic δ(ε) e^{λε}.
        smoothing: τ.
        near: the ε that was thought to be the answer, or that was asked for.
        main: rough value of δ e^{λε}/M.
        log_moment: log M = log E[e^{λS}], rounded up.
        chernoff: for a target δ an ε that suffices, for a target ε the log of a δ that does.
    """

    tilt: npt.NDArray[np.intp]
    period: Array
    smoothing: Array
    near: Array
    main: Array
    log_moment: Array
    chernoff: Array

    def of(self, rows: npt.NDArray[np.intp]) -> TiltPlan:
        """The plan of some of the totals."""
        return TiltPlan(*[getattr(self, field.name)[rows] for field in dataclasses.fields(self)])

    @classmethod
    def joined(cls, parts: list[TiltPlan]) -> TiltPlan:
        """The plan of all totals, from some at a time."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})


class TiltPlanner:
    """Moments of one step's loss at J norms and many tilts, in one direction.

    Args:
        shifts: r/σ > 0, shape (J,).
        probability: Poisson rate q in (0, 1).
        remove: the loss log dP/dQ under P; otherwise log dQ/dP under Q.
    """

    def __init__(self, shifts: Array, *, probability: float, remove: bool) -> None:
        self._shifts = shifts
        self._losses = functools.partial(TiltedLosses, probability=probability, remove=remove)

    def losses(self, columns: npt.NDArray[np.intp], tilt: float) -> TiltedLosses:
        """One step's tilted loss at some of the norms."""
        return self._losses(self._shifts[columns], tilt=tilt)

    @functools.cached_property
    def _tables(self) -> tuple[Array, Array]:
        """log E[e^{λL}], rounded up, and the tilted variance: each (J, tilts)."""
        moments = np.full((self._shifts.size, TILTS.size), _ABSENT)
        variances = np.zeros_like(moments)
        for index, tilt in enumerate(TILTS):
            # Flat tilts are needed whatever the norms are.
            rows = np.flatnonzero((tilt * self._shifts <= _STEEPEST) | (index < 2 * _EVERY))
            if rows.size:
                losses = self.losses(rows, float(tilt))
                moments[rows, index] = losses.cumulant + losses.error
                variances[rows, index] = losses.variance
        return moments, variances

    def plan(
        self, counts: Array, *, epsilon: Array | None = None, log_delta: Array | None = None,
        guess: Array | None = None,
    ) -> TiltPlan:  # fmt: skip
        """The plan for targets ε or log δ, and an idea of the other, each of shape (n,).

        Args:
            counts: of every norm, shape (n, J).
            epsilon: where δ is wanted, or
            log_delta: where ε is wanted.
            guess: of log δ or of ε, the one that is not given.
        """
        moments = self._tables[0]
        kernel = log_kernel_maximum(TILTS)
        # Padded by the rounding of the product with the counts.
        bound = counts @ moments * (1.0 + 1e-12)
        row, position = np.arange(len(counts)), np.arange(TILTS.size)
        # A few steeper tilts are kept to see what wraps around.
        last = np.sum(bound < 0.1 * _ABSENT, axis=1) - 1 - _EVERY
        usable = (position % _EVERY == 0) & (position <= last[:, None])
        if log_delta is not None:
            score = (bound + kernel - log_delta[:, None]) / TILTS
        else:
            assert epsilon is not None
            score = bound + kernel - TILTS * epsilon[:, None]
        tilt = np.argmin(np.where(usable, score, np.inf), axis=1)
        least = score.min(axis=1)
        short = self._saddle(counts, tilt)[1]
        if log_delta is not None:
            saddle = np.maximum(score[row, tilt] - short / TILTS[tilt], 0.0)
            level, near = log_delta, saddle if guess is None else guess
        else:
            assert epsilon is not None
            level, near = score[row, tilt] - short if guess is None else guess, epsilon
        tilt = self._shortest(bound + kernel, tilt, near, level)
        order, log_moment, variance = TILTS[tilt], bound[row, tilt], self._saddle(counts, tilt)[0]
        main = np.minimum(level + order * near - log_moment, kernel[tilt])
        scale = np.maximum(near / (order + 1.0), 0.1 * np.minimum(variance, order**-2.0))
        return TiltPlan(
            tilt=tilt,
            period=self._period(bound + kernel, order, near, level),
            smoothing=np.sqrt(_SMOOTHING * scale),
            near=near,
            main=np.exp(main),
            log_moment=log_moment,
            chernoff=least + 1e-12 * np.abs(least),
        )

    def _saddle(self, counts: Array, tilt: npt.NDArray[np.intp]) -> tuple[Array, Array]:
        """Tilted variance, and log of the saddle point's factor from δ to the moments' bound."""
        variance = np.empty(len(counts))
        for index in np.unique(tilt):
            variance[tilt == index] = counts[tilt == index] @ self._tables[1][:, index]
        order = TILTS[tilt]
        short = 0.5 * np.log(2.0 * math.pi * variance) + np.log(order * (order + 1.0))
        return variance, np.maximum(short + log_kernel_maximum(order), 0.0)

    def _shortest(
        self, bound: Array, tilt: npt.NDArray[np.intp], near: Array, level: Array
    ) -> npt.NDArray[np.intp]:
        """The tilt, or a flatter one if its period is shorter by far.

        Where moments explode beyond a tilt, a second lump of mass far above ε is about to take
        over, and would wrap around.
        """
        result, shortest = tilt, 0.7 * self._period(bound, TILTS[tilt], near, level)
        for back in _FLATTER:
            trial = np.maximum(tilt - back * _EVERY, tilt % _EVERY)
            period = self._period(bound, TILTS[trial], near, level)
            result = np.where(period < shortest, trial, result)
            shortest = np.minimum(period, shortest)
        return result

    @staticmethod
    def _period(bound: Array, order: Array, near: Array, level: Array) -> Array:
        """P with g(ε ± P) ≤ e^{_ALIAS} g(ε) for g(ε) = δ(ε) e^{λε}, by the moments of other tilts.

        δ(ε') ≤ e^{bound} e^{-λ'ε'} for every λ'; those above λ settle ε + P, those below ε - P.
        """
        gap = TILTS - order[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = (bound - (level + order * near)[:, None] - _ALIAS) / gap
        above = np.min(np.where(gap > 0, reach, np.inf), axis=1) - near
        below = np.min(np.where(gap < 0, -reach, np.inf), axis=1) + near
        whole = -(_ALIAS + level) / order  # δ ≤ 1
        return np.maximum(np.maximum(above, np.minimum(below, whole)), 1e-3 / order)

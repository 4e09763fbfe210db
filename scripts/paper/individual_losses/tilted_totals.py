"""δ and ε of many sums of sampled Gaussian losses, in one direction, grouped by tilt and scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from dptrain.core import Array
from scripts.paper.individual_losses.periodic_hockey_stick import (
    PeriodicHockeyStick,
    kernel_transform,
)
from scripts.paper.individual_losses.tilt_plan import TILTS, TiltPlan, TiltPlanner

Indices = npt.NDArray[np.intp]
Counts = npt.NDArray[np.integer]
Done = Callable[[int], object]

# Share of the main term that all frequencies left out may make.
_TAIL_SHARE = 1e-5
_BLOCK_RATIO = 1.2
_LEAST_FREQUENCIES, _MOST_FREQUENCIES = 6, 1 << 14
# Passes with a better idea of the answer each, for totals of which more than this share of δ is
# what was left out, or whose ε was thought to be this many times as large.
_PASSES, _SETTLED, _FAR = 4, 0.01, 1.5
_ROWS = 4096  # examples at a time
_CELLS = 1 << 22  # of a transform at a time


class TiltedTotals:
    """Totals of counted steps' losses, in one direction.

    Totals of like tilt and period are a group, for which the transform of one step is computed at
    every norm; a matrix product with the counts gives the logarithm of the totals' transforms.

    Args:
        shifts: r/σ > 0 of every column of the counts, shape (J,).
        probability: Poisson rate q in (0, 1).
        remove: the loss log dP/dQ under P; otherwise log dQ/dP under Q.
    """

    def __init__(self, shifts: Array, *, probability: float, remove: bool) -> None:
        self._planner = TiltPlanner(shifts, probability=probability, remove=remove)

    def log_delta(self, counts: Counts, epsilon: Array, done: Done) -> Array:
        """Upper bound of log δ(ε), one ε ≥ 0 for each total, shape (n,)."""
        result, members = np.zeros(len(counts)), np.arange(len(counts))
        for attempt in range(_PASSES):
            guess = result[members] if attempt else None
            plan = self._plan(counts, members, epsilon=epsilon[members], guess=guess)
            result[members] = np.minimum(result[members], plan.chernoff)
            open_ = np.zeros(members.size, bool)
            for chosen, stick in self._sticks(counts, members, plan):
                rows, at = members[chosen], epsilon[members[chosen]]
                before, found = result[rows], stick.log_delta(at)
                result[rows] = np.minimum(before, found)
                open_[chosen] = (stick.left_out(at) > _SETTLED) & (found < before - 0.01)
                done(chosen.size * (attempt == 0))
            members = members[open_]
        return result

    def epsilon(self, counts: Counts, log_delta: Array, least: Array, done: Done) -> Array:
        """An ε ≥ ``least`` ≥ 0 that suffices for δ, one δ for each total, shape (n,)."""
        result, members = np.full(len(counts), np.inf), np.arange(len(counts))
        for attempt in range(_PASSES):
            guess = result[members] if attempt else None
            plan = self._plan(counts, members, log_delta=log_delta[members], guess=guess)
            result[members] = np.clip(plan.chernoff, least[members], result[members])
            above = np.flatnonzero(result[members] > least[members])
            done((members.size - above.size) * (attempt == 0))
            members, plan = members[above], plan.of(above)
            open_ = np.zeros(members.size, bool)
            for chosen, stick in self._sticks(counts, members, plan):
                rows = members[chosen]
                before = result[rows]
                found = result[rows] = stick.epsilon(log_delta[rows], least[rows], before)
                open_[chosen] = (stick.left_out(found) > _SETTLED) & (found < 0.99 * before)
                open_[chosen] |= plan.near[chosen] > _FAR * found
                open_[chosen] &= found > least[rows]
                done(chosen.size * (attempt == 0))
            members = members[open_]
        return result

    def _plan(self, counts: Counts, members: Indices, **targets: Array | None) -> TiltPlan:
        parts = []
        for rows in _slices(members.size):
            chosen = {k: None if v is None else v[rows] for k, v in targets.items()}
            parts.append(self._planner.plan(counts[members[rows]].astype(float), **chosen))
        return TiltPlan.joined(parts) if parts else TiltPlan(*[np.zeros(0)] * 7)  # type: ignore[arg-type]

    def _sticks(
        self, counts: Counts, members: Indices, plan: TiltPlan
    ) -> Iterator[tuple[Indices, PeriodicHockeyStick]]:
        """Positions in ``members`` and δ(ε) of those, group by group."""
        octave = np.ceil(np.log2(plan.period)).astype(int)
        keys, inverse = np.unique(np.stack([plan.tilt, octave]), axis=1, return_inverse=True)
        for index, (tilt, exponent) in enumerate(keys.T):
            group = np.flatnonzero(inverse.reshape(-1) == index)
            yield from _Group(
                self._planner, counts, members, group, plan,
                tilt=float(TILTS[tilt]), period=2.0 ** float(exponent),
            ).sticks()  # fmt: skip


class _Group:
    """Totals that share a tilt λ and a period."""

    def __init__(
        self, planner: TiltPlanner, counts: Counts, members: Indices, group: Indices,
        plan: TiltPlan, *, tilt: float, period: float,
    ) -> None:  # fmt: skip
        self._counts, self._members, self._group, self._plan = counts, members, group, plan
        self._tilt, self._step = tilt, 2.0 * math.pi / period
        used = [counts[members[group[rows]]].any(axis=0) for rows in _slices(group.size)]
        self._columns = np.flatnonzero(np.any(used, axis=0))
        self._losses = planner.losses(self._columns, tilt)
        # The smoothing ends the transform: what lies beyond c/τ adds at most τ e^{-c²/2}/(π c³).
        smoothing = plan.smoothing[group]
        excess = smoothing / (8.0 * math.pi * _TAIL_SHARE * plan.main[group])
        end = np.sqrt(2.0 * np.log(np.maximum(excess, 10.0))) / smoothing
        most = math.ceil(min(float(end.max()) / self._step, _MOST_FREQUENCIES))
        # Blocks of frequencies: (edges[i], edges[i + 1]].
        edges = [_LEAST_FREQUENCIES]
        while edges[-1] < most:
            edges.append(min(max(edges[-1] + 1, math.ceil(edges[-1] * _BLOCK_RATIO)), most))
        self._edges = np.array(edges)

    def _chunk(self, positions: Indices) -> Array:
        return self._counts[np.ix_(self._members[positions], self._columns)].astype(float)

    def sticks(self) -> Iterator[tuple[Indices, PeriodicHockeyStick]]:
        """Positions and δ(ε), some at a time: those that need like numbers of frequencies."""
        last, tails = self._cut()
        frequencies = self._edges[last]
        order = np.argsort(last, kind="stable")
        table, errors = self._losses.log_transform(self._step, int(frequencies.max()))
        parts = np.concatenate([table.real.T, table.imag.T])
        at, width = 0, table.shape[1]
        while at < order.size:
            least = int(frequencies[order[at]])
            rows = order[at : at + max(16, min(_ROWS, _CELLS // (2 * least + 2)))]
            rows = rows[frequencies[rows] <= 1.5 * least]
            at += rows.size
            # The bounds of what is left out stay valid where more is kept.
            kept = np.arange(int(frequencies[rows].max()) + 1)
            table_rows = np.concatenate([kept, width + kept])
            yield (
                self._group[rows],
                self._stick(self._group[rows], parts[table_rows], errors, tails[rows]),
            )

    def _cut(self) -> tuple[Indices, Array]:
        """The last block of frequencies that each member needs, and a bound of those left out."""
        first, final = self._edges[:-1] + 1, self._edges[1:]
        low, high = self._step * first, self._step * final
        kernel = np.abs(kernel_transform(self._tilt, self._step * np.arange(self._edges[-1] + 1)))
        sums = np.cumsum(kernel) * self._step / math.pi
        block = sums[final] - sums[self._edges[:-1]]
        envelope = self._losses.log_envelope(low, high)
        end = self._step * float(self._edges[-1])
        lasts, tails = [], []
        for rows in _slices(self._group.size):
            positions = self._group[rows]
            smoothing = self._plan.smoothing[positions]
            decay = self._chunk(positions) @ envelope
            decay -= 0.5 * np.multiply.outer(smoothing, low) ** 2
            left = np.exp(decay) * block * (1.0 + 1e-9)
            # Σ_{k>K} h e^{-τ²ω²/2}/ω² ≤ ∫ from the last ω on ≤ e^{-τ²ω²/2} min(1/ω, 1/(τ²ω³)).
            beyond = np.exp(-0.5 * (smoothing * end) ** 2) / math.pi
            beyond *= np.minimum(1.0 / end, 1.0 / (smoothing**2 * end**3))
            after = np.concatenate([left, beyond[:, None]], axis=1)[:, ::-1].cumsum(axis=1)[:, ::-1]
            enough = after <= (beyond + _TAIL_SHARE * self._plan.main[positions])[:, None]
            enough[:, -1] = True
            lasts.append(np.argmax(enough, axis=1))
            tails.append(np.take_along_axis(after, lasts[-1][:, None], axis=1)[:, 0])
        return np.concatenate(lasts), np.concatenate(tails)

    def _stick(
        self, positions: Indices, parts: Array, errors: Array, tail: Array
    ) -> PeriodicHockeyStick:
        """δ(ε) of some members; ``parts`` are the log transforms, real above imaginary."""
        counts, size, tilt = self._chunk(positions), len(parts) // 2, self._tilt
        smoothing = self._plan.smoothing[positions]
        total = parts @ counts.T
        total[:size] -= 0.5 * np.multiply.outer(self._step * np.arange(size), smoothing) ** 2
        transform = np.exp(total[:size]) * np.exp(1j * total[size:])
        moment = self._plan.log_moment[positions]
        return PeriodicHockeyStick(
            tilt=tilt,
            step=self._step,
            log_moment=moment + 0.5 * smoothing**2 * tilt * (tilt + 1.0),
            mean=counts @ self._losses.mean + 0.5 * smoothing**2 * (2.0 * tilt + 1.0),
            transform=transform,
            tail=tail,
            error=counts @ errors,
        )


def _slices(total: int) -> list[slice]:
    return [slice(at, min(at + _ROWS, total)) for at in range(0, total, _ROWS)]

"""The exponential tilts that resolve each part of a composed privacy profile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from dptrain.core import Array

# How far, in nats, a rung's Chernoff bound may be above the best tilt's. What a rung resolves is
# rounding by e^GAP, 2 digits, and by how far δ is below its best Chernoff bound.
GAP = 5.0
# Least ratio of neighboring tilts.
_PROGRESS = 1.02
# How often a tilt is moved half the way to the saddle point where its window is too wide.
_HALVINGS = 8
# Groups of neighboring losses of all parts together, and limits for one part.
_GROUPS = 1 << 17
_MOST, _FEWEST = 4096, 64


@dataclasses.dataclass(frozen=True)
class Rung:
    """A tilt t ≥ 0 and the ε from ``start`` to ``end`` for which it serves.

    ``bound`` is the logarithm of the best Chernoff bound at ``end``, roughly.
    """

    tilt: float
    start: float
    end: float
    bound: float


class RoughLosses:
    """Losses of the parts in groups: moments of the tilted total, good enough to choose a tilt.

    Groups are narrow where mass is, and the narrower the closer to the least or greatest loss: a
    steep tilt looks at nothing but the end. The cumulant of the groups' means is below the true one
    (Jensen), so no bound may rest on it.

    Args:
        parts: ascending losses and logarithms of their masses, finite, and how often each occurs.
    """

    def __init__(self, parts: list[tuple[Array, Array, int]]) -> None:
        most = min(_MOST, max(_FEWEST, _GROUPS // len(parts)))
        grouped = [_grouped(losses, log_mass, most) for losses, log_mass, _ in parts]
        self._sizes = np.array([mass.size for mass, _ in grouped])
        self._starts = np.cumsum([0, *self._sizes[:-1]])
        self._counts = np.array([float(count) for _, _, count in parts])
        self._losses = np.concatenate([losses for _, losses in grouped])
        with np.errstate(divide="ignore"):
            self._log_mass = np.log(np.concatenate([mass for mass, _ in grouped]))

    def moments(self, tilt: float) -> tuple[float, float, float]:
        """Cumulant K(t) = log E[e^{tL}], mean K'(t) and standard deviation of the tilted total."""
        weight = self._log_mass + tilt * self._losses
        top = np.maximum.reduceat(weight, self._starts)
        weight = np.exp(weight - np.repeat(top, self._sizes))
        total = np.add.reduceat(weight, self._starts)
        mean = np.add.reduceat(weight * self._losses, self._starts) / total
        squares = (self._losses - np.repeat(mean, self._sizes)) ** 2
        variance = np.add.reduceat(weight * squares, self._starts) / total
        cumulant = float(self._counts @ (top + np.log(total)))
        return cumulant, float(self._counts @ mean), math.sqrt(float(self._counts @ variance))

    def steps(self, tilt: float, need: float, least: float) -> tuple[tuple[float, float], ...]:
        """Steps that bound the tilted total from above and below (Chernoff), and roughly where.

        Each step s ≠ 0 says that beyond (K(t+s) - K(t) + need)/s there is at most e^-need of the
        tilted mass. Where the total is nearly normal the best is sqrt(2 need)/deviation; rare large
        losses want one that is smaller by orders of magnitude, a bounded end a larger one.

        Deviations below ``least`` are taken for it.
        """
        base, _, deviation = self.moments(tilt)
        sizes = np.geomspace(1e-5, 10.0, 25) * math.sqrt(2.0 * need) / max(deviation, least)
        found = []
        for sign in (1.0, -1.0):
            ends = [(self.moments(tilt + sign * s)[0] - base + need) / s for s in sizes]
            best = int(np.argmin(ends))
            found.append((sign * float(sizes[best]), sign * ends[best]))
        return tuple(found)


def _grouped(losses: Array, log_mass: Array, most: int) -> tuple[Array, Array]:
    """Masses of at most ``most`` groups of neighbors and their mean losses."""
    mass, size = np.exp(log_mass), losses.size
    if size <= most:
        return mass, losses
    few = most // 4
    from_an_end = np.unique(np.geomspace(1, size, few).astype(np.int64)) - 1
    evenly = np.arange(0, size, -(-size // few))
    share = np.cumsum(mass)
    by_mass = np.searchsorted(share, share[-1] * np.arange(1, few) / few)
    starts = [from_an_end, size - 1 - from_an_end, evenly, np.minimum(by_mass, size - 1)]
    first: npt.NDArray[np.int64] = np.unique(np.concatenate(starts))
    total = np.add.reduceat(mass, first)
    center = np.add.reduceat(mass * losses, first)
    return total, np.where(total > 0, center / np.maximum(total, 1e-320), losses[first])


def rungs(
    rough: RoughLosses, *, steepest: float, lowest: float, fits: Callable[[float], bool]
) -> Iterator[Rung]:
    """Tilts of which one is near the best at every ε ≥ 0, in ascending order of ε.

    δ(ε) is at most e^{K(t) - tε} for every t ≥ 0, and FFTs resolve it to a fixed share of that: a
    tilt serves while its exponent is at most ``GAP`` above the least one, that of the saddle point
    K'(s) = ε. Nothing here depends on what is asked, so that every question about a composition is
    answered from the same curve.

    Args:
        steepest: greatest tilt of use.
        lowest: logarithm of δ below which nothing need be resolved; the last rung goes there.
        fits: whether the window of a tilt can be computed; if not, a flatter one is taken, whose
            window is narrower and which serves for fewer ε.
    """

    def cumulant(tilt: float) -> float:
        return rough.moments(tilt)[0]

    tilt, start, saddle = _greatest(lambda t: cumulant(t) <= GAP, 0.0, steepest), 0.0, 0.0
    while True:
        tilt = _flattened(tilt, saddle, fits)
        height = cumulant(tilt)

        def serves(saddle: float, tilt: float = tilt, height: float = height) -> bool:
            own, mean, _ = rough.moments(saddle)
            return height - own + (saddle - tilt) * mean <= GAP

        # Where lumps of losses are far apart the next rung may be near: there is to be an end.
        saddle = min(max(_greatest(serves, tilt, steepest), _PROGRESS * tilt), steepest)
        own, mean, _ = rough.moments(saddle)
        end = max(mean, start)
        best = own - saddle * end
        yield Rung(tilt, start, end, best)
        if saddle >= steepest or best < lowest:
            return

        def joins(t: float, best: float = best, end: float = end) -> bool:
            return cumulant(t) - t * end - best <= GAP

        start, tilt = end, _greatest(joins, saddle, steepest)


def _flattened(tilt: float, saddle: float, fits: Callable[[float], bool]) -> float:
    """A tilt that fits, from the given one towards the saddle point; the nearest if none does."""
    for _ in range(_HALVINGS):
        if fits(tilt):
            break
        tilt = 0.5 * (saddle + tilt)
    return tilt


def _greatest(holds: Callable[[float], bool], low: float, limit: float) -> float:
    """Roughly the greatest t in [low, limit] at which ``holds``, which it does up to some point."""
    step = max(0.1 * low, min(1e-3, 0.1 * limit))
    high = low + step
    while high < limit and holds(high):
        low, step = high, 2.0 * step
        high = low + step
    if high >= limit and holds(limit):
        return limit
    high = min(high, limit)
    while high - low > 0.01 * high and high > 1e-9:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

"""Bounds on a membership test by counting alone: sound whatever the release and the score are.

Scores of runs with the example and of runs without it are halved. The first half chooses the
direction, the threshold (and the ε of a curve), the second half is counted, so one test is made and
Clopper-Pearson bounds hold as they stand. Counting sees rare events only if they happen: the
largest ε that m runs can show is about log m.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from dptrain.auditing.intervals import least_probability, most_probability
from dptrain.core import Array, checks

_THRESHOLDS = 400  # that are tried on the first half


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StatedCurve:
    """δ(ε) as it is stated, in both directions.

    Attributes:
        epsilon: grid of ε ≥ 0, shape (k,).
        remove: δ of H(P‖Q) at each, shape (k,).
        add: δ of H(Q‖P) at each, shape (k,).
    """

    epsilon: Array
    remove: Array
    add: Array

    def __post_init__(self) -> None:
        for name in ("epsilon", "remove", "add"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if values.shape != np.shape(self.epsilon) or values.ndim != 1 or not values.size:
                raise ValueError(
                    f"{name} has the shape {values.shape}: must have the shape of epsilon"
                )
            object.__setattr__(self, name, values)

    def direction(self, name: str) -> Array:
        """The δ of one direction, ``remove`` or ``add``."""
        return self.remove if name == "remove" else self.add


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
    """A membership test, and how often it was right in runs that did not choose it.

    Attributes:
        direction: ``"remove"``: the test says "in" from the threshold on; ``"add"``: "out" below.
        threshold: of the score.
        runs: counted in each world.
        hits: how often the test spoke in the world that it speaks of (P, or Q for ``"add"``).
        false: how often in the other.
        epsilon: the ε at which a curve is tested; the stated one without a curve.
        delta: the δ that is stated there.
        epsilon_lower: ε at δ is at least this; 0 if nothing is shown.
        delta_lower: δ at ``epsilon`` is at least this; 0 if nothing is shown.
        most: the largest ``epsilon_lower`` that so many runs can show, by a test that never errs.
        alpha: chance that one of the two bounds is false.
    """

    direction: str
    threshold: float
    runs: int
    hits: int
    false: int
    epsilon: float
    delta: float
    epsilon_lower: float
    delta_lower: float
    most: float
    alpha: float

    @property
    def violated(self) -> bool:
        """True if the statement (ε, δ) is refuted."""
        return self.delta_lower > self.delta


def most_countable(runs: int, delta: float, alpha: float) -> float:
    """The largest ε that counting ``runs`` of each world can show at δ: no error in any of them."""
    low, high = least_probability(runs, runs, alpha / 2), most_probability(0, runs, alpha / 2)
    return _epsilon(float(low), float(high), delta)


def count(
    scores_in: npt.ArrayLike,
    scores_out: npt.ArrayLike,
    *,
    alpha: float,
    epsilon: float,
    delta: float,
    curve: StatedCurve | None = None,
) -> Count:
    """Test a statement by counting, at the point where it is most clearly exceeded, if it is.

    Args:
        scores_in: of runs with the example, in any order that does not depend on them.
        scores_out: of as many runs without it.
        alpha: chance of a false verdict.
        epsilon: the ε that is stated.
        delta: the δ that is stated.
        curve: all of δ(ε) as stated; the test then takes the ε where it sees most. Near ε = 0
            events are common, and few runs see what they would never see at a large ε.

    Raises:
        ValueError: if there are not as many scores of either world, at least four, or α is not in
            (0, 1).
    """
    alpha = checks.number("alpha", alpha, above=0, below=1)
    worlds = _checked(scores_in, scores_out)
    if curve is None:
        at = np.array([epsilon], dtype=np.float64)
        curve = StatedCurve(epsilon=at, remove=np.array([delta]), add=np.array([delta]))
    half = worlds[0].size // 2
    chosen = _choice(worlds[0][:half], worlds[1][:half], curve, delta)
    return _counted(chosen, worlds, half, alpha, delta)


def count_epsilon(
    scores_in: npt.ArrayLike, scores_out: npt.ArrayLike, *, alpha: float, delta: float
) -> Count:
    """The largest ε at δ that counting shows: its test is the one that shows most.

    Args:
        scores_in: of runs with the example.
        scores_out: of as many runs without it.
        alpha: chance that ``epsilon_lower`` is false.
        delta: δ.

    Raises:
        ValueError: as ``count``.
    """
    alpha = checks.number("alpha", alpha, above=0, below=1)
    worlds = _checked(scores_in, scores_out)
    half = worlds[0].size // 2
    best, found = -math.inf, _Test("remove", 0.0, 0.0, delta)
    thresholds, rates = _rates(worlds[0][:half], worlds[1][:half])
    for direction, (spoken, false) in rates.items():
        hits, errors = (np.rint(half * each).astype(int) for each in (spoken, false))
        least = least_probability(hits, half, alpha / 2) - delta
        shown = np.maximum(least, 1e-300) / most_probability(errors, half, alpha / 2)
        k = int(np.argmax(shown))
        if shown[k] > best:
            best = float(shown[k])
            found = _Test(direction, float(thresholds[k]), 0.0, delta)
    counted = _counted(found, worlds, half, alpha, delta)
    return dataclasses.replace(counted, epsilon=counted.epsilon_lower, delta_lower=delta)


def _checked(scores_in: npt.ArrayLike, scores_out: npt.ArrayLike) -> list[Array]:
    worlds = [np.asarray(scores, dtype=np.float64) for scores in (scores_in, scores_out)]
    if worlds[0].shape != worlds[1].shape or worlds[0].ndim != 1 or worlds[0].size < 4:
        shapes = [world.shape for world in worlds]
        raise ValueError(
            f"scores_in, scores_out: have the shapes {shapes}: must have equally many scores, 4 or "
            "more"
        )
    return worlds


@dataclasses.dataclass(frozen=True)
class _Test:
    direction: str
    threshold: float
    epsilon: float
    delta: float


def _rates(inside: Array, outside: Array) -> tuple[Array, dict[str, tuple[Array, Array]]]:
    """Thresholds, and the rates at which each direction's test says "in", in both worlds."""
    levels = np.linspace(0, 1, _THRESHOLDS + 2)[1:-1]
    tails = np.concatenate([levels, np.arange(1, 20) / inside.size])
    tails = np.unique(np.clip(np.concatenate([tails, 1 - tails]), 0, 1))
    thresholds = np.unique(np.quantile(np.concatenate([inside, outside]), tails))
    below = [
        np.searchsorted(np.sort(world), thresholds) / inside.size for world in (inside, outside)
    ]
    above = [1 - each for each in below]
    return thresholds, {"remove": (above[0], above[1]), "add": (below[1], below[0])}


def _choice(inside: Array, outside: Array, curve: StatedCurve, delta: float) -> _Test:
    """The test at which the first half is most standard errors above what is stated."""
    thresholds, rates = _rates(inside, outside)
    best, found = -math.inf, _Test("remove", float(thresholds[0]), float(curve.epsilon[0]), delta)
    for direction, (spoken, false) in rates.items():
        # A little above 0, as no error in so many runs does not mean that there is none.
        own, other = (
            (rate * (1 - rate) + 1 / inside.size) / inside.size for rate in (spoken, false)
        )
        for e, d in zip(curve.epsilon, curve.direction(direction), strict=True):
            z = (spoken - math.exp(e) * false - d) / np.sqrt(own + math.exp(2 * e) * other)
            k = int(np.argmax(z))
            if z[k] > best:
                best = float(z[k])
                found = _Test(direction, float(thresholds[k]), float(e), float(d))
    return found


def _counted(test: _Test, worlds: list[Array], half: int, alpha: float, delta: float) -> Count:
    spoken, false = worlds if test.direction == "remove" else worlds[::-1]
    above = test.direction == "remove"
    hits, errors = (
        int(np.count_nonzero((world[half:] >= test.threshold) == above))
        for world in (spoken, false)
    )
    runs = worlds[0].size - half
    low = float(least_probability(hits, runs, alpha / 2))
    high = float(most_probability(errors, runs, alpha / 2))
    return Count(
        direction=test.direction,
        threshold=test.threshold,
        runs=runs,
        hits=hits,
        false=errors,
        epsilon=test.epsilon,
        delta=test.delta,
        epsilon_lower=_epsilon(low, high, delta),
        delta_lower=max(0.0, low - math.exp(test.epsilon) * high),
        most=most_countable(runs, delta, alpha),
        alpha=alpha,
    )


def _epsilon(least_hits: float, most_false: float, delta: float) -> float:
    return max(0.0, math.log((least_hits - delta) / most_false)) if least_hits > delta else 0.0

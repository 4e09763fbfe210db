"""A quick estimate of the noise that a simulated accountant will ask for. It proves nothing."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import norm

from dptrain.accounting.losses import gaussian, hockey_stick
from dptrain.accounting.simulation import Simulation, default_threads, loss_chunks
from dptrain.core import Array

_WORK = 40_000_000  # steps simulated at each of the points that are fitted: a second or two
_FEWEST, _MOST = 10_000, 400_000
_HITS = 10.0  # expected sum of (1 - e^{ε-L})_+ that makes a point worth fitting
_LARGEST_DELTA = 0.03
_POINTS = 6
_STEP = 1.15


def estimate_noise(
    simulation: Simulation, *, epsilon: float, target: float, seed: int = 0
) -> float:
    """A σ at which δ(ε) of the simulated pair is near ``target``, to a few percent.

    Few samples show large δ only. So δ is simulated at smaller σ, where it is larger, and log σ is
    fitted as a quadratic in the normal quantile of δ (exactly linear for tails of a normal loss
    under small changes of σ). A number for comparing, never a guarantee.

    Args:
        simulation: the pair of distributions.
        epsilon: ε > 0.
        target: δ, the larger of both directions.

    Returns:
        σ, at most what the unamplified Gaussian mechanism needs.
    """
    samples = int(min(_MOST, max(_FEWEST, _WORK / simulation.work)))
    ceiling = simulation.sensitivity / gaussian.largest_mu(epsilon, target)
    few = max(2_000, samples // 20)
    coarse = ceiling * _STEP ** -np.arange(1.0, 9.0)
    sigmas: Array = np.empty(0)
    deltas: Array = np.empty(0)
    while coarse[0] > 1e-6 * ceiling:
        found = _deltas(simulation, coarse, epsilon, few, [seed, 0, len(sigmas)])
        sigmas, deltas = np.append(sigmas, coarse), np.append(deltas, found)
        if found[-1] > _LARGEST_DELTA:
            break
        coarse = coarse * _STEP ** -len(coarse)
    usable = deltas >= max(target, _HITS / samples)
    if not usable.any():
        return ceiling
    top = float(sigmas[usable].max())
    bottom = float(sigmas[usable & (deltas <= _LARGEST_DELTA)].min(initial=top / _STEP))
    bottom = min(bottom, top / _STEP)
    points = np.geomspace(bottom, min(ceiling, top * _STEP), _POINTS)
    fitted = _deltas(simulation, points, epsilon, samples, [seed, 1])
    kept = fitted * samples >= _HITS / 2
    if kept.sum() < 3:
        return ceiling
    # The error of log σ goes with that of log δ, about 1/sqrt(hits).
    weights = np.sqrt(np.minimum(fitted[kept] * samples, 1e3))
    degree = 2 if kept.sum() > 3 else 1
    line = np.polyfit(norm.isf(fitted[kept]), np.log(points[kept]), degree, w=weights)
    return min(ceiling, math.exp(float(np.polyval(line, norm.isf(target)))))


def _deltas(
    simulation: Simulation, sigmas: Array, epsilon: float, samples: int, seed: list[int]
) -> Array:
    """Mean of (1 - e^{ε-L})_+ at every σ, the larger of both directions."""
    totals = np.zeros((2, len(sigmas)))
    for block in loss_chunks(
        simulation, list(sigmas), seed=seed, samples=samples, threads=default_threads()
    ):
        totals += hockey_stick(block, epsilon).sum(axis=2)
    worst: Array = totals.max(axis=0) / samples
    return worst

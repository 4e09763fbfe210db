"""Means of hockey-stick terms of losses without weights, with standard errors: no guarantee."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.simulation import SimulatedAccountant, Simulation, loss_chunks
from dptrain.mechanism import MatrixMechanism

Array = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    """δ(ε) of either direction, and standard errors."""

    remove: Array
    add: Array
    remove_error: Array
    add_error: Array


def means(
    losses: Simulation, sigma: float, epsilon: npt.ArrayLike, *, samples: int, seed: int = 1
) -> Estimate:
    """Those of a pair's losses."""
    grid = np.asarray(epsilon, float)
    sums = np.zeros((2, 2, grid.size))
    for block in loss_chunks(losses, [sigma], seed=[seed], samples=samples, threads=1):
        for index, at in enumerate(grid.tolist()):
            terms = hockey_stick(block[:, 0], at)
            sums[:, 0, index] += terms.sum(axis=1)
            sums[:, 1, index] += (terms**2).sum(axis=1)
    first, second = sums[:, 0] / samples, sums[:, 1] / samples
    errors = np.sqrt(np.maximum(second - first**2, 0.0) / samples)
    return Estimate(first[0], first[1], errors[0], errors[1])


def estimate(
    member: SimulatedAccountant,
    mechanism: MatrixMechanism,
    epsilon: npt.ArrayLike,
    *,
    samples: int = 200_000,
    seed: int = 1,
) -> Estimate:
    """Those of the losses of an accountant's law."""
    losses = member.law(mechanism).losses
    return means(losses, mechanism.noise_multiplier, epsilon, samples=samples, seed=seed)

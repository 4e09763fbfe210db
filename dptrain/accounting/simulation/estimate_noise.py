"""The σ around which a certificate's grid is declared."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tqdm.auto import tqdm

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.simulation.chunk_sums import BITS, exact_sums
from dptrain.accounting.simulation.declaration import ESTIMATE
from dptrain.accounting.simulation.simulation import DIRECTIONS, Simulation, loss_chunks
from dptrain.core import Array, checks

Gather = Callable[[list[list[int]]], list[list[list[int]]]]


def alone(sums: list[list[int]]) -> list[list[list[int]]]:
    """What a single process gathers."""
    return [sums]


def estimate_noise(
    simulation: Simulation,
    *,
    epsilon: float,
    target: float,
    ceiling: float,
    seed: int,
    threads: int,
    progress: bool,
    share: tuple[int, int] = (0, 1),
    gather: Gather = alone,
) -> float:
    """A σ whose δ(ε) is near ``target``: proves nothing, only centers the grid.

    Several processes may share the work if all of them call this alike: process i of k
    (``share``) draws every k-th part, and ``gather`` returns everybody's sums to everybody. Sums
    are integers, so all go on with the same numbers, those of a single process.
    """

    def deltas(sigmas: list[float], hits: float, label: int) -> Array:
        samples, lanes = math.ceil(hits / target), simulation.lanes
        index, count = share
        chunks = -(-samples // lanes)
        first, end = index * chunks // count, (index + 1) * chunks // count
        own = max(0, min(end * lanes, samples) - first * lanes)
        totals = [[0] * len(sigmas) for _ in DIRECTIONS]
        with tqdm(
            total=2 * own, desc="estimate σ", unit="sample", unit_scale=True,
            disable=not progress, delay=2.0, leave=False,
        ) as bar:  # fmt: skip
            for block in loss_chunks(
                simulation, sigmas, "both", seed=[seed, ESTIMATE, label], samples=own,
                threads=threads, first_chunk=first,
            ):  # fmt: skip
                sums = exact_sums(hockey_stick(block, epsilon))
                for row, found in zip(totals, sums, strict=True):
                    row[:] = [total + each for total, each in zip(row, found, strict=True)]
                bar.update(2 * block.shape[2])
        everyone = gather(totals)
        return np.array(
            [
                max(sum(each[d][k] for each in everyone) for d in range(len(DIRECTIONS)))
                / (samples << BITS)
                for k in range(len(sigmas))
            ]
        )

    # Coarse: walk down from the unamplified Gaussian until the target is exceeded.
    above, label = ceiling, 0
    while True:
        trial = [above / 1.3, above / 1.3**2, above / 1.3**3]
        over = np.nonzero(deltas(trial, 4.0, label) > target)[0]
        label += 1
        if over.size:
            below = trial[over[0]]
            above = below * 1.3
            break
        above = trial[-1]
        checks.invariant(label < 200, "the privacy loss does not grow as the noise vanishes")
    # Fine: interpolate log δ over log σ in the bracket, a little wider for the coarse errors.
    sigmas = [float(s) for s in np.geomspace(below / 1.1, min(above * 1.1, ceiling), 4)]
    values = np.maximum.accumulate(deltas(sigmas, 12.0, label)[::-1])
    logs = np.log(np.maximum(values, target * 1e-3))
    return float(np.exp(np.interp(math.log(target), logs, np.log(sigmas[::-1]))))

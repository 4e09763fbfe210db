"""Runs of the one-example game by what trains: the scheme's stream and the strategy's noise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dptrain.core import Array, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.noise import noise_stream
from dptrain.sampling import (
    BallsInBins,
    CyclicPoisson,
    MinSep,
    Poisson,
    RandomAllocation,
    Scheme,
)

Patterns = npt.NDArray[np.bool_]

# Schemes whose examples are drawn independently of each other, given the parts of a cycle: all
# examples of one stream are as many independent draws.
_INDEPENDENT = (BallsInBins, CyclicPoisson, MinSep, Poisson, RandomAllocation)
_MOST_EXAMPLES = 1 << 16  # of one stream, which bounds the memory


def key(seed: int, *path: int) -> int:
    """A 128-bit seed for one of the draws that are made under ``seed``."""
    words = np.random.SeedSequence(seed, spawn_key=path).generate_state(2, np.uint64)
    return int(words[0]) << 64 | int(words[1])


def participations(scheme: Scheme, count: int, seed: int) -> Patterns:
    """Independent participation vectors of an example, from streams as loaders open them.

    Of ``CyclicPoisson`` these are of examples of the first part.

    Args:
        scheme: the scheme.
        count: how many.
        seed: of the streams.

    Returns:
        Shape (count, n).
    """
    checks.integer("count", count)
    found = np.zeros((count, scheme.steps), dtype=bool)
    done = stream_number = 0
    while done < count:
        stream = scheme.stream(key(seed, stream_number))
        stream_number += 1
        members = _members(scheme, stream.state_dict())[: count - done]
        place = np.full(scheme.dataset_size, -1)
        place[members] = np.arange(len(members)) + done
        for t, batch in enumerate(stream):
            rows = place[batch]
            found[rows[rows >= 0], t] = True
        done += len(members)
    return found


def _members(scheme: Scheme, state: dict[str, torch.Tensor]) -> npt.NDArray[np.int64]:
    """The examples of a stream that are draws of the game."""
    if isinstance(scheme, CyclicPoisson):
        return state["members"][: int(state["offsets"][1])].numpy()[:_MOST_EXAMPLES]
    if isinstance(scheme, _INDEPENDENT):
        return np.arange(min(scheme.dataset_size, _MOST_EXAMPLES))
    return np.zeros(1, dtype=np.int64)


def noises(mechanism: MatrixMechanism, count: int, seed: int) -> Array:
    """σ times independent columns of C^-1 Z, as the optimizer's stream releases sums of zero.

    Returns:
        Shape (count, n).
    """
    stream = noise_stream(
        mechanism.strategy, steps=mechanism.steps, like=[torch.zeros(count)], seed=key(seed)
    )
    rows = np.empty((mechanism.steps, count))
    for t in range(mechanism.steps):
        (released,) = stream.release([torch.zeros(count)], mechanism.noise_multiplier)
        rows[t] = released.numpy()
    return rows.T


def step_rates(scheme: Scheme) -> Array | None:
    """The chance that an example, of the first part if there are parts, is in each step's batch.

    Shape (n,); ``None`` if not known.
    """
    if isinstance(scheme, CyclicPoisson):  # of the first part
        return np.where(np.arange(scheme.steps) % scheme.cycle == 0, scheme.probability, 0.0)
    if isinstance(scheme, MinSep) and not scheme.warm_start:
        p, b = scheme.probability, scheme.min_sep
        rates = np.zeros(scheme.steps)
        for t in range(scheme.steps):
            rates[t] = p * (1.0 - rates[max(0, t - b + 1) : t].sum())
        return rates
    if isinstance(scheme, Poisson | MinSep | BallsInBins | RandomAllocation):
        return np.full(scheme.steps, scheme.rate)
    return None

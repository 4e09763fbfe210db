"""The rows that a batch of constant size needs so that cutting it costs no privacy that shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from dptrain.accounting.min_sep import FullBatches, MinSepLaw
from dptrain.accounting.poisson import Branches
from dptrain.sampling import MinSep

# Share of δ that an example's expected number of displacements may reach.
SHARE = 0.1


def displacements(
    *, dataset_size: int, probability: float, max_batch_size: int, draws: int
) -> float:
    """T·π_t·q2: how often an example displaces another in T = ``draws`` steps, on average.

    π_t is the chance that B others are drawn and q2 that the example is then drawn and kept. A run
    without such an event is Poisson sampling, so below δ the cost of cutting does not show
    (docs/theory/poisson.md#thm-truncated-cases).
    """
    if max_batch_size >= dataset_size:
        return 0.0
    cases = Branches.of(
        dataset_size=dataset_size, probability=probability, max_batch_size=max_batch_size
    )
    return draws * cases.full * cases.kept


def least_max_batch_size(
    *, dataset_size: int, probability: float, draws: int, delta: float, multiple_of: int = 1
) -> int:
    """The least B, a multiple of ``multiple_of``, with at most δ/10 displacements an example.

    Args:
        dataset_size: examples that toss a coin in a step (N, or the size of a part).
        probability: their chance p.
        draws: T, steps in which an example may be drawn.
        delta: δ of the run.
        multiple_of: rows that the device holds at a time.
    """

    def fits(largest: int) -> bool:
        expected = displacements(
            dataset_size=dataset_size,
            probability=probability,
            max_batch_size=largest,
            draws=draws,
        )
        return expected <= SHARE * delta

    return _least_multiple(fits, dataset_size, multiple_of)


def least_min_sep_batch_size(
    scheme: MinSep, *, epsilon: float, delta: float, multiple_of: int = 1
) -> int:
    """The least B, a multiple of ``multiple_of``, at which cutting adds at most δ/10 to δ(ε).

    That is so at every σ (docs/theory/min-sep.md#thm-min-sep-cut;
    ``test_a_cap_of_b_min_sep_sampling_adds_little``).

    Args:
        scheme: the sampling; its own cap is ignored.
        multiple_of: rows that the device holds at a time.
    """
    law = MinSepLaw(
        coefficients=np.ones(1), probability=scheme.probability, min_sep=scheme.min_sep,
        steps=scheme.steps, warm_start=scheme.warm_start,
    )  # fmt: skip

    def fits(largest: int) -> bool:
        cut = dataclasses.replace(scheme, max_batch_size=largest)
        return FullBatches.of(cut).worst_loss(law, epsilon) <= SHARE * delta

    return _least_multiple(fits, scheme.dataset_size, multiple_of)


def _least_multiple(fits: Callable[[int], bool], most: int, multiple_of: int) -> int:
    """The least multiple that fits, by bisection; all of ``most`` examples always fit."""
    low, high = 0, math.ceil(most / multiple_of)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * multiple_of) else (middle, high)
    return high * multiple_of

"""The loss when a public coin, the same in both worlds, picks one of several pairs.

It is the mixture of the losses, and masses may be rounded up
(docs/theory/composition.md#thm-public-mixture;
``test_branches_are_those_of_the_theorem_rounded_up``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dptrain.accounting.losses.composition import LossDistribution
from dptrain.accounting.losses.subsampled_gaussian import Spread


def public_mixture(parts: Sequence[tuple[float, LossDistribution]]) -> LossDistribution:
    """The mixture of the parts' losses: the coin says nothing, so the loss is that of its pair.

    Args:
        parts: weights and losses of the same spacing. Weights that are rounded up may add up to
            more than 1: all masses are then at least the true ones, and so is every δ.

    Raises:
        ValueError: if the spacings differ.
    """
    spacing = parts[0][1].spacing
    if any(part.spacing != spacing for _, part in parts):
        raise ValueError(
            "parts: the losses must have the same spacing; discretize them on one grid"
        )
    lowest = min(part.lowest for _, part in parts)
    size = max(part.lowest + part.log_mass.size for _, part in parts) - lowest
    mass = np.zeros(size)
    for weight, part in parts:
        first = part.lowest - lowest
        mass[first : first + part.log_mass.size] += weight * np.exp(part.log_mass)
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    infinity = sum(weight * part.infinity for weight, part in parts)
    return LossDistribution(spacing, lowest, log_mass, infinity)


def public_spread(parts: Sequence[tuple[float, Spread]]) -> Spread:
    """The spread of such a mixture."""
    mean = sum(weight * part.mean for weight, part in parts)
    variance = sum(weight * (part.variance + (part.mean - mean) ** 2) for weight, part in parts)
    return Spread(
        mean, variance, min(part.low for _, part in parts), max(part.high for _, part in parts)
    )

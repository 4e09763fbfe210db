"""Terms in [0, M] whose mean bounds δ, and those of the add direction below a Gaussian loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
from scipy.special import log_ndtr, ndtri_exp

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.core import Array


@dataclasses.dataclass(frozen=True)
class WeightedTerms:
    """Independent terms ≥ 0 of mean ≥ δ(ε) in one direction.

    Attributes:
        ceiling: proven bound of every term, or of the root of the mean of their squares; hence of
            δ(ε).
        lanes: terms a chunk.
        draw: ``draw(rng, size)`` gives ``size`` terms.
        bounded: whether the ceiling is one of every term.
        rough: draws other terms of about that mean, rare values of which weigh little, for
            estimates; by default these.
    """

    ceiling: float
    lanes: int
    draw: Callable[[np.random.Generator, int], Array]
    bounded: bool = True
    rough: Callable[[np.random.Generator, int], Array] | None = None

    def range_at(self, mean: float) -> float:
        """The M for which terms of this mean are small no more often than some in [0, M] are.

        (docs/theory/certification.md#thm-weighted-squares;
        ``test_terms_of_bounded_squares_are_small_as_rarely_as_stated``.)
        """
        return self.ceiling if self.bounded else self.ceiling**2 / mean


Both = Mapping[str, WeightedTerms]
"""The terms of both directions, by name."""


class OnDemand(dict[str, WeightedTerms]):
    """Both directions' terms by name, each made when it is first asked for."""

    def __init__(self, make: Callable[[str], WeightedTerms]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, direction: str) -> WeightedTerms:
        self[direction] = self._make(direction)
        return self[direction]


def noise_along(unit: Array, rng: np.random.Generator, along: Array) -> Array:
    """Normals of the law of N(0, I) given their products with ``unit``: (len(unit), size)."""
    noise = rng.standard_normal((unit.size, along.size))
    noise += unit[:, None] * (along - unit @ noise)
    return noise


def below_linear_loss(
    losses: Callable[[Array, np.random.Generator, Array], Array],
    epsilon: float,
    *,
    nu: float,
    direction: Array,
    log_mean: float,
    slack: float,
    lanes: int,
) -> WeightedTerms:
    """Terms of the add direction, whose loss L' is at most Y = ν - <direction, z>, z ~ N(0, I).

    With h(x) = (1 - e^{ε-x})_+ and Z ≥ E[h(Y)] they are Z h(L')/h(Y) ∈ [0, Z] under z of density
    h(Y)/E[h(Y)] against N(0, I): only the coordinate along the direction has another law, and is
    drawn by rejection from a truncated normal (docs/theory/certification.md#thm-weighted-add).

    Args:
        losses: ``losses(unit, rng, along)`` draws normals with these products with a unit vector,
            as ``noise_along`` does, and gives their L'.
        epsilon: ε ≥ 0.
        direction: not 0.
        log_mean: log Z.
        slack: what covers the rounding of L'.
        lanes: terms a chunk.
    """
    xi = float(np.linalg.norm(direction))
    unit = direction / xi
    # Y = ν - ξ g with g standard normal under Q; Y > ε where g < edge.
    log_mass = float(log_ndtr((nu - epsilon) / xi))

    def along(rng: np.random.Generator, size: int) -> Array:
        found = np.empty(size)
        missing = np.arange(size)
        while missing.size:
            # log of a uniform number below Φ(edge): exact however deep the tail.
            trial = ndtri_exp(log_mass - rng.standard_exponential(missing.size))
            keep = rng.random(missing.size) < hockey_stick(nu - xi * trial, epsilon)
            found[missing[keep]] = trial[keep]
            missing = missing[~keep]
        return found

    def draw(rng: np.random.Generator, size: int) -> Array:
        tilted = along(rng, size)
        top = hockey_stick(nu - xi * tilted, epsilon)
        share = np.minimum(hockey_stick(losses(unit, rng, tilted), epsilon - slack) / top, 1.0)
        return np.asarray(math.exp(log_mean) * share)

    return WeightedTerms(math.exp(log_mean), lanes, draw)

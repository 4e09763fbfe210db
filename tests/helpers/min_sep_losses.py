"""Privacy losses of b-min-sep sampling drawn without weights, by the definition of the pair."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from dptrain.accounting.min_sep import MinSepLaw, min_sep_law, participations
from dptrain.accounting.min_sep.recursion import log_ratio
from dptrain.accounting.simulation import DIRECTIONS, Simulation
from dptrain.mechanism import MatrixMechanism
from tests.helpers.plain_means import Estimate, means


@dataclasses.dataclass(frozen=True)
class MinSepLosses(Simulation):
    """The losses of a law: outputs y = C x + σz or σz, and log P/Q of what they are."""

    law: MinSepLaw
    lanes = 4096

    @property
    def sensitivity(self) -> float:
        return self.law.sensitivity

    @property
    def work(self) -> int:
        return self.law.steps

    def to_dict(self) -> dict[str, Any]:
        return self.law.to_dict()

    def draw(self, sigmas, direction, rng, size):
        law = self.law
        x, z = np.zeros((law.steps, size)), rng.standard_normal((law.steps, size))
        x[participations(law, rng, size)] = 1.0
        mean = {"remove": lfilter(law.coefficients, [1.0], x, axis=0), "add": 0.0}
        sign = {"remove": 1.0, "add": -1.0}
        both = [
            [sign[each] * log_ratio(law, sigma, mean[each] + sigma * z) for sigma in sigmas]
            for each in (DIRECTIONS if direction == "both" else [direction])
        ]
        return np.array(both) if direction == "both" else np.array(both[0])


def min_sep_means(
    mechanism: MatrixMechanism, epsilon: npt.ArrayLike, *, samples: int = 200_000, seed: int = 1
) -> Estimate:
    """δ(ε) of a mechanism that the accountants of b-min-sep sampling cover."""
    losses = MinSepLosses(min_sep_law(mechanism))
    return means(losses, mechanism.noise_multiplier, epsilon, samples=samples, seed=seed)

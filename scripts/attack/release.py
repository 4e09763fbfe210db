"""Releases off a grid: what the numbers that leave the engine tell by which numbers they are.

Each case trains with everybody in every step, with an example and without, and an observer who
knows both sums to the last bit asks of every noisy sum which of the two it can be of: whether it is
a whole number of the grid, whether float32 noise reaches it, how its last bits fall. None of that
has to do with the Gaussian, whose own evidence is not counted. So whoever is right more often than
coins are has found a hole (docs/guides/floating-point.md).

Each case also audits the engine with noise in floating point, as it once was: if that is not found
out, the case proves nothing, and fails.

``Game.play`` and ``leaks`` of ``tests/oracles/membership_game.py`` audit any function from sums to
noisy sums, of another engine too.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

from scripts.attack.harness import Finding, Part
from tests.helpers.released import in_floating_point, membership
from tests.oracles.membership_game import leaks

_CHANCE = 1e-9  # that a case of an engine that is right fails
_STEPS = 40


def case(seed: int) -> int:
    """One run audited as it is, and with noise in floating point."""
    rng = np.random.default_rng([20_271_044, seed])
    sigma = float(rng.uniform(1.1, 1.9) * 2.0 ** rng.integers(-1, 10))
    dtype = (torch.float32, torch.float64)[seed % 2]
    options = {"dtype": dtype, "seed": seed, "secure": bool(rng.integers(2)), "releases": _STEPS}
    said = f"noise_multiplier={sigma}, {options}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = leaks(membership(sigma, **options), chance=_CHANCE)
        if found:
            raise Finding(f"{'; '.join(found)}: {said}")
        with in_floating_point():
            caught = leaks(membership(sigma, **options), chance=_CHANCE)
        if not caught:
            raise Finding(f"no power: nothing is found of noise in floating point: {said}")
    return 2


PART = Part("release", "audited releases", case)

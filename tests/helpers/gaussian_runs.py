"""Runs that are Gaussian mechanisms, so that everything about them is known."""

from __future__ import annotations

import math

from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson
from dptrain.strategies import Identity


def full_batches(mu, steps=4, size=1000):
    """Gaussians: μ = √steps/σ."""
    scheme = Poisson(probability=1, dataset_size=size, steps=steps)
    return MatrixMechanism(
        scheme=scheme, strategy=Identity(), noise_multiplier=math.sqrt(steps) / mu
    )

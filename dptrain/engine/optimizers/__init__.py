"""Optimizers of a private run besides torch's own."""

from dptrain.engine.optimizers.joined import JoinedOptimizer, single_optimizers
from dptrain.engine.optimizers.scaled_adam import ScaledAdam, ScalesGradients, scales_of

__all__ = [
    "JoinedOptimizer",
    "ScaledAdam",
    "ScalesGradients",
    "scales_of",
    "single_optimizers",
]

"""Optimizers of a private run besides torch's own."""

from dptrain.engine.optimizers.joined import JoinedOptimizer, single_optimizers
from dptrain.engine.optimizers.scaled_adam import ScaledAdam, ScalesGradients, scales_of
from dptrain.engine.optimizers.sliced import (
    PIECES,
    SlicedOptimizer,
    all_of,
    for_each_part,
    in_pieces,
    joined_states,
    laid_out_like,
    nothing_of,
    whole_because,
)

__all__ = [
    "PIECES",
    "JoinedOptimizer",
    "ScaledAdam",
    "ScalesGradients",
    "SlicedOptimizer",
    "all_of",
    "for_each_part",
    "in_pieces",
    "joined_states",
    "laid_out_like",
    "nothing_of",
    "scales_of",
    "single_optimizers",
    "whole_because",
]

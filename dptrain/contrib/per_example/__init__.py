"""The spending of single examples, from their gradient norms."""

from dptrain.contrib.per_example.loss_transform import TiltedLosses
from dptrain.contrib.per_example.norm_grid import NormGrid
from dptrain.contrib.per_example.periodic_hockey_stick import kernel_transform
from dptrain.contrib.per_example.pld import IndividualPLD
from dptrain.contrib.per_example.renyi import IndividualRenyi
from dptrain.contrib.per_example.tilt_plan import TILTS, TiltPlanner

__all__ = [
    "TILTS",
    "IndividualPLD",
    "IndividualRenyi",
    "NormGrid",
    "TiltPlanner",
    "TiltedLosses",
    "kernel_transform",
]

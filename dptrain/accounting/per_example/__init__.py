"""What single examples have spent, from their gradient norms."""

from dptrain.accounting.per_example.loss_transform import TiltedLosses
from dptrain.accounting.per_example.norm_grid import NormGrid
from dptrain.accounting.per_example.periodic_hockey_stick import kernel_transform
from dptrain.accounting.per_example.pld import IndividualPLD
from dptrain.accounting.per_example.renyi import IndividualRenyi
from dptrain.accounting.per_example.tilt_plan import TILTS, TiltPlanner

__all__ = [
    "TILTS",
    "IndividualPLD",
    "IndividualRenyi",
    "NormGrid",
    "TiltPlanner",
    "TiltedLosses",
    "kernel_transform",
]

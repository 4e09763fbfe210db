"""Per-example norms and clipped sums on top of Opacus's grad-sample modes."""

from dptrain.clipping.ghost import GhostClipper, GhostLoss
from dptrain.clipping.ghost_module import GhostModule
from dptrain.clipping.norms import per_example_norms
from dptrain.clipping.per_example import HookedModule, PerExampleClipper

__all__ = [
    "GhostClipper",
    "GhostLoss",
    "GhostModule",
    "HookedModule",
    "PerExampleClipper",
    "per_example_norms",
]

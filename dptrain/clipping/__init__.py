"""Per-example norms and clipped sums, from bookkeeping or on top of Opacus's modes."""

from dptrain.clipping.norms import per_example_norms
from dptrain.clipping.opacus.per_example import HookedModule, PerExampleClipper

__all__ = [
    "HookedModule",
    "PerExampleClipper",
    "per_example_norms",
]

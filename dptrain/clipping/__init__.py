"""Per-example norms and clipped sums, from bookkeeping or on top of Opacus's modes."""

from dptrain.clipping.base.styles import parameter_groups
from dptrain.clipping.mixing_layers import keeps_statistics, why_not
from dptrain.clipping.modes import Attached, attach, check_mode_name, choose_mode, own_attributes
from dptrain.clipping.opacus.per_example import HookedModule, PerExampleClipper
from dptrain.clipping.repair import fix, freeze_batchnorm
from dptrain.clipping.unreached import Unreached

__all__ = [
    "Attached",
    "HookedModule",
    "PerExampleClipper",
    "Unreached",
    "attach",
    "check_mode_name",
    "choose_mode",
    "fix",
    "freeze_batchnorm",
    "keeps_statistics",
    "own_attributes",
    "parameter_groups",
    "why_not",
]

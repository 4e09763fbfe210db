"""Individual privacy: every example has a budget of its own and is left out once it is spent.

``make_private(..., noise_multiplier=..., individual=...)`` takes one of

- ``GDPFilter``: full batches, ``Poisson(probability=1, ...)``; proven;
- ``GDPOdometer``: the same with a budget that grows round by round;
- ``RenyiFilter``: any Poisson rate; proven;
- ``PLDFilter``: any Poisson rate; an estimate.

``private.guarantee()`` states what holds for every example and may be published. What each example
has spent is private data and comes on request only: ``IndividualReport.of(private)`` has
``summary()``, ``save(path)`` and ``by_group(groups)``; ``dptrain.reporting.individual_plots`` and
``dptrain.reporting.individual_plots`` draw it, marked as not for release.
"""

from dptrain.individual.filter import IndividualFilter
from dptrain.individual.gdp import GDPFilter, GDPLedger
from dptrain.individual.odometer import GDPOdometer, OdometerLedger
from dptrain.individual.pld import PLDFilter
from dptrain.individual.pld_record import PLDLedger
from dptrain.individual.record import Indices, IndividualLedger, Mask
from dptrain.individual.renyi import RenyiFilter, RenyiLedger
from dptrain.individual.sampled_record import SampledLedger

__all__ = [
    "GDPFilter",
    "GDPLedger",
    "GDPOdometer",
    "Indices",
    "IndividualFilter",
    "IndividualLedger",
    "Mask",
    "OdometerLedger",
    "PLDFilter",
    "PLDLedger",
    "RenyiFilter",
    "RenyiLedger",
    "SampledLedger",
]

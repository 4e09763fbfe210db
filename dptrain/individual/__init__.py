"""Individual privacy: every example has a budget of its own and is left out once it is spent.

``make_private(..., noise_multiplier=..., individual=...)`` takes one of

- ``GDPFilter``: full batches, ``Poisson(probability=1, ...)``; proven;
- ``GDPOdometer``: the same with a budget that grows round by round;
- ``RenyiFilter``: any Poisson rate; proven;
- ``PLDFilter``: any Poisson rate; an estimate.

``private.guarantee()`` states what holds for every example and may be published. What each example
has spent is private data and comes on request only: ``IndividualReport.of(private)`` has
``summary()``, ``save(path)`` and ``by_group(groups)``; ``dptrain.reporting.individual_plots`` draws
it, marked as not for release.
"""

from dptrain.individual.budget_curve import filter_profile
from dptrain.individual.filter import IndividualFilter
from dptrain.individual.gdp import GDPFilter, GDPRecord
from dptrain.individual.odometer import GDPOdometer, OdometerRecord
from dptrain.individual.pld import PLDFilter
from dptrain.individual.pld_record import PLDRecord
from dptrain.individual.record import Indices, IndividualRecord, Mask
from dptrain.individual.renyi import RenyiFilter, RenyiRecord
from dptrain.individual.sampled_record import SampledRecord

__all__ = [
    "GDPFilter",
    "GDPOdometer",
    "GDPRecord",
    "Indices",
    "IndividualFilter",
    "IndividualRecord",
    "Mask",
    "OdometerRecord",
    "PLDFilter",
    "PLDRecord",
    "RenyiFilter",
    "RenyiRecord",
    "SampledRecord",
    "filter_profile",
]

"""Individual privacy: every example has a budget of its own and is left out once it is spent.

``make_private(..., noise_multiplier=..., individual=...)`` takes one of

- :class:`GDPFilter`: full batches, ``Poisson(probability=1, ...)``; proven;
- :class:`GDPOdometer`: the same with a budget that grows round by round;
- :class:`RenyiFilter`: any Poisson rate; proven;
- :class:`PLDFilter`: any Poisson rate; an estimate.

``private.guarantee()`` states what holds for every example and may be published. What each example
has spent is private data and comes on request only: ``IndividualReport.of(private)`` has
``summary()``, ``save(path)`` and ``by_group(groups)``; :mod:`dptrain.individual.plots` and
:mod:`dptrain.individual.plots_groups` draw it, marked as not for release.
"""

from dptrain.individual.gdp import GDPFilter, GDPLedger
from dptrain.individual.individual_filter import IndividualFilter
from dptrain.individual.ledger import IndividualLedger
from dptrain.individual.odometer import GDPOdometer, OdometerLedger
from dptrain.individual.pld import PLDFilter
from dptrain.individual.pld_ledger import PLDLedger
from dptrain.individual.renyi import RenyiFilter, RenyiLedger
from dptrain.individual.report import IndividualReport
from dptrain.individual.sampled import SampledLedger

__all__ = [
    "GDPFilter",
    "GDPLedger",
    "GDPOdometer",
    "IndividualFilter",
    "IndividualLedger",
    "IndividualReport",
    "OdometerLedger",
    "PLDFilter",
    "PLDLedger",
    "RenyiFilter",
    "RenyiLedger",
    "SampledLedger",
]

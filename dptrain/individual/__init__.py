"""Individual privacy: every example has a budget of its own and is left out once it is spent.

``make_private(..., noise_multiplier=..., individual=...)`` takes one of

- ``GDPFilter``: full batches, ``Poisson(probability=1, ...)``; proven;
- ``GDPOdometer``: the same with a budget that grows round by round;
- ``RenyiFilter``: any Poisson rate; proven;
- ``PLDFilter``: any Poisson rate; an estimate.

``private.guarantee()`` states what holds for every example and may be published. What each example
has spent is private data and comes on request only: ``IndividualReport.of(private)`` has
``summary()``, ``save(path)`` and ``by_group(groups)``; ``dptrain.reporting`` draws it,
marked as not for release.
"""

from typing import TYPE_CHECKING

from dptrain._on_demand import names_of
from dptrain.individual.filter import IndividualFilter
from dptrain.individual.record import Indices, IndividualRecord, Mask, Staged

if TYPE_CHECKING:
    from dptrain.contrib.individual import (
        GDPFilter,
        GDPOdometer,
        GDPRecord,
        OdometerRecord,
        PLDFilter,
        PLDRecord,
        RenyiFilter,
        RenyiRecord,
        SampledRecord,
        filter_profile,
    )

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
    "Staged",
    "filter_profile",
]

__getattr__, __dir__ = names_of(
    __name__,
    {
        "dptrain.contrib.individual": (
            "GDPFilter GDPOdometer GDPRecord OdometerRecord PLDFilter PLDRecord RenyiFilter "
            "RenyiRecord SampledRecord filter_profile"
        )
    },
)

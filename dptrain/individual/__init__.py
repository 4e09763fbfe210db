"""Individual privacy: every example has a budget of its own and is left out once it is spent.

``make_private(..., noise_multiplier=..., individual=...)`` takes one of

- ``GDPFilter``: full batches, ``Poisson(probability=1, ...)``; proven;
- ``GDPOdometer``: the same with a budget that grows round by round;
- ``RenyiFilter``: any Poisson rate; proven.

``private.guarantee()`` states what holds for every example and may be published. What each example
has spent is private data and comes on request only: ``IndividualReport.of(private)`` has
``summary()``, ``save(path)`` and ``by_group(groups)``; ``dptrain.reporting`` draws it,
marked as not for release.
"""

from typing import TYPE_CHECKING, Any

from dptrain._on_demand import names_of
from dptrain.individual.filter import IndividualFilter
from dptrain.individual.record import Indices, IndividualRecord, Mask, Staged

if TYPE_CHECKING:
    from dptrain.contrib.individual import (
        GDPFilter,
        GDPOdometer,
        GDPRecord,
        OdometerRecord,
        RenyiFilter,
        RenyiRecord,
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
    "RenyiFilter",
    "RenyiRecord",
    "Staged",
    "filter_profile",
]

_found, __dir__ = names_of(
    __name__,
    {
        "dptrain.contrib.individual": (
            "GDPFilter GDPOdometer GDPRecord OdometerRecord RenyiFilter RenyiRecord filter_profile"
        )
    },
)


def __getattr__(name: str) -> Any:
    if name == "PLDFilter":
        raise ImportError(
            "dptrain has no PLDFilter any more: its bound was an estimate, and RenyiFilter has a "
            "proof; use dptrain.individual.RenyiFilter(target_epsilon=..., target_delta=..., "
            "max_steps=...)"
        )
    return _found(name)

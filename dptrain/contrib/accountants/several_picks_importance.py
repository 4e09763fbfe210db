"""Certified accountant of k picks out of t steps: the bound by blocks, then weighted samples."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from dptrain.accounting import Cost
from dptrain.accounting.balls_in_bins import AllocationCurve, AllocationPLD, picks_refusal
from dptrain.accounting.simulation import SimulatedAccountant, SimulatedLaw, TermsAtEpsilon
from dptrain.contrib.accountants.several_picks import SubsetLosses, cost_of_samples
from dptrain.contrib.accountants.several_picks_terms import TiltedSubsets
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import RandomAllocation


class _PicksLaw(SimulatedLaw):
    """One pick from each of k blocks."""

    def __init__(self, mechanism: MatrixMechanism) -> None:
        self._mechanism = mechanism

    @functools.cached_property
    def curve(self) -> AllocationCurve:
        return AllocationPLD().curve(self._mechanism)

    @functools.cached_property
    def losses(self) -> SubsetLosses:
        return SubsetLosses.of(self._mechanism)

    @functools.cached_property
    def _tilted(self) -> TiltedSubsets:
        return TiltedSubsets(self.losses, self.curve)

    def to_dict(self) -> dict[str, Any]:
        return self.losses.to_dict()

    def terms(self, sigma: float) -> TermsAtEpsilon:
        return self._tilted.at(sigma).both


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationImportance(SimulatedAccountant):
    """Refines the bound by blocks of ``RandomAllocation`` with k > 1 by the exact k-subsets' law.

    The terms are those of ``TiltedSubsets``. What it states is never above what 'allocation-pld'
    does: that is the top of its grid, and stands where samples would not pay.
    """

    max_samples: int = 2 * 10**7

    name = "allocation-importance"
    display = "allocation importance sampling"
    formerly = ("allocation-monte-carlo",)
    ample = 1_000_000  # some ten microseconds each at t = 1,000

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, one pick, correlated noise, and noise that varies."""
        if reason := picks_refusal(mechanism):
            return reason
        scheme = mechanism.scheme
        assert isinstance(scheme, RandomAllocation)
        if scheme.participations == 1:
            return (
                "with one participation the privacy loss is known without samples; use "
                "'allocation-pld'"
            )
        return None

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """The reason to ask by name: the bound by blocks needs no samples, mostly as tight."""
        return (
            "'allocation-pld' needs no samples and is as tight if an example takes part in few of "
            "the steps; request this one by name"
        )

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Seconds to minutes, hours where a loss takes many steps."""
        return cost_of_samples(mechanism)

    def law(self, mechanism: MatrixMechanism) -> SimulatedLaw:
        """The law of 'allocation-pld'."""
        return _PicksLaw(mechanism)

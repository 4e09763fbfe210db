"""The default accountant for balls-in-bins with correlated noise: proven bounds, then samples."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from dptrain.accounting.balls_in_bins.bins_losses import BallsInBinsLosses
from dptrain.accounting.balls_in_bins.conditional_composition import ConditionalComposition
from dptrain.accounting.balls_in_bins.importance_terms import TiltedBallsInBins
from dptrain.accounting.balls_in_bins.one_pick import AllocationPLD
from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi, periodic_refusal
from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve
from dptrain.accounting.best_of import BestOf
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.law import SimulatedLaw, TermsAtEpsilon
from dptrain.mechanism import MatrixMechanism

MOST_BINS = 8192  # a factor of half a gigabyte


class _BallsInBinsLaw(SimulatedLaw):
    """The least of the deterministic accountants that would answer without simulation."""

    def __init__(self, mechanism: MatrixMechanism) -> None:
        self._mechanism = mechanism
        known = (BallsInBinsRenyi(), ConditionalComposition())
        self._proven = BestOf.of([m for m in known if m.reserved(mechanism) is None])

    @functools.cached_property
    def curve(self) -> Curve:
        return self._proven.curve(self._mechanism)

    @functools.cached_property
    def losses(self) -> BallsInBinsLosses:
        scheme = self._mechanism.scheme
        return BallsInBinsLosses(self._mechanism.strategy, scheme.steps, scheme.min_sep)

    @functools.cached_property
    def _tilted(self) -> TiltedBallsInBins:
        return TiltedBallsInBins(self.losses)

    def to_dict(self) -> dict[str, Any]:
        return self.losses.to_dict()

    def terms(self, sigma: float) -> TermsAtEpsilon:
        return self._tilted.at(sigma).both

    def least_sigma(self, epsilon: float, delta: float, *, progress: bool) -> float | None:
        """Ask dear members only where they better the others (``BestOf.calibrate``)."""
        found = self._proven.calibrate(self._mechanism, epsilon=epsilon, delta=delta)
        return found.noise_multiplier


@dataclasses.dataclass(frozen=True, kw_only=True)
class BallsInBinsImportance(SimulatedAccountant):
    """Refines the deterministic bounds of balls-in-bins with any C by weighted samples.

    The terms are those of ``TiltedBallsInBins``, drawn in b dimensions. What it states is
    never above what the deterministic accountants do: theirs is the top of its grid, and stands
    where samples would not pay (a δ far below 1e-6, or little amplification).

    ``MinSep`` with p = 1 and a warm start is the same law.
    """

    max_samples: int = 2 * 10**7

    name = "balls-in-bins-importance"
    display = "balls-in-bins importance sampling"
    formerly = ("balls-in-bins-monte-carlo",)
    refines = True
    ample = 400_000  # a few microseconds each

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse other schemes, and tables and factors that do not fit the memory."""
        if reason := periodic_refusal(mechanism):
            return reason
        if (bins := mechanism.scheme.min_sep) > MOST_BINS:
            return (
                f"{bins} bins exceed the {MOST_BINS} whose products it can correlate in half a "
                "gigabyte; with a banded Toeplitz strategy see 'min-sep-importance'"
            )
        return None

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Answer by name only where the loss is known without samples."""
        if AllocationPLD().refusal(mechanism) is None:
            return "the noise is independent, where 'allocation-pld' needs no samples"
        return None

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Seconds at δ = 1e-5 and a hundred bins, beside the deterministic bounds."""
        return Cost.MINUTES

    def law(self, mechanism: MatrixMechanism) -> SimulatedLaw:
        """The law whose bounds are those of the deterministic accountants."""
        return _BallsInBinsLaw(mechanism)

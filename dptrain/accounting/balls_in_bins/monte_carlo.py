"""Monte Carlo accountant for balls-in-bins sampling with any strategy."""

from __future__ import annotations

import dataclasses

from dptrain.accounting.balls_in_bins.losses import BallsInBinsLosses
from dptrain.accounting.balls_in_bins.renyi import periodic_refusal
from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.simulation.monte_carlo import MonteCarloAccountant
from dptrain.mechanism import MatrixMechanism

MOST_BINS = 8192  # a factor of half a gigabyte


@dataclasses.dataclass(frozen=True, kw_only=True)
class BallsInBinsMonteCarlo(MonteCarloAccountant):
    """Simulates the privacy loss of ``BallsInBins`` sampling in b dimensions, any C.

    Nothing is lost but the certificate's margin: see ``BallsInBinsLosses``. ``MinSep`` with
    p = 1 and a warm start is the same law.
    """

    name = "balls-in-bins-monte-carlo"
    display = "balls-in-bins Monte Carlo"

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, and tables and factors that do not fit the memory."""
        bins = mechanism.scheme.min_sep
        if reason := periodic_refusal(mechanism):
            return reason
        if bins > MOST_BINS:
            return (
                f"{bins} bins exceed the {MOST_BINS} whose products it can correlate in half a "
                "gigabyte; with a banded Toeplitz strategy see 'min-sep-importance'"
            )
        return None

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """By name only: deterministic accountants cover the same mechanisms."""
        return (
            "it simulates where deterministic bounds exist; ask for it by name, it is tighter than "
            "they are for correlated noise"
        )

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """A minute or so at δ = 1e-5 and a hundred bins; more samples for smaller δ."""
        return Cost.MINUTES

    def simulation(self, mechanism: MatrixMechanism) -> BallsInBinsLosses:
        """The pair (P, Q) of the mechanism, without its σ."""
        scheme = mechanism.scheme
        return BallsInBinsLosses(mechanism.strategy, scheme.steps, scheme.min_sep)

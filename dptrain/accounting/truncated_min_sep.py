"""Monte Carlo accountant for truncated b-min-sep sampling with a banded strategy."""

from __future__ import annotations

import dataclasses

from dptrain.accounting.accountant import Cost
from dptrain.accounting.min_sep import banded_refusal
from dptrain.accounting.monte_carlo import MonteCarloAccountant
from dptrain.accounting.truncated_min_sep_loss import TruncatedMinSepLosses
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.truncated_min_sep import TruncatedMinSep
from dptrain.strategies.toeplitz import BandedToeplitz


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedMinSepMonteCarlo(MonteCarloAccountant):
    """Simulates the privacy loss of :class:`TruncatedMinSep` under zero-out, bands ≤ min_sep.

    (Dong & Ganesh 2026, Appendix D; proof in :class:`TruncatedMinSepLosses`.) The loss of the
    dominating pair is exact for each simulated output. The pair itself gives something away where
    batches are cut (an example and the one it displaces are taken at their worst in both worlds),
    nothing where B ≥ N.
    """

    name = "truncated b-min-sep Monte Carlo"

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """``None`` for TruncatedMinSep with a banded Toeplitz C, bands ≤ b."""
        scheme = mechanism.scheme
        if not isinstance(scheme, TruncatedMinSep):
            return f"it needs TruncatedMinSep sampling, the scheme is {type(scheme).__name__}"
        return banded_refusal(mechanism)

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Simulation takes hours at the δ of large data sets."""
        return Cost.HOURS

    def simulation(self, mechanism: MatrixMechanism) -> TruncatedMinSepLosses:
        """The pair (P, Q) of the mechanism, without its σ."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        assert isinstance(scheme, TruncatedMinSep)
        assert isinstance(strategy, BandedToeplitz)
        return TruncatedMinSepLosses(scheme, strategy.first_column(scheme.steps))

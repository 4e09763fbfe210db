"""Monte Carlo accountant for b-min-sep sampling with a banded strategy."""

from __future__ import annotations

import dataclasses
from typing import get_args

from dptrain.accounting.base.accountant import truncation_refusal
from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.accounting.min_sep.losses import Engine, MinSepLosses
from dptrain.accounting.simulation.monte_carlo import MonteCarloAccountant
from dptrain.core import checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies.toeplitz import BandedToeplitz


def min_sep_refusal(mechanism: MatrixMechanism) -> str | None:
    """``None`` for MinSep, BallsInBins, Poisson, not cut, with a banded Toeplitz C, bands ≤ b."""
    if reason := truncation_refusal(mechanism.scheme):
        return reason
    if not isinstance(mechanism.scheme, MinSep | BallsInBins | Poisson):
        name = type(mechanism.scheme).__name__
        return f"{name} sampling is not b-min-sep, balls-in-bins or Poisson"
    return banded_refusal(mechanism)


def banded_refusal(mechanism: MatrixMechanism) -> str | None:
    """``None`` for a banded Toeplitz C with bands ≤ b."""
    scheme, strategy = mechanism.scheme, mechanism.strategy
    if not isinstance(strategy, BandedToeplitz):
        return f"{type(strategy).__name__} is not a banded Toeplitz strategy"
    if strategy.bands > scheme.min_sep:
        return (
            f"{strategy.bands} bands exceed the minimum separation b = {scheme.min_sep}; "
            "use at most b bands"
        )
    return None


def min_sep_law(mechanism: MatrixMechanism) -> MinSepLaw:
    """The law of a mechanism that ``min_sep_refusal`` does not refuse.

    Two further schemes have the law of b-min-sep sampling for one example, which is all that the
    pair (P, Q) depends on:

    * ``BallsInBins(b)`` is MinSep(p = 1, warm start): the warm start is available with weight 1 or
      barred for s = 1..b-1 steps with weight p = 1 each, so the first participation is uniform on
      the first b steps, and with p = 1 the example returns exactly every b steps.
    * ``Poisson(p)`` is MinSep(b = 1): nothing is ever barred. (With one band, composition is
      sharper and quicker.)
    """
    scheme, strategy = mechanism.scheme, mechanism.strategy
    assert isinstance(strategy, BandedToeplitz)
    checks.invariant(
        scheme.max_batch_size is None, "this simulation is for draws that are not truncated"
    )
    probability, warm_start = 1.0, True
    if isinstance(scheme, MinSep):
        probability, warm_start = scheme.probability, scheme.warm_start
    elif isinstance(scheme, Poisson):
        probability = scheme.probability
    return MinSepLaw(
        coefficients=strategy.first_column(scheme.steps),
        probability=probability,
        min_sep=scheme.min_sep,
        steps=scheme.steps,
        warm_start=warm_start,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinSepMonteCarlo(MonteCarloAccountant):
    """Simulates the privacy loss of ``MinSep`` sampling, bands ≤ min_sep.

    The loss is computed exactly for each simulated output (Dong & Ganesh 2026, Theorem 5.1, arXiv
    2602.09338), so nothing is lost but the certificate's margin. Also for the schemes of
    ``min_sep_law`` that have the same law.

    Args:
        engine: what draws, see ``MinSepLosses``; ``"cuda"`` is for large jobs. The other
            options are those of ``MonteCarloAccountant``.
    """

    engine: Engine = "auto"

    name = "min-sep-monte-carlo"
    display = "b-min-sep Monte Carlo"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("engine", self.engine, get_args(Engine))

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """``None`` for laws of b-min-sep sampling with a banded Toeplitz C, bands ≤ b."""
        return min_sep_refusal(mechanism)

    def simulation(self, mechanism: MatrixMechanism) -> MinSepLosses:
        """The pair (P, Q) of the mechanism, without its σ."""
        return MinSepLosses(min_sep_law(mechanism), self.engine)

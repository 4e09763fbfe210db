"""The default accountant for b-min-sep sampling: importance sampling below a proven bound."""

from __future__ import annotations

import dataclasses
from typing import get_args

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.min_sep.importance_terms import Asked
from dptrain.accounting.min_sep.law import often_cut, simulated_law
from dptrain.accounting.min_sep.pair import covered_refusal
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.law import SimulatedLaw
from dptrain.core import checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinSepImportance(SimulatedAccountant):
    """Certification of b-min-sep sampling, bands ≤ min_sep, by the terms of ``TiltedMinSep``.

    Where ``MinSep`` has a ``max_batch_size`` (under zero-out) that is rarely reached, the terms are
    those of whole batches, and each is larger by what cutting costs at most: their mean is at least
    δ(ε) of cut batches (docs/theory/min-sep.md#thm-min-sep-cut;
    ``test_bounds_are_above_brute_force_over_everybodys_draws``).

    Where batches are often cut, an example meeting a full one more than 1/N times on average, the
    losses of the dominating pair are drawn, without weights
    (docs/theory/min-sep.md#thm-truncated-min-sep, by ``TruncatedMinSepLosses``; Dong & Ganesh 2026,
    Appendix D, arXiv 2602.09338). The pair itself gives something away there: an example and the
    one it displaces are taken at their worst in both worlds.

    Args:
        max_samples: samples a direction at most; above 10^8 only where batches are often cut.
        engine: ``"auto"`` (compiled code) or ``"cuda"``: noise and losses on a GPU by torch, after
            participations that compiled code draws. It is part of the certificate, as one seed
            means other draws in another engine. Samples without numba, of the extra
            ``fast``, are a ``ModuleNotFoundError``, as is reading their certificate; without the
            GPU drawing is a ``ValueError``, and reading is not. The other options
            are those of ``SimulatedAccountant``.
    """

    max_samples: int = 10**9
    engine: Asked = "auto"

    name = "min-sep-importance"
    display = "b-min-sep importance sampling"
    formerly = (
        "truncated-min-sep-importance",
        "min-sep-monte-carlo",
        "truncated-min-sep-monte-carlo",
    )
    changes = 1
    refines = True
    truncation = True
    instead = (
        "a larger max_batch_size, which is reached less often, or accountant='min-sep-renyi' "
        "without simulation"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("engine", self.engine, get_args(Asked))

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """``None`` for b-min-sep laws, cut or not, with a banded Toeplitz C, bands ≤ b."""
        return covered_refusal(mechanism)

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Answer by name only where noise is independent and the loss is known without samples."""
        scheme = mechanism.scheme
        if scheme.max_batch_size is not None:
            return None
        # Without separation it is Poisson sampling, with p = 1 from a random start balls in bins.
        own = (
            isinstance(scheme, MinSep)
            and scheme.min_sep > 1
            and not (scheme.probability == 1.0 and scheme.warm_start)
        )
        if mechanism.strategy.bands == 1 and not own:
            return "the noise is independent, where the loss is known without samples"
        return None

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Minutes at most at the usual δ; hours where batches are often cut."""
        return Cost.HOURS if often_cut(mechanism) else Cost.MINUTES

    def law(self, mechanism: MatrixMechanism) -> SimulatedLaw:
        """Rényi divergences of small orders, and a Gaussian loss in the add direction."""
        return simulated_law(mechanism, self.engine)

"""The default accountant for truncated b-min-sep sampling: samples of whole or of cut batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.min_sep.importance import WholeBatches
from dptrain.accounting.min_sep.truncated.full_batches import FullBatches
from dptrain.accounting.min_sep.truncated.renyi import (
    TruncatedMinSepCurve,
    truncated_curve,
    truncated_refusal,
)
from dptrain.accounting.min_sep.truncated.truncated_losses import TruncatedMinSepLosses
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.law import PlainLaw, SimulatedLaw, TermsAtEpsilon
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies.toeplitz import BandedToeplitz


class RarelyCut(WholeBatches):
    """The terms of whole batches, each larger by what cutting them costs at most."""

    def __init__(self, scheme: MinSep, curve: TruncatedMinSepCurve) -> None:
        super().__init__(curve.whole, of=lambda whole: dataclasses.replace(curve, whole=whole))
        self._scheme, self._cut = scheme, curve

    def to_dict(self) -> dict[str, Any]:
        """The law of whole batches, and the cap."""
        return {
            **super().to_dict(),
            "dataset_size": self._scheme.dataset_size,
            "max_batch_size": self._scheme.max_batch_size,
        }

    @property
    def most_samples(self) -> int:
        """Number of samples that take minutes."""
        return 10**8

    def terms(self, sigma: float) -> TermsAtEpsilon:
        """The terms of whole batches, raised."""
        whole = self.at(sigma)

        def both(epsilon: float) -> dict[str, WeightedTerms]:
            remove, add = self._cut.losses(sigma, np.array([epsilon]))
            return {
                "remove": _raised(whole.remove(epsilon), float(remove[0])),
                "add": _raised(whole.add(epsilon), float(add[0])),
            }

        return both


def _raised(terms: WeightedTerms, loss: float) -> WeightedTerms:
    """Terms that are larger by a constant."""

    def draw(rng: np.random.Generator, size: int) -> Array:
        return terms.draw(rng, size) + loss

    return WeightedTerms(terms.ceiling + loss, terms.lanes, draw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedMinSepImportance(SimulatedAccountant):
    """Certification of ``MinSep`` with ``max_batch_size`` under zero-out, bands ≤ min_sep.

    Where batches are rarely cut the terms are those of whole batches, and each is larger by what
    cutting costs at most: their mean is at least δ(ε) of cut batches
    (docs/theory/min-sep.md#thm-min-sep-cut;
    ``test_bounds_are_above_brute_force_over_everybodys_draws``).

    Where they are often cut, an example meeting a full batch more than 1/N times on average, the
    losses of the dominating pair are drawn, without weights
    (docs/theory/min-sep.md#thm-truncated-min-sep, by ``TruncatedMinSepLosses``; Dong & Ganesh 2026,
    Appendix D, arXiv 2602.09338). The pair itself gives something away there: an example and the
    one it displaces are taken at their worst in both worlds.
    """

    max_samples: int = 10**9

    name = "truncated-min-sep-importance"
    display = "truncated b-min-sep importance sampling"
    formerly = ("truncated-min-sep-monte-carlo",)
    truncation = True
    instead = (
        "a larger max_batch_size, which is reached less often, or accountant="
        "'truncated-min-sep-renyi' without simulation"
    )

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """``None`` for MinSep with a largest batch and a banded Toeplitz C, bands ≤ b."""
        return truncated_refusal(mechanism)

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Minutes at most at the usual δ; hours where batches are often cut."""
        return Cost.HOURS if often_cut(mechanism) else Cost.MINUTES

    def law(self, mechanism: MatrixMechanism) -> SimulatedLaw:
        """Whole batches and what cutting them costs, or the pair of cut batches."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        assert isinstance(scheme, MinSep)
        if not often_cut(mechanism):
            return RarelyCut(scheme, truncated_curve(mechanism))
        assert isinstance(strategy, BandedToeplitz)
        return PlainLaw(TruncatedMinSepLosses(scheme, strategy.first_column(scheme.steps)))


def often_cut(mechanism: MatrixMechanism) -> bool:
    """True if full batches are met so often that the pair of cut batches shows more."""
    scheme = mechanism.scheme
    assert isinstance(scheme, MinSep)
    return FullBatches.of(scheme).drawn * scheme.dataset_size > 1.0

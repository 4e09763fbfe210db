"""The default accountant for truncated b-min-sep sampling: weighted samples of whole batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.min_sep.importance import MinSepBounds
from dptrain.accounting.min_sep.truncated.full_batches import FullBatches
from dptrain.accounting.min_sep.truncated.renyi import (
    TruncatedMinSepCurve,
    truncated_curve,
    truncated_refusal,
)
from dptrain.accounting.simulation.weighted.accountant import (
    Bounds,
    TermsAtEpsilon,
    WeightedAccountant,
)
from dptrain.accounting.simulation.weighted.terms import WeightedTerms
from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep


class _TruncatedBounds(MinSepBounds):
    def __init__(self, scheme: MinSep, curve: TruncatedMinSepCurve) -> None:
        super().__init__(curve.whole, of=lambda whole: dataclasses.replace(curve, whole=whole))
        self._scheme, self._cut = scheme, curve

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "dataset_size": self._scheme.dataset_size,
            "max_batch_size": self._scheme.max_batch_size,
        }

    def tilted(self, sigma: float) -> TermsAtEpsilon:
        whole = self.terms(sigma)

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
class TruncatedMinSepImportance(WeightedAccountant):
    """Certifies ``MinSep`` with ``max_batch_size`` under zero-out, bands ≤ min_sep.

    The terms are those of whole batches, and each is larger by what cutting costs at most: their
    mean is at least δ(ε) of cut batches (docs/theory/min-sep.md#thm-min-sep-cut;
    ``test_bounds_are_above_brute_force_over_everybodys_draws``).
    """

    name = "truncated-min-sep-importance"
    display = "truncated b-min-sep importance sampling"
    truncation = True

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """``None`` for MinSep with a largest batch and a banded Toeplitz C, bands ≤ b."""
        return truncated_refusal(mechanism)

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Where batches are often cut, simulating the pair itself shows more."""
        scheme = mechanism.scheme
        assert isinstance(scheme, MinSep)
        meets = FullBatches.of(scheme).drawn
        if meets * scheme.dataset_size <= 1.0:
            return None
        return (
            f"an example meets a full batch {meets:.2g} times on average, which it adds to δ; "
            f"choose a larger max_batch_size than {scheme.max_batch_size}, or ask for it by name"
        )

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Minutes at most at the usual δ."""
        return Cost.MINUTES

    def bounds(self, mechanism: MatrixMechanism) -> Bounds:
        """Those of whole batches, and what cutting them costs."""
        assert isinstance(mechanism.scheme, MinSep)
        return _TruncatedBounds(mechanism.scheme, truncated_curve(mechanism))

"""Discretised privacy loss distributions, composed with themselves at any depth of tail."""

from __future__ import annotations

from dptrain.accounting.heterogeneous import HeterogeneousComposition
from dptrain.accounting.loss_distribution import LossDistribution, connect_the_dots

__all__ = ["Composition", "LossDistribution", "connect_the_dots"]


class Composition(HeterogeneousComposition):
    """δ(ε) and ε(δ) of ``count`` independent copies of a loss distribution, rounded up."""

    def __init__(self, single: LossDistribution, count: int) -> None:
        super().__init__([(single, count)])
        self._single = single

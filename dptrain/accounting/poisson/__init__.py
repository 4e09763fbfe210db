"""Accounting of Poisson sampling, whole and cut, from all examples and from parts in turn."""

from dptrain.accounting.poisson.curves import SubsampledGaussianCurve
from dptrain.accounting.poisson.parts import poisson_curve, truncated_curve
from dptrain.accounting.poisson.poisson import PoissonPLD, tosses_coins
from dptrain.accounting.poisson.truncated_step import Branches, open_pair

__all__ = [
    "Branches",
    "PoissonPLD",
    "SubsampledGaussianCurve",
    "open_pair",
    "poisson_curve",
    "tosses_coins",
    "truncated_curve",
]

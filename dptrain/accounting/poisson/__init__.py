"""Accountants of Poisson sampling, plain, truncated and cyclic."""

from dptrain.accounting.poisson.cyclic import CyclicPoissonPLD
from dptrain.accounting.poisson.poisson import (
    PoissonPLD,
    SubsampledGaussianCurve,
    poisson_curve,
    tosses_coins,
)
from dptrain.accounting.poisson.truncated import TruncatedPoissonPLD, truncated_curve
from dptrain.accounting.poisson.truncated_step import Branches, open_pair

__all__ = [
    "Branches",
    "CyclicPoissonPLD",
    "PoissonPLD",
    "SubsampledGaussianCurve",
    "TruncatedPoissonPLD",
    "open_pair",
    "poisson_curve",
    "tosses_coins",
    "truncated_curve",
]

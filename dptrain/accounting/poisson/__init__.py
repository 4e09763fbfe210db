"""Accountants of Poisson sampling, plain, truncated and cyclic."""

from dptrain.accounting.poisson.cyclic import CyclicPoissonPLD
from dptrain.accounting.poisson.poisson import (
    SETTINGS_ARE_PUBLIC,
    PoissonPLD,
    SubsampledGaussianCurve,
    poisson_curve,
)
from dptrain.accounting.poisson.truncated import TruncatedPoissonPLD, truncated_curve
from dptrain.accounting.poisson.truncated_step import Branches, open_pair

__all__ = [
    "SETTINGS_ARE_PUBLIC",
    "Branches",
    "CyclicPoissonPLD",
    "PoissonPLD",
    "SubsampledGaussianCurve",
    "TruncatedPoissonPLD",
    "open_pair",
    "poisson_curve",
    "truncated_curve",
]

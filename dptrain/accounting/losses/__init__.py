"""Privacy losses of Gaussians and their mixtures, and their composition."""

from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.coin_sums import row_law
from dptrain.accounting.losses.composition import (
    Composition,
    HeterogeneousComposition,
    LossDistribution,
    connect_the_dots,
)
from dptrain.accounting.losses.gaussian_mixture import GaussianMixtures, common_spacing
from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.losses.loss_distribution import split_cells
from dptrain.accounting.losses.public_coin import public_mixture
from dptrain.accounting.losses.search import least_true
from dptrain.accounting.losses.subsampled_gaussian import spread, subsampled_gaussian_on_grid

__all__ = [
    "Composition",
    "GaussianMixtures",
    "HeterogeneousComposition",
    "LossDistribution",
    "common_spacing",
    "connect_the_dots",
    "gaussian",
    "hockey_stick",
    "least_true",
    "public_mixture",
    "row_law",
    "split_cells",
    "spread",
    "subsampled_gaussian_on_grid",
]

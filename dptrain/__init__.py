"""Differentially private training for PyTorch: schemes, correlated noise and their accountant."""

from dptrain.accounting import account, accountants_for, calibrate, profile
from dptrain.clipping.base import Automatic, ClippingStyle, Flat, PerGroup, PerLayer
from dptrain.clipping.bookkeeping import GradientRule, LayerRule, register_layer
from dptrain.core import Adjacency, Guarantee, Kind, Unit
from dptrain.engine import PrivacyEngine, PrivateTraining, ScaledAdam
from dptrain.mechanism import MatrixMechanism
from dptrain.noise import register_noise_stream
from dptrain.sampling import (
    AttributionGraph,
    BallsInBins,
    CyclicPoisson,
    MinSep,
    Poisson,
    PrivateLoader,
    RandomAllocation,
    Shuffled,
    UserFixed,
    UserMinSep,
    register_scheme,
)
from dptrain.strategies import (
    BISR,
    BLT,
    BSR,
    BandInvMF,
    BandMF,
    ColumnNormalizedBandMF,
    Dense,
    Identity,
    SquareRoot,
    Tree,
    TreeRestart,
    register_strategy,
)

__version__ = "0.1.0"
"""Version of the package, which pyproject.toml reads from here."""

__all__ = [
    "BISR",
    "BLT",
    "BSR",
    "Adjacency",
    "AttributionGraph",
    "Automatic",
    "BallsInBins",
    "BandInvMF",
    "BandMF",
    "ClippingStyle",
    "ColumnNormalizedBandMF",
    "CyclicPoisson",
    "Dense",
    "Flat",
    "GradientRule",
    "Guarantee",
    "Identity",
    "Kind",
    "LayerRule",
    "MatrixMechanism",
    "MinSep",
    "PerGroup",
    "PerLayer",
    "Poisson",
    "PrivacyEngine",
    "PrivateLoader",
    "PrivateTraining",
    "RandomAllocation",
    "ScaledAdam",
    "Shuffled",
    "SquareRoot",
    "Tree",
    "TreeRestart",
    "Unit",
    "UserFixed",
    "UserMinSep",
    "__version__",
    "account",
    "accountants_for",
    "calibrate",
    "profile",
    "register_layer",
    "register_noise_stream",
    "register_scheme",
    "register_strategy",
]

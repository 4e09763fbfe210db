"""Differentially private training for PyTorch: schemes, correlated noise and their accountant."""

from dptrain.accounting import account, accountants_for, calibrate, profile
from dptrain.engine import PrivacyEngine
from dptrain.guarantee import Adjacency, Guarantee, Kind, Unit
from dptrain.mechanism import MatrixMechanism
from dptrain.private import PrivateTraining
from dptrain.sampling import BallsInBins, MinSep, Poisson, PrivateLoader
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
)

__all__ = [
    "BISR",
    "BLT",
    "BSR",
    "Adjacency",
    "BallsInBins",
    "BandInvMF",
    "BandMF",
    "ColumnNormalizedBandMF",
    "Dense",
    "Guarantee",
    "Identity",
    "Kind",
    "MatrixMechanism",
    "MinSep",
    "Poisson",
    "PrivacyEngine",
    "PrivateLoader",
    "PrivateTraining",
    "SquareRoot",
    "Tree",
    "TreeRestart",
    "Unit",
    "account",
    "accountants_for",
    "calibrate",
    "profile",
]

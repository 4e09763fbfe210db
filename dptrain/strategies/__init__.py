"""Strategy matrices: how the noise of different steps is correlated."""

from dptrain.strategies.binding import check_bands_fit
from dptrain.strategies.blt.blt import BLT
from dptrain.strategies.matrices.column_normalized import ColumnNormalizedBandMF
from dptrain.strategies.matrices.dense import Dense
from dptrain.strategies.matrices.gram_sensitivity import fixed_epoch_sensitivity
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.registry import proposals, register_strategy, strategy_types
from dptrain.strategies.strategy import RunShape, Strategy
from dptrain.strategies.toeplitz.band_inv_mf import BandInvMF
from dptrain.strategies.toeplitz.band_mf import BandMF
from dptrain.strategies.toeplitz.bisr import BISR
from dptrain.strategies.toeplitz.bsr import BSR
from dptrain.strategies.toeplitz.identity import Identity
from dptrain.strategies.toeplitz.lambda_cgd import LambdaCGD
from dptrain.strategies.toeplitz.square_root import SquareRoot
from dptrain.strategies.toeplitz.toeplitz import noise_autocorrelation
from dptrain.strategies.trees.tree import Tree, TreeRestart
from dptrain.strategies.workloads import (
    PREFIX_SUMS,
    DenseWorkload,
    PrefixSums,
    Workload,
    checked_workload,
)

__all__ = [
    "BISR",
    "BLT",
    "BSR",
    "PREFIX_SUMS",
    "BandInvMF",
    "BandMF",
    "ColumnNormalizedBandMF",
    "Dense",
    "DenseWorkload",
    "Identity",
    "LambdaCGD",
    "MomentumSGD",
    "PrefixSums",
    "RunShape",
    "SquareRoot",
    "Strategy",
    "Tree",
    "TreeRestart",
    "Workload",
    "check_bands_fit",
    "checked_workload",
    "fixed_epoch_sensitivity",
    "noise_autocorrelation",
    "proposals",
    "register_strategy",
    "strategy_types",
]

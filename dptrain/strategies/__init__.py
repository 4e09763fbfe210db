"""Strategy matrices: how the noise of different steps is correlated."""

from dptrain.strategies.band_inv_mf import BandInvMF
from dptrain.strategies.band_mf import BandMF
from dptrain.strategies.bisr import BISR
from dptrain.strategies.blt import BLT
from dptrain.strategies.bsr import BSR
from dptrain.strategies.column_normalized import ColumnNormalizedBandMF
from dptrain.strategies.correlation import noise_autocorrelation
from dptrain.strategies.dense import Dense
from dptrain.strategies.dense_workload import DenseWorkload
from dptrain.strategies.gram_sensitivity import fixed_epoch_sensitivity
from dptrain.strategies.identity import Identity
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.square_root import SquareRoot
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.table import StrategyTable, table
from dptrain.strategies.tree import Tree, TreeRestart
from dptrain.strategies.workload import PrefixSums, Workload

__all__ = [
    "BISR",
    "BLT",
    "BSR",
    "BandInvMF",
    "BandMF",
    "ColumnNormalizedBandMF",
    "Dense",
    "DenseWorkload",
    "Identity",
    "MomentumSGD",
    "PrefixSums",
    "SquareRoot",
    "Strategy",
    "StrategyTable",
    "Tree",
    "TreeRestart",
    "Workload",
    "fixed_epoch_sensitivity",
    "noise_autocorrelation",
    "table",
]

"""Strategy matrices: how the noise of different steps is correlated."""

from dptrain.strategies.band_mf import BandMF
from dptrain.strategies.bsr import BSR
from dptrain.strategies.identity import Identity
from dptrain.strategies.strategy import Strategy

__all__ = ["BSR", "BandMF", "Identity", "Strategy"]

"""Sampling schemes, their batch streams and the private loader."""

from dptrain.sampling.balls_in_bins import BallsInBins
from dptrain.sampling.loader import PrivateLoader
from dptrain.sampling.microbatch import MicroBatch
from dptrain.sampling.min_sep import MinSep
from dptrain.sampling.poisson import Poisson
from dptrain.sampling.scheme import BatchStream, ExchangeableScheme, Scheme

__all__ = [
    "BallsInBins",
    "BatchStream",
    "ExchangeableScheme",
    "MicroBatch",
    "MinSep",
    "Poisson",
    "PrivateLoader",
    "Scheme",
]

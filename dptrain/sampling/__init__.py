"""Sampling schemes, attribution graphs, batch streams and the private loader."""

from dptrain.sampling.balls_in_bins import BallsInBins
from dptrain.sampling.bounding import BoundedGraph
from dptrain.sampling.cyclic_poisson import CyclicPoisson
from dptrain.sampling.graph import AttributionGraph
from dptrain.sampling.loader import PrivateLoader
from dptrain.sampling.microbatch import MicroBatch
from dptrain.sampling.min_sep import MinSep
from dptrain.sampling.poisson import Poisson
from dptrain.sampling.random_allocation import RandomAllocation
from dptrain.sampling.scheme import BatchStream, ExchangeableScheme, Scheme
from dptrain.sampling.shuffled import Shuffled
from dptrain.sampling.truncated_min_sep import TruncatedMinSep
from dptrain.sampling.truncated_poisson import TruncatedPoisson
from dptrain.sampling.user_fixed import UserFixed
from dptrain.sampling.user_min_sep import UserMinSep
from dptrain.sampling.user_scheme import UserScheme

__all__ = [
    "AttributionGraph",
    "BallsInBins",
    "BatchStream",
    "BoundedGraph",
    "CyclicPoisson",
    "ExchangeableScheme",
    "MicroBatch",
    "MinSep",
    "Poisson",
    "PrivateLoader",
    "RandomAllocation",
    "Scheme",
    "Shuffled",
    "TruncatedMinSep",
    "TruncatedPoisson",
    "UserFixed",
    "UserMinSep",
    "UserScheme",
]

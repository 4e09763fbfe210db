"""Sampling schemes, attribution graphs, batch streams and the private loader."""

from typing import TYPE_CHECKING

from dptrain._on_demand import names_of
from dptrain.sampling.fields import check_microbatches, public_size
from dptrain.sampling.loading.loader import PrivateLoader
from dptrain.sampling.loading.microbatch import MicroBatch
from dptrain.sampling.registry import register_scheme, scheme_types
from dptrain.sampling.scheme import BatchStream, ExchangeableScheme, SampledRun, Scheme
from dptrain.sampling.schemes.any_size import AnySizeScheme
from dptrain.sampling.schemes.balls_in_bins import BallsInBins
from dptrain.sampling.schemes.cyclic_poisson import CyclicPoisson
from dptrain.sampling.schemes.min_sep import MinSep
from dptrain.sampling.schemes.poisson import Poisson
from dptrain.sampling.schemes.random_allocation import RandomAllocation
from dptrain.sampling.schemes.shuffled import Shuffled
from dptrain.sampling.stream import SeededStream

if TYPE_CHECKING:
    from dptrain.sampling.users import (
        AttributionGraph,
        BoundedGraph,
        GraphPartition,
        PerUser,
        UserCyclic,
        UserFixed,
        UserMinSep,
        UserScheme,
    )

__all__ = [
    "AnySizeScheme",
    "AttributionGraph",
    "BallsInBins",
    "BatchStream",
    "BoundedGraph",
    "CyclicPoisson",
    "ExchangeableScheme",
    "GraphPartition",
    "MicroBatch",
    "MinSep",
    "PerUser",
    "Poisson",
    "PrivateLoader",
    "RandomAllocation",
    "SampledRun",
    "Scheme",
    "SeededStream",
    "Shuffled",
    "UserCyclic",
    "UserFixed",
    "UserMinSep",
    "UserScheme",
    "check_microbatches",
    "public_size",
    "register_scheme",
    "scheme_types",
]

__getattr__, __dir__ = names_of(
    __name__,
    {
        "dptrain.sampling.users": (
            "AttributionGraph BoundedGraph GraphPartition PerUser UserCyclic UserFixed UserMinSep "
            "UserScheme"
        )
    },
)

"""User-level sampling: attribution graphs, their bounds, and schemes over them."""

from dptrain.sampling.users.batch_size import probability_for_batch_size
from dptrain.sampling.users.exclusion import Exclusion
from dptrain.sampling.users.graph import AttributionGraph, BoundedGraph
from dptrain.sampling.users.graph_edges import spans
from dptrain.sampling.users.graph_statistics import GraphStatistics
from dptrain.sampling.users.partition import GraphPartition
from dptrain.sampling.users.per_user import PerUser
from dptrain.sampling.users.user_cyclic import UserCyclic
from dptrain.sampling.users.user_fixed import UserFixed
from dptrain.sampling.users.user_fixed_limits import largest_min_sep
from dptrain.sampling.users.user_min_sep import UserMinSep
from dptrain.sampling.users.user_scheme import UserScheme

__all__ = [
    "AttributionGraph",
    "BoundedGraph",
    "Exclusion",
    "GraphPartition",
    "GraphStatistics",
    "PerUser",
    "UserCyclic",
    "UserFixed",
    "UserMinSep",
    "UserScheme",
    "largest_min_sep",
    "probability_for_batch_size",
    "spans",
]

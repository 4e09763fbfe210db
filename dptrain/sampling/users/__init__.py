"""User-level sampling: attribution graphs, their bounds, and schemes over them."""

from dptrain.sampling.users.batch_size import probability_for_batch_size, simulated_batch_size
from dptrain.sampling.users.exclusion import Exclusion
from dptrain.sampling.users.graph_edges import spans
from dptrain.sampling.users.graph_statistics import GraphStatistics
from dptrain.sampling.users.user_fixed_limits import largest_min_sep

__all__ = [
    "Exclusion",
    "GraphStatistics",
    "largest_min_sep",
    "probability_for_batch_size",
    "simulated_batch_size",
    "spans",
]

"""User-level sampling: attribution graphs, their bounds, and schemes over them."""

from dptrain.sampling.users.batch_size import probability_for_batch_size, simulated_batch_size
from dptrain.sampling.users.exclusion import Exclusion
from dptrain.sampling.users.graph_edges import spans
from dptrain.sampling.users.graph_statistics import GraphStatistics

__all__ = [
    "Exclusion",
    "GraphStatistics",
    "probability_for_batch_size",
    "simulated_batch_size",
    "spans",
]

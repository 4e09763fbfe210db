"""Slots of a cycle for the examples of a graph: nobody's draws bar anybody else."""

from dptrain.sampling.users.partition.graph_partition import GraphPartition
from dptrain.sampling.users.partition.pieces import METHODS, Method

__all__ = ["METHODS", "GraphPartition", "Method"]

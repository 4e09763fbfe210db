"""Slots of a cycle for the examples of a graph: nobody's draws bar anybody else."""

from dptrain.sampling.users.partition.graph_partition import GraphPartition

__all__ = ["GraphPartition"]

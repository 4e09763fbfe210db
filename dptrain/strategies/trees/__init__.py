"""Tree aggregation as a strategy."""

from dptrain.strategies.trees.binary_trees import BinaryTrees
from dptrain.strategies.trees.estimator import node_variance
from dptrain.strategies.trees.nodes import node_count, top_level

__all__ = ["BinaryTrees", "node_count", "node_variance", "top_level"]

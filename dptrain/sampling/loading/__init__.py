"""The private loader: from a stream of batches to the tensors of a step."""

from dptrain.sampling.loading.padding import map_leaves
from dptrain.sampling.loading.takeover import check_length, check_sampler

__all__ = ["check_length", "check_sampler", "map_leaves"]

"""The private loader: from a stream of batches to the tensors of a step."""

from dptrain.sampling.loading.dataset import check_length, check_sampler, length_of
from dptrain.sampling.loading.padding import map_leaves

__all__ = ["check_length", "check_sampler", "length_of", "map_leaves"]

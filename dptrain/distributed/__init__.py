"""One private run on several processes."""

from dptrain.distributed.fully_sharded import FullySharded, is_divided, local_of
from dptrain.distributed.ranks import Grid, Ranks
from dptrain.distributed.transport import bucket_length
from dptrain.distributed.wrappers import bare_module, check_not_prepared, check_whole_optimizer

__all__ = [
    "FullySharded",
    "Grid",
    "Ranks",
    "bare_module",
    "bucket_length",
    "check_not_prepared",
    "check_whole_optimizer",
    "is_divided",
    "local_of",
]

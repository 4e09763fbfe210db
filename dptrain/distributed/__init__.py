"""One private run on several processes."""

from dptrain.distributed.ranks import Ranks
from dptrain.distributed.wrappers import bare_module, check_not_prepared, check_whole_optimizer

__all__ = ["Ranks", "bare_module", "check_not_prepared", "check_whole_optimizer"]

"""The planned batches of a run, and how many of them are done."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from dptrain.sampling.fetch import Request, fetch_seed
from dptrain.sampling.microbatch import split
from dptrain.sampling.scheme import Scheme


class Plan:
    """Hands out the microbatches of the steps that are not completed yet.

    The main stream stands at the completed position. Each iteration runs ahead on a copy of it,
    so whatever was prefetched beyond a ``break`` is drawn again, the same.

    Attributes:
        stop: logical step at which the next iteration ends.
    """

    def __init__(self, scheme: Scheme, seed: int, max_physical_batch_size: int | None) -> None:
        self.stream = scheme.stream(seed)
        self.seed = seed
        self.stop = scheme.steps
        self._max_physical_batch_size = max_physical_batch_size

    @property
    def position(self) -> int:
        """Number of completed logical steps."""
        return self.stream.step

    def complete(self) -> None:
        """Count the step at :attr:`position` as done."""
        next(self.stream)

    def __iter__(self) -> Iterator[Request]:
        # The copy is made here and not at the first request, where the position may have moved.
        return self._requests(copy.deepcopy(self.stream), self.stop)

    def _requests(self, stream: Iterator, stop: int) -> Iterator[Request]:
        for step in range(self.position, stop):
            for micro in split(step, next(stream), self._max_physical_batch_size):
                yield Request(micro=micro, seed=fetch_seed(self.seed, step, micro.part))

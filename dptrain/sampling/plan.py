"""The planned batches of a run, and how many of them are done."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

from dptrain.sampling.fetch import COMPUTING, Request, fetch_seed
from dptrain.sampling.microbatch import MicroBatch, split
from dptrain.sampling.scheme import Scheme


class Plan:
    """Hands out the microbatches of the steps that are not completed yet.

    The main stream stands at the completed position. Each iteration runs ahead on a copy of it,
    so whatever was prefetched beyond a ``break`` is drawn again, the same.

    Attributes:
        stop: logical step at which the next iteration ends.
    """

    def __init__(
        self,
        scheme: Scheme,
        seed: int,
        max_physical_batch_size: int | None,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.stream = scheme.stream(seed)
        self.seed = seed
        self.stop = scheme.steps
        self.rank = rank
        self._split = functools.partial(
            split,
            max_physical_batch_size=max_physical_batch_size,
            physical_batch_size=scheme.physical_batch_size,
            rank=rank,
            world_size=world_size,
        )

    @property
    def position(self) -> int:
        """Number of completed logical steps."""
        return self.stream.step

    def complete(self) -> None:
        """Count the step at :attr:`position` as done."""
        next(self.stream)

    def compute_seed(self, micro: MicroBatch) -> int:
        """Seed of what the model draws (dropout) on this rank's part of a batch."""
        return fetch_seed(self.seed, micro.step, micro.part, self.rank, domain=COMPUTING)

    def __iter__(self) -> Iterator[Request]:
        # The copy is made here and not at the first request, where the position may have moved.
        return self._requests(copy.deepcopy(self.stream), self.stop)

    def _requests(self, stream: Iterator, stop: int) -> Iterator[Request]:
        for step in range(self.position, stop):
            for micro in self._split(step, next(stream)):
                seed = fetch_seed(self.seed, step, micro.part, self.rank)
                yield Request(micro=micro, seed=seed)

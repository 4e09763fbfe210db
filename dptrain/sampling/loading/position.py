"""The planned batches of a run, how many of them are done, and where a saved run stands."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dptrain.core import digest
from dptrain.sampling.loading.fetch import COMPUTING, Request, fetch_seed
from dptrain.sampling.loading.microbatch import MicroBatch, parts_for, split
from dptrain.sampling.scheme import Indices, Scheme

FIELDS = {"scheme", "dataset_size", "fingerprint", "seed", "stream"}


class BatchPlan:
    """Hands out the microbatches of the steps that are not completed yet.

    The main stream stands at the completed position. Each iteration runs ahead on a copy of it,
    so whatever was prefetched beyond a ``break`` is drawn again, the same.

    Attributes:
        stop: logical step at which the next iteration ends.
        parts: microbatches of every logical step; ``None`` if that follows from how many examples
            were drawn, which is random, and private.
    """

    def __init__(
        self,
        scheme: Scheme,
        seed: int,
        max_physical_batch_size: int | None,
        *,
        microbatches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.stream = scheme.stream(seed)
        self.seed = seed
        self.stop = scheme.steps
        self.rank = rank
        self.parts = microbatches
        if microbatches is None:
            size, group = scheme.physical_batch_size, scheme.group_size or 1
            most, group = (scheme.dataset_size, 1) if size is None else (size // group, group)
            parts = parts_for(most, max_physical_batch_size, world_size, group_size=group)
            one = parts == 1 and (max_physical_batch_size is None or scheme.nominal_size is None)
            self.parts = parts if one or size is not None else None
        self._scheme = scheme
        self._options: dict[str, Any] = {
            "max_physical_batch_size": max_physical_batch_size,
            "microbatches": microbatches,
            "rank": rank,
            "world_size": world_size,
        }

    def _split(self, step: int, batch: Indices) -> list[MicroBatch]:
        rows, sizes = self._scheme.grouped(batch)
        physical, group = self._scheme.physical_batch_size, self._scheme.group_size or 1
        units = None if physical is None else physical // group
        return split(
            step, rows, sizes=sizes, group_size=group, physical_units=units, **self._options
        )

    @property
    def position(self) -> int:
        """Number of completed logical steps."""
        return self.stream.step

    def complete(self) -> None:
        """Count the step at ``position`` as done."""
        next(self.stream)

    def compute_seed(self, micro: MicroBatch) -> int:
        """Seed of what the model draws (dropout) on this rank's part of a batch."""
        return fetch_seed(self.seed, micro.step, micro.part, self.rank, domain=COMPUTING)

    def __iter__(self) -> Iterator[Request]:
        # The copy is made here and not at the first request, where the position may have moved.
        return self._requests(copy.deepcopy(self.stream), self.stop)

    def _requests(self, stream: Iterator[Indices], stop: int) -> Iterator[Request]:
        for step in range(self.position, stop):
            for micro in self._split(step, next(stream)):
                seed = fetch_seed(self.seed, step, micro.part, self.rank)
                yield Request(micro=micro, seed=seed)


def check_state(
    state: dict[str, Any], *, scheme: Scheme, dataset_size: int, known_by: Callable[[], str]
) -> None:
    """Refuse the state of another scheme or data set; cheap checks come first.

    Args:
        known_by: computes the fingerprint of this loader's data set.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state is a {type(state).__name__}: must be what a loader's state_dict() returned"
        )
    if missing := sorted(FIELDS - set(state)):
        raise ValueError(f"the state lacks {missing}: it is not a state of a PrivateLoader")
    if state["dataset_size"] != dataset_size:
        raise ValueError(
            f"the state was saved for a dataset of {state['dataset_size']} examples, but this one "
            f"has {dataset_size}: resume with the same data"
        )
    if state["scheme"] != digest(scheme.to_dict()):
        raise ValueError(
            f"the state was saved for another scheme or other parameters than {scheme}: resume "
            "with the scheme of the checkpoint"
        )
    if state["fingerprint"] != known_by():
        raise ValueError(
            "the dataset has changed since the state was saved: its rows have other contents. "
            "Resume with the same data in the same order"
        )

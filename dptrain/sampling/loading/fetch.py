"""Fetching the rows of a microbatch, alike in the main process and in any worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from dptrain.core import seeded_globals
from dptrain.sampling.loading.collating import CollateCheck, CompanionCheck
from dptrain.sampling.loading.microbatch import MicroBatch
from dptrain.sampling.loading.padding import blank, blank_rows

# Keeps the seeds of random augmentations apart from the batches drawn from the same seed.
_DOMAIN = 0x6665746368
COMPUTING = 0x64726F706F7574  # and these from what the model draws


class Request(NamedTuple):
    """The sampler's request to the data set: these rows, under this seed of 64 bits."""

    micro: MicroBatch
    seed: int


def fetch_seed(seed: int, step: int, part: int, rank: int = 0, *, domain: int = _DOMAIN) -> int:
    """Seed of the random augmentations of one microbatch of one rank, or of another domain."""
    sequence = np.random.SeedSequence(seed, spawn_key=(domain, step, part, rank))
    return int(sequence.generate_state(1, np.uint64)[0])


class FetchedBatches(Dataset[tuple[MicroBatch, Any]]):
    """A map-style dataset whose index is a ``Request`` and whose item is a whole batch.

    Padding rows are copies of the first row after collation with their numbers set to zero, so
    that the shapes are right; an empty microbatch shows example 0 like that, and nothing of the
    example is left in the tensors.

    Args:
        check: whether these keep the examples apart is tried on a few batches, in each worker.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any], *, check: bool = False
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._checks = (CollateCheck(collate_fn), CompanionCheck(dataset)) if check else None

    def __getitem__(self, request: Request) -> tuple[MicroBatch, Any]:
        micro = request.micro
        used, rows = len(micro.indices), micro.rows
        with seeded_globals(request.seed):
            indices = micro.indices.tolist() or [0]
            samples = self._samples(indices)
            if self._checks is not None:
                collated, together = self._checks
                collated.look_at(samples, request.seed)
                together.look_at(indices, request.seed)
            batch = self.collate_fn([*samples, *[samples[0]] * (rows - len(samples))])
        if used == 0:
            return micro, blank(batch)
        return micro, batch if used == rows else blank_rows(batch, start=used, rows=rows)

    def _samples(self, indices: list[int]) -> list[Any]:
        if callable(many := getattr(self.dataset, "__getitems__", None)):
            found: list[Any] = many(indices)
            return found
        return [self.dataset[index] for index in indices]

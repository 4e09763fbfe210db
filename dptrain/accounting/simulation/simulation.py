"""The interface of simulated privacy losses, and the loop that draws them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from dptrain.core import Array

T = TypeVar("T")
Direction = Literal["remove", "add"]
"""One direction of a neighboring relation."""

DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")
"""Both directions of a neighboring relation."""


class Simulation(ABC):
    """A pair (P, Q) at an open σ > 0 whose privacy losses can be drawn.

    P and Q are images of a fixed law plus N(0, σ²I): privacy grows with σ, which certificates rely
    on. At any σ the pair is dominated by the Gaussian mechanism of sensitivity ``sensitivity``.
    """

    @property
    def slack(self) -> float:
        """Bound on a loss's rounding error: losses are evaluated at ε - slack, which covers it.

        Recorded in certificates; may depend on the law, never on σ or the samples.
        """
        return 1e-9

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """A sensitivity (at σ = 1) that bounds the pair without the randomness of sampling."""

    @property
    @abstractmethod
    def work(self) -> int:
        """Cost of one sample in rough units (steps), for choosing default sizes."""

    @property
    @abstractmethod
    def lanes(self) -> int:
        """Samples a chunk, so that a chunk's memory is bounded; part of what seeds mean."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of everything the losses depend on, except σ; part of a cache's key."""

    @abstractmethod
    def draw(
        self,
        sigmas: Sequence[float],
        direction: Direction | Literal["both"],
        rng: np.random.Generator,
        size: int,
    ) -> Array:
        """Independent privacy losses: shape (len(sigmas), size), for "both" (2, len(sigmas), size).

        ``"remove"`` draws y ~ P and returns log P/Q (or an upper bound); ``"add"`` draws y ~ Q and
        returns log Q/P (or an upper bound). Entries of one row are independent; rows and directions
        may share their normals.
        """


def default_threads() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loss_chunks(
    simulation: Simulation,
    sigmas: Sequence[float],
    *,
    seed: Sequence[int],
    samples: int,
    threads: int,
) -> Iterator[Array]:
    """Losses of both directions in chunks, in order: shape (2, len(sigmas), size)."""

    def draw(rng: np.random.Generator, size: int) -> Array:
        return simulation.draw(tuple(sigmas), "both", rng, size)

    return chunks(draw, lanes=simulation.lanes, seed=seed, samples=samples, threads=threads)


def chunks(
    draw: Callable[[np.random.Generator, int], T],
    *,
    lanes: int,
    seed: Sequence[int],
    samples: int,
    threads: int,
    indices: Sequence[int] | None = None,
) -> Iterator[T]:
    """``draw(rng, size)`` for sizes of ≤ ``lanes`` that add up to ``samples``, in fixed order.

    Chunk i draws from a stream of its own, ``SeedSequence(seed, spawn_key=(i,))``, so the results
    do not depend on the number of threads, nor on who draws which chunk: ``indices`` are those to
    be drawn here, by default all. At most 2·threads + 1 chunks exist at a time.
    """

    def work(index: int) -> T:
        sequence = np.random.SeedSequence(list(seed), spawn_key=(index,))
        rng = np.random.Generator(np.random.SFC64(sequence))
        return draw(rng, min(lanes, samples - index * lanes))

    # One chunk, one thread: torch's own threads would only get in each other's way. The setting is
    # per thread, except that new threads take the latest; so the caller's is put back.
    own_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    pending: deque[Future[T]] = deque()
    try:
        for index in range(-(-samples // lanes)) if indices is None else indices:
            pending.append(pool.submit(work, index))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(own_threads)

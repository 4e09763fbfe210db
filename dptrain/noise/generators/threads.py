"""The threads that share the chunks of a row of noise."""

from __future__ import annotations

import collections
import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

# A smaller row takes a few ms at most, and waking threads on a busy machine costs as much.
PARALLEL_FROM = 1 << 20

_thread = threading.local()


def for_each(task: Callable[[Any], None], items: Iterable[Any], *, entries: int) -> None:
    """``task(item)`` for every item, on as many threads as torch uses if it is worth it.

    The tasks must write to disjoint memory; their order and the number of threads then change no
    result. A thread of the pool runs torch's operations alone, without threads of its own, and a
    task that calls this function again goes on by itself: waiting for the pool from within it would
    never end.

    Args:
        task: called once an item.
        items: independent pieces of work.
        entries: how many numbers they hold together.
    """
    workers = torch.get_num_threads()
    if workers > 1 and entries >= PARALLEL_FROM and not getattr(_thread, "of_pool", False):
        # One task a thread, which takes the next item when it is done with one: less to hand over.
        waiting = collections.deque(items)
        work = functools.partial(_work_through, task)
        for _ in _pool(os.getpid(), workers).map(work, [waiting] * workers):
            pass
    else:
        for item in items:
            task(item)


def _work_through(task: Callable[[Any], None], waiting: collections.deque[Any]) -> None:
    while True:
        try:
            item = waiting.popleft()  # atomic
        except IndexError:
            return
        task(item)


@functools.lru_cache(maxsize=4)
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """One pool per process: the threads of a parent do not survive a fork."""
    started = threading.Barrier(workers)

    def start(_: int) -> None:
        torch.set_num_threads(1)
        _thread.of_pool = True
        started.wait()  # holds this thread back until every other one has started as well

    pool = ThreadPoolExecutor(workers, thread_name_prefix="dptrain-noise")
    list(pool.map(start, range(workers)))
    # torch keeps a number per thread, and one for threads to come: that one is put back.
    torch.set_num_threads(workers)
    return pool

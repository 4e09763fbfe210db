"""Running a module as it is, past what reports to a run."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

_depths: Counter[int] = Counter()  # by threads


@contextlib.contextmanager
def untapped() -> Iterator[None]:
    """Layers run their own forward meanwhile, in this thread and in those of autograd.

    Autograd runs checkpointed layers again in threads of its own, where no context variable of
    this one would be known. Other threads of the user's may have a run of their own.
    """
    thread = threading.get_ident()
    _depths[thread] += 1
    try:
        yield
    finally:
        _depths[thread] -= 1
        if not _depths[thread]:
            del _depths[thread]


def is_untapped() -> bool:
    """Whether layers run their own forward."""
    if not _depths:
        return False
    return threading.get_ident() in _depths or _is_autograds()


def _is_autograds() -> bool:
    """Whether this thread was begun by torch, and not by Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)

"""Running a module as it is, past what reports to a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_depth = 0


@contextlib.contextmanager
def untapped() -> Iterator[None]:
    """Layers run their own forward meanwhile, in all threads.

    Autograd runs checkpointed layers again in threads of its own, where no context variable of
    this one would be known.
    """
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_untapped() -> bool:
    """Whether layers run their own forward."""
    return _depth > 0

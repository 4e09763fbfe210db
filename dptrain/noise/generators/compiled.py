"""Loops that numba compiles, where it is installed and where there is enough to do."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

WORTH = 1 << 15
"""Entries from which on compiled loops pay: loading what was compiled before takes tenths of a
second, and to compile it the first time some seconds."""


@functools.cache
def can_compile() -> bool:
    """True if numba, of the extra ``fast``, is installed."""
    return importlib.util.find_spec("numba") is not None


def chosen(
    plain: Callable[..., None],
    loops: Callable[..., None],
    signatures: tuple[str, ...],
    *,
    entries: int,
) -> Callable[..., None]:
    """The compiled loops where that pays, or what numpy does in their place with the same bits."""
    return compiled(loops, signatures) if entries >= WORTH and can_compile() else plain


@functools.cache
def compiled(loops: Callable[..., None], signatures: tuple[str, ...]) -> Callable[..., None]:
    """The compiled loops; kept on the disk for the next process, where there is a place for it.

    Without ``fastmath``: every operation is rounded as it stands there, the same on all processors.
    """
    import numba  # late: it takes long to import

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    made: Callable[..., None]
    try:
        made = numba.njit(list(signatures), cache=True, **options)(loops)
    except RuntimeError:  # no folder that this process may write to
        made = numba.njit(list(signatures), **options)(loops)
    return made

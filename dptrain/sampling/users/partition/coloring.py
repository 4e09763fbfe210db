"""The examples of a part over its slots, so that a user's lie in different ones."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.sampling.users.graph_edges import Offsets, Users
from dptrain.sampling.users.partition.pieces import Rows

# Examples; compiling takes half a second, as does walking through so many without.
_WORTH_COMPILING = 1 << 16


def _spread(
    offsets: npt.NDArray[Any],
    members: npt.NDArray[Any],
    by_user: npt.NDArray[Any],
    of_user: npt.NDArray[Any],
    part: npt.NDArray[Any],
    spread: int,
    most: int,
    taken: npt.NDArray[Any],
    loads: npt.NDArray[Any],
    color: npt.NDArray[Any],
    queue: npt.NDArray[Any],
) -> None:
    """Fill ``color``: what follows is compiled where numba is installed.

    Examples are visited from neighbor to neighbor, so that two colors are enough wherever they can
    be: once the first has its color, that of every other is forced.
    """
    for start in range(len(part)):
        if part[start] < 0 or color[start] != -2:
            continue
        queue[0], ends, at = start, 1, 0
        color[start] = -3  # queued
        while at < ends:
            example = queue[at]
            at += 1
            best = -1
            for c in range(spread):
                free = True
                for edge in range(offsets[example], offsets[example + 1]):
                    if taken[members[edge], c] >= most:
                        free = False
                        break
                if free and (best < 0 or loads[part[example], c] < loads[part[example], best]):
                    best = c
            color[example] = best
            if best >= 0:
                loads[part[example], best] += 1
            for edge in range(offsets[example], offsets[example + 1]):
                user = members[edge]
                if best >= 0:
                    taken[user, best] += 1
                for place in range(by_user[user], by_user[user + 1]):
                    other = of_user[place]
                    # Who was dropped connects nobody: a walk through it would not force colors.
                    if best >= 0 and part[other] >= 0 and color[other] == -2:
                        color[other] = -3
                        queue[ends] = other
                        ends += 1


@functools.cache
def _compiled() -> Callable[..., None]:
    import numba  # late: it takes long to import

    found: Callable[..., None] = numba.njit(nogil=True)(_spread)
    return found


def colored(
    offsets: Offsets,
    members: Users,
    by_user: Offsets,
    of_user: Rows,
    part: Rows,
    *,
    parts: int,
    spread: int,
    most: int,
    compiled: bool | None = None,
) -> Rows:
    """A color for every example, at most ``most`` examples of a user in one color.

    Args:
        offsets, members: the users of every example.
        by_user, of_user: the examples of every user.
        part: of every example, -1 for who is dropped.
        parts: their number.
        most: ≥ 1.
        compiled: whether by numba; ``None``: where it is installed and there is enough to do. The
            result is the same.

    Returns:
        0..spread-1, or -1 for an example for whom no color is left, shape (examples,).
    """
    color = np.full(len(part), -2, dtype=np.int64)
    taken = np.zeros((len(by_user) - 1, spread), dtype=np.int32)
    loads = np.zeros((parts, spread), dtype=np.int64)
    queue = np.empty(len(part), dtype=np.int64)
    if compiled is None:
        compiled = len(part) >= _WORTH_COMPILING and importlib.util.find_spec("numba") is not None
    walk = _compiled() if compiled else _spread
    walk(offsets, members, by_user, of_user, part, spread, most, taken, loads, color, queue)
    color[part < 0] = -1
    return color

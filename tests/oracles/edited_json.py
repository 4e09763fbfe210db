"""Every single edit of a JSON value that a forger might try."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Place = tuple[Any, ...]


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """(place, leaf) of all that is neither a list nor a dictionary."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*place, key))
    else:
        yield place, value


def edited(value: Any, place: Place, new: Any) -> Any:
    """A copy with another leaf."""
    found = copy.deepcopy(value)
    holder = found
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = new
    return found


def others(leaf: Any) -> list[Any]:
    """Other values that a leaf might be given."""
    if isinstance(leaf, bool):
        return [not leaf, 1, None]
    if isinstance(leaf, int):
        return [leaf + 1, leaf - 1, 10**6, leaf + 0.5, None]
    if isinstance(leaf, float):
        return [leaf * 0.9999, leaf * 1.0001, leaf / 2, -leaf, 1e-300, None]
    if isinstance(leaf, str):
        return [leaf + "1", ""]
    return [0, 1.0, "x"]

"""Checks of arguments: each returns the value in its one canonical type, or says what is wrong.

A wrong type is a TypeError, a wrong value a ValueError; either names the argument, the value and
what would do. NumPy scalars and arrays and tensors of no dimension are taken where they hold an
ordinary number. ``bool`` is an ``int`` to Python, but True is a mistake for 1.
"""

from __future__ import annotations

import math
import numbers as abstract
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from dptrain.core.text import did_you_mean

T = TypeVar("T")

# Steps of a run. Coefficients of a strategy and shares of an example are held for every step: at a
# hundred million they take gigabytes already, and 10^9 would end in the system's memory killer.
MOST_STEPS = 10**8

_LONGEST = 200  # characters of a value in a message


def shown(value: Any) -> str:
    """The value for a message: one line, not too long.

    Of arrays, tensors, tables and what holds some only the type and the size: they may be data.
    """
    if _has_arrays(value):
        return _outline(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _has_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_arrays(each) for each in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(_has_arrays(each) for each in value)
    return hasattr(value, "__array__") and not isinstance(_scalar(value), int | float)


def _outline(value: Any) -> str:
    size = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else f"length {len(value)}"
    return f"<{type(value).__name__} of {size}>"


def named(name: str, value: Any, owner: str = "") -> str:
    """The start of a message: ``owner: name=value``."""
    return f"{owner}: {name}={shown(value)}" if owner else f"{name}={shown(value)}"


def _scalar(value: Any) -> Any:
    """The number in an array or tensor of no dimension; any other value as it is."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor) and value.ndim == 0:
        return value.item()
    return value


def invariant(holds: object, what: str) -> None:
    """Stop where a proof or a record would be about something else, under ``python -O`` too.

    Args:
        holds: what no argument of a user's should be able to break.
        what: that is wrong otherwise, as a sentence without its end.
    """
    if not holds:
        raise RuntimeError(
            f"{what}. This is a fault of dptrain's, and the run stops because its guarantee might "
            "be false; please report it with the program that caused it"
        )


def integer(
    name: str,
    value: Any,
    *,
    minimum: int | None = 1,
    maximum: int | None = None,
    owner: str = "",
) -> int:
    """``value`` as a Python int of at least ``minimum`` and at most ``maximum``."""
    number = _scalar(value)
    if isinstance(number, bool) or not isinstance(number, abstract.Integral):
        start = named(name, value, owner)
        raise TypeError(f"{start} must be an integer, not {type(value).__name__}")
    number = int(number)
    if minimum is not None and number < minimum:
        raise ValueError(f"{named(name, number, owner)} must be at least {minimum}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{named(name, number, owner)} must be at most {maximum}")
    return number


def steps(value: Any, *, name: str = "steps", owner: str = "") -> int:
    """A number of steps of a run: an integer from 1 to ``MOST_STEPS``.

    Raises:
        TypeError: if it is a bool or not an integer.
        ValueError: if it is out of range.
    """
    return integer(name, value, maximum=MOST_STEPS, owner=owner)


def number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    owner: str = "",
    remedy: str = "",
) -> float:
    """``value`` as a finite float in the stated range.

    Args:
        above: the value has to be greater.
        below: the value has to be smaller.
        owner: whose argument it is, if a class of many.
        remedy: what else a message about the range should say.
    """
    found = _scalar(value)
    if isinstance(found, bool) or not isinstance(found, abstract.Real):
        start = named(name, value, owner)
        raise TypeError(f"{start} must be a number, not {type(value).__name__}")
    try:
        found = float(found)
    except OverflowError:
        found = math.inf
    wanted = [
        text
        for text, limit, holds in (
            ("at least", minimum, minimum is None or found >= minimum),
            ("above", above, above is None or found > above),
            ("at most", maximum, maximum is None or found <= maximum),
            ("below", below, below is None or found < below),
        )
        if not holds
    ]
    if wanted or not math.isfinite(found):
        limits = [
            f"{text} {limit:g}"
            for text, limit in (
                ("at least", minimum),
                ("above", above),
                ("at most", maximum),
                ("below", below),
            )
            if limit is not None
        ]
        said = " and ".join(["must be finite", *limits])
        hint = f" ({remedy})" if remedy else ""
        raise ValueError(f"{named(name, found, owner)} {said}{hint}")
    return found


def probability(name: str, value: Any, *, owner: str = "") -> float:
    """``value`` as a float in (0, 1]."""
    found = number(name, value, owner=owner) if _finite(value) else math.nan
    if not 0.0 < found <= 1.0:
        raise ValueError(f"{named(name, value, owner)} must be a probability in (0, 1]")
    return found


def _finite(value: Any) -> bool:
    """True if a real number is finite, and for other types, which other checks refuse."""
    found = _scalar(value)
    return not isinstance(found, float) or math.isfinite(found)


def numbers(name: str, values: Any, *, owner: str = "") -> tuple[float, ...]:
    """``values`` as finite floats."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        start = named(name, values, owner)
        raise TypeError(f"{start} must be a sequence of numbers, not {type(values).__name__}")
    if isinstance(values, np.ndarray | torch.Tensor) and values.ndim != 1:
        start = named(name, values, owner)
        raise ValueError(f"{start} must have one dimension, not {values.ndim}")
    return tuple(number(f"{name}[{i}]", value, owner=owner) for i, value in enumerate(values))


def flag(name: str, value: Any, *, owner: str = "") -> bool:
    """``value`` if it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{named(name, value, owner)} must be True or False")
    return value


def text(name: str, value: Any, *, owner: str = "") -> str:
    """``value`` if it is a string."""
    if not isinstance(value, str):
        start = named(name, value, owner)
        raise TypeError(f"{start} must be a string, not {type(value).__name__}")
    return value


def choice(name: str, value: Any, options: Iterable[str], *, owner: str = "") -> str:
    """``value`` if it is one of some strings."""
    known = list(options)
    if (chosen := text(name, value, owner=owner)) not in known:
        hint = f"; {did_you_mean(chosen, known)}".rstrip("; ")
        raise ValueError(f"{named(name, value, owner)} must be one of {known}{hint}")
    return chosen


def function(name: str, value: Any, *, owner: str = "") -> None:
    """Refuse what is neither ``None`` nor can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{named(name, value, owner)} must be a function, or None")


def instance(
    name: str,
    value: T,
    kind: type | tuple[type, ...],
    *,
    example: str = "",
    owner: str = "",
) -> T:
    """``value`` if it is of a type.

    Args:
        example: what would do, in a few words.
        owner: whose argument it is, if a class of many.
    """
    if not isinstance(value, kind):
        hint = f", for instance {example}" if example else ""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(f"{k.__module__.split('.')[0]}.{k.__name__}" for k in kinds)
        wanted = wanted.replace("builtins.", "")
        start = named(name, value, owner)
        found = type(value).__name__
        if isinstance(value, type) and issubclass(value, kind):
            found = f"the class itself: write {value.__name__}(...)"
        raise TypeError(f"{start} must be a {wanted}, not {found}{hint}")
    return value

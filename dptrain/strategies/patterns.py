"""Participation patterns: at most m of n steps, any two at least b apart."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def positive_int(name: str, value: Any) -> int:
    """``value`` as a Python int.

    Raises:
        ValueError: if it is not an integer of at least 1 (booleans and floats are not integers).
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    return number


def number(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        ValueError: if it is not a real number.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r}: must be a number") from error


def numbers(name: str, values: Any) -> tuple[float, ...]:
    """``values`` as floats.

    Raises:
        ValueError: if it is not a sequence of real numbers.
    """
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={values!r}: must be a sequence of numbers") from error


def participations(steps: int, max_participations: int, min_sep: int) -> tuple[int, int]:
    """(m, b), with m cut to the ceil(n/b) participations that fit.

    Raises:
        ValueError: if one of the three is not a positive integer.
    """
    steps = positive_int("steps", steps)
    b = positive_int("min_sep", min_sep)
    return min(positive_int("max_participations", max_participations), -(-steps // b)), b


def regular_pattern(steps: int, m: int, b: int) -> Array:
    """x in {0, 1}^n with ones at 0, b, …, (m-1)b, shape (steps,)."""
    x = np.zeros(steps)
    x[: m * b : b] = 1.0
    return x

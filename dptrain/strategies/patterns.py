"""Participation patterns: at most m of n steps, any two at least b apart."""

from __future__ import annotations

import numpy as np

from dptrain.core import Array, checks


def participations(steps: int, max_participations: int, min_sep: int) -> tuple[int, int]:
    """(m, b), with m cut to the ceil(n/b) participations that fit.

    Raises:
        TypeError, ValueError: if one of the three is not a positive integer.
    """
    steps = checks.steps(steps)
    b = checks.integer("min_sep", min_sep)
    return min(checks.integer("max_participations", max_participations), -(-steps // b)), b


def regular_pattern(steps: int, m: int, b: int) -> Array:
    """x in {0, 1}^n with ones at 0, b, …, (m-1)b, shape (steps,)."""
    x = np.zeros(steps)
    x[: m * b : b] = 1.0
    return x

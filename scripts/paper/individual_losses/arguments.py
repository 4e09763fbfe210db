"""Checked arguments of the individual accountants: a sampled step, counts of norms, δ."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dptrain.contrib.individual import NormGrid
from dptrain.core import Array, checks

Counts = npt.NDArray[np.integer]


def check_step(probability: float, noise_multiplier: float) -> None:
    """Refuse a Poisson rate q or a noise σ that is none."""
    checks.probability("probability", probability)
    checks.number("noise_multiplier", noise_multiplier, above=0)


def checked_counts(counts: npt.ArrayLike, grid: NormGrid) -> Counts:
    """The number of times each value of the grid occurred, as whole numbers, shape (N, grid)."""
    array = np.asarray(counts)
    wanted = len(grid.values)
    if array.ndim != 2 or array.shape[1] != wanted:
        raise ValueError(
            f"counts has shape {array.shape}: must be (examples, {wanted}), one column for every "
            "value of the norm grid"
        )
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"counts must be integers, not {array.dtype}; convert them with .astype(np.uint32)"
        )
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        raise ValueError("counts: must not be negative")
    return array


def checked_deltas(delta: npt.ArrayLike, examples: int) -> Array:
    """δ in (0, 1) for every example, from one number or one for each."""
    wanted = one_each("delta", delta, examples)
    if not np.all((wanted > 0) & (wanted < 1)):
        raise ValueError("delta: must lie in (0, 1), e.g. 1e-5")
    return wanted


def one_each(name: str, value: npt.ArrayLike, examples: int) -> Array:
    """``value`` for every example, from one number or one for each."""
    array = np.asarray(value, float)
    if array.shape not in ((), (examples,)):
        raise ValueError(
            f"{name} has shape {array.shape}: must be one number or one for each of the {examples} "
            "examples"
        )
    return np.broadcast_to(array, (examples,))

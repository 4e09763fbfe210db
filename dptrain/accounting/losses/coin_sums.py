"""Laws of the sums of a row's entries over independent coins, rounded up to an even grid."""

from __future__ import annotations

import numpy as np

from dptrain.core import Array

# Entries are rounded up by at most one part in so many.
_STEPS_AN_ENTRY = 64
# Mass of the highest sums that is moved to the greatest sum of all.
_CUT = 1e-32
_CUT_EVERY = 16
# Relative, an entry of a row: covers the rounding of two products and a sum.
_ROUNDING = 1e-15


def row_law(sizes: Array, chances: Array, *, unit: float) -> tuple[Array, float]:
    """Law of Σ_j size_j·x_j with independent coins x_j, or of something above it.

    Small entries are added first, on grids finer by powers of two, so that each is rounded up by at
    most a 64th of itself; from a grid to the next coarser one it is the sum that is rounded up,
    once. Only non-negative numbers are multiplied and added, so that every mass, however small,
    keeps its digits.

    Args:
        sizes: positive, shape (m,).
        chances: in [0, 1], shape (m,).
        unit: spacing of the grid; at least a multiple of the largest size is wise.

    Returns:
        Masses at 0, unit, 2·unit, …, and the mass whose place is unknown: it is to be put on a mean
        at or above Σ_j size_j. They sum to 1, and to rounding each tail is at least that of the
        law.
    """
    levels = np.maximum(np.ceil(np.log2(_STEPS_AN_ENTRY * unit / sizes)), 0.0).astype(int)
    order = np.lexsort((sizes, -levels))
    law, beyond, level = np.ones(1), 0.0, int(levels.max(initial=0))
    for place, j in enumerate(order):
        while level > levels[j]:
            law, level = _coarser(law), level - 1
        shift = int(np.ceil(sizes[j] / unit * 2.0**level * (1.0 - 1e-14)))
        chance = float(chances[j])
        longer = np.zeros(law.size + shift)
        np.multiply(law, 1.0 - chance, out=longer[: law.size])
        longer[shift:] += chance * law
        law = longer
        if place % _CUT_EVERY == 0:
            law, cut = _cut(law)
            beyond += cut
    while level > 0:
        law, level = _coarser(law), level - 1
    law, cut = _cut(law)
    return raised(law, beyond + cut, _ROUNDING * (sizes.size + 10.0))


def _coarser(law: Array) -> Array:
    """The same masses on a grid of twice the spacing, rounded up."""
    result = np.zeros(law.size // 2 + 1)
    even = law[::2]
    result[: even.size] = even
    result[1 : 1 + law[1::2].size] += law[1::2]
    return result


def _cut(law: Array) -> tuple[Array, float]:
    """The law without its highest sums, and their mass."""
    # Sums of so small a mass are far up; the reversed sum of all would cost as much as a step.
    keep = law.size
    total, block = 0.0, 64
    while keep > block:
        mass = float(law[keep - block : keep].sum())
        if total + mass > _CUT:
            break
        total, keep = total + mass, keep - block
    return law[:keep], total


def raised(law: Array, beyond: float, relative: float) -> tuple[Array, float]:
    """All masses raised by ``relative``; what is too much then is taken from the lowest sums."""
    law = law * (1.0 + relative)
    beyond = min(beyond * (1.0 + relative), 1.0)
    excess = float(law.sum()) + beyond - 1.0
    for k in range(law.size):
        if excess <= 0.0:
            break
        taken = min(float(law[k]), excess)
        law[k] -= taken
        excess -= taken
    # The sum may be short of 1 by rounding only: the highest sum gets it.
    law[-1] += max(1.0 - beyond - float(law.sum()), 0.0)
    return law, beyond

"""The privacy of one pick out of t steps from *below*, by conditional means.

dP/dQ = (1/t) Σ_i X_i with independent log-normal X_i. Replacing a variable by its conditional mean
given the cell of a grid it falls in can only lower E[φ] of a convex φ (Jensen), and so does doing
it again after every addition: δ = E[(A - e^ε)_+] (remove) and E[(1 - e^ε A)_+] (add) come out too
small. Cells keep their own means, so there is nothing in common with a split between grid points.
"""

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr


def _gathered(mass, mean, spacing):
    """Merge points that share a cell of the grid of log values; cells without mass vanish."""
    cell = np.floor(np.log(mean / mass) / spacing).astype(int)
    cell -= cell.min()
    total = np.bincount(cell, weights=mass)
    held = total > 1e-300
    return total[held], np.bincount(cell, weights=mean)[held]


def _sum(first, second, spacing):
    """The law of A + B: masses and partial means of the cells."""
    mass = np.outer(first[0], second[0])
    mean = np.outer(first[1], second[0]) + np.outer(first[0], second[1])
    held = mass > 1e-30
    return _gathered(mass[held], mean[held], spacing)


def _single(ratio, spacing):
    z = np.arange(-10.0, 10.0 + ratio, spacing / ratio)
    middle = 0.5 * (z[1:] + z[:-1])

    def cells(shift):
        left, right = ndtr(z - shift), ndtr(shift - z)
        return np.where(middle > shift, right[:-1] - right[1:], left[1:] - left[:-1])

    mass, mean = cells(0.0), cells(ratio)
    held = mass > 1e-30
    return mass[held], mean[held]


def law_from_below(groups, spacing):
    """(masses, values) of dP/dQ for ``groups`` of (r, count), lower in convex order."""
    total, law = sum(count for _, count in groups), None
    for ratio, count in groups:
        one = _single(ratio, spacing)
        part = one
        for digit in bin(count)[3:]:
            part = _sum(part, part, spacing)
            if digit == "1":
                part = _sum(part, one, spacing)
        law = part if law is None else _sum(law, part, spacing)
    return law[0], law[1] / law[0] / total


def deltas_from_below(law, epsilon):
    """δ(ε) (remove, add), too small."""
    mass, value = law
    return (
        float(mass @ np.maximum(value - math.exp(epsilon), 0.0)),
        float(mass @ np.maximum(1.0 - math.exp(epsilon) * value, 0.0)),
    )


def epsilons_from_below(law, delta):
    """ε at δ (remove, add), too small."""
    return [
        brentq(lambda e, i=i: deltas_from_below(law, e)[i] - delta, 0.0, 50.0, xtol=1e-9)
        for i in (0, 1)
    ]

"""The best of a secret, random number of runs: what choosing it costs."""

from __future__ import annotations

import numpy as np

from dptrain.accounting import TradeOff
from dptrain.contrib.selection.pair import delta_at
from dptrain.contrib.selection.trials import TrialCount
from dptrain.core import Array

_POINTS = 1 << 13  # of the chances of being beaten
_LEAST = 1e-14
_APART = 1e-5  # the least relative distance of two of them
_PAD = 1e-9


class SelectionCurve:
    """δ(ε) of the best of K independent runs, K of a law that hides it; rounded up.

    With w(a) = E[K (1-a)^(K-1)] and G(a) the greatest chance, in the one world, of an event that
    has chance a in the other, δ(ε) ≤ E_P[h(e^(ε-L))] for h(r) = max_a (w(a) - r w(G(a)))_+ and the
    loss L of one run. h is a falling polygon, so this is a sum of δ of one run at other ε
    (docs/theory/selection.md#thm-selection; ``test_no_selection_loses_more_than_is_claimed``).

    Args:
        run: what is known of one run: its model, its hyperparameters and its score.
        trials: the law of K.
        remove: the direction, of (P, Q), else of (Q, P).
    """

    def __init__(self, run: TradeOff, trials: TrialCount, *, remove: bool) -> None:
        self._run, self._remove = run, remove
        reversed_run = run.reversed if remove else run
        chances = _grid(reversed_run)
        alpha = trials.weight(chances)
        beta = trials.weight(_greatest(reversed_run, chances))
        self._shares, self._shifts = _polygon(*_lines(chances, alpha, beta))

    def delta(self, epsilon: float) -> float:
        """δ at ε ≥ 0."""
        values = delta_at(self._run, epsilon - self._shifts, remove=self._remove)
        return min(float(self._shares @ values) * (1.0 + _PAD), 1.0)


def _grid(run: TradeOff) -> Array:
    """Chances from 0 to 1, with the corners of ``_greatest`` among them, none too close."""
    corners = run.corners[0]
    even = np.geomspace(_LEAST, 1.0, _POINTS)
    found = np.unique(np.concatenate([even, corners[(corners > _LEAST) & (corners < 1.0)]]))
    marked = np.isin(found, corners)
    near = np.diff(found) <= _APART * found[1:]
    # Of two neighbors the corner stays.
    drop = np.zeros(found.shape, bool)
    drop[:-1] |= near & ~marked[:-1]
    drop[1:] |= near & ~drop[:-1]
    drop[-1] = False
    return np.concatenate([[0.0], found[~drop]])


def _lines(chances: Array, alpha: Array, beta: Array) -> tuple[Array, Array]:
    """Lines alpha - beta r of which at every r one is above w(a) - r w(G(a)) for every chance a.

    w falls and is convex, and so is w(G), as G grows and is concave. Between two chances w is
    below its chord, and w(G) above the chord of the two chances before, drawn on: their difference
    is greatest at an end. Where that line falls too far, w(G) is above its right value.
    """
    width = np.diff(chances)
    drawn_on = beta[1:-1] + (beta[1:-1] - beta[:-2]) * (width[1:] / width[:-1])
    good = drawn_on > 0.99 * beta[2:]
    tops = np.concatenate([alpha, alpha[:1], np.where(good, alpha[2:], alpha[1:-1])])
    falls = np.concatenate([beta, beta[1:2], np.where(good, drawn_on, beta[2:])])
    return tops * (1.0 + _PAD), falls * (1.0 - _PAD)


def _greatest(run: TradeOff, chances: Array) -> Array:
    """The most true positives at these false positive rates, off its corners; rounded up."""
    _, near, far = run.sides
    alpha, power = run.corners
    at = np.concatenate([[0.0], alpha[::-1], [1.0 - far[-1], 1.0]])
    most = np.concatenate([[near[-1]], power[::-1], [1.0, 1.0]])
    order = np.argsort(at, kind="stable")
    found = np.interp(chances, at[order], np.maximum.accumulate(most[order]))
    return np.asarray(np.minimum(found * (1.0 + _PAD), 1.0))


def _polygon(alpha: Array, beta: Array) -> tuple[Array, Array]:
    """Heights and logarithms of the corners of r ↦ max_i (alpha_i - beta_i r)_+.

    It is Σ s_j (1 - r/t_j)_+ over the concave hull of the points (beta, alpha) and (0, 0): s_j are
    the hull's rises and t_j its slopes.
    """
    order = np.lexsort((-alpha, beta))
    hull: list[tuple[float, float]] = [(0.0, 0.0)]
    for x, y in zip(beta[order].tolist(), alpha[order].tolist(), strict=True):
        if y <= hull[-1][1]:
            continue  # a line below another that falls no faster
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-1][0]) <= (
            y - hull[-1][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    corners = np.array(hull)
    rises, runs = np.diff(corners[:, 1]), np.diff(corners[:, 0])
    with np.errstate(divide="ignore"):
        shifts = np.log(rises) - np.log(runs) + _PAD
    return rises, shifts

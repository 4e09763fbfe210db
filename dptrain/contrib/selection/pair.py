"""A model of one run: its profile at every real ε, and a pair of laws that dominates it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dptrain.accounting.base import WEAKEST, TradeOff, check_same_subject
from dptrain.accounting.losses import LossDistribution, split_cells
from dptrain.core import Array, checks

_PAD = 16.0 * np.finfo(float).eps


def delta_at(run: TradeOff, epsilon: Array, *, remove: bool) -> Array:
    """δ at every real ε, rounded up: chords in e^ε, and for ε < 0 by the other direction.

    H_{e^ε}(P‖Q) = 1 - e^ε + e^ε H_{e^-ε}(Q‖P) (docs/theory/composition.md#thm-direction).
    """
    at, ahead, back = run.sides
    ahead, back = (ahead, back) if remove else (back, ahead)
    positive = epsilon >= 0.0
    found = np.where(
        positive,
        _on_chords(at, ahead, np.where(positive, epsilon, 0.0)),
        _below_zero(at, back, np.where(positive, 0.0, epsilon)),
    )
    return np.minimum(found * (1.0 + _PAD), 1.0)


def epsilon_at(run: TradeOff, delta: float) -> float:
    """Least ε ≥ 0 at which δ is known to be at most this in both directions; ∞ if there is none.

    On the chords in e^ε, rounded up.
    """
    at, remove, add = run.sides
    return max(_reached(at, side, delta) for side in (remove, add))


def _reached(at: Array, side: Array, delta: float) -> float:
    below = np.flatnonzero(side <= delta)
    if not below.size:
        return math.inf
    right = int(below[0])
    if right == 0:
        return 0.0
    left, width = float(at[right - 1]), float(at[right] - at[right - 1])
    share = (side[right - 1] * (1.0 + _PAD) - delta) / (side[right - 1] - side[right])
    # log(1 + share (e^width - 1)), which does not overflow.
    found = left + width + math.log(share + (1.0 - share) * math.exp(-width))
    return min(max(found, left) * (1.0 + _PAD) + 1e-15, float(at[right]))


def _below_zero(at: Array, back: Array, epsilon: Array) -> Array:
    return np.asarray(-np.expm1(epsilon) + np.exp(epsilon) * _on_chords(at, back, -epsilon))


def _on_chords(at: Array, side: Array, epsilon: Array) -> Array:
    """The chords in e^ε between neighboring bounds; beyond the last one its δ."""
    if at.size == 1:
        return np.full(epsilon.shape, side[0])
    cell = np.clip(np.searchsorted(at, epsilon, side="right") - 1, 0, at.size - 2)
    left, right = at[cell], at[cell + 1]
    held = np.minimum(epsilon, right)
    # (e^ε - e^l)/(e^r - e^l), which neither overflows nor cancels.
    share = np.exp(held - right) * np.expm1(left - held) / np.expm1(left - right)
    return np.asarray(side[cell] + share * (side[cell + 1] - side[cell]))


def losses(run: TradeOff, *, spacing: float, remove: bool) -> LossDistribution:
    """The loss log(dP/dQ) under P of a pair that dominates the run, on a grid, rounded up.

    A profile of chords is that of a pair with atoms at its corners: the fall of δ per unit of e^ε
    to the right of ε is Q's mass at losses above, likewise for the other direction, and what is
    left of P has loss 0 (docs/theory/selection.md#thm-pair-of-chords;
    ``test_the_pair_has_the_profile``). Between grid points masses go to both neighbors, which
    keeps them in both worlds (docs/theory/composition.md#thm-discretization).

    Args:
        run: what is known of it.
        spacing: distance of the grid's losses.
        remove: of (P, Q), else of (Q, P).
    """
    at, ahead, back = run.sides
    ahead, back = (ahead, back) if remove else (back, ahead)
    if at.size == 1:
        return LossDistribution(spacing, 0, np.log([max(1.0 - ahead[0], 1e-300)]), float(ahead[0]))
    log_lower, mirrored = _log_atoms(at, ahead), _log_atoms(at, back)
    infinity = float(ahead[-1])
    up, down = np.exp(log_lower + at[1:]), np.exp(mirrored)
    # Of sums of thousands of terms that add up to at most 1.
    rest = max(1.0 + 1e-13 - infinity - float(up.sum()) - float(down.sum()), 0.0)
    atoms = np.concatenate([-at[:0:-1], [0.0], at[1:]])
    upper = np.concatenate([down[::-1], [rest], up])
    taken = upper > 0.0
    atoms, upper = atoms[taken], upper[taken]
    low = np.floor(atoms / spacing).astype(np.int64)
    return split_cells(
        spacing=spacing,
        low=low,
        high=low + 1,
        upper=upper,
        lower=np.exp(np.log(upper) - atoms),
        above=infinity,
    )


def _log_atoms(at: Array, side: Array) -> Array:
    """log of the mass at each ε but the first, in the world that has less of it."""
    with np.errstate(divide="ignore"):
        falls = np.log(np.maximum(side[:-1] - side[1:], 0.0))
    slopes = falls - at[1:] - np.log(-np.expm1(at[:-1] - at[1:]))
    following = np.append(slopes[1:], -np.inf)
    with np.errstate(invalid="ignore"):
        gap = np.where(following < slopes, -np.expm1(following - slopes), 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.where(gap > 0.0, slopes + np.log(gap), -np.inf))


def one_of_runs(runs: Sequence[TradeOff]) -> TradeOff:
    """A run that is drawn uniformly from these and tells which one it was: the mean of their δ.

    (docs/theory/composition.md#thm-public-mixture.)

    Args:
        runs: what is known of each configuration of a search space; at least one.

    Raises:
        TypeError: if one is no ``TradeOff``.
        ValueError: if there are none, or they are about different adjacencies or units.
    """
    kept = [checks.instance("runs", run, TradeOff) for run in runs]
    if not kept:
        raise ValueError("runs: must contain at least one")
    check_same_subject(kept)
    counts = {run: kept.count(run) / len(kept) for run in dict.fromkeys(kept)}
    if len(counts) == 1:
        return kept[0]
    epsilon = np.unique(np.concatenate([run.sides[0] for run in counts]))
    remove, add = (
        np.minimum(
            sum(
                (share * delta_at(run, epsilon, remove=way) for run, share in counts.items()),
                np.zeros(epsilon.size),
            )
            * (1.0 + _PAD),
            1.0,
        )
        for way in (True, False)
    )
    return TradeOff(
        epsilon=tuple(epsilon.tolist()),
        remove=tuple(remove.tolist()),
        add=tuple(add.tolist()),
        floor=max(run.floor for run in counts),
        kind=max((run.kind for run in counts), key=WEAKEST.index),
        accountant=", ".join(dict.fromkeys(run.accountant for run in counts)),
        adjacency=kept[0].adjacency,
        unit=kept[0].unit,
    )


def least_spacing(runs: Sequence[TradeOff], *, relative: float = 2.0**-9) -> float:
    """A distance of grid points: fine beside the losses of these runs, and such that one ε fits."""
    bare = {run.epsilon[-1] for run in runs if len(run.epsilon) == 1}
    total = math.sqrt(sum(_scale(run) ** 2 for run in runs))
    spacing = max(relative * total / math.sqrt(len(runs)), 1e-6)
    if len(bare) == 1 and (only := bare.pop()) > 0.0:
        return only / math.ceil(only / spacing)
    return spacing


def _scale(run: TradeOff) -> float:
    """About how large the losses of a run are."""
    at, remove, add = run.sides
    both = np.maximum(remove, add)
    return float(at[np.argmax(both <= 0.5 * both[0])]) if at.size > 1 else 1.0

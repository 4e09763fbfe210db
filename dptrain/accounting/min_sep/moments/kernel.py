"""One step of the reduced program, compiled with numba or in numpy: both give the same numbers."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.accounting.min_sep.moments.states import Ages, Ints, States
from dptrain.core import Array

Step = Callable[..., float]
Indices = npt.NDArray[np.int64]


def available() -> bool:
    """True if numba can be imported (optional extra ``fast``)."""
    return importlib.util.find_spec("numba") is not None


def step_plain(
    starts: Indices,
    own: Ints,
    rest: Ints,
    resting: Array,
    taking: Array,
    some_own: Ints,
    some_weight: Array,
    some_next: Ints,
    after: Array,
    lines: Array,
    tick: int,
    new: Array,
) -> float:
    """Write the level before ``after`` into ``new`` and into ``lines``; its largest value.

    Args:
        starts, own, rest: of ``States``.
        resting: weight of every row if nobody takes part.
        taking: weight of every row if all free copies do.
        some_own, some_weight, some_next: the further choices.
        after: the later level, shape (states,).
        lines: block s of the s+1 levels before this one, the one of tick τ in place τ mod (s+1).
        tick: the place of this level in time.
        new: shape (states,).
    """
    offset, places = 0, []
    for block in range(starts.size - 1):
        size = int(starts[block + 1] - starts[block])
        place = offset + tick % (block + 1) * size
        places.append((slice(starts[block], starts[block + 1]), slice(place, place + size)))
        offset += (block + 1) * size
    oldest = np.concatenate([lines[line] for _, line in places])
    new[own] = resting * after[rest] + taking * oldest
    np.add.at(new, some_own, some_weight * after[some_next])
    for rows, line in places:
        lines[line] = new[rows]
    return float(new.max())


# fmt: off
def _step(  # type: ignore[no-untyped-def]
    starts, own, rest, resting, taking, some_own, some_weight, some_next, after, lines, tick, new,
):
    # fmt: on
    offset = 0
    for block in range(starts.size - 1):
        start, stop = starts[block], starts[block + 1]
        place = offset + tick % (block + 1) * (stop - start) - start
        for k in range(start, stop):
            new[own[k]] = resting[k] * after[rest[k]] + taking[k] * lines[place + k]
        offset += (block + 1) * (stop - start)
    for i in range(some_own.size):
        new[some_own[i]] += some_weight[i] * after[some_next[i]]
    offset, top = 0, 0.0
    for block in range(starts.size - 1):
        start, stop = starts[block], starts[block + 1]
        place = offset + tick % (block + 1) * (stop - start) - start
        for k in range(start, stop):
            lines[place + k] = new[k]
            top = max(top, new[k])
        offset += (block + 1) * (stop - start)
    return top


def taking_plain(ages: Ages, free: npt.NDArray[np.int8], pulls: Array, own: Array) -> Array:
    """own[f]·(Π pulls[age])^f of every row: the weight if all f free copies take part."""
    weight = np.ones(len(ages))
    for column in range(ages.shape[1]):
        weight *= pulls[ages[:, column]]
    for f in range(2, own.size):
        more = free == f
        weight[more] **= f
    return np.asarray(weight * own[free])


def _taking(ages, free, pulls, own):  # type: ignore[no-untyped-def]
    found = np.empty(ages.shape[0])
    for k in range(ages.shape[0]):
        weight = 1.0
        for column in range(ages.shape[1]):
            weight *= pulls[ages[k, column]]
        found[k] = own[free[k]] * (weight if free[k] == 1 else weight ** free[k])
    return found


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba  # late: it takes long to import

    # Contraction only drops roundings.
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        compiled = numba.njit(**options)(function)
    return compiled


class StepWeights:
    """Weights of the choices of one step, at one σ."""

    def __init__(self, states: States, probability: float, *, compiled: bool) -> None:
        self._states, self._p, self._compiled = states, probability, compiled
        self._order = int(states.free.max())
        rested = (1.0 - probability) ** np.arange(self._order + 1.0)
        self.resting = rested[states.free]
        self.some_own = states.own[states.some_row]
        self.step: Step = _compiled(_step) if compiled else step_plain

    def compute(self, gram: Array, cost: float = 0.0) -> None:
        """Set ``taking`` and ``some_weight`` for overlaps <c_t, c_{t-d}>/σ², d = 0..b-1.

        ``cost`` is what every copy that takes part takes off the exponent.
        """
        states, p = self._states, self._p
        copies = np.arange(self._order + 1.0)
        own = p**copies * np.exp(copies * (copies - 1.0) / 2.0 * gram[0] - copies * cost)
        pulls = np.exp(np.append(gram[1:], 0.0))  # of an age; the last is a free copy's
        function = _compiled(_taking) if self._compiled else taking_plain
        self.taking: Array = function(states.ages, states.free, pulls, own)
        rows, taking = states.some_row, states.some_taking
        choices = np.array([[_choose(f, j) for j in copies] for f in copies])
        pulled = np.ones(rows.size)
        for column in range(states.ages.shape[1]):
            pulled *= pulls[states.ages[rows, column]]
        free = states.free[rows]
        self.some_weight = (
            choices[free, taking] * own[taking] * (1.0 - p) ** (free - taking) * pulled**taking
        )

    def advance(self, after: Array, lines: Array, tick: int, new: Array) -> float:
        """One step; see ``step_plain``."""
        states = self._states
        return self.step(
            states.starts, states.own, states.rest, self.resting, self.taking, self.some_own,
            self.some_weight, states.some_next, after, lines, tick, new,
        )  # fmt: skip


def _choose(n: float, k: float) -> float:
    value = 1.0
    for i in range(int(k)):
        value = value * (n - i) / (i + 1.0)
    return value if k <= n else 0.0

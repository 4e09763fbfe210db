"""Exact sums of simulated hockey-stick terms, chunk by chunk, and the verdicts they support."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction
from typing import Any

import numpy as np

from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.core import Array, checks

BITS = 60
# Sums of one chunk in units of 2^-60: for each direction those of the largest σ, ascending.
Sums = tuple[tuple[int, ...], ...]


def exact_sums(terms: Array) -> Sums:
    """Sums over the last axis of terms in [0, 1], shape (2, σ, samples), rounded up to 2^-60.

    The factor covers the rounding of the terms and of their summation within the chunk, on the
    side of rejection; from there on integers are added, in any order, to the same result.

    Raises:
        ArithmeticError: if a term is not a number.
    """
    sums = terms.sum(axis=2) * (1.0 + 1e-12)
    if not np.isfinite(sums).all():
        raise ArithmeticError("a simulated privacy loss is not a number")
    return tuple(tuple(math.ceil(math.ldexp(value, BITS)) for value in row) for row in sums)


class Verdicts:
    """Verdicts on ascending σ from chunks that are fed in order.

    A σ is rejected as soon as the sum of its terms exceeds s·δ' in either direction, which rules
    out all smaller ones; what stands after all s samples is accepted.
    """

    def __init__(self, sigmas: Sequence[float], *, samples: int, threshold: float) -> None:
        self._rows: list[dict[str, Any]] = [
            {"noise_multiplier": float(sigma), "remove": None, "add": None, "accepted": False}
            for sigma in sigmas
        ]
        self._sums = [[0] * len(self._rows) for _ in DIRECTIONS]
        self._limit = math.floor(Fraction(threshold) * samples * 2**BITS)
        self._samples, self._used, self._lowest = samples, 0, 0

    @property
    def standing(self) -> int:
        """How many σ, the largest ones, have not been ruled out."""
        return len(self._rows) - self._lowest

    def feed(self, sums: Sums, size: int) -> int:
        """Add a chunk of ``size`` samples; returns how many σ it rules out.

        ``sums`` may hold further, smaller σ, but not fewer than stand.

        Raises:
            ValueError: if it does.
        """
        for totals, row in zip(self._sums, sums, strict=True):
            if len(row) < self.standing:
                raise ValueError(f"sums of {len(row)} noise levels where {self.standing} stand")
            for index in range(self._lowest, len(self._rows)):
                totals[index] += row[index - len(self._rows)]
        self._used += size
        over = [[total > self._limit for total in totals] for totals in self._sums]
        rejected = [i for i in range(self._lowest, len(self._rows)) if over[0][i] or over[1][i]]
        if not rejected:
            return 0
        before, last = self._lowest, rejected[-1]
        for index in range(before, last + 1):
            self._record(index, [False if each[index] else None for each in over])
        self._lowest = last + 1
        return self._lowest - before

    @property
    def decided(self) -> bool:
        """Whether all s samples are in, or nothing stands."""
        return self.standing == 0 or self._used == self._samples

    def rows(self) -> list[dict[str, Any]]:
        """The verdicts, see ``certify_noise``."""
        checks.invariant(self.decided, "verdicts were asked for before all were decided")
        for index in range(self._lowest, len(self._rows)):
            self._record(index, (True, True))
            self._rows[index]["accepted"] = True
        return self._rows

    def _record(self, index: int, decisions: Sequence[bool | None]) -> None:
        for direction, totals, accepted in zip(DIRECTIONS, self._sums, decisions, strict=True):
            # A quotient of integers is rounded correctly, so it is ≤ δ' if and only if it was.
            mean = totals[index] / (self._used << BITS)
            self._rows[index][direction] = {
                "mean": mean,
                "samples": self._used,
                "accepted": accepted,
            }


def sums_of(chunk: int, sums: Mapping[int, Sums], standing: int) -> Sums:
    """The sums of a chunk that is in; ``standing`` zeros where nothing was stored."""
    return sums.get(chunk, ((0,) * standing,) * len(DIRECTIONS))


def replay(
    verdicts: Verdicts,
    sizes: Callable[[int], int],
    done: AbstractSet[int],
    sums: Mapping[int, Sums],
) -> list[dict[str, Any]] | None:
    """Feed fresh ``verdicts`` the chunks in their order; ``sizes`` gives the samples of each.

    Returns:
        Their rows, or ``None`` while samples that matter are missing.

    Raises:
        ValueError: if a chunk lacks the sums of a σ that was not ruled out before it.
    """
    chunk = 0
    while not verdicts.decided:
        if chunk not in done:
            return None
        try:
            verdicts.feed(sums_of(chunk, sums, verdicts.standing), sizes(chunk))
        except ValueError as error:
            raise ValueError(f"chunk {chunk}: {error}") from error
        chunk += 1
    return verdicts.rows()

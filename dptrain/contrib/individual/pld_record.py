"""Spending records of the individual PLD filter: counts of norms, and credits of steps.

A credit is the number of further steps that an example's budget surely allows.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from dptrain.contrib.individual import gaussian_renyi
from dptrain.contrib.individual.gaussian_dominance import GaussianDominance
from dptrain.contrib.individual.sampled_record import EVERYBODY, Buckets, SampledRecord, Which
from dptrain.contrib.per_example import IndividualPLD, NormGrid
from dptrain.core import Array, checks
from dptrain.individual import Mask, Staged

Single = npt.NDArray[np.float32]
Counts = npt.NDArray[np.integer]
Credits = npt.NDArray[np.int64]

_CELLS = 1 << 21  # of the linear part at a time
_TRIALS = 6
_WORTH = 0.02  # a trial must promise this share more steps


def step_credits(test: GaussianDominance, counts: Counts, buckets: Buckets, most: int) -> Credits:
    """Steps with norms in the given bucket that still fit; 0 only where not even one does.

    The answer may fall a little short of the largest. Every answer was tried: the total
    with so many more steps is dominated, and therefore with fewer steps, and with smaller norms
    (more noise is post-processing).

    Args:
        test: against the budget.
        counts: steps so far, shape (n, grid).
        buckets: above 0, shape (n,).
        most: upper limit of the answer.
    """
    result = np.zeros(len(counts), dtype=np.int64)
    size = max(1, _CELLS // test.cells)
    for at in range(0, len(counts) if most > 0 else 0, size):
        rows = slice(at, at + size)
        result[rows] = _seen(test, counts[rows], buckets[rows], most)
    return result


def _seen(test: GaussianDominance, counts: Counts, buckets: Buckets, most: int) -> Credits:
    """Sought where the reference is decided, and tried everywhere."""
    credit = _searched(test.leading, counts, buckets, most)
    total = counts.astype(np.float32)  # exact up to 2^24 steps
    total[np.arange(len(counts)), buckets] += credit
    fits = (test.log_ratios(test.exponents(total)) <= 0.0).all(axis=1)
    again = np.flatnonzero(~fits & (credit > 0))
    if again.size:
        credit[again] = _searched(test, counts[again], buckets[again], most)
    return credit


def _searched(test: GaussianDominance, counts: Counts, buckets: Buckets, most: int) -> Credits:
    """Newton's steps from below: log δ rises by at most about its cumulant with every step."""
    start = test.exponents(counts)
    norms, norm = np.unique(buckets, return_inverse=True)
    norm = norm.reshape(-1)
    charges = test.charges(norms)
    slopes = test.slopes(charges)
    credit = np.zeros(len(counts), dtype=np.int64)

    def ratios(rows: Buckets, steps: Credits) -> Single:
        more = charges[norm[rows]] if norms.size > 1 else charges
        return test.log_ratios(start[rows] + steps[:, None, None].astype(np.float32) * more)

    def room(rows: Buckets, found: Single) -> Credits:
        least = np.min(-found / slopes[norm[rows]], axis=1)
        return np.minimum(np.clip(least, 0.0, most).astype(np.int64), most - credit[rows])

    everybody = np.arange(len(counts))
    left = room(everybody, test.log_ratios(start))
    failed = np.full(len(counts), np.iinfo(np.int64).max)  # least that was seen not to fit
    for _ in range(_TRIALS):
        open_ = np.flatnonzero(left > _WORTH * credit)
        if open_.size == 0:
            break
        trial = credit[open_] + left[open_]
        found = ratios(open_, trial)
        fits = (found <= 0.0).all(axis=1)
        good, bad = open_[fits], open_[~fits]
        credit[good] = trial[fits]
        left[good] = np.minimum(room(good, found[fits]), failed[good] - 1 - credit[good])
        failed[bad] = trial[~fits]
        left[bad] //= 2
    none = np.flatnonzero((credit == 0) & (failed > 1))
    if none.size:
        one = np.ones(none.size, dtype=np.int64)
        credit[none] = (ratios(none, one) <= 0.0).all(axis=1)
    return credit


_NONE = -1  # credit of those whose next step was seen not to fit
# Credits are for norms up to so many times the bound, which saves trials when bounds rise.
_HEADROOM = 1.5
_SHORT = 0.02  # share of the steps so far below which a credit for the bound itself is looked for


class PLDRecord(SampledRecord):
    """A record of every example's spending, as the μ of a Gaussian; budget B.

    Args:
        size: N.
        grid: of norm ratios.
        budget: B.
        max_steps: of the filter.
        personal_clipping: see ``PLDFilter``.
    """

    def __init__(
        self,
        *,
        size: int,
        grid: NormGrid,
        budget: float,
        max_steps: int,
        personal_clipping: float | None,
    ) -> None:
        super().__init__(
            size=size, grid=grid, max_steps=max_steps, personal_clipping=personal_clipping
        )
        self.budget = budget

    @property
    @abstractmethod
    def spent(self) -> Array:
        """μ that each example has spent, at most B, shape (N,); not for release.

        B for those that are out for good.
        """

    def epsilons(self, delta: float) -> Array:
        """ε_i of R_α ≤ αμ²/2 at all orders, shape (N,); not for release."""
        return gaussian_renyi.epsilons(delta, self.spent)

    def epsilon_bound(self, delta: float) -> float:
        """ε of R_α ≤ αB²/2 at all orders."""
        return float(gaussian_renyi.epsilons(delta, self.budget))

    @property
    def condition(self) -> str:
        """The budget in one sentence."""
        return (
            "Approximate, an estimate and not a proven bound: every example has its own budget of "
            f"{self.budget:.6g}-GDP, converted through Rényi divergences, "
            f"{self._between_draws} and is left out of steps that would exceed it, of at most "
            f"{self.max_steps} steps"
        )

    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        """Refuse another budget too; see ``IndividualRecord.check_state``."""
        super().check_state(state, steps)
        budget = state["spending"]["budget"]
        # Another machine's logarithms may make another last digit of B.
        if not abs(budget - self.budget) <= 1e-9 * self.budget:
            raise ValueError(
                f"the individual record has the budget {budget:g}-GDP, this run has "
                f"{self.budget:g}-GDP: resume with the filter of the checkpoint"
            )

    def _refuse_tampered(self) -> None:
        """Raises ValueError: what is held cannot have been spent."""
        raise ValueError(
            "the individual record holds spendings outside the budget: the checkpoint was changed "
            "after it was written; go on from one that was not"
        )

    def _spending(self) -> dict[str, Any]:
        return {**super()._spending(), "budget": self.budget}


class UnsampledPLDRecord(PLDRecord):
    """Full batches: the Gaussian composes exactly, Σ r² ≤ B²σ²."""

    def __init__(self, *, noise_multiplier: float, **common: Any) -> None:
        super().__init__(**common)
        self._sigma = noise_multiplier
        self._most = (self.budget * noise_multiplier) ** 2
        self._squares: Array = np.zeros(self.size)  # Σ r²

    @property
    @override
    def spent(self) -> Array:
        return np.minimum(np.sqrt(self._squares) / self._sigma, self.budget)

    def _affordable(self, which: Which, buckets: Buckets) -> Mask:
        return self._squares[which] + self.grid.values[buckets] ** 2 <= self._most

    def _charge(self, which: Which, buckets: Buckets) -> None:
        self._squares[which] += self.grid.values[buckets] ** 2

    def _exhaust(self, which: Mask) -> None:
        self._squares[which] = self._most

    @override
    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        super().check_state(state, steps)
        squares = state["spending"]["squares"]
        if not bool(((squares >= 0) & (squares <= self._most * (1.0 + 1e-9))).all()):
            self._refuse_tampered()

    def _spending(self) -> dict[str, Any]:
        return {**super()._spending(), "squares": torch.from_numpy(self._squares.copy())}

    def _load_spending(self, spending: dict[str, Any]) -> None:
        super()._load_spending(spending)
        self._squares = spending["squares"].double().numpy().copy()


class SampledPLDRecord(PLDRecord):
    """Counts of norms, shape (N, grid), in the smallest type that holds ``max_steps``.

    Example i also has a credit: so many more steps with norms up to a reference norm fit, which
    was seen when it was given. A step costs one; only examples without credit, or whose bound has
    risen above their reference, are looked at again, after the step. So most steps only count.

    Args:
        probability: q < 1.
        noise_multiplier: σ.
        floor: of δ; see ``PLDFilter``.
        full_norm_steps: that everybody can afford at first.
    """

    def __init__(
        self,
        *,
        probability: float,
        noise_multiplier: float,
        floor: float,
        full_norm_steps: int,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._probability, self._sigma, self._floor = probability, noise_multiplier, floor
        self._full_norm_steps = full_norm_steps
        columns = len(self.grid.values)
        # torch has no larger unsigned types everywhere: one bit of the signed ones is not used.
        kind = next(k for k in (np.int16, np.int32, np.int64) if self.max_steps <= np.iinfo(k).max)
        self._counts = np.zeros((self.size, columns), dtype=kind)
        self._places = np.arange(self.size) * columns
        self._credit = np.full(self.size, min(full_norm_steps, self.max_steps), dtype=np.int64)
        self._reference = np.full(self.size, columns - 1, dtype=np.int16)
        self._test: GaussianDominance | None = None

    @property
    def spent(self) -> Array:
        """ε of every example so far; takes about 2 ms for each example whose counts differ."""
        accountant = IndividualPLD(
            probability=self._probability, noise_multiplier=self._sigma, grid=self.grid
        )
        counts, inverse = np.unique(self._counts, axis=0, return_inverse=True)
        found = accountant.gaussian_mu(counts, floor=self._floor)[inverse.reshape(-1)]
        return np.where(self._alive, np.minimum(found, self.budget), self.budget)

    def _credits(self, rows: Buckets, buckets: Buckets) -> Buckets:
        """The steps with norms in these buckets above 0 that still fit, shape of ``rows``."""
        if self._test is None:
            self._test = GaussianDominance(
                probability=self._probability,
                noise_multiplier=self._sigma,
                grid=self.grid,
                mu=self.budget,
                floor=self._floor,
                reference=self._full_norm_steps,
            )
        return step_credits(
            self._test, self._counts[rows], buckets, max(self.max_steps - self.steps, 1)
        )

    def _affordable(self, which: Which, buckets: Buckets) -> Mask:
        credit, reference = self._credit[which], self._reference[which]
        fits = (credit > 0) | (buckets == 0)
        # The reference norm was seen not to fit. A smaller one may.
        asked = np.flatnonzero(~fits & self._alive[which] & (buckets < reference))
        if asked.size:
            rows = np.arange(self.size)[which][asked]
            fits[asked] = self._credits(rows, buckets[asked]) > 0
        return fits

    def _charge(self, which: Which, buckets: Buckets) -> None:
        checks.invariant(which == EVERYBODY, "a full step charges every example")
        charged = np.flatnonzero(buckets)
        self._counts.reshape(-1)[self._places[charged] + buckets[charged]] += 1
        self._credit[charged] -= self._credit[charged] > 0

    def _exhaust(self, which: Mask) -> None:
        self._credit[which] = _NONE

    def _book(self, step: Staged) -> int:
        taking_part = super()._book(step)
        bounds, reference = self._bounds, self._reference
        stale = (self._credit == 0) | (bounds > reference)
        stale |= (self._credit == _NONE) & (bounds < reference)
        rows = np.flatnonzero(stale & self._alive & (bounds > 0))
        if rows.size:
            self._renew(rows)
        return taking_part

    def _renew(self, rows: Buckets) -> None:
        """New credits, for a norm a little above the bound where that lasts long enough."""
        exact = self._bounds[rows]
        higher = self.grid.bucket(np.minimum(_HEADROOM * self.grid.values[exact], 1.0))
        found, reference = self._credits(rows, higher), higher
        again = np.flatnonzero((found < _SHORT * self.steps) | (found < 1))
        again = again[higher[again] > exact[again]]
        if again.size:
            found[again] = self._credits(rows[again], exact[again])
            reference[again] = exact[again]
        self._credit[rows] = np.where(found > 0, found, _NONE)
        self._reference[rows] = reference

    @override
    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        super().check_state(state, steps)
        spending, booked = state["spending"], len(state["active_counts"])
        counts, credit = spending["counts"], spending["credit"]
        sound = bool((counts >= 0).all()) and bool((counts.sum(dim=1) <= booked).all())
        sound = sound and bool((credit >= _NONE).all()) and bool((credit <= self.max_steps).all())
        reference = spending["reference"]
        sound = sound and bool(((reference >= 0) & (reference < counts.shape[1])).all())
        if not sound:
            self._refuse_tampered()

    def _spending(self) -> dict[str, Any]:
        return {
            **super()._spending(),
            "counts": torch.from_numpy(self._counts.copy()),
            "credit": torch.from_numpy(self._credit.copy()),
            "reference": torch.from_numpy(self._reference.copy()),
        }

    def _load_spending(self, spending: dict[str, Any]) -> None:
        super()._load_spending(spending)
        self._counts = spending["counts"].numpy().copy()
        self._credit = spending["credit"].numpy().copy()
        self._reference = spending["reference"].numpy().copy()

"""Spending records of the individual PLD filter: counts of norms, and credits of steps."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from dptrain.accounting.individual_pld import IndividualPLD
from dptrain.accounting.norm_grid import NormGrid
from dptrain.individual import gaussian_renyi
from dptrain.individual.gaussian_dominance import GaussianDominance
from dptrain.individual.ledger import Array, Mask, Staged
from dptrain.individual.sampled import EVERYBODY, Buckets, SampledLedger, Which
from dptrain.individual.step_credit import step_credits

_NONE = -1  # credit of those whose next step was seen not to fit
# Credits are for norms up to so many times the bound, which saves trials when bounds rise.
_HEADROOM = 1.5
_SHORT = 0.02  # share of the steps so far below which a credit for the bound itself is looked for


class PLDLedger(SampledLedger):
    """What every example has spent, as the μ of a Gaussian; budget B.

    Args:
        size: N.
        grid: of norm ratios.
        budget: B.
        max_steps: of the filter.
        personal_clipping: see :class:`~dptrain.individual.pld.PLDFilter`.
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
        """Also refuse another budget; see :meth:`IndividualLedger.check_state`."""
        super().check_state(state, steps)
        budget = state["spending"]["budget"]
        # Another machine's logarithms may make another last digit of B.
        if not abs(budget - self.budget) <= 1e-9 * self.budget:
            raise ValueError(
                f"the individual ledger has the budget {budget:g}-GDP, this run has "
                f"{self.budget:g}-GDP: resume with the filter of the checkpoint"
            )

    def _refuse_tampered(self) -> None:
        """Raises ValueError: what is held cannot have been spent."""
        raise ValueError(
            "the individual ledger holds spendings outside the budget: the checkpoint was changed "
            "after it was written; go on from one that was not"
        )

    def _spending(self) -> dict[str, Any]:
        return {**super()._spending(), "budget": self.budget}


class UnsampledPLDLedger(PLDLedger):
    """Full batches: the Gaussian composes exactly, Σ r² ≤ B²σ².

    Args:
        noise_multiplier: σ.
    """

    def __init__(self, *, noise_multiplier: float, **common: Any) -> None:
        super().__init__(**common)
        self._sigma = noise_multiplier
        self._most = (self.budget * noise_multiplier) ** 2
        self._squares: Array = np.zeros(self.size)  # Σ r²

    @property
    def spent(self) -> Array:
        """See :attr:`PLDLedger.spent`."""
        return np.minimum(np.sqrt(self._squares) / self._sigma, self.budget)

    def _affordable(self, which: Which, buckets: Buckets) -> Mask:
        return self._squares[which] + self.grid.values[buckets] ** 2 <= self._most

    def _charge(self, which: Which, buckets: Buckets) -> None:
        self._squares[which] += self.grid.values[buckets] ** 2

    def _exhaust(self, which: Mask) -> None:
        self._squares[which] = self._most

    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        """See :meth:`PLDLedger.check_state`."""
        super().check_state(state, steps)
        squares = state["spending"]["squares"]
        if not bool(((squares >= 0) & (squares <= self._most * (1.0 + 1e-9))).all()):
            self._refuse_tampered()

    def _spending(self) -> dict[str, Any]:
        return {**super()._spending(), "squares": torch.from_numpy(self._squares.copy())}

    def _load_spending(self, spending: dict[str, Any]) -> None:
        super()._load_spending(spending)
        self._squares = spending["squares"].double().numpy().copy()


class SampledPLDLedger(PLDLedger):
    """Counts of norms, shape (N, grid), in the smallest type that holds ``max_steps``.

    Example i also has a credit: so many more steps with norms up to a reference norm fit, which
    was seen when it was given. A step costs one; only examples without credit, or whose bound has
    risen above their reference, are looked at again, after the step. So most steps only count.

    Args:
        probability: q < 1.
        noise_multiplier: σ.
        floor: of δ; see :class:`~dptrain.individual.pld.PLDFilter`.
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
        """See :attr:`PLDLedger.spent`; takes about 2 ms for each example whose counts differ."""
        accountant = IndividualPLD(
            probability=self._probability, noise_multiplier=self._sigma, grid=self.grid
        )
        counts, inverse = np.unique(self._counts, axis=0, return_inverse=True)
        found = accountant.gaussian_mu(counts, floor=self._floor)[inverse.reshape(-1)]
        return np.where(self._alive, np.minimum(found, self.budget), self.budget)

    def _credits(self, rows: Buckets, buckets: Buckets) -> Buckets:
        """So many more steps with norms in these buckets above 0 fit, shape of ``rows``."""
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
        assert which == EVERYBODY
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

    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        """See :meth:`PLDLedger.check_state`."""
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

"""The spending record of the Rényi filter: a norm is seen only when its example is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dptrain.accounting.renyi import epsilon_at_order
from dptrain.contrib.individual.norm_grid import NormGrid
from dptrain.core import Array
from dptrain.individual import Indices, IndividualRecord, Mask, Staged

Buckets = npt.NDArray[np.intp]  # indices into a norm grid
Which = Indices | slice  # examples

EVERYBODY = slice(None)


class RenyiRecord(IndividualRecord):
    """Σ ρ of every example: each that is still there is charged at every step, drawn or not.

    That it is not drawn is hidden, but a filter that charged only for what was drawn would let
    undrawn examples wait for free, and its bound would be wrong
    (docs/theory/individual.md#thm-renyi-filter;
    ``test_charging_only_draws_would_exceed_the_budget``). Example i has a bound C_i, in units of R:

    - drawn, it is clipped to C_i and charged its clipped norm. A gradient that does not fit is left
      out and costs nothing: a smaller one may fit the next time;
    - not drawn, it is charged C_i. If that does not fit, it is out for good, its budget spent.

    With ``personal_clipping=None`` every C_i stays 1. With ``personal_clipping=g`` it starts there,
    and a draw with norm ratio r (before clipping to C_i) makes it min(1, gr), rounded up, from
    the next step on. Norms are rounded up to the grid.

    Args:
        size: N.
        grid: of norm ratios, to which they are rounded up.
        costs: ρ at the grid's values; first 0, ascending.
        order: α.
        budget: B.
        max_steps: of the filter.
        personal_clipping: g, or ``None``.
    """

    def __init__(
        self,
        *,
        size: int,
        grid: NormGrid,
        costs: Array,
        order: float,
        budget: float,
        max_steps: int,
        personal_clipping: float | None,
    ) -> None:
        super().__init__(size)
        self.grid = grid
        self.order = order
        self.budget = budget
        self.max_steps = max_steps
        self._costs = costs
        self._factor = personal_clipping
        self._spent: Array = np.zeros(size)
        self._alive: Mask = np.ones(size, dtype=bool)
        self._bounds: Buckets = np.full(size, len(grid.values) - 1, dtype=np.intp)  # of C_i

    @property
    def spent(self) -> Array:
        """Rényi divergence of order α that each example has spent, shape (N,); not for release."""
        return self._spent.copy()

    def _affordable(self, which: Which, buckets: Buckets) -> Mask:
        """True where one more step with norms in these buckets fits the budget; changes nothing.

        Args:
            which: m examples.
            buckets: of the norm that each would be charged, shape (m,).
        """
        # The same sum as in _book, so that rounding cannot lift it above B.
        return self._spent[which] + self._costs.take(buckets) <= self.budget

    @property
    def bounds(self) -> Array:
        """C_i at the next step, shape (N,); 1 without personal clipping; not for release."""
        return self.grid.values[self._bounds]

    def _clipped(self, indices: Indices, ratios: Array) -> Buckets:
        """The buckets of the norms that these examples release, clipped to their bounds."""
        return np.minimum(self.grid.bucket(ratios), self._bounds[indices])

    def _shares(self, indices: Indices, ratios: Array) -> Array:
        fits = self._affordable(indices, self._clipped(indices, ratios))
        bounds = self.grid.values[self._bounds[indices]]
        clipped = np.divide(bounds, ratios, out=np.ones(len(ratios)), where=ratios > bounds)
        return np.where(self._alive[indices] & fits, clipped, 0.0)

    def _book(self, step: Staged) -> int:
        charged = self._bounds.copy()
        charged[step.indices] = self._clipped(step.indices, step.ratios)
        taking_part = self._alive & self._affordable(EVERYBODY, charged)
        self._spent += self._costs.take(np.where(taking_part, charged, 0))
        out = self._alive & ~taking_part
        out[step.indices] = False
        if out.any():
            self._spent[out] = self.budget
            self._alive &= ~out
        if self._factor is not None:
            raised = np.minimum(self._factor * step.ratios, 1.0)
            self._bounds[step.indices] = self.grid.bucket(raised)
        return int(np.count_nonzero(taking_part))

    @property
    def active(self) -> Mask:
        """True for examples that can take part in the next step, at least with a small gradient."""
        return self._alive & self._affordable(EVERYBODY, np.minimum(self._bounds, 1))

    def epsilons(self, delta: float) -> Array:
        """ε_i of what was spent at this one order, shape (N,); not for release.

        Most of a small ε_i is what the conversion adds; 0 only where nothing was spent.
        """
        return epsilon_at_order(self._spent, order=self.order, delta=delta)

    def epsilon_bound(self, delta: float) -> float:
        """ε of (α, B)-RDP."""
        return float(epsilon_at_order(self.budget, order=self.order, delta=delta))

    @property
    def condition(self) -> str:
        """The budget in one sentence."""
        between_draws = (
            "is charged the full clipping norm when it is not drawn"
            if self._factor is None
            else f"is clipped to {self._factor:g} times its norm at its last draw"
        )
        return (
            f"Every example has its own budget of {self.budget:.6g} of Rényi divergence of order "
            f"{self.order:g}, {between_draws} and is left out of steps that would exceed it, "
            f"of at most {self.max_steps} steps"
        )

    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        """Refuse what was spent at another order too; see ``IndividualRecord.check_state``."""
        super().check_state(state, steps)
        self.grid.bucket(state["spending"]["bounds"].numpy())
        order, spent = state["spending"]["order"], state["spending"]["spent"]
        if order != self.order:
            raise ValueError(
                f"the individual record has Rényi order {order}, but this run's is {self.order}: "
                "order=None chose another one there (another version or machine). Resume where "
                f"the checkpoint was written, or start a new run with order={order}, which is the "
                "same everywhere"
            )
        # Another machine's logarithms may make another last digit of B.
        if not bool(((spent >= 0) & (spent <= self.budget * (1.0 + 1e-9))).all()):  # NaN fails both
            raise ValueError(
                f"the individual record holds spending outside the budget, 0 to {self.budget:g}, "
                "so the checkpoint was changed after it was written: resume from an unchanged one"
            )

    def _spending(self) -> dict[str, Any]:
        return {
            "alive": torch.from_numpy(self._alive.copy()),
            "bounds": torch.from_numpy(self.bounds),
            "order": self.order,
            "spent": torch.from_numpy(self._spent.copy()),
        }

    def _load_spending(self, spending: dict[str, Any]) -> None:
        self._alive = spending["alive"].bool().numpy().copy()
        self._bounds = self.grid.bucket(spending["bounds"].double().numpy())
        self._spent = spending["spent"].double().numpy().copy()

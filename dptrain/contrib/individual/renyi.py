"""The individual Rényi filter: rigorous for Poisson-sampled batches."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import numpy as np
import torch

from dptrain.accounting.renyi import (
    LARGEST_ORDER,
    epsilon_at_order,
    largest_divergence,
    step_divergence,
)
from dptrain.contrib.individual.sampled_filter import SampledFilter
from dptrain.contrib.individual.sampled_record import Buckets, SampledRecord, Which
from dptrain.contrib.per_example import NormGrid
from dptrain.core import Array, Kind
from dptrain.individual import Mask
from dptrain.mechanism import MatrixMechanism

# Tenths matter where ε is large and integers where it is not; each is within 1 % of the best order.
ORDERS = (
    *(round(0.1 * k, 1) for k in range(11, 110)),
    *(float(k) for k in range(11, 65)),
    *(float(round(64 * 1.1**k)) for k in range(1, 30)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenyiFilter(SampledFilter):
    """Every example has a budget B of Rényi divergence at one order α; any Poisson rate q.

    ρ(r) below is the Rényi divergence of order α, the larger of both directions, of one step with
    a gradient of norm rR (``step_divergence``). The run is (α, B)-RDP in both directions for every
    real α > 1, although the filter decides from what only the trainer sees: when an example was
    drawn, and its norm then (docs/theory/individual.md#thm-renyi-filter;
    ``test_adaptive_runs_keep_the_budget_in_both_directions``). Feldman & Zrnic 2021
    (arXiv 2008.11193) want decisions from released outputs.

    Example i has a bound C (always 1 without personal clipping). If it is drawn, it releases the
    norm min(r, C) and is charged ρ(min(r, C)), where that fits, and is left out where not. If it is
    not drawn, it is charged ρ(C), or all that is left where that does not fit, and is then out for
    good. ``SampledRecord`` keeps this record.

    Args:
        target_epsilon, target_delta, max_steps: see ``IndividualFilter``.
        order: real α > 1; ``None``: of ``ORDERS`` the one at which gradients of the full norm may
            take part longest. It depends on q, σ and the target only, which are public.
        personal_clipping: see ``SampledFilter``.

    Raises:
        ValueError: if a value is out of range, or at this order there is no budget for the target.
    """

    name: ClassVar[str] = "individual Rényi filter"
    kind: ClassVar[Kind] = Kind.UPPER_BOUND

    order: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_number("order")
        if self.order is not None and not 1 < self.order <= LARGEST_ORDER:
            raise ValueError(
                f"order={self.order}: a Rényi order must lie above 1, up to {LARGEST_ORDER:g}; "
                "None chooses it"
            )
        if not self._orders:
            raise ValueError(
                f"order={self.order}: no Rényi budget of that order is ({self.target_epsilon}, "
                f"{self.target_delta})-DP; "
                + ("raise the target or state a larger order" if self.order is None else "use None")
            )

    @functools.cached_property
    def _orders(self) -> tuple[float, ...]:
        """The orders to choose from at which there is a budget."""
        orders = ORDERS if self.order is None else (self.order,)
        return tuple(order for order in orders if self.budget_at(order) > 0)

    def budget_at(self, order: float) -> float:
        """B at this order: the largest such that (α, B)-RDP is (ε, δ)-DP; rounded down."""
        return largest_divergence(self.target_epsilon, order=order, delta=self.target_delta)

    def order_for(self, mechanism: MatrixMechanism) -> float:
        """α of a run of this mechanism."""
        return max(self._orders, key=lambda order: self._full_norm_steps(mechanism, order))

    def _full_norm_steps(self, mechanism: MatrixMechanism, order: float) -> float:
        return self.budget_at(order) / float(_costs(mechanism, order, 1.0))

    def full_norm_steps(self, mechanism: MatrixMechanism) -> int:
        """⌊B/ρ(1)⌋: 405 for σ = 100, q = 1, ε = 0.8, δ = 1e-5.

        Raises:
            ValueError: as ``check``.
        """
        self.check(mechanism)
        return math.floor(self._full_norm_steps(mechanism, self.order_for(mechanism)))

    def record(self, mechanism: MatrixMechanism) -> RenyiRecord:
        """An empty record of what examples spend in a run of this mechanism.

        Raises:
            ValueError: also if everybody would be left out from the first step on.
        """
        self.check(mechanism)
        self._check_first_step(mechanism)
        order, grid = self.order_for(mechanism), NormGrid()
        return RenyiRecord(
            size=mechanism.scheme.dataset_size,
            grid=grid,
            costs=_costs(mechanism, order, grid.values),
            order=order,
            budget=self.budget_at(order),
            max_steps=self.max_steps,
            personal_clipping=self.personal_clipping,
        )


def _costs(mechanism: MatrixMechanism, order: float, ratios: Array | float) -> Array:
    """ρ(r) of a step of the mechanism, in the shape of the norm ratios."""
    return step_divergence(
        ratios,
        order=order,
        probability=mechanism.scheme.rate,
        sigma=mechanism.noise_multiplier,
    )


class RenyiRecord(SampledRecord):
    """Σ ρ of every example.

    Args:
        size: N.
        grid: of norm ratios.
        costs: ρ at the grid's values; first 0, ascending.
        order: α.
        budget: B.
        max_steps: of the filter.
        personal_clipping: see ``RenyiFilter``.
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
        super().__init__(
            size=size, grid=grid, max_steps=max_steps, personal_clipping=personal_clipping
        )
        self.order = order
        self.budget = budget
        self._costs = costs
        self._spent: Array = np.zeros(size)

    @property
    def spent(self) -> Array:
        """Rényi divergence of order α that each example has spent, shape (N,); not for release."""
        return self._spent.copy()

    def _affordable(self, which: Which, buckets: Buckets) -> Mask:
        # The same sum as in _charge, so that rounding cannot lift it above B.
        return self._spent[which] + self._costs.take(buckets) <= self.budget

    def _charge(self, which: Which, buckets: Buckets) -> None:
        self._spent[which] += self._costs.take(buckets)

    def _exhaust(self, which: Mask) -> None:
        self._spent[which] = self.budget

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
        return (
            f"Every example has its own budget of {self.budget:.6g} of Rényi divergence of order "
            f"{self.order:g}, {self._between_draws} and is left out of steps that would exceed it, "
            f"of at most {self.max_steps} steps"
        )

    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        """Refuse what was spent at another order too; see ``IndividualRecord.check_state``."""
        super().check_state(state, steps)
        order, spent = state["spending"]["order"], state["spending"]["spent"]
        if order != self.order:
            raise ValueError(
                f"the individual record is of Rényi order {order}, this run's is {self.order}: "
                "order=None chose otherwise there (another version or machine); resume where the "
                f"checkpoint was written. A new run with order={order} is the same everywhere"
            )
        # Another machine's logarithms may make another last digit of B.
        if not bool(((spent >= 0) & (spent <= self.budget * (1.0 + 1e-9))).all()):  # NaN fails both
            raise ValueError(
                f"the individual record holds spendings outside the budget, 0 to {self.budget:g}: "
                "the checkpoint was changed after it was written; go on from one that was not"
            )

    def _spending(self) -> dict[str, Any]:
        spent = torch.from_numpy(self._spent.copy())
        return {**super()._spending(), "order": self.order, "spent": spent}

    def _load_spending(self, spending: dict[str, Any]) -> None:
        super()._load_spending(spending)
        self._spent = spending["spent"].double().numpy().copy()

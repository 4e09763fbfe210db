"""The individual Rényi filter: rigorous for Poisson-sampled batches."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

from dptrain.accounting.base import checked_sigma
from dptrain.accounting.renyi import LARGEST_ORDER, largest_divergence, step_divergence
from dptrain.contrib.individual.norm_grid import NormGrid
from dptrain.contrib.individual.renyi_record import RenyiRecord
from dptrain.core import Array, Kind, checks
from dptrain.individual import IndividualFilter
from dptrain.mechanism import MatrixMechanism

# Tenths matter where ε is large and integers where it is not; each is within 1 % of the best order.
ORDERS = (
    *(round(0.1 * k, 1) for k in range(11, 110)),
    *(float(k) for k in range(11, 65)),
    *(float(round(64 * 1.1**k)) for k in range(1, 30)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenyiFilter(IndividualFilter):
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
    good. ``RenyiRecord`` keeps this record.

    Args:
        target_epsilon, target_delta, max_steps: see ``IndividualFilter``.
        order: real α > 1; ``None``: of ``ORDERS`` the one at which gradients of the full norm may
            take part longest. It depends on q, σ and the target only, which are public.
        personal_clipping: g ≥ 1: clip each example to g times its norm at its last draw, and charge
            that between draws. ``None``: charge R between draws, which for a small q is most of the
            time. The first pays for what is released and lets small gradients take part longer, at
            the price of a bias where gradients grow by more than g between draws.

    Raises:
        ValueError: if a value is out of range, or at this order there is no budget for the target.
    """

    name: ClassVar[str] = "individual Rényi filter"
    kind: ClassVar[Kind] = Kind.UPPER_BOUND

    personal_clipping: float | None = None
    order: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("order", "personal_clipping"):
            if (value := getattr(self, field)) is not None:
                number = checks.number(field, value, owner=type(self).__name__)
                object.__setattr__(self, field, number)
        if self.personal_clipping is not None and not self.personal_clipping >= 1:
            raise ValueError(
                f"personal_clipping={self.personal_clipping}: must be finite and at least 1, e.g. "
                "1.5, or None to charge the full norm between draws"
            )
        if self.order is not None and not 1 < self.order <= LARGEST_ORDER:
            raise ValueError(
                f"order={self.order}: a Rényi order must lie above 1, up to {LARGEST_ORDER:g}; "
                "None chooses one"
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

    def check(self, mechanism: MatrixMechanism) -> None:
        """Refuse what the filter is not proven for; any rate will do."""
        super().check(mechanism)
        checked_sigma(mechanism)

    def record(self, mechanism: MatrixMechanism) -> RenyiRecord:
        """An empty record of what examples spend in a run of this mechanism.

        Raises:
            ValueError: also if everybody would be left out from the first step on.
        """
        self.check(mechanism)
        rate, sigma = mechanism.scheme.rate, mechanism.noise_multiplier
        before_the_norm = rate < 1 or self.personal_clipping is not None
        if before_the_norm and self.full_norm_steps(mechanism) == 0:
            raise ValueError(
                f"target_epsilon={self.target_epsilon:g}: the budget does not cover one step of "
                f"the full norm at noise_multiplier={sigma:g} and probability={rate:g}, which "
                "every example is charged before its norm is known; raise the noise or the target"
            )
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

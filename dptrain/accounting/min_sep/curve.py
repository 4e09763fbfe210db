"""δ and ε of b-min-sep sampling that need no samples: Rényi divergences of small orders."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from dptrain.accounting.losses import gaussian
from dptrain.accounting.min_sep.linear_loss import best_linear_loss
from dptrain.accounting.min_sep.moments import (
    LARGEST_ORDER,
    NO_WORK,
    affordable,
    bounded_by,
    foreseen,
    least_work,
    log_large_moment,
    log_moment,
    most_copies,
    rough_large_moments,
)
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.renyi.bins import RenyiOrders
from dptrain.accounting.renyi.curve import RenyiCurve
from dptrain.core import Array

_NEXT = 1.15  # from a large order to the next one tried


@dataclasses.dataclass(frozen=True)
class MinSepRenyiCurve(RenyiCurve):
    """Remove: R_α = log E_Q[(P/Q)^α]/(α-1) of the affordable α, and a bound on that of larger ones
    (docs/theory/min-sep.md#thm-min-sep-large-orders); add: ``LinearLoss``.

    Both: the Gaussian mechanism without amplification, and the chance of taking part at all.

    Attributes:
        most_work: values of the moments' program that an order may take; by default its limit.
    """

    law: MinSepLaw
    most_work: int | None = None
    _orders: dict[tuple[float, int, int], float] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    add_bound: ClassVar[str] = "Jensen's inequality at the best of other sampling rates"

    def up_to(self, most_work: int) -> MinSepRenyiCurve:
        """The curve of the orders that take no more work, or itself if there are no others.

        Both remember the same moments.
        """
        if (
            affordable(self.law, math.inf, most_work).largest
            == affordable(self.law, math.inf).largest
        ):
            return self
        found = dataclasses.replace(self, most_work=most_work)
        object.__setattr__(found, "_orders", self._orders)
        return found

    def log_moment(self, sigma: float, order: int) -> float:
        """log E_Q[(P/Q)^α], rounded up; remembered."""
        key = (sigma, order, order)
        if key not in self._orders:
            self._orders[key] = log_moment(self.law, sigma, order, progress=True)
        return self._orders[key]

    def _log_large_moment(self, sigma: float, order: int, copies: int) -> float:
        copies = min(copies, order)
        key = (sigma, order, copies)
        if key not in self._orders:
            self._orders[key] = log_large_moment(self.law, sigma, order, copies)
        return self._orders[key]

    def orders(
        self,
        sigma: float,
        convert: Callable[[Array], tuple[float, float]],
        enough: float = -math.inf,
    ) -> RenyiOrders:
        """Divergences up to the order at which a further one stops helping.

        Large orders are tried before those that take long, which then have to promise more.
        """
        largest = affordable(self.law, sigma, self.most_work).largest
        moments, large = [0.0], dict[int, float]()  # log A of α = 1, 2, …, and of large α
        for order in range(2, largest + 1):
            if order > 3 and least_work(self.law, order) > NO_WORK:
                large = large or self._large_orders(sigma, moments, convert)
                if not _promises(moments, large, largest, convert):
                    break
            moments.append(self.log_moment(sigma, order))
            value, best = convert(_divergence(moments, large))
            if value <= enough or best < order:
                break
        else:
            if largest >= 2:
                large = large or self._large_orders(sigma, moments, convert)
        divergence = _divergence(moments, large)
        return RenyiOrders(divergence, np.ones(divergence.size, dtype=np.int64), len(moments))

    def _large_orders(
        self, sigma: float, moments: list[float], convert: Callable[[Array], tuple[float, float]]
    ) -> dict[int, float]:
        """log A of larger orders from above, from where they may help to where they stop."""
        found, copies = dict[int, float](), most_copies(self.law, NO_WORK)
        rough = rough_large_moments(self.law, sigma, moments[1])
        order = max(len(moments) + 1, math.ceil(convert(_divergence([0.0], rough))[1]))
        while order <= LARGEST_ORDER:
            found[order] = self._log_large_moment(sigma, order, copies)
            if convert(_divergence(moments, found))[1] < order:
                return found
            order = max(order + 1, round(_NEXT * order))
        return found

    def log_delta_add(self, sigma: float, epsilon: Array) -> Array:
        """The best ``LinearLoss`` at each ε; δ = 0 from the largest loss on."""
        found = np.full(epsilon.shape, -math.inf)
        for i in np.flatnonzero(epsilon < self.law.add_limit):
            at = epsilon[i : i + 1]
            found[i] = best_linear_loss(self.law, sigma, float(at[0])).log_delta(at)[0]
        return found

    def unamplified(self, sigma: float, epsilon: Array) -> Array:
        """δ(ε) without amplification; whoever never takes part loses nothing."""
        return np.minimum(gaussian.delta(epsilon, self.sensitivity / sigma), self.law.participation)

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """ε (remove, add), each by its best bound."""
        if self.law.participation <= delta:
            return 0.0, 0.0
        return super().epsilons(sigma, delta)

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger ε of the two directions; costs less than both."""
        return 0.0 if self.law.participation <= delta else super().epsilon(sigma, delta)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """ε per direction, which bound gave the remove direction, and what limits its orders."""
        if self.law.participation <= delta:
            return (f"an example takes part with a chance of {self.law.participation:.3g} at most",)
        return (*super().notes(sigma, delta), f"Rényi {affordable(self.law, sigma).reason}")

    @property
    def sensitivity(self) -> float:
        """max ‖Cx‖."""
        return self.law.sensitivity

    def describe(self, orders: RenyiOrders, best: int) -> str:
        """A remark that it is the divergence itself, or on what bounds it."""
        if best > orders.exact_up_to:
            return "(by fewer copies at less noise)"
        bound = bounded_by(self.law, best)
        return "(exact)" if bound is None else f"(by {bound})"


def _divergence(moments: list[float], large: dict[int, float]) -> Array:
    """R_α at index α from log A of α = 1, 2, …, and of larger ones; ∞ where it is not known."""
    found = np.full(max(len(moments), *large, 2) + 1, math.inf)
    for order, moment in [*enumerate(moments, 1), *large.items()]:
        if order > 1:
            found[order] = min(found[order], moment / (order - 1))
    return found


def _promises(
    moments: list[float],
    large: dict[int, float],
    largest: int,
    convert: Callable[[Array], tuple[float, float]],
) -> bool:
    """True if moments up to the largest order may well show more than large orders do."""
    further = list(moments)
    while len(further) < largest:
        further.append(foreseen(further))
    return convert(_divergence(further, large))[0] < convert(_divergence(moments, large))[0]


def orders_refusal(law: MinSepLaw) -> str | None:
    """The reason why not even order 2 is affordable at any σ, and what to do; ``None`` if it is."""
    found = affordable(law, math.inf)
    if found.largest < 2:
        return f"{found.reason}; use a smaller min_sep, or the Monte Carlo accountant"
    return None

"""Random allocation with independent noise: balls-in-bins, drawn anew in every epoch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from dptrain.accounting.balls_in_bins.add_direction import GAUSSIAN_OR_DIVERGENCES, AddDivergences
from dptrain.accounting.base.accountant import varying_noise
from dptrain.accounting.base.curve import DeterministicAccountant
from dptrain.accounting.losses import gaussian
from dptrain.accounting.renyi.bins import DIAGONAL_ORDERS, RELATIVE_PAD, RenyiOrders
from dptrain.accounting.renyi.curve import RenyiCurve, log_delta_gaussian_loss
from dptrain.accounting.renyi.log_sums import independent_log_sums, renyi_from_log_sums
from dptrain.core import Array, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import RandomAllocation

# Absolute rounding of log E_Q[(P/Q)^α] per epoch, on top of the relative one: the logarithms of the
# sums err by less than 2e-11 at the orders and σ that matter (against 60 digits, orders up to 512);
# epochs multiply the error.
_LOG_MOMENT_PAD = 1e-9


@dataclasses.dataclass(frozen=True)
class RandomAllocationCurve(RenyiCurve):
    """Bounds for E independent copies of P = (1/t) Σ_i N(c·e_i, σ²I_t), Q = N(0, σ²I_t).

    Remove: R_α of E copies is E times that of one (exact, an integer order is a multinomial sum).
    Add: by Jensen the loss of one copy is at most N(ν, ξ²) with ν = c²/(2σ²), ξ² = c²/(tσ²), a
    linear function of its own sample; copies are independent, so that of all is at most
    N(Eν, Eξ²). Or E·R_α of ``add_orders``, mostly less. Both: μ-GDP with μ = √E·c/σ, what is
    left when the picks are published.

    ``bins`` is t, ``epochs`` is E, and ``norm`` is c > 0, the norm of every column of C.
    """

    bins: int
    epochs: int
    norm: float
    _orders: dict[tuple[float, int], RenyiOrders] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def add_bound(self) -> str:
        """Both bounds on the add direction, in words."""
        return GAUSSIAN_OR_DIVERGENCES

    def _computed(self, sigma: float, largest: int) -> RenyiOrders:
        key = (sigma, largest)
        if key not in self._orders:
            while len(self._orders) >= 12:
                del self._orders[next(iter(self._orders))]
            diagonal = np.full(self.bins, (self.norm / sigma) ** 2)
            divergence = renyi_from_log_sums(independent_log_sums(diagonal, largest))
            divergence *= 1.0 + RELATIVE_PAD
            divergence[2:] += _LOG_MOMENT_PAD / np.arange(1.0, largest)
            bandwidth = np.ones(largest + 1, dtype=np.int64)
            self._orders[key] = RenyiOrders(self.epochs * divergence, bandwidth, largest)
        return self._orders[key]

    def orders(
        self,
        sigma: float,
        convert: Callable[[Array], tuple[float, float]],
        enough: float = -math.inf,
    ) -> RenyiOrders:
        """E·R_α for as many orders as settle the best one, at most 512."""
        for largest in DIAGONAL_ORDERS:
            orders = self._computed(sigma, largest)
            value, best = convert(orders.divergence)
            if best < largest or value <= enough:
                break
        return orders

    @functools.cached_property
    def _add(self) -> AddDivergences:
        return AddDivergences(self.bins, self.norm, self.epochs)

    def log_delta_add(self, sigma: float, epsilon: Array) -> Array:
        """The least of the Gaussian loss N(Eν, Eξ²) and the Rényi divergences."""
        mu = self.sensitivity / sigma
        loss = log_delta_gaussian_loss(mu**2 / 2.0, mu / math.sqrt(self.bins), epsilon)
        return np.minimum(loss, self._add.log_delta(sigma, epsilon))

    def unamplified(self, sigma: float, epsilon: Array) -> Array:
        """δ(ε) of μ-GDP."""
        return gaussian.delta(epsilon, self.sensitivity / sigma)

    @property
    def sensitivity(self) -> float:
        """√E·c."""
        return math.sqrt(self.epochs) * self.norm

    def describe(self, orders: RenyiOrders, best: int) -> str:
        """A remark that it is the divergence itself."""
        return f"(exact, times {self.epochs} epochs)"


class RandomAllocationRenyi(DeterministicAccountant):
    """Rényi accountant for random allocation of one step per epoch, with C = c·I.

    The run is dominated by (P^E, Q^E) under remove and (Q^E, P^E) under add, with P and Q of
    ``RandomAllocationCurve`` (docs/theory/random-allocation.md#thm-allocation-pair;
    ``test_is_above_the_simulated_truth``). Hence Rényi divergences of epochs add, and so do
    independent losses. (With kept picks, ``BallsInBins``, the copies would share their pick:
    another law.)
    """

    name = "random-allocation-renyi"
    display = "random allocation Rényi"
    kind = Kind.UPPER_BOUND

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse other schemes, k > 1, correlated noise, and noise that varies by the step."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        if not isinstance(scheme, RandomAllocation):
            return "it needs RandomAllocation"
        if scheme.participations != 1:
            return (
                f"it needs participations=1, the scheme has participations="
                f"{scheme.participations}: the divergence of a uniform subset of several steps, "
                "whose picks depend on each other, is not bounded here; 'allocation-pld' covers it"
            )
        if strategy.bands != 1:
            return (
                f"it needs independent noise (bands=1), the strategy has bands={strategy.bands}: "
                "noise shared by two epochs couples their picks, so they do not compose; use "
                "Identity(), or BallsInBins with this strategy"
            )
        varies = varying_noise(mechanism)
        return varies and f"{varies}; use Identity()"

    def curve(self, mechanism: MatrixMechanism) -> RandomAllocationCurve:
        """The curve of t bins and E epochs; a diagonal C only scales the norm."""
        scheme = mechanism.scheme
        assert isinstance(scheme, RandomAllocation)
        norms = mechanism.strategy.column_norms(scheme.steps)
        return RandomAllocationCurve(scheme.steps_per_epoch, scheme.epochs, float(norms.max()))

"""Curves whose remove direction is a Rényi divergence and whose add direction a Gaussian loss."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from dptrain.accounting.base.curve import Curve
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.search import least_true
from dptrain.accounting.renyi.bins import RenyiOrders
from dptrain.accounting.renyi.chords import epsilon_from_renyi, log_delta_from_renyi
from dptrain.core import Array


def log_delta_gaussian_loss(nu: float | Array, xi: float | Array, epsilon: float | Array) -> Array:
    """log δ(ε) from above, for a privacy loss that is at most Y ~ N(ν, ξ²); rounded up.

    δ ≤ E[(1 - e^{ε-Y})_+] = Φ((ν-ε)/ξ) - e^{ε-ν+ξ²/2} Φ((ν-ε)/ξ - ξ), as the expectation grows with
    the loss. Y need not be the loss of any pair of distributions: ν and ξ²/2 may differ.
    """
    return gaussian.log_excess((epsilon - nu) / xi, xi)


class RenyiCurve(Curve):
    """Two deterministic bounds per direction, of which the least counts.

    Remove: Rényi divergences of integer orders, converted with the best order of these or between
    them; add: a Gaussian loss; both: the Gaussian mechanism without amplification.
    """

    @property
    def add_bound(self) -> str:
        """The bound on the add direction, in words."""
        return "the Gaussian bound"

    @abstractmethod
    def orders(
        self,
        sigma: float,
        convert: Callable[[Array], tuple[float, float]],
        enough: float = -math.inf,
    ) -> RenyiOrders:
        """Divergences of the remove direction, as many as settle the best order of ``convert``.

        ``convert`` maps divergences to the value they prove (less is better) and the best order;
        a value of at most ``enough`` is not improved further.
        """

    @abstractmethod
    def log_delta_add(self, sigma: float, epsilon: Array) -> Array:
        """log δ(ε) of the add direction by ``add_bound``, rounded up."""

    @abstractmethod
    def unamplified(self, sigma: float, epsilon: Array) -> Array:
        """δ(ε) of both directions without amplification, rounded up."""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """The largest shift of the means: ``unamplified`` is no more than its Gaussian."""

    @abstractmethod
    def describe(self, orders: RenyiOrders, best: int) -> str:
        """The origin of the divergence of order ``best``, in words."""

    def remove(self, sigma: float, epsilon: Array) -> Array:
        """δ(ε) of (P, Q), rounded up."""
        value = self.unamplified(sigma, epsilon)
        for i, at in enumerate(epsilon):
            convert = functools.partial(log_delta_from_renyi, epsilon=float(at))
            orders = self.orders(sigma, convert)
            value[i] = min(value[i], math.exp(convert(orders.divergence)[0]))
        return value

    def add(self, sigma: float, epsilon: Array) -> Array:
        """δ(ε) of (Q, P), rounded up."""
        jensen = np.exp(self.log_delta_add(sigma, epsilon))
        return np.minimum(jensen, self.unamplified(sigma, epsilon))

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ in both directions."""
        return self.remove(sigma, epsilon), self.add(sigma, epsilon)

    def _at_delta(
        self, sigma: float, delta: float, *, larger_only: bool
    ) -> tuple[float, float, RenyiOrders]:
        """ε in the add direction, ε of the unamplified bound, and the Rényi orders for remove.

        With ``larger_only`` the orders are settled only as far as remove is above add.
        """
        top = gaussian.epsilon(delta, self.sensitivity / sigma)

        def solve(curve: Callable[[float, Array], Array]) -> float:
            return least_true(
                lambda e: float(curve(sigma, np.array([e]))[0]) <= delta,
                low=0.0,
                high=top,
                tolerance=1e-9 * top,
            )

        add, plain = solve(self.add), solve(self.unamplified)
        enough = add if larger_only else -math.inf
        orders = self.orders(sigma, lambda r: epsilon_from_renyi(r, delta), enough=enough)
        return add, plain, orders

    def _epsilons(self, sigma: float, delta: float, *, larger_only: bool) -> tuple[float, float]:
        add, plain, orders = self._at_delta(sigma, delta, larger_only=larger_only)
        return min(plain, epsilon_from_renyi(orders.divergence, delta)[0]), add

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """ε (remove, add), each by its best bound."""
        return self._epsilons(sigma, delta, larger_only=False)

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger ε of the two directions; costs less than both."""
        return max(self._epsilons(sigma, delta, larger_only=True))

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """ε per direction, and which bound gave the remove direction."""
        add, plain, orders = self._at_delta(sigma, delta, larger_only=True)
        renyi, best = epsilon_from_renyi(orders.divergence, delta)
        directions = f"ε = {min(renyi, plain):.6g} (remove) and {add:.6g} (add)"
        if plain <= renyi:
            return (f"{directions}, remove by the Gaussian bound without amplification",)
        between = "" if best.is_integer() else ", between integers by convexity"
        return (
            f"{directions}, remove by the Rényi divergence of order {best:.4g} (of 2 to "
            f"{orders.divergence.size - 1}) {self.describe(orders, math.ceil(best))}{between}, "
            f"add by {self.add_bound}",
        )

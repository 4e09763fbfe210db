"""Balls-in-bins sampling with any strategy matrix: the best proven bound in each direction."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dptrain.accounting.balls_in_bins.add_direction import AddDivergences
from dptrain.accounting.base.accountant import Cost, truncation_refusal
from dptrain.accounting.base.curve import DeterministicAccountant
from dptrain.accounting.losses import gaussian
from dptrain.accounting.renyi.bins import EFFORTS, RenyiOrders, affordable_exactly, remove_orders
from dptrain.accounting.renyi.curve import RenyiCurve, log_delta_gaussian_loss
from dptrain.accounting.renyi.gram import cyclic_bandwidth, gram_matrix
from dptrain.core import Array, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Scheme

# Largest steps × bins table of means that is formed (8 bytes an entry).
_LARGEST_TABLE = 2**28


def log_delta_add(gram: Array, sigma: float, epsilon: Array) -> Array:
    """log δ(ε) of (Q, P) from above, rounded up.

    By Jensen's inequality the add-direction loss is at most Y ~ N(ν, ξ²) with
    ν = tr(G)/(2bσ²), ξ² = 1ᵀG1/(b²σ²): the step behind Lemma 3.4 of Schuchardt & Kalinin 2026, used
    without the detour through Rényi divergences.
    """
    bins = gram.shape[0]
    nu = float(np.trace(gram)) / (2.0 * bins * sigma**2)
    xi = math.sqrt(float(gram.sum())) / (bins * sigma)
    return log_delta_gaussian_loss(nu, xi, epsilon)


class BallsInBinsCurve(RenyiCurve):
    """Bounds for P = (1/b) Σ_i N(m_i, σ²I) against Q = N(0, σ²I), given the Gram matrix of m.

    Remove: the Rényi divergence of every affordable integer order, and the average over i of the
    Gaussian curves of ‖m_i‖/σ (δ is jointly convex). Add: the Gaussian bound of
    ``log_delta_add``, and the same average; where no two m_i overlap, also the divergences of
    ``add_orders`` for the largest norm. Each is a bound, so the least counts.
    """

    def __init__(self, gram: Array) -> None:
        self._gram = gram
        self._norms, self._counts = np.unique(np.sqrt(np.diag(gram)), return_counts=True)
        self._bandwidth = cyclic_bandwidth(gram)
        self._orders: dict[tuple[float, int, bool], RenyiOrders] = {}
        self._add = AddDivergences(gram.shape[0], self.sensitivity)

    def _computed(self, sigma: float, effort: int, *, narrower: bool = False) -> RenyiOrders:
        key = (sigma, effort, narrower)
        if key not in self._orders:
            while len(self._orders) >= 12:
                del self._orders[next(iter(self._orders))]
            self._orders[key] = remove_orders(self._gram, sigma, effort, narrower=narrower)
        return self._orders[key]

    def orders(
        self,
        sigma: float,
        convert: Callable[[Array], tuple[float, float]],
        enough: float = -math.inf,
    ) -> RenyiOrders:
        """Divergences at the least effort that settles the best order of ``convert``."""
        for effort in range(len(EFFORTS)):
            orders = self._computed(sigma, effort)
            value, best = convert(orders.divergence)
            if best < orders.exact_up_to or value <= enough:
                return orders
            if not affordable_exactly(self._gram, max(math.ceil(best), orders.exact_up_to) + 1):
                break
        if self._bandwidth == 1:
            return orders  # there is no narrower band
        # Larger orders are out of reach at the true bandwidth. Narrower ones may still help, and so
        # may the largest exact ones: with less effort, more noise could look less private.
        return self._computed(sigma, len(EFFORTS) - 2, narrower=True)

    @property
    def add_bound(self) -> str:
        """The bounds that hold, in words: both where both do."""
        both = "the least of a Gaussian loss and Rényi divergences"
        return both if self._bandwidth == 1 else super().add_bound

    def log_delta_add(self, sigma: float, epsilon: Array) -> Array:
        """The function of the same name at this Gram matrix, or divergences."""
        jensen = log_delta_add(self._gram, sigma, epsilon)
        if self._bandwidth > 1:
            return jensen
        return np.minimum(jensen, self._add.log_delta(sigma, epsilon))

    def unamplified(self, sigma: float, epsilon: Array) -> Array:
        """The average over the bins of the Gaussian curves."""
        values = gaussian.log_delta(epsilon[..., None], self._norms / sigma)
        return np.asarray(np.exp(values) @ (self._counts / self._counts.sum()))

    @property
    def sensitivity(self) -> float:
        """The largest ‖m_i‖."""
        return float(self._norms[-1])

    def describe(self, orders: RenyiOrders, best: int) -> str:
        """The effective bandwidth, and whether it is the true one."""
        exactness = "exact" if best <= orders.exact_up_to else f"the true one is {self._bandwidth}"
        return f"with bandwidth {int(orders.bandwidth[best])} ({exactness})"


def is_periodic(scheme: Scheme) -> bool:
    """True if an example picks one of b steps and takes part at every b-th from there on."""
    return isinstance(scheme, BallsInBins) or (
        isinstance(scheme, MinSep)
        and scheme.probability == 1.0
        and scheme.warm_start
        and scheme.max_batch_size is None
    )


def periodic_refusal(mechanism: MatrixMechanism) -> str | None:
    """``None`` for balls-in-bins whose table of means fits into two gigabytes."""
    scheme = mechanism.scheme
    if not is_periodic(scheme):
        return truncation_refusal(scheme) or (
            "it needs BallsInBins (or MinSep with probability=1 and a warm start)"
        )
    size = scheme.steps * scheme.min_sep
    if size > _LARGEST_TABLE:
        return f"steps times bins is {size}, above the {_LARGEST_TABLE} it can tabulate"
    return None


class BallsInBinsRenyi(DeterministicAccountant):
    """Rényi accountant for balls-in-bins and any C.

    (docs/theory/balls-in-bins.md#thm-bins-renyi;
    ``test_enumeration_equals_the_sum_over_tuples``; Schuchardt & Kalinin 2026, Lemmas 2.8 and 3.2,
    arXiv 2601.21636.)

    ``MinSep`` with p = 1 and a warm start is the same law: the first step is uniform on 0..b-1 and
    every b-th follows.
    """

    name = "balls-in-bins-renyi"
    display = "balls-in-bins Rényi"
    kind = Kind.UPPER_BOUND

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse other schemes, and tables of means beyond two gigabytes."""
        return periodic_refusal(mechanism)

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Half a minute for each σ where bands are wide and not yet dense."""
        bands, bins = mechanism.strategy.bands, mechanism.scheme.min_sep
        if bands == 1:
            return Cost.INSTANT
        return Cost.MINUTES if 16 < bands <= (bins + 1) // 2 else Cost.SECONDS

    def curve(self, mechanism: MatrixMechanism) -> BallsInBinsCurve:
        """The curve of the Gram matrix of the b means."""
        scheme = mechanism.scheme
        gram = gram_matrix(mechanism.strategy, steps=scheme.steps, bins=scheme.min_sep)
        return BallsInBinsCurve(gram)

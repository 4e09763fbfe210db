"""Individual ε by Rényi divergences of many orders, from counts of gradient norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from dptrain.accounting.renyi import LARGEST_ORDER, conversion_term, step_divergence
from dptrain.contrib.individual import NormGrid
from dptrain.core import Array
from scripts.paper.individual_losses.arguments import check_step, checked_counts, checked_deltas

# Integers up to 64, and real orders up to the largest whose distance to 1 grows by 10 % each: small
# norms call for orders in the thousands. The best real order is less than .2 % better.
ORDERS = tuple(
    sorted(
        {float(k) for k in range(2, 65)}
        | {1.0 + 0.1 * 1.1**k for k in range(121)}
        | {LARGEST_ORDER}
    )
)

_ROWS = 4096  # examples at a time
_PAD = 1e-12  # relative rounding of ε, to the safe side


class IndividualRenyi:
    """ε_x(δ) of Poisson-sampled steps by adding up Rényi divergences, at each example's best order.

    An example whose norm ratio at a step is r is charged ρ_α(q, r), the larger of both directions'
    divergence of that step (``step_divergence``). Norms are rounded up to a grid and
    counted, as for ``IndividualPLD``, whose ε is never
    larger. The conversion is that of Canonne, Kamath & Steinke 2020 (Proposition 12, arXiv
    2004.00010), which holds at every order, so the best one may differ from example to example.

    The numbers are an example's own guarantee only for steps that did not depend on the outputs:
    for adaptive training they are an estimate (Feldman & Zrnic 2021 need a filter,
    ``RenyiFilter``). They are private data.

    Args:
        probability: Poisson rate q in (0, 1].
        noise_multiplier: σ > 0, over the clipping norm.
        grid: of norm ratios.
        orders: real α in (1, 1e4].

    Raises:
        ValueError: if a value is out of range.
    """

    def __init__(
        self,
        *,
        probability: float,
        noise_multiplier: float,
        grid: NormGrid | None = None,
        orders: Sequence[float] = ORDERS,
    ) -> None:
        check_step(probability, noise_multiplier)
        self.probability = float(probability)
        self.noise_multiplier = float(noise_multiplier)
        self.grid = grid if grid is not None else NormGrid()
        self.orders: Array = np.asarray(orders, float)
        if not (self.orders.ndim == 1 and self.orders.size and np.all(_usable(self.orders))):
            raise ValueError(
                f"orders={orders}: must contain at least one Rényi order above 1, up to "
                f"{LARGEST_ORDER:g}"
            )
        self._costs: Array = np.full((len(self.grid.values), self.orders.size), math.nan)

    def epsilon(
        self, counts: npt.ArrayLike, delta: npt.ArrayLike, *, progress: bool = True
    ) -> Array:
        """Least ε_x ≥ 0 at δ over the orders, for both directions, rounded up.

        Args:
            counts: how often each value of the grid occurred, whole numbers, shape (N, grid).
            delta: one δ in (0, 1), or one for each example.
            progress: show a bar when it takes over two seconds.

        Returns:
            Shape (N,); 0 only where there was no positive norm or δ is large.

        Raises:
            TypeError: for counts that are not whole numbers.
            ValueError: for counts of another shape, or δ out of range.
        """
        checked = checked_counts(counts, self.grid)
        wanted = checked_deltas(delta, len(checked))
        costs = self._charges(np.asarray(checked.any(axis=0)), progress=progress)
        result = np.zeros(len(checked))
        for start in range(0, len(checked), _ROWS):
            rows = slice(start, start + _ROWS)
            divergence = checked[rows].astype(float) @ costs
            offset = conversion_term(self.orders) - np.log(wanted[rows, None])
            offset /= self.orders - 1.0
            value = divergence + offset + _PAD * (divergence + np.abs(offset))
            # Divergence 0 is ε = 0: both distributions are the same.
            result[rows] = np.where(divergence > 0, np.maximum(value, 0.0), 0.0).min(axis=1)
        return result

    def _charges(self, used: npt.NDArray[np.bool_], *, progress: bool) -> Array:
        """ρ of the used columns at every order, shape (grid, orders); 0 in the others."""
        missing = np.flatnonzero(used & np.isnan(self._costs[:, 0]))
        if missing.size:
            for k, order in enumerate(
                tqdm(
                    self.orders.tolist(), desc="Rényi divergences", unit="order", delay=2,
                    leave=False, disable=not progress,
                )
            ):  # fmt: skip
                self._costs[missing, k] = step_divergence(
                    self.grid.values[missing],
                    order=order,
                    probability=self.probability,
                    sigma=self.noise_multiplier,
                )
        return np.where(used[:, None], self._costs, 0.0)


def _usable(orders: Array) -> npt.NDArray[np.bool_]:
    return (orders > 1) & (orders <= LARGEST_ORDER)

"""Spending records under Poisson sampling, where a norm is seen only when its example is drawn."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from dptrain.contrib.per_example import NormGrid
from dptrain.core import Array
from dptrain.individual import Indices, IndividualRecord, Mask, Staged

Buckets = npt.NDArray[np.intp]  # indices into a norm grid
Which = Indices | slice  # examples

EVERYBODY = slice(None)


class SampledRecord(IndividualRecord):
    """A record that charges each example that is still there at every step, drawn or not.

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

    Subclasses say what a step with a certain norm costs: ``_affordable``, ``_charge``,
    ``_exhaust``. A step with norm 0 (bucket 0) must cost nothing, and a larger norm no less
    than a smaller one.

    Args:
        size: N.
        grid: of norm ratios, to which they are rounded up.
        max_steps: of the filter.
        personal_clipping: g, or ``None``.
    """

    def __init__(
        self, *, size: int, grid: NormGrid, max_steps: int, personal_clipping: float | None
    ) -> None:
        super().__init__(size)
        self.grid = grid
        self.max_steps = max_steps
        self._factor = personal_clipping
        self._alive: Mask = np.ones(size, dtype=bool)
        self._bounds: Buckets = np.full(size, len(grid.values) - 1, dtype=np.intp)  # of C_i

    @abstractmethod
    def _affordable(self, which: Which, buckets: Buckets) -> Mask:
        """True where one more step with norms in these buckets fits the budget; changes nothing.

        Args:
            which: m examples.
            buckets: of the norm that each would be charged, shape (m,).
        """

    @abstractmethod
    def _charge(self, which: Which, buckets: Buckets) -> None:
        """Book one more step with norms in these buckets, which fits or is bucket 0."""

    @abstractmethod
    def _exhaust(self, which: Mask) -> None:
        """Book all that is left of the budget."""

    @property
    def bounds(self) -> Array:
        """C_i at the next step, shape (N,); 1 without personal clipping; not for release."""
        return self.grid.values[self._bounds]

    @property
    def _between_draws(self) -> str:
        """Part of a condition's sentence."""
        if self._factor is None:
            return "is charged the full clipping norm when it is not drawn"
        return f"is clipped to {self._factor:g} times its norm at its last draw"

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
        self._charge(EVERYBODY, np.where(taking_part, charged, 0))
        out = self._alive & ~taking_part
        out[step.indices] = False
        if out.any():
            self._exhaust(out)
            self._alive &= ~out
        if self._factor is not None:
            raised = np.minimum(self._factor * step.ratios, 1.0)
            self._bounds[step.indices] = self.grid.bucket(raised)
        return int(np.count_nonzero(taking_part))

    @property
    def active(self) -> Mask:
        """True for examples that can take part in the next step, at least with a small gradient."""
        return self._alive & self._affordable(EVERYBODY, np.minimum(self._bounds, 1))

    @override
    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        super().check_state(state, steps)
        self.grid.bucket(state["spending"]["bounds"].numpy())

    def _spending(self) -> dict[str, Any]:
        return {
            "alive": torch.from_numpy(self._alive.copy()),
            "bounds": torch.from_numpy(self.bounds),
        }

    def _load_spending(self, spending: dict[str, Any]) -> None:
        self._alive = spending["alive"].bool().numpy().copy()
        self._bounds = self.grid.bucket(spending["bounds"].double().numpy())

"""The individual GDP filter of full-batch private gradient descent."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from dptrain.accounting.losses import gaussian
from dptrain.core import Array, Kind, checks
from dptrain.individual import Indices, IndividualFilter, IndividualRecord, Mask, Staged
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class GDPFilter(IndividualFilter):
    """Full batches: example i takes part in step j while Σ_{l≤j} (μ_l^(i))² ≤ B².

    μ_l^(i) = min(‖g_i‖, R)/(σR) of the step's own gradient, the current step included; what is
    left out costs nothing, and a later, smaller gradient may fit again. The released sums are
    B-GDP, with B the largest μ that is (ε, δ)-DP, also where norms depend on hidden randomness
    (augmentation, dropout) besides past outputs (docs/theory/individual.md#thm-gdp-filter;
    ``test_hidden_coins_never_exceed_the_budget``; Koskela, Tobaben & Honkela 2023, Alg. 1 and
    Thm. 4.1, arXiv 2209.15596).

    Args:
        target_epsilon, target_delta, max_steps: see ``IndividualFilter``.
        full_consumption: scale the first gradient that does not fit down to what is left of the
            budget, instead of leaving it out (Feldman & Zrnic 2021, Alg. 3).
    """

    name: ClassVar[str] = "individual GDP filter"
    kind: ClassVar[Kind] = Kind.UPPER_BOUND

    full_consumption: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.flag("full_consumption", self.full_consumption, owner=type(self).__name__)

    @functools.cached_property
    def budget(self) -> float:
        """B, the largest μ that is (ε, δ)-DP; rounded down."""
        return gaussian.largest_mu(self.target_epsilon, self.target_delta)

    def noise_multiplier(self, full_norm_steps: int) -> float:
        """The least σ at which gradients of the full norm may take part in so many steps.

        Raises:
            TypeError, ValueError: if that is no number of steps, or there is not at least one.
        """
        full_norm_steps = checks.steps(full_norm_steps, name="full_norm_steps")
        return math.sqrt(full_norm_steps) / self.budget * (1.0 + 1e-12)

    def check_plan(self, scheme: Scheme, strategy: Strategy) -> None:
        """Refuse anything but full batches and independent noise.

        Raises:
            ValueError: saying which, and what to use.
        """
        super().check_plan(scheme, strategy)
        if scheme.rate < 1:
            raise ValueError(
                f"individual={type(self).__name__} with Poisson(probability={scheme.rate:g}): a "
                "sampled step is not Gaussian, so a GDP budget is no bound; use RenyiFilter(...), "
                "or full batches with scheme=Poisson(probability=1, ...)"
            )

    @override
    def record(self, mechanism: MatrixMechanism) -> GDPRecord:
        self.check(mechanism)
        return GDPRecord(
            size=mechanism.scheme.dataset_size,
            noise_multiplier=mechanism.noise_multiplier,
            budget=self.budget,
            max_steps=self.max_steps,
            full_consumption=self.full_consumption,
        )

    def full_norm_steps(self, mechanism: MatrixMechanism) -> int:
        """⌊B²σ²⌋: 478 for σ = 100, ε = 0.8, δ = 1e-5."""
        return math.floor((self.budget * mechanism.noise_multiplier) ** 2)


class GDPRecord(IndividualRecord):
    """Σ (μ^(i))² of every example.

    Args:
        size: N.
        noise_multiplier: σ.
        budget: B.
        max_steps: of the filter.
        full_consumption: see ``GDPFilter``.
    """

    def __init__(
        self,
        *,
        size: int,
        noise_multiplier: float,
        budget: float,
        max_steps: int,
        full_consumption: bool,
    ) -> None:
        super().__init__(size)
        self.budget = budget
        self.max_steps = max_steps
        self._sigma = noise_multiplier
        self._full_consumption = full_consumption
        self._spent: Array = np.zeros(size)  # Σ μ²

    @property
    def spent(self) -> Array:
        """μ that each example has spent, √Σ μ², shape (N,); not for release."""
        return np.sqrt(self._spent)

    def _shares(self, indices: Indices, ratios: Array) -> Array:
        cost = (ratios / self._sigma) ** 2
        left = self.budget**2 - self._spent[indices]
        fits = cost <= left
        if not self._full_consumption:
            return fits.astype(float)
        # √(left/cost) of a gradient costs exactly what is left. A hair less: the factors and the
        # sum of the release are rounded to float32.
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.sqrt(np.maximum(left, 0.0) / cost) * (1.0 - 1e-6)
        return np.where(fits, 1.0, part)

    def _book(self, step: Staged) -> int:
        taking_part = step.shares > 0
        cost = (step.shares * step.ratios / self._sigma) ** 2
        # A scaled gradient has used up its budget: nothing is left for a hair.
        cost = np.where((step.shares < 1) & taking_part, np.inf, cost)
        booked = np.minimum(self._spent[step.indices] + cost, self.budget**2)
        self._spent[step.indices] = np.where(taking_part, booked, self._spent[step.indices])
        return int(taking_part.sum())

    @property
    def active(self) -> Mask:
        """A mask of the examples that have something left of their budget."""
        return self._spent < self.budget**2

    def epsilons(self, delta: float) -> Array:
        """ε_i of √Σ μ²-GDP, shape (N,); not for release."""
        return gaussian.epsilons(delta, self.spent)

    def epsilon_bound(self, delta: float) -> float:
        """ε of B-GDP."""
        return gaussian.epsilon(delta, self.budget)

    @property
    def condition(self) -> str:
        """The budget in one sentence."""
        return self._kept_to(self.budget)

    def _kept_to(self, budget: float) -> str:
        return (
            f"Every example has its own budget of {budget:.6g}-GDP and is left out of those steps, "
            f"of at most {self.max_steps}, that would exceed it"
        )

    @override
    def check_state(self, state: dict[str, Any], steps: int | None = None) -> None:
        super().check_state(state, steps)
        squares, budget = state["spending"]["squares"], self._budget_in(state["spending"])
        if not bool(((squares >= 0) & (squares <= budget**2)).all()):  # NaN fails both
            raise ValueError(
                f"the individual record holds spending outside the budget, 0 to {budget:g}, so the "
                "checkpoint was changed after it was written: resume from an unchanged one"
            )

    def _budget_in(self, spending: dict[str, Any]) -> float:
        """B of a saved record."""
        return self.budget

    def _spending(self) -> dict[str, Any]:
        return {"squares": torch.from_numpy(self._spent.copy())}

    def _load_spending(self, spending: dict[str, Any]) -> None:
        self._spent = spending["squares"].double().numpy().copy()

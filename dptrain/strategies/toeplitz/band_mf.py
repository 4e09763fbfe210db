"""Banded Toeplitz strategies optimized for the length of the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from dptrain.core import Array, checks
from dptrain.strategies.binding import Bindable, check_bands_fit, unoptimized
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.band_mf_optimization import optimal_coefficients
from dptrain.strategies.toeplitz.error_loss import checked_objective
from dptrain.strategies.toeplitz.toeplitz import BandedToeplitz, check_stable_filter
from dptrain.strategies.workloads import PREFIX_SUMS, Workload, checked_workload


@register_strategy(planned=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class BandMF(Bindable, BandedToeplitz):
    """Banded Toeplitz C of least error for a workload (Choquette-Choo et al. 2023).

    ``BandMF(bands=16)`` is a declaration; ``bind(steps)`` optimizes the coefficients for a run of
    that length and returns them in the value, so that whoever reads its JSON gets the same matrix
    without optimizing again. With explicit ``coefficients``, ``bind`` keeps them.

    Args:
        bands: number of coefficients; choose at most the scheme's min-sep.
        objective: ``"mean"`` minimizes ‖A C^-1‖_F·‖c‖₂ (all queries), ``"max"`` the error of the
            worst query (see ``optimal_coefficients``).
        coefficients: c_0 > 0, c_1, …, c_{bands-1} ≥ 0; they may rise.
        steps: the n that the value is bound to; set by ``bind``.
        workload: the A that coefficients are optimized for.
        overlap: κ in [0, 1], how much the products of columns of different steps count beside
            ‖c‖₂² when coefficients are optimized (see ``optimal_coefficients``). 0 is the optimum
            without amplification by sampling; a positive κ trades error for columns that sampling
            hides better. ``dptrain.planning.amplified_band_mf`` finds it for a scheme, ε and δ.
        overlap_decay: ρ in (0, 1]: steps d apart count κ·ρ^d.

    Raises:
        ValueError: if ``bands`` or ``steps`` is not a positive integer, ``bands > steps``, the
            objective is unknown, ``overlap`` or ``overlap_decay`` is out of range, the
            coefficients are not ``bands`` finite numbers as above, or C^-1 blows up within the n
            steps that the value is bound to.

    Example:
        >>> BandMF(bands=2).bind(2).steps
        2
    """

    bands: int
    objective: str = "mean"
    coefficients: tuple[float, ...] | None = None
    steps: int | None = None
    workload: Workload = PREFIX_SUMS
    overlap: float = 0.0
    overlap_decay: float = 1.0

    def __post_init__(self) -> None:
        self._settle(
            bands=checks.integer("bands", self.bands),
            overlap=checks.number("overlap", self.overlap, minimum=0, maximum=1),
            overlap_decay=checks.number("overlap_decay", self.overlap_decay, above=0, maximum=1),
        )
        checked_objective(self.objective)
        checked_workload(self.workload)
        if self.coefficients is not None:
            self._settle(coefficients=self._checked(self.coefficients))
        if self.steps is not None:
            self._settle(steps=checks.steps(self.steps))
            if self.coefficients is None:
                raise unoptimized(self.steps, "coefficients")
            self._check_fits(self.steps)
            owner = f"BandMF(bands={self.bands})"
            check_stable_filter(owner, self.coefficients, self.steps)

    def _checked(self, coefficients: tuple[float, ...]) -> tuple[float, ...]:
        c = checks.numbers("coefficients", coefficients)
        if len(c) != self.bands:
            raise ValueError(
                f"coefficients has {len(c)} entries and bands={self.bands}: make them equal"
            )
        for k, value in enumerate(c):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"coefficients: entry {k} is {value}: must be finite and not negative"
                )
        if c[0] == 0:
            raise ValueError(
                "coefficients: entry 0 is 0: must be positive, since otherwise C has no inverse"
            )
        return c

    def _check_fits(self, steps: int) -> None:
        check_bands_fit(self.bands, steps)
        self.workload.check(steps)

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """One for every number of bands, optimized for the workload."""
        return [cls(bands=bands, workload=run.workload) for bands in run.bands]

    def _optimized(self, steps: int) -> dict[str, Any]:
        """The coefficients, unless they were given."""
        self._check_fits(steps)
        if self.coefficients is not None:
            return {}
        optimum = optimal_coefficients(
            steps, self.bands, self.objective, self.workload, self.overlap, self.overlap_decay
        )
        return {"coefficients": tuple(optimum.tolist())}

    def prefix(self, steps: int) -> BandMF:
        """The same coefficients, as many as fit."""
        c = tuple(self.first_column(checks.steps(self.steps)).tolist())
        steps = checks.integer("steps", steps, maximum=self.steps)
        return BandMF(bands=min(self.bands, steps), coefficients=c[:steps], steps=steps)

    def first_column(self, steps: int) -> Array:
        """The optimized coefficients, shape (bands,).

        Raises:
            ValueError: if the value is not bound, or is bound to another n.
        """
        self.check_bound(steps)
        return np.array(self.coefficients)

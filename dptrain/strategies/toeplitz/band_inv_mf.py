"""Toeplitz strategies with a banded C^-1, optimized for the run and its participations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from dptrain.core import Array, checks
from dptrain.strategies.binding import unoptimized
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.toeplitz.error_loss import checked_objective
from dptrain.strategies.toeplitz.inverse_banded import InverseBandedToeplitz, check_bounded
from dptrain.strategies.toeplitz.inverse_optimization import optimal_inverse_coefficients
from dptrain.strategies.workloads import PREFIX_SUMS, Workload, checked_workload


@register_strategy
@dataclasses.dataclass(frozen=True, kw_only=True)
class BandInvMF(InverseBandedToeplitz):
    """Banded Toeplitz C^-1 of least error × sensitivity (Kalinin et al. 2025, arXiv 2505.12128).

    Least among the coefficients with C ≥ 0, as the sensitivity requires. g_k ≤ 0 for k ≥ 1
    guarantees that for any n; signs are freed where that helps and the run is not too long
    (n·inverse_bands ≤ 2^18), and C ≥ 0 is then checked for the n of the run.

    ``BandInvMF(inverse_bands=4, max_participations=4, min_sep=500)`` is a declaration;
    ``bind(steps)`` optimizes the coefficients for a run of that length and returns them in the
    value, so that whoever reads its JSON gets the same matrix without optimizing again. They are
    scaled to ‖c‖₂ = 1, as those of BandMF. With explicit ``coefficients``, ``bind`` keeps them.

    What is optimized is the sensitivity that ``sensitivity`` reports for the same schedule, or
    an upper bound on it: it is exact where the optimum's c does not increase from lag ``min_sep``
    on, as all optima found with ``inverse_bands <= min_sep`` do. Ask ``sensitivity_is_exact``.

    Args:
        inverse_bands: number of coefficients of C^-1. Not the bands of C, which is dense.
        objective: ``"mean"`` minimizes the RMSE over all queries times the sensitivity, ``"max"``
            the error of the worst query times the sensitivity.
        workload: the queries A; prefix sums unless told otherwise.
        max_participations: m, participations to optimize for; accounting takes its own.
        min_sep: b, steps between two of them; required if ``max_participations > 1``.
        coefficients: of C^-1: g_0 > 0, and such that C ≥ 0 for the steps of the run; any g_k ≤ 0
            are.
        steps: the n that the value is bound to; set by ``bind``.

    Raises:
        ValueError: if a number is not a positive integer, ``inverse_bands > steps``, ``min_sep``
            is missing, the objective or workload is unknown, the coefficients are not
            ``inverse_bands`` finite numbers as above, or C blows up or becomes negative with them
            within ``steps``.

    Example:
        >>> BandInvMF(inverse_bands=2).bind(2).steps
        2
    """

    inverse_bands: int
    objective: str = "mean"
    workload: Workload = PREFIX_SUMS
    max_participations: int = 1
    min_sep: int | None = None
    coefficients: tuple[float, ...] | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("inverse_bands", "max_participations"):
            self._settle(**{name: checks.integer(name, getattr(self, name))})
        checked_objective(self.objective)
        checked_workload(self.workload)
        if self.min_sep is not None:
            self._settle(min_sep=checks.integer("min_sep", self.min_sep))
        elif self.max_participations > 1:
            raise ValueError(
                f"min_sep=None with max_participations={self.max_participations}: set the least "
                "number of steps between two participations, e.g. min_sep=steps // "
                "max_participations for whole epochs"
            )
        if self.coefficients is not None:
            self._settle(coefficients=self._checked(self.coefficients))
        if self.steps is not None:
            self._settle(steps=self.check_fits(self.steps))
            if self.coefficients is None:
                raise unoptimized(self.steps, "coefficients")
            check_bounded("BandInvMF", self.filter(), self.steps)

    def _checked(self, coefficients: tuple[float, ...]) -> tuple[float, ...]:
        g = tuple(value + 0.0 for value in checks.numbers("coefficients", coefficients))  # no -0.0
        if len(g) != self.inverse_bands:
            raise ValueError(
                f"coefficients has {len(g)} entries and inverse_bands={self.inverse_bands}: make "
                "them equal"
            )
        if not all(map(math.isfinite, g)) or g[0] <= 0:
            raise ValueError(
                f"coefficients={g}: the coefficients of C^-1 must be finite and the first one "
                "positive"
            )
        return g

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """One for every number of bands, of the inverse, optimized for the run."""
        return [
            cls(
                inverse_bands=bands,
                workload=run.workload,
                max_participations=run.max_participations,
                min_sep=run.min_sep,
            )
            for bands in run.bands
        ]

    def _optimized(self, steps: int) -> dict[str, Any]:
        """The coefficients, unless they were given."""
        steps = self.check_fits(steps)
        if self.coefficients is not None:
            return {}
        found = optimal_inverse_coefficients(
            steps=steps,
            inverse_bands=self.inverse_bands,
            objective=self.objective,
            workload=self.workload,
            max_participations=self.max_participations,
            min_sep=steps if self.min_sep is None else self.min_sep,
        )
        return {"coefficients": tuple(found.tolist())}

    def prefix(self, steps: int) -> BandInvMF:
        """The same coefficients of C^-1, as many as fit."""
        steps = checks.integer("steps", steps, maximum=self.steps)
        g = tuple(self.filter().tolist())[:steps]
        return BandInvMF(inverse_bands=len(g), coefficients=g, steps=steps)

    def filter(self) -> Array:
        """The coefficients, shape (inverse_bands,).

        Raises:
            ValueError: if the value has none yet.
        """
        if self.coefficients is None:
            raise ValueError("this BandInvMF has no coefficients yet: use bind(steps) first")
        return np.array(self.coefficients)

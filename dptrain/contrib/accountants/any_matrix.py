"""b-min-sep sampling with any non-negative strategy: bounds on the ratio instead of the ratio."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dptrain.accounting.base import Cost, truncation_refusal
from dptrain.accounting.min_sep import MinSepLaw, log_mixture, min_sep_refusal, participations
from dptrain.accounting.simulation import (
    DIRECTIONS,
    Direction,
    PlainLaw,
    SimulatedAccountant,
    Simulation,
)
from dptrain.core import Array, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies import Strategy

_MOST_STEPS = 4096
_CHUNK_BYTES = 64 << 20


def greatest_overlaps(gram: Array, min_sep: int) -> Array:
    """κ_i = max over later patterns of Σ_j <c_i, c_j>, gaps ≥ b from i on: shape (n,).

    With V_j(i) the best sum over patterns from step j on, V_j = max(V_{j+1}, <c_i, c_j> + V_{j+b});
    κ_i = V_{i+b}(i). O(n²) in all.
    """
    n = len(gram)
    best = np.zeros((n + min_sep + 1, n))
    for j in range(n - 1, -1, -1):
        best[j] = np.maximum(best[j + 1], gram[j] + best[j + min_sep])
    rows = np.minimum(np.arange(n) + min_sep, n)
    return np.asarray(best[rows, np.arange(n)])


@dataclasses.dataclass(frozen=True, eq=False)
class AnyMatrixLosses(Simulation):
    """Upper bounds on the losses of b-min-sep sampling with any non-negative C.

    Leaving out the overlaps of columns enlarges P/Q, and then it is the recursion of ``Recursion``
    with whole columns (Dong & Ganesh 2026, Appendix B, arXiv 2602.09338):

        f_i = (1-p) f_{i+1} + p exp((2<y,c_i> - ‖c_i‖²)/(2σ²)) f_{i+b} ≥ P/Q.

    A larger P/Q overestimates δ when y ~ P (remove), and underestimates it when y ~ Q. There each i
    is charged the most that the later participations of any pattern can overlap with it:

        g_i = (1-p) g_{i+1} + p exp((2<y,c_i> - ‖c_i‖² - 2κ_i)/(2σ²)) g_{i+b} ≤ P/Q.

    The proof is docs/theory/min-sep.md#thm-min-sep-any, its test
    ``test_bounds_enclose_the_exact_ratio_of_every_output``.
    """

    strategy: Strategy
    probability: float
    min_sep: int
    steps: int
    warm_start: bool
    max_participations: int

    def __post_init__(self) -> None:
        columns = np.ascontiguousarray(self.strategy.columns(self.steps, np.arange(self.steps)))
        gram = columns.T @ columns
        object.__setattr__(self, "_columns", columns)
        object.__setattr__(self, "_squares", np.diag(gram).copy())
        object.__setattr__(self, "_overlaps", greatest_overlaps(gram, self.min_sep))

    _columns: Array = dataclasses.field(init=False, repr=False)
    _squares: Array = dataclasses.field(init=False, repr=False)
    _overlaps: Array = dataclasses.field(init=False, repr=False)

    @property
    def sensitivity(self) -> float:
        """max ‖Cx‖ over the patterns."""
        return self.strategy.sensitivity(
            steps=self.steps, max_participations=self.max_participations, min_sep=self.min_sep
        )

    @property
    def work(self) -> int:
        """n² products a sample; counted a hundredfold cheaper than steps."""
        return self.steps + self.steps**2 // 100

    @property
    def lanes(self) -> int:
        """Samples a chunk."""
        return max(16, min(1024, _CHUNK_BYTES // (32 * self.steps)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of everything but σ."""
        return {
            "bound": "r-min-sep",
            "strategy": self.strategy.to_dict(),
            "strategy_hash": self.strategy.coefficient_hash,
            "probability": self.probability,
            "min_sep": self.min_sep,
            "steps": self.steps,
            "warm_start": self.warm_start,
        }

    def _log_bound(self, products: Array, sigma: float, *, upper: bool) -> Array:
        """log f or log g from the products <c_i, y>, shape (steps, k): shape (k,)."""
        half = self._squares / 2.0 + (0.0 if upper else self._overlaps)
        return log_mixture(
            products / sigma**2,
            half / sigma**2,
            probability=self.probability,
            min_sep=self.min_sep,
            warm_start=self.warm_start,
        )

    def log_ratio_bound(self, outputs: Array, sigma: float, *, upper: bool) -> Array:
        """log of an upper or a lower bound on P/Q of given outputs, shape (rows, k): (k,)."""
        return self._log_bound(self._columns.T @ outputs, sigma, upper=upper)

    def draw(
        self,
        sigmas: Sequence[float],
        direction: Direction | Literal["both"],
        rng: np.random.Generator,
        size: int,
    ) -> Array:
        """Bounds on the losses; see ``Simulation.draw``."""
        directions = DIRECTIONS if direction == "both" else (direction,)
        signal = None
        if "remove" in directions:
            times, lane = participations(self._draws, rng, size)
            x = np.zeros((self.steps, size))
            x[times, lane] = 1.0
            signal = self._columns.T @ (self._columns @ x)
        noise = self._columns.T @ rng.standard_normal((len(self._columns), size))
        losses = np.empty((len(directions), len(sigmas), size))
        for row, sigma in enumerate(sigmas):
            for side, each in enumerate(directions):
                if each == "remove":
                    assert signal is not None
                    losses[side, row] = self._log_bound(signal + sigma * noise, sigma, upper=True)
                else:
                    losses[side, row] = -self._log_bound(sigma * noise, sigma, upper=False)
        return losses if direction == "both" else losses[0]

    @property
    def _draws(self) -> MinSepLaw:
        """The law of participations alone."""
        return MinSepLaw(
            coefficients=np.ones(1),
            probability=self.probability,
            min_sep=self.min_sep,
            steps=self.steps,
            warm_start=self.warm_start,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinSepAnyMatrix(SimulatedAccountant):
    """Simulates bounds on the privacy loss of ``MinSep`` sampling with any C ≥ 0.

    The losses that bound it are those of ``AnyMatrixLosses``. For a banded Toeplitz C with
    bands ≤ min_sep the loss itself can be computed, which ``MinSepImportance`` does.
    """

    max_samples: int = 10**9

    name = "min-sep-any-matrix"
    display = "r-min-sep Monte Carlo"

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, negative entries and matrices beyond 4,096 steps."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        if reason := truncation_refusal(scheme):
            return reason
        if not isinstance(scheme, MinSep):
            return "it needs MinSep sampling"
        if strategy.magnitude() is not strategy:
            return (
                f"{type(strategy).__name__} has negative entries, but the theorem requires a "
                "non-negative strategy; use e.g. BandMF or BSR"
            )
        if scheme.steps > _MOST_STEPS:
            return f"steps={scheme.steps}: it tabulates C, for at most {_MOST_STEPS} steps"
        return None

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """The reason to ask by name: not needed where the exact loss is known, slow elsewhere."""
        if min_sep_refusal(mechanism) is None:
            return "the exact loss of this pair is known, and this bound is never better"
        return (
            "its simulation takes hours; use a banded Toeplitz strategy with bands <= min_sep, or "
            f"request it by name (accountant={self.name!r})"
        )

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """n² operations a sample."""
        return Cost.HOURS

    def law(self, mechanism: MatrixMechanism) -> PlainLaw:
        """The losses, below the unamplified Gaussian mechanism."""
        scheme = mechanism.scheme
        assert isinstance(scheme, MinSep)
        checks.invariant(
            scheme.max_batch_size is None, "this simulation does not cover truncated batches"
        )
        losses = AnyMatrixLosses(
            strategy=mechanism.strategy,
            probability=scheme.probability,
            min_sep=scheme.min_sep,
            steps=scheme.steps,
            warm_start=scheme.warm_start,
            max_participations=scheme.max_participations,
        )
        return PlainLaw(losses)

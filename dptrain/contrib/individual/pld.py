"""The individual PLD filter: an estimate for Poisson-sampled batches."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import numpy as np

from dptrain.contrib.individual import gaussian_renyi
from dptrain.contrib.individual.pld_record import PLDRecord, SampledPLDRecord, UnsampledPLDRecord
from dptrain.contrib.individual.sampled_filter import SampledFilter
from dptrain.contrib.per_example import IndividualPLD, NormGrid
from dptrain.core import Kind
from dptrain.mechanism import MatrixMechanism

# Coarser than the accountant's: what rounding adds to norms is under 3 %.
GRID = NormGrid(ratio=1.03, smallest=1e-2)
FLOOR_SHARE = 1e-3
_FULL_NORM = NormGrid(ratio=2.0, smallest=1.0)
_MOST_STEPS = 1 << 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class PLDFilter(SampledFilter):
    """Every example takes part while its loss stays below that of one Gaussian; an estimate.

    Example x may take part in a step if its steps so far and this one, composed as independent
    Poisson-sampled Gaussians, have δ_x(ε) ≤ δ_B(ε), the curve of B-GDP (Koskela, Tobaben & Honkela
    2023, section 5, arXiv 2209.15596). If they had it for all ε, they would be post-processing of
    that Gaussian, and their Rényi divergences at most αB²/2 at every order. (ε, δ) is stated by
    converting those: B is the largest μ for which the best order gives the target. δ_B(ε) itself is
    never stated: it needs more than the filter has.

    ``RenyiFilter`` is the rigorous choice. Domination for *all* ε implies its budget, so this
    filter can admit more steps only by not looking below ``floor``. It is an estimate
    (docs/theory/individual.md#thm-pld-filter; ``test_the_guarantee_says_that_it_is_an_estimate``)
    because

    - δ_x ≤ δ_B for all ε would need the μ of no sampling, √(Σ r²)/σ: far out, the loss is that of
      having been drawn always. So curves are compared, in both directions, only at ε ≥ 0 down to
      where δ_B(ε) is ``floor``, on a grid;
    - without that Blackwell's theorem does not apply, and nothing bounds the Rényi divergence by
      αB²/2: that of large orders comes from below the floor;
    - the composition is one of steps that were fixed beforehand. For steps that depend on earlier
      outputs, Feldman & Zrnic's argument needs a budget of Rényi divergence spent at each step.

    Charges are those of the Rényi filter: everybody at every step, undrawn examples the full norm
    or their personal bound (``SampledRecord``).

    For full batches (q = 1) the rule is Σ r² ≤ B²σ², with norms rounded up by at most 1 %.

    Args:
        target_epsilon, target_delta, max_steps: see ``IndividualFilter``.
        personal_clipping: see ``SampledFilter``.
        floor: least δ at which curves are compared, in (0, target_delta]; ``None``:
            ``target_delta``/1000. A smaller one admits fewer steps.

    Raises:
        ValueError: if a value is out of range, or there is no budget for the target.
    """

    name: ClassVar[str] = "individual PLD filter"
    kind: ClassVar[Kind] = Kind.ESTIMATE

    floor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_number("floor")
        if self.floor is not None and not 0 < self.floor <= self.target_delta:
            raise ValueError(
                f"floor={self.floor}: must lie above 0, up to target_delta={self.target_delta}; "
                "None chooses a thousandth of it"
            )
        if self.budget == 0:
            raise ValueError(
                f"target_epsilon={self.target_epsilon}: no Gaussian's Rényi divergences are "
                f"({self.target_epsilon}, {self.target_delta})-DP; raise the target"
            )

    @functools.cached_property
    def budget(self) -> float:
        """B, the largest μ for which R_α ≤ αμ²/2 at all orders is (ε, δ)-DP; rounded down."""
        return gaussian_renyi.largest_mu(self.target_epsilon, self.target_delta)

    @property
    def _floor(self) -> float:
        return FLOOR_SHARE * self.target_delta if self.floor is None else self.floor

    def full_norm_steps(self, mechanism: MatrixMechanism) -> int:
        """Number of steps of the full norm that B-GDP dominates; an estimate, as all of this is.

        Raises:
            ValueError: as ``check``.
        """
        self.check(mechanism)
        rate, sigma = mechanism.scheme.rate, mechanism.noise_multiplier
        if rate == 1.0:
            return math.floor((self.budget * sigma) ** 2)
        return _dominated_steps(rate, sigma, self.budget, self._floor)

    def record(self, mechanism: MatrixMechanism) -> PLDRecord:
        """An empty record of what examples spend in a run of this mechanism.

        Raises:
            ValueError: also if everybody would be left out from the first step on.
        """
        self.check(mechanism)
        rate, sigma = mechanism.scheme.rate, mechanism.noise_multiplier
        self._check_first_step(mechanism)
        common: dict[str, Any] = {
            "size": mechanism.scheme.dataset_size,
            "budget": self.budget,
            "max_steps": self.max_steps,
            "personal_clipping": self.personal_clipping,
            "noise_multiplier": sigma,
        }
        if rate == 1.0:
            return UnsampledPLDRecord(grid=NormGrid(), **common)
        return SampledPLDRecord(
            grid=GRID,
            probability=rate,
            floor=self._floor,
            full_norm_steps=self.full_norm_steps(mechanism),
            **common,
        )


@functools.lru_cache(maxsize=64)
def _dominated_steps(probability: float, sigma: float, mu: float, floor: float) -> int:
    """Most steps of the full norm with δ(ε) ≤ δ_μ(ε) down to the floor."""
    accountant = IndividualPLD(probability=probability, noise_multiplier=sigma, grid=_FULL_NORM)

    def needed(steps: list[int]) -> list[float]:
        counts = np.array([[0, n] for n in steps], dtype=np.int64)
        return list(accountant.gaussian_mu(counts, floor=floor))

    # Newton's method: each guess is tried with its neighbor.
    low, high, guess = 0, _MOST_STEPS, _limit_steps(probability, sigma, mu)
    while high - low > 1:
        trial = sorted({min(max(math.floor(guess) + k, low + 1), high - 1) for k in (0, 1)})
        found = needed(trial)
        for steps, least in zip(trial, found, strict=True):
            low, high = (max(low, steps), high) if least <= mu else (low, min(high, steps))
        slope = found[-1] - found[0]
        guess = trial[0] + (mu - found[0]) / slope if slope > 0 else 0.0
        if not low < guess < high:
            guess = 0.5 * (low + high) if high < _MOST_STEPS else 2.0 * low
    return low


def _limit_steps(probability: float, sigma: float, mu: float) -> float:
    """(μ/(q√(e^{1/σ²} - 1)))², by the central limit theorem (Bu et al. 2020): a first guess."""
    each = probability**2 * math.expm1(min(1.0 / sigma**2, 500.0))
    return min(max(mu**2 / each, 1.0), float(_MOST_STEPS // 2))

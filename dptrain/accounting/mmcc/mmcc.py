"""MMCC: any strategy under Poisson or cyclic Poisson sampling, by conditional composition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
from tqdm import tqdm

from dptrain.accounting.base.accountant import Cost, truncation_refusal, varying_noise
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.losses.coin_sums import row_law
from dptrain.accounting.losses.composition import HeterogeneousComposition
from dptrain.accounting.losses.gaussian_mixture import GaussianMixtures, common_spacing
from dptrain.accounting.losses.loss_distribution import LossDistribution
from dptrain.accounting.mmcc.blocks import MOST_ENTRIES, MatrixRows, rows_of, work_entries
from dptrain.accounting.mmcc.posterior import participation_bounds
from dptrain.accounting.poisson.poisson import tosses_coins
from dptrain.core import Array, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import CyclicPoisson

# The grid of a row's sums: the largest entry is so many of its steps.
_STEPS = 256
# Below this, δ is not split any further: profiles do not go deeper than twice it.
_LEAST_FAILURE = 1e-18
# Relative precision to which the split of δ is found for a given ε.
_SPLIT_PRECISION = 1e-4
_MOST_SPLITS = 60


def row_mixtures(
    rows: MatrixRows, *, probability: float, sigma: float, failure: float, remove: bool
) -> GaussianMixtures:
    """Mixtures, with shared means, that dominate the rows unless one of the events fails.

    ``failure`` is that of all events together; it is not looked at where there are none.
    """
    chances = participation_bounds(
        rows.entries,
        probability=probability,
        sigma=sigma,
        failure=failure / max(rows.pairs, 1),
        remove=remove,
    )
    unit = float(rows.entries.size.max()) / _STEPS
    laws = []
    bounds = list(zip(rows.starts[:-1], rows.starts[1:], strict=True))
    for first, last in tqdm(bounds, desc="MMCC rows", unit="row", delay=2.0, leave=False):
        laws.append(row_law(rows.entries.size[first:last], chances[first:last], unit=unit))
    longest = max(law.size for law, _ in laws)
    weights = np.zeros((len(laws), longest + 1))
    for weight, (law, beyond) in zip(weights, laws, strict=True):
        weight[: law.size], weight[-1] = law, beyond
    # Sizes within 1e-14 of a grid point were taken to be there.
    means = np.asarray(unit * np.arange(longest + 1) * (1.0 + 1e-13), float)
    means[-1] = max(rows.greatest_sum, means[-1])
    return GaussianMixtures(weights, means)


@dataclasses.dataclass(frozen=True, eq=False)
class MMCCCurve(Curve):
    """Composed row mixtures at δ_1 = δ_2 = δ/2 (δ_1 = 0 where there are no events).

    ``epsilon`` takes δ_1 = δ/2 and states the ε at which the composition is at δ/2. ``delta`` looks
    for the δ at which that is the given ε: every δ_1 > 0 proves δ_1 + δ_2(ε; δ_1), as δ_1 is
    chosen by a rule that knows nothing but public parameters; so the search may stop anywhere.
    Both directions are statements of their own, each with its own events and its own split.

    Attributes:
        parts: what is published about the example picks one of them; the worst counts.
    """

    probability: float
    parts: tuple[MatrixRows, ...]

    def _composed(
        self, rows: MatrixRows, sigma: float, failure: float, *, remove: bool
    ) -> HeterogeneousComposition:
        mixtures = row_mixtures(
            rows, probability=self.probability, sigma=sigma, failure=failure, remove=remove
        )
        counts = rows.counts.tolist()
        spacing = common_spacing(mixtures.spread(sigma=sigma, remove=remove), counts)

        def losses() -> Iterator[tuple[LossDistribution, int]]:
            found = mixtures.discretized(sigma=sigma, spacing=spacing, remove=remove)
            yield from zip(found, counts, strict=True)

        return HeterogeneousComposition(losses())

    def _needs_events(self, rows: MatrixRows) -> bool:
        return rows.pairs > 0 and self.probability < 1.0

    def epsilon(self, sigma: float, delta: float) -> float:
        """The largest ε of all parts and both directions."""
        worst = 0.0
        for rows in self.parts:
            share = 0.5 * delta if self._needs_events(rows) else delta
            for remove in (True, False):
                composed = self._composed(rows, sigma, delta - share, remove=remove)
                worst = max(worst, composed.epsilon(share))
        return worst

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """The largest δ of all parts at every ε, per direction."""
        result = np.zeros((2, epsilon.size))
        for rows in self.parts:
            for which, remove in enumerate((True, False)):
                found = self._delta_of_part(rows, sigma, epsilon, remove=remove)
                result[which] = np.maximum(result[which], found)
        return result[0], result[1]

    def _delta_of_part(
        self, rows: MatrixRows, sigma: float, epsilon: Array, *, remove: bool
    ) -> Array:
        if not self._needs_events(rows):
            return self._composed(rows, sigma, 0.0, remove=remove).delta(epsilon)

        def rest(failure: float) -> Array:
            return self._composed(rows, sigma, failure, remove=remove).delta(epsilon)

        return equal_split(rest, epsilon.size)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """Remarks on what was rounded, and on how δ was split."""
        events = sum(self._needs_events(rows) for rows in self.parts)
        split = "half of δ is spent on events that bound what past releases tell" if events else ""
        rounded = (
            f"entries of |C| were rounded up by at most a 64th each, row sums to a {_STEPS}th of "
            "the largest entry; privacy losses were rounded pessimistically to a grid"
        )
        return (split, rounded) if split else (rounded,)


def equal_split(rest: Callable[[float], Array], size: int) -> Array:
    """δ_1 + δ_2(δ_1) for every one of ``size`` values of ε, δ_1 such that both are about equal.

    ``rest`` gives δ_2 for all ε at once. log δ_2 falls with log δ_1, almost linearly: secant steps
    within a bracket; what one ε asks for serves all others.
    """
    seen: dict[float, Array] = {}

    def gaps(log_failure: float) -> Array:
        if log_failure not in seen:
            seen[log_failure] = np.asarray(rest(math.exp(log_failure)), float)
        return seen[log_failure]

    low, high = math.log(_LEAST_FAILURE), math.log(0.5)
    gaps(low), gaps(high)
    result = np.empty(size)
    for k in range(size):
        for _ in range(_MOST_SPLITS):
            # δ_2 ≥ δ_1 left of the solution, less right of it.
            log_rest = {at: math.log(max(values[k], 1e-300)) for at, values in seen.items()}
            left = max((at for at, value in log_rest.items() if value >= at), default=None)
            right = min((at for at, value in log_rest.items() if value < at), default=None)
            if left is None or right is None or right - left < _SPLIT_PRECISION:
                break
            if min(abs(value - at) for at, value in log_rest.items()) < _SPLIT_PRECISION:
                break
            above, below = log_rest[left] - left, log_rest[right] - right
            step = (right - left) * above / (above - below)
            margin = 0.02 * (right - left)
            gaps(left + min(max(step, margin), right - left - margin))
        nearest = min(log_rest, key=lambda at: abs(log_rest[at] - at))
        result[k] = math.exp(nearest) + float(seen[nearest][k])
    return np.minimum(result, 1.0)


class MMCC(DeterministicAccountant):
    """Conditional composition over the rows of C, for coins that are tossed anew at every step.

    With the p̃ of ``participation_bounds``, whose events fail with probability at most δ_1
    together, the run is (ε, δ_1 + δ_2)-DP in a direction if the composition of the pairs (P̃_i, Q),
    Q = N(0, σ²) and P̃_i = Σ_j |C_ij| x_j + Q with independent coins x_j of probability p̃_ij, is
    (ε, δ_2)-DP in it (docs/theory/mmcc.md#thm-mmcc; ``test_quadrature_of_two_steps``,
    ``test_never_below_monte_carlo``; Choquette-Choo et al. 2024, Theorem 4.3 and Appendix D, arXiv
    2310.15526). C may have any signs. There are K events, one for each entry C_ij ≠ 0 whose column
    has a part in the rows before, each at δ_1/K; the diagonal C = c·I has none, δ_1 = 0, and what
    is composed are n subsampled Gaussians.

    *Cyclic sampling.* The example's part is published, and the rows from one of its steps up to the
    next are one block, with the norms of the columns in it for entries
    (docs/theory/mmcc.md#thm-mmcc-cyclic; ``test_every_part_of_a_cycle_is_covered``).

    All roundings are upwards: entries and row sums, p̃, the losses.
    """

    name = "mmcc"
    display = "MMCC"
    kind = Kind.UPPER_BOUND

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse schemes without a coin of its own for every step, and matrices too large."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        if reason := truncation_refusal(scheme):
            return reason
        if not (isinstance(scheme, CyclicPoisson) or tosses_coins(scheme)):
            return "it needs Poisson, CyclicPoisson, or MinSep with min_sep=1"
        entries = work_entries(strategy, steps=scheme.steps, cycle=scheme.min_sep)
        if entries > MOST_ENTRIES:
            return (
                f"it would need matrices of {entries} entries, more than {MOST_ENTRIES}; use fewer "
                "steps, or a Toeplitz strategy with fewer bands"
            )
        return None

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """By name only where exact or equal ones are faster: C = c·I, bands within the cycle."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        if isinstance(scheme, CyclicPoisson):
            if strategy.bands <= scheme.cycle:
                return "with bands <= cycle it equals 'poisson-pld', but is slower"
        elif strategy.bands == 1 and varying_noise(mechanism) is None:
            return "with independent noise it equals 'poisson-pld', but is slower"
        return None

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Estimate by the number of entries of C that it has to add up."""
        scheme = mechanism.scheme
        entries = work_entries(mechanism.strategy, steps=scheme.steps, cycle=scheme.min_sep)
        if entries < 1 << 12:
            return Cost.INSTANT
        return Cost.SECONDS if entries < 1 << 19 else Cost.MINUTES

    def curve(self, mechanism: MatrixMechanism) -> MMCCCurve:
        """The parts of the mechanism that σ cannot change."""
        scheme = mechanism.scheme
        if not (isinstance(scheme, CyclicPoisson) or tosses_coins(scheme)):
            raise ValueError(f"{self.name}: {self.refusal(mechanism)}")
        parts = rows_of(mechanism.strategy, steps=scheme.steps, cycle=scheme.min_sep)
        return MMCCCurve(scheme.probability, tuple(parts))

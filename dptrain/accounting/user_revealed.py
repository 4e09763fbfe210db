"""User-level b-min-sep sampling on any attribution graph: reveal the user's draws."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod

import numpy as np
from scipy.special import logsumexp

from dptrain.accounting import gaussian
from dptrain.accounting.deterministic import Array, Curve, DeterministicAccountant
from dptrain.accounting.revealed_blocking import worst_blocking
from dptrain.accounting.revealed_grid import NormGrid
from dptrain.accounting.revealed_law import revealed_law
from dptrain.accounting.search import least_true
from dptrain.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.user_min_sep import UserMinSep

CONJECTURE = "Conj. 6.2 of Dong & Ganesh 2026"
# Below this, lost underflows could matter; the unamplified Gaussian bound still applies.
_SMALLEST = 1e-300
_MOST_EXAMPLES = 1000
_MOST_ENTRIES = 1 << 26  # 0.5 GB of float64
_AT_ONCE = 24  # ε values of one backward program


@dataclasses.dataclass(frozen=True)
class Draws:
    """What the user's draws depend on: k, p, b and the grid of squared norms."""

    grid: NormGrid
    examples: int
    probability: float
    min_sep: int

    @property
    def rounding(self) -> float:
        """Relative error of a probability that is a sum of products of up to n factors.

        Each factor carries at most k + 800 ulp (the exponential in ``binomial``), each step a few
        additions.
        """
        factors = len(self.grid.added) * (self.examples + 800)
        return 4.0 * factors * float(np.finfo(np.float64).eps)

    def notes(self) -> tuple[str, ...]:
        """What was rounded."""
        return (
            f"Squared norms of C x were rounded up to multiples of {self.grid.unit:.3g}, "
            f"probabilities by a relative {self.rounding:.1g}",
        )

    def unamplified(self, sigma: float, epsilon: Array) -> Array:
        """log δ at the largest norm that any draws reach."""
        return gaussian.log_delta(epsilon, math.sqrt(self.grid.squared()[-1]) / sigma)

    def ceiling(self, sigma: float, delta: float) -> float:
        """ε(δ) at the largest norm."""
        return gaussian.epsilon(delta, math.sqrt(self.grid.squared()[-1]) / sigma)

    def log_deltas(self, sigma: float, epsilon: Array) -> Array:
        """log δ_Gauss(ε; ‖C x‖/σ) at every level: shape (len(epsilon), size + 1)."""
        norms = np.sqrt(self.grid.squared())
        return gaussian.log_delta(epsilon[:, None], norms[None, :] / sigma)

    def rounded_up(self, sigma: float, epsilon: Array, log_delta: Array) -> Array:
        """δ from its computed logarithm, never above the unamplified bound."""
        padded = np.exp(log_delta + math.log1p(self.rounding)) + _SMALLEST
        return np.minimum(padded, np.exp(self.unamplified(sigma, epsilon)))


class OwnDrawsCurve(Curve):
    """max over k' ≤ k of E_x[δ_Gauss(ε; ‖C x‖/σ)], exclusion by the user's own draws."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        with np.errstate(divide="ignore"):
            self._log_laws = [
                np.log(
                    revealed_law(
                        draws.grid,
                        examples=examples,
                        probability=draws.probability,
                        min_sep=draws.min_sep,
                    )
                )
                for examples in range(1, draws.examples + 1)
            ]

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε), the same in both directions."""
        given = self._draws.log_deltas(sigma, epsilon)
        log_delta = np.max([logsumexp(given + law, axis=1) for law in self._log_laws], axis=0)
        value = self._draws.rounded_up(sigma, epsilon, log_delta)
        return value, value

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """What was rounded."""
        return self._draws.notes()

    def epsilon(self, sigma: float, delta: float) -> float:
        """ε(δ) by bisection."""
        top = self._draws.ceiling(sigma, delta)
        return least_true(
            lambda e: float(self.delta(sigma, np.array([e]))[0][0]) <= delta,
            low=0.0,
            high=top,
            tolerance=1e-9 * top,
        )


class AnyBlockingCurve(Curve):
    """E_x[δ_Gauss(ε; ‖C x‖/σ)] under the worst blocking by others, for every ε anew."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε), the same in both directions."""
        value = np.concatenate(
            [
                self._some(sigma, part)
                for part in np.array_split(epsilon, -(-epsilon.size // _AT_ONCE))
            ]
        )
        return value, value

    def _some(self, sigma: float, epsilon: Array) -> Array:
        draws = self._draws
        log_final = draws.log_deltas(sigma, epsilon)
        # Scaled by the largest value so that no δ underflows on the way.
        scale = log_final[:, -1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            final = np.where(np.isfinite(scale), np.exp(log_final - scale), 0.0)
            worst = worst_blocking(
                draws.grid,
                final,
                examples=draws.examples,
                probability=draws.probability,
                min_sep=draws.min_sep,
            )
            log_delta = np.log(worst) + scale[:, 0]
        return draws.rounded_up(sigma, epsilon, log_delta)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """That nothing is conjectured."""
        return (
            *self._draws.notes(),
            "This bound on exclusion by participation is proven for any rule by which others "
            f"exclude and does not use {CONJECTURE}",
        )

    def epsilon(self, sigma: float, delta: float) -> float:
        """ε(δ) by cutting the interval into many parts at once."""
        low, high = 0.0, self._draws.ceiling(sigma, delta)
        tolerance = 1e-9 * high
        while high - low > tolerance:
            trials = np.linspace(low, high, _AT_ONCE + 1)[:-1]
            fits = np.flatnonzero(self.delta(sigma, trials)[0] <= delta)
            if fits.size and fits[0] == 0:
                return float(trials[0])
            first = int(fits[0]) if fits.size else _AT_ONCE
            low = float(trials[first - 1])
            high = float(trials[first]) if fits.size else high
        return high


class _RevealedDraws(DeterministicAccountant):
    """What the accountants that reveal the user's draws share."""

    kind = Kind.UPPER_BOUND
    operations: float  # see NormGrid.of: a tenth of a second for one law, or for one batch of ε

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, other rules of exclusion, and bands beyond the separation."""
        scheme = mechanism.scheme
        if not isinstance(scheme, UserMinSep):
            return "it needs UserMinSep sampling"
        if reason := self.rule_refusal(scheme):
            return reason
        if mechanism.strategy.bands > scheme.min_sep:
            return (
                f"it needs bands <= min_sep, the strategy has bands={mechanism.strategy.bands} and "
                f"the scheme min_sep={scheme.min_sep}; use fewer bands or a larger min_sep"
            )
        if scheme.unit.max_examples > _MOST_EXAMPLES:
            return (
                f"it covers at most {_MOST_EXAMPLES} examples a user, one has "
                f"{scheme.unit.max_examples}; bound the attribution graph first"
            )
        grid = self.draws(mechanism).grid
        entries = 2 * scheme.min_sep * grid.size
        if entries > _MOST_ENTRIES:
            return f"its table would hold {entries} numbers, above the {_MOST_ENTRIES} it allows"
        return None

    @abstractmethod
    def rule_refusal(self, scheme: UserMinSep) -> str | None:
        """Why the scheme's rule of exclusion is not covered, or ``None``."""

    def draws(self, mechanism: MatrixMechanism) -> Draws:
        """The user's draws and the norms that they lead to."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        examples = scheme.unit.max_examples
        norms = mechanism.strategy.column_norms(scheme.steps)
        most = float(
            examples
            * mechanism.strategy.sensitivity(
                steps=scheme.steps,
                max_participations=scheme.max_participations,
                min_sep=scheme.min_sep,
            )
        )
        grid = NormGrid.of(
            norms**2,
            examples=examples,
            probability=scheme.probability,
            most=most**2,
            operations=self.operations,
        )
        return Draws(grid, examples, scheme.probability, scheme.min_sep)


class RevealedDraws(_RevealedDraws):
    """Sampling-based exclusion on any graph, by an expectation without simulation.

    δ(ε) ≤ max_{k' ≤ k} E_x[δ_Gauss(ε; ‖C x‖/σ)] in both directions, for bands ≤ b, where
    x_t ~ Bin(k', p), zeroed if any of the user's own draws in the last b-1 steps was non-empty
    (zeroed draws included).

    Proof. Let S_t be the coins of step t, D_u the user's k' examples, x^u_t = |B_t ∩ D_u|.

    1. Coins do not depend on the data or on what was released, so publishing them all beside the
       run keeps their law on both data sets. δ of a pair with a common first part is the mean over
       it of the δ given it.
    2. Given the coins, all batches are fixed (exclusion reads coins and the public graph). The two
       runs then differ by C applied to vectors v_t, ‖v_t‖ ≤ x^u_t (in units of the clipping norm),
       which may depend on earlier releases. Participations of the user are at least b ≥ bands
       steps apart, so no two of them touch the same row of C v: ‖C v‖² = Σ_t ‖C_{:,t}‖²‖v_t‖² ≤
       Σ_t (x^u_t)² ‖C_{:,t}‖². Rows are Gaussian given the past, with shifts whose squares add up
       to at most that number for certain, so the run is as private as one Gaussian of that shift
       (adaptive composition of Gaussians: Denisov et al. 2022; Smith & Thakurta 2022).
    3. All of D_u are neighbours of each other through u: a non-empty S_j ∩ D_u excludes them in
       the b-1 steps after j. Exclusion by others and coins of the burn-in only exclude more, and do
       not change S ∩ D_u. So x^u ≤ x coordinate by coordinate, with the same coins.

    Users with fewer than k examples need the maximum over k': an example more also bars more, so
    that no k' dominates the others (p near 1: whoever has many examples is barred almost always).
    For the same reason the bound need not grow with p.

    Theorem 6.1 of Dong & Ganesh 2026, which would amplify by the hidden draws, is *not* used: on
    graphs with shared examples others' contributions show what u drew.
    """

    name = "revealed draws"
    operations = 1e8

    def rule_refusal(self, scheme: UserMinSep) -> str | None:
        """Refuses exclusion by participation."""
        if scheme.exclusion != "sampling":
            return "it needs exclusion='sampling': unused draws do not bar otherwise"
        return None

    def curve(self, mechanism: MatrixMechanism) -> OwnDrawsCurve:
        """The curve of the law of ‖C x‖."""
        return OwnDrawsCurve(self.draws(mechanism))


class RevealedDrawsAnyBlocking(_RevealedDraws):
    """Participation-based exclusion on any graph: the worst case over what others can block.

    δ(ε) ≤ max over controllers of E[δ_Gauss(ε; ‖C x‖/σ)], both directions, for bands ≤ b; see
    :func:`worst_blocking` for controllers and the exact program over them.

    Proof. Steps 1 and 2 of :class:`RevealedDraws` hold as they are: coins are independent of data
    and releases, batches are a function of the coins and the graph, and a participation of the
    user excludes all of D_u for b-1 steps. What remains is E over the coins of a non-decreasing
    function F of Σ_t (x^u_t)² ‖C_{:,t}‖². Fix everybody else's coins. Which of D_u are excluded at
    step t is decided by the batches before t, thus by the user's coins before t: it is the choice
    of a controller, and as the user's coins of step t are independent of it, x^u_t ~ Bin(a, p) with
    a ≤ k the number of examples that are not excluded. So the mean given others' coins is at most
    the maximum over controllers, and hence is the mean over all coins. A burn-in only adds earlier
    steps to what controllers may use; a user with fewer examples is one whose controller never
    allows more.

    Nothing is assumed about the rule by which others exclude: Conjecture 6.2 is not used.
    """

    name = "revealed draws, any blocking"
    operations = 4e6

    def rule_refusal(self, scheme: UserMinSep) -> str | None:
        """Refuses exclusion by sampled examples, for which there is a sharper accountant."""
        if scheme.exclusion != "participation":
            return "it is for exclusion='participation'; see 'revealed draws'"
        return None

    def curve(self, mechanism: MatrixMechanism) -> AnyBlockingCurve:
        """The curve of the worst controllers."""
        return AnyBlockingCurve(self.draws(mechanism))

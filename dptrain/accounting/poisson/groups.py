"""Groups of examples, and the last iterate of a linear loss: Gaussians of binomial sensitivity."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.stats import binom

from dptrain.accounting.base.accountant import truncation_refusal, varying_noise
from dptrain.accounting.base.curve import Curve
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.coin_sums import raised
from dptrain.accounting.losses.composition import HeterogeneousComposition
from dptrain.accounting.losses.gaussian_mixture import GaussianMixtures, common_spacing
from dptrain.accounting.losses.public_coin import public_mixture, public_spread
from dptrain.accounting.poisson.poisson import tosses_coins
from dptrain.core import Array, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson

# Relative error of the binomial probabilities, rounded up.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Tosses:
    """Steps at each of which somebody's examples toss a coin of their own.

    Attributes:
        trials: number of examples k, whose sensitivities add up.
        probability: p in (0, 1], of each.
        published: chance of a coin of the step that is public, is independent of these draws, and
            has them published; or a larger number.
    """

    trials: int
    probability: float
    steps: int
    published: float = 0.0


@dataclasses.dataclass(frozen=True)
class BinomialMixtureCurve(Curve):
    """Independent pairs: c·Bin(trials, p) + spread·σz against spread·σz.

    Attributes:
        norm: c > 0.
        spread: > 0, what σ is multiplied by.
    """

    tosses: tuple[Tosses, ...]
    norm: float
    spread: float = 1.0

    @property
    def unsampled(self) -> float:
        """Distance, in units of σ, of all steps together if every coin were published."""
        squares = math.fsum(each.steps * each.trials**2 for each in self.tosses)
        return math.sqrt(squares) * self.norm / self.spread

    def _mixtures(self, each: Tosses) -> list[tuple[float, GaussianMixtures]]:
        """The pairs of one step and their weights, rounded up: hidden draws, and each number."""
        counts = np.arange(each.trials + 1)
        law, _ = raised(binom.pmf(counts, each.trials, each.probability), 0.0, _ROUNDING)
        # Rounded up by more than the product with c may round down.
        means = np.asarray(counts * (self.norm / self.spread * (1.0 + 1e-14)), float)
        # Too large a ``published`` only publishes more; what is left of 1 stays hidden.
        hidden = ((1.0 - each.published) * (1.0 + 1e-15), GaussianMixtures(law[None, :], means))
        if each.published == 0.0:
            return [(1.0, hidden[1])]
        known = [
            (each.published * (float(weight) + _ROUNDING), GaussianMixtures(row[None, :], means))
            for weight, row in zip(law, np.eye(len(counts)), strict=True)
        ]
        return [hidden, *known]

    def _composed(self, sigma: float, *, remove: bool) -> HeterogeneousComposition:
        times = [each.steps for each in self.tosses]
        mixtures = [self._mixtures(each) for each in self.tosses]
        spreads = [
            public_spread([(w, part.spread(sigma=sigma, remove=remove)[0]) for w, part in parts])
            for parts in mixtures
        ]
        spacing = common_spacing(spreads, times)
        losses = (
            public_mixture(
                [
                    (w, next(part.discretized(sigma=sigma, spacing=spacing, remove=remove)))
                    for w, part in parts
                ]
            )
            for parts in mixtures
        )
        return HeterogeneousComposition(zip(losses, times, strict=True))

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε) in both directions, at most that with every coin published."""
        most = gaussian.delta(epsilon, self.unsampled / sigma)
        remove, add = (
            np.minimum(self._composed(sigma, remove=side).delta(epsilon), most)
            for side in (True, False)
        )
        return remove, add

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """ε(δ) of each direction, at most that with every coin published."""
        most = gaussian.epsilon(delta, self.unsampled / sigma)
        remove, add = (
            min(self._composed(sigma, remove=side).epsilon(delta), most) for side in (True, False)
        )
        return remove, add

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger ε of the two directions."""
        return max(self.epsilons(sigma, delta))


def group_curve(mechanism: MatrixMechanism, *, group_size: int) -> BinomialMixtureCurve:
    """Privacy of any ``group_size`` examples together, all zeroed out, under Poisson sampling.

    Each step is dominated by c·Bin(k, p) + σz against σz, in both directions, and the steps
    compose; examples with equal gradients attain it (docs/theory/poisson.md#thm-group;
    ``test_one_step_by_quadrature``; Choquette-Choo et al. 2024, Appendix F.5, arXiv 2310.15526;
    Ganesh 2024, arXiv 2401.10294).

    Raises:
        ValueError: if the scheme is not Poisson, noise is correlated or varies, or the group is
            not a positive number of the data set's examples.
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    scheme, probability, norm = _independent(mechanism)
    size = checks.integer("group_size", group_size)
    if size > scheme.dataset_size:
        raise ValueError(
            f"group_size={size}: the data set has {scheme.dataset_size} examples; use at most that"
        )
    return BinomialMixtureCurve((Tosses(size, probability, scheme.steps),), norm)


def last_iterate_curve(mechanism: MatrixMechanism, *, group_size: int = 1) -> BinomialMixtureCurve:
    """Privacy of the last iterate alone, for losses that are **linear** in the parameters.

    With a constant learning rate, no momentum and no projection it is Bin(nk, p) participations
    with noise of variance nσ² (docs/theory/poisson.md#thm-last-iterate;
    ``test_last_iterate_by_quadrature``; Choquette-Choo et al. 2024, Appendix F.5, arXiv
    2310.15526). Nothing else of the run may be released, and nothing is claimed for other losses:
    it is not an accountant that is ever chosen automatically.

    Raises:
        ValueError: as for ``group_curve``.
    """
    group = group_curve(mechanism, group_size=group_size)
    (own,) = group.tosses
    return BinomialMixtureCurve(
        (Tosses(own.trials * own.steps, own.probability, 1),),
        group.norm,
        spread=float(np.sqrt(own.steps)),
    )


def _independent(mechanism: MatrixMechanism) -> tuple[Poisson | MinSep, float, float]:
    """Scheme, probability and c of a Poisson run with C = c·I."""
    scheme, strategy = mechanism.scheme, mechanism.strategy
    if reason := truncation_refusal(scheme):
        raise ValueError(f"scheme: {reason}")
    if not tosses_coins(scheme):
        raise ValueError(
            f"scheme={type(scheme).__name__}: groups are bounded only under Poisson sampling (or "
            "MinSep with min_sep=1), where examples are drawn independently; use one of these"
        )
    if strategy.bands != 1:
        raise ValueError(
            f"strategy: bands={strategy.bands}, but steps compose only with independent noise; use "
            "Identity()"
        )
    if reason := varying_noise(mechanism):
        raise ValueError(f"strategy: {reason}; use Identity()")
    norms = strategy.column_norms(scheme.steps)
    return scheme, scheme.probability, float(norms.max())

"""Groups of examples, and the last iterate of a linear loss: Gaussians of binomial sensitivity."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.stats import binom

from dptrain.accounting.base.accountant import truncation_refusal, varying_noise
from dptrain.accounting.base.curve import Curve
from dptrain.accounting.losses.coin_sums import raised
from dptrain.accounting.losses.composition import HeterogeneousComposition
from dptrain.accounting.losses.gaussian_mixture import GaussianMixtures, common_spacing
from dptrain.accounting.poisson.poisson import tosses_coins
from dptrain.core import Array, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson

# Relative error of the binomial probabilities, rounded up.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class BinomialMixtureCurve(Curve):
    """``compositions`` independent pairs: c·Bin(trials, p) + spread·σz against spread·σz.

    Attributes:
        trials: number of coins that a sensitivity adds up.
        probability: p in (0, 1], of each.
        compositions: how many pairs.
        norm: c > 0.
        spread: > 0, what σ is multiplied by.
    """

    trials: int
    probability: float
    compositions: int
    norm: float
    spread: float = 1.0

    def _composed(self, sigma: float, *, remove: bool) -> HeterogeneousComposition:
        counts = np.arange(self.trials + 1)
        law, _ = raised(binom.pmf(counts, self.trials, self.probability), 0.0, _ROUNDING)
        # Rounded up by more than the product with c may round down.
        means = np.asarray(counts * (self.norm / self.spread * (1.0 + 1e-14)), float)
        mixtures = GaussianMixtures(law[None, :], means)
        times = [self.compositions]
        spacing = common_spacing(mixtures.spread(sigma=sigma, remove=remove), times)
        losses = mixtures.discretized(sigma=sigma, spacing=spacing, remove=remove)
        return HeterogeneousComposition(zip(losses, times, strict=True))

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε) in both directions."""
        return (
            self._composed(sigma, remove=True).delta(epsilon),
            self._composed(sigma, remove=False).delta(epsilon),
        )

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """ε(δ) of each direction."""
        remove, add = (self._composed(sigma, remove=side).epsilon(delta) for side in (True, False))
        return remove, add

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger of the two."""
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
    return BinomialMixtureCurve(size, probability, scheme.steps, norm)


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
    steps = group.compositions
    return BinomialMixtureCurve(
        group.trials * steps, group.probability, 1, group.norm, spread=float(np.sqrt(steps))
    )


def _independent(mechanism: MatrixMechanism) -> tuple[Poisson | MinSep, float, float]:
    """Scheme, probability and c of a Poisson run with C = c·I."""
    scheme, strategy = mechanism.scheme, mechanism.strategy
    if reason := truncation_refusal(scheme):
        raise ValueError(f"scheme: {reason}")
    if not tosses_coins(scheme):
        raise ValueError(
            f"scheme={type(scheme).__name__}: groups are bounded under Poisson sampling (or MinSep "
            "with min_sep=1), where everybody's coins are independent; use one of these"
        )
    if strategy.bands != 1:
        raise ValueError(
            f"strategy: bands={strategy.bands}, but steps compose with independent noise only; use "
            "Identity()"
        )
    if reason := varying_noise(mechanism):
        raise ValueError(f"strategy: {reason}; use Identity()")
    norms = strategy.column_norms(scheme.steps)
    return scheme, scheme.probability, float(norms.max())

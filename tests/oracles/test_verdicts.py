"""The certificate on mechanisms whose true δ is known: how often is a violation let through?"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom

from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.simulation.draws import SharedDraws
from dptrain.accounting.simulation.law import PlainLaw
from dptrain.accounting.simulation.verdicts import Rule, verify_points
from dptrain.contrib.accountants.any_matrix import MinSepAnyMatrix
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies import BandMF, Identity, Strategy
from tests.helpers.min_sep_losses import MinSepLosses
from tests.oracles import enumeration as oracle
from tests.oracles import quadrature

TAIL = 1e-9  # one-sided 6 standard deviations


Q = 0.05


def one_step(p: float) -> PlainLaw:
    law = MinSepLaw(coefficients=np.ones(1), probability=p, min_sep=1, steps=1, warm_start=False)
    return PlainLaw(MinSepLosses(law))


def accepted(law: PlainLaw, sigma: float, epsilon: float, rule: Rule, repeats: int) -> int:
    """How many of ``repeats`` verifications of one σ with seeds 0, 1, … accept it."""
    terms = law.terms(sigma)(epsilon)
    rows = [
        verify_points([1], lambda _: terms, rule, SharedDraws(each, 1), 0)
        for each in range(repeats)
    ]
    return sum(row["accepted"] for found in rows for row in found)


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The σ at which one Gaussian step has exactly this δ(ε)."""

    def excess(sigma: float) -> float:
        return quadrature.gaussian_delta(epsilon, 1 / sigma) - delta

    return float(brentq(excess, 0.05, 50.0, xtol=1e-12))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_violating_gaussian_is_accepted_at_most_as_often_as_stated(epsilon: float) -> None:
    rule, repeats = Rule.plain(0.2, Q, 10**5), 200
    count = accepted(one_step(1.0), gaussian_sigma(epsilon, 0.2 * 1.0001), epsilon, rule, repeats)
    assert binom.sf(count - 1, repeats, Q) > TAIL
    # A rule that accepts nothing would pass: a mechanism well within δ_v has to be accepted.
    assert accepted(one_step(1.0), gaussian_sigma(epsilon, 0.1), epsilon, rule, 50) == 50


@pytest.mark.slow
def test_acceptance_of_a_nearly_bernoulli_loss_is_below_the_binomial_one() -> None:
    """With σ = 0.02 a taken step shows for certain: (1 - e^{ε-L})_+ is 1 with probability p > δ_v.

    This is the worst case of Chernoff's bound. The add direction has δ = 0 as ε > -log(1-p). Each
    look accepts as often as a binomial number is at most its threshold; two tails at 1e-9.
    """
    epsilon, repeats, p = 0.5, 400, 0.2
    rule, law = Rule.plain(0.1999, 0.9, 10**5), one_step(p)
    pattern = oracle.poisson(1, p)
    true = quadrature.delta(pattern, np.eye(1), 0.02, epsilon, remove=True)
    assert true == pytest.approx(p, rel=1e-9)
    assert quadrature.delta(pattern, np.eye(1), 0.02, epsilon, remove=False) == 0.0
    chances = [
        binom.cdf(math.floor(each * rule.threshold(1.0, each) + 1e-9), each, true)
        for each in rule.looks(1.0)
    ]
    assert max(chances) > 0.01
    assert sum(chances) <= 0.9
    count = accepted(law, 0.02, epsilon, rule, repeats)
    assert binom.cdf(count, repeats, max(chances)) > TAIL
    assert binom.sf(count - 1, repeats, sum(chances)) > TAIL


def calibrated(scheme: MinSep, strategy: Strategy, *, seed: int, delta: float) -> float:
    made = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    accountant = MinSepAnyMatrix(seed=seed, progress=False, threads=1)
    return accountant.calibrate(made, epsilon=1.0, delta=delta).noise_multiplier


def test_calibrated_noise_suffices_for_the_gaussian() -> None:
    """By the certificate's own claim each fails with probability below q < δ; fixed seeds."""
    delta = 0.05
    needed = gaussian_sigma(1.0, delta)
    scheme = MinSep(probability=1.0, min_sep=1, dataset_size=10, steps=1)
    for seed in range(5):
        sigma = calibrated(scheme, Identity(), seed=seed, delta=delta)
        assert needed <= sigma < 2 * needed


@pytest.mark.parametrize("warm", [False, True])
def test_calibrated_noise_suffices_at_two_steps(warm: bool) -> None:
    """True δ(ε) by quadrature at the calibrated σ, both directions."""
    delta, c = 0.02, (1.0, 0.6)
    scheme = MinSep(probability=0.4, min_sep=2, dataset_size=10, steps=2, warm_start=warm)
    law = (oracle.min_sep_warm if warm else oracle.min_sep_cold)(2, 0.4, 2)
    for seed in (3, 4, 5):
        strategy = BandMF(bands=2, coefficients=c)
        sigma = calibrated(scheme, strategy, seed=seed, delta=delta)
        true = [
            quadrature.delta(law, oracle.toeplitz(c, 2), sigma, 1.0, remove=remove)
            for remove in (True, False)
        ]
        assert max(true) <= delta
        assert max(true) > delta / 10  # and not by the unamplified fallback

"""The laws of the number of runs."""

from __future__ import annotations

import random
import secrets

import numpy as np
import pytest
from scipy import stats

from dptrain.accounting import NegativeBinomialTrials, PoissonTrials

LAWS = [
    NegativeBinomialTrials(0.1),
    NegativeBinomialTrials(0.3, 0.0),
    NegativeBinomialTrials(0.2, -0.5),
    NegativeBinomialTrials(0.4, 3.0),
    PoissonTrials(0.2),
    PoissonTrials(30.0),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.describe())
def test_mean_and_weight_are_sums_over_the_number(law):
    chances = law.probabilities(2000)
    number = np.arange(2001.0)
    assert chances.sum() == pytest.approx(1.0, abs=1e-12)
    assert chances @ number == pytest.approx(law.mean, rel=1e-10)
    better = np.array([0.0, 1e-6, 0.01, 0.3, 0.9])
    powers = (1.0 - better[:, None]) ** np.maximum(number - 1.0, 0.0)
    assert law.weight(better) == pytest.approx(powers @ (chances * number), rel=1e-9)


def test_laws_are_the_known_ones():
    k = np.arange(1, 40)
    geometric = NegativeBinomialTrials(0.1).probabilities(39)[1:]
    assert geometric == pytest.approx(stats.geom.pmf(k, 0.1), rel=1e-12)
    logarithmic = NegativeBinomialTrials(0.1, 0.0).probabilities(39)[1:]
    assert logarithmic == pytest.approx(stats.logser.pmf(k, 0.9), rel=1e-12)
    negative = stats.nbinom.pmf(k, 2.5, 0.3) / (1.0 - stats.nbinom.pmf(0, 2.5, 0.3))
    assert NegativeBinomialTrials(0.3, 2.5).probabilities(39)[1:] == pytest.approx(
        negative, rel=1e-10
    )
    poisson = PoissonTrials(7.0).probabilities(39)[1:]
    assert poisson == pytest.approx(stats.poisson.pmf(k, 7.0), rel=1e-12)


@pytest.mark.parametrize("shape", [-0.7, 0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("mean", [1.5, 10.0, 300.0])
def test_the_mean_that_was_asked_for(shape, mean):
    found = NegativeBinomialTrials.with_mean(mean, shape=shape).mean
    assert mean * (1 - 1e-8) <= found <= mean * (1 + 1e-12)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.describe())
def test_draws_have_the_law(law, monkeypatch):
    monkeypatch.setattr(secrets, "randbelow", random.Random(7).randrange)
    drawn = np.array([law.draw() for _ in range(4000)])
    most = law.quantile(0.9)
    for k, chance in enumerate(law.probabilities(most)):
        spread = np.sqrt(4000 * chance * (1 - chance)) + 1e-9
        assert abs((drawn == k).sum() - 4000 * chance) <= 6 * spread


def test_refusals():
    with pytest.raises(ValueError, match="stopping"):
        NegativeBinomialTrials(1.0)
    with pytest.raises(ValueError, match="shape"):
        NegativeBinomialTrials(0.5, -1.0)
    with pytest.raises(ValueError, match="mean"):
        NegativeBinomialTrials.with_mean(1.0)
    with pytest.raises(ValueError, match="expected"):
        PoissonTrials(0.0)
    with pytest.raises(ValueError, match="probability"):
        PoissonTrials(3.0).quantile(1.0)
    with pytest.raises(ValueError, match="more than 1000000 trials"):
        NegativeBinomialTrials(1e-9).quantile(0.999)

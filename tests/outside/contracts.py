"""The contracts of dptrain.testing on what the package brings, and its mathematics by brute force.

Run in a process of its own by ``test_outside``: importing the package registers its members, which
other tests, of dptrain as it comes, should not see.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from stranger_dp import Cohort, CohortAccountant, Fading, FadingStream, Shift

from dptrain import BandMF, Identity, MatrixMechanism, Poisson
from dptrain.accounting import accountants_for
from dptrain.configuration import build_scheme, build_strategy
from dptrain.noise import noise_stream
from dptrain.planning import Question, compare, compare_strategies
from dptrain.strategies import strategy_types
from dptrain.testing import (
    AccountantContract,
    ExchangeableSchemeContract,
    NoiseStreamContract,
    StrategyContract,
    check_layer_rule,
)


class TestCohort(ExchangeableSchemeContract):
    def scheme(self):
        return Cohort(probability=0.1, dataset_size=100, steps=6)

    def joint_probabilities(self):
        return np.full((6, 6), 0.1)


class TestFading(StrategyContract):
    def make_strategy(self):
        return Fading(ratio=0.6)


class TestFadingStream(NoiseStreamContract):
    regenerates = False

    def make_strategy(self):
        return Fading(ratio=0.6)

    def foreign_strategy(self):
        return Fading(ratio=0.5).bind(self.steps)

    def rounding_bound(self, noise, z):
        # What is kept is z: C·noise is off by C (r e), with |e_t| ≤ 2^-7 |z_{t-1}|.
        before = np.abs(np.vstack([np.zeros_like(z[:1]), z[:-1]]))
        dense = self.bound().columns(self.steps, np.arange(self.steps))
        return dense @ (0.6 * before * 2.0**-7)


class TestCohortAccountant(AccountantContract):
    def accountant(self):
        return CohortAccountant()

    def mechanism(self):
        return MatrixMechanism(
            scheme=Cohort(probability=0.2, dataset_size=10_000, steps=8),
            strategy=Fading(ratio=0.5),
            noise_multiplier=3.0,
        )

    def refused_mechanism(self):
        scheme = Poisson(probability=0.1, dataset_size=1000, steps=8)
        return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)


def test_the_layer_rule():
    check_layer_rule(Shift(3), torch.randn(4, 3))
    check_layer_rule(Shift(3), torch.randn(4, 5, 3))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("probability", [0.05, 0.6, 1.0])
def test_delta_is_the_integral_over_the_densities(probability, epsilon):
    """For C ≥ 0 the worst example adds 1 at every step: the pair is one-dimensional."""
    scheme = Cohort(probability=probability, dataset_size=1000, steps=4)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Fading(ratio=0.5), noise_multiplier=1.5)
    dense = mechanism.strategy.columns(4, np.arange(4))
    mu = np.linalg.norm(dense.sum(axis=1)) / 1.5

    def with_it(x):
        return probability * norm.pdf(x, mu) + (1 - probability) * norm.pdf(x)

    def area(p, q):
        def difference(x):
            return max(0.0, p(x) - np.exp(epsilon) * q(x))

        return quad(difference, -10.0, 10.0 + mu, limit=500, points=list(np.arange(-9.0, mu + 9)))[
            0
        ]

    found = CohortAccountant().profile(mechanism, [epsilon])
    # The kinks of the integrand leave quad about 1e-9.
    assert found.remove[0] == pytest.approx(area(with_it, norm.pdf), abs=1e-7)
    assert found.add[0] == pytest.approx(area(norm.pdf, with_it), abs=1e-7)


def test_it_answers_by_itself_and_only_for_its_own_scheme():
    own = TestCohortAccountant().mechanism()
    answering = [each.name for each in accountants_for(own) if each.reason is None]
    assert answering == ["stranger-cohort"]
    others = TestCohortAccountant().refused_mechanism()
    assert "stranger-cohort" not in {e.name for e in accountants_for(others) if e.reason is None}


def test_its_strategy_goes_with_our_schemes_and_its_scheme_with_our_strategies():
    rows = compare_strategies(steps=12, bands=(4,), timed=False, progress=False).rows
    assert Fading(ratio=0.5).bind(12) in [row.strategy for row in rows]
    cohort = Cohort(probability=0.2, dataset_size=100, steps=8)
    mechanism = MatrixMechanism(scheme=cohort, strategy=BandMF(bands=3), noise_multiplier=2.0)
    assert MatrixMechanism.from_json(mechanism.to_json()) == mechanism


def test_a_plan_tries_them():
    run = {"epsilon": 4.0, "delta": 1e-4, "dataset_size": 1000, "batch_size": 100, "epochs": 2}
    question = Question.of_run(**run, max_bands=1, buffers=0)
    asked = {"accountant": "stranger-cohort", "timed": False, "progress": False}
    (row,) = compare(question, **asked).rows
    assert row.candidate.scheme == {"type": "Cohort", "batch_size": 100}
    assert row.candidate.strategy == {"type": "Fading", "ratio": 0.5}
    # What is planned is what the accountant proves: 20 participations of everybody in the cohort.
    shown = CohortAccountant().guarantee(row.mechanism, delta=1e-4)
    assert 3.99 < shown.epsilon <= 4.0
    everything = compare(question, timed=False, progress=False).rows
    assert {"Cohort", "Poisson"} <= {each.candidate.scheme["type"] for each in everything}


def test_the_nearest_stream_draws_its_noise():
    stream = noise_stream(Fading(ratio=0.5), steps=4, like=[torch.zeros(3)], seed=0)
    assert type(stream) is FadingStream
    assert stream.buffer_bytes == 3 * 8


def test_it_is_built_from_the_words_of_a_configuration():
    scheme = build_scheme({"type": "Cohort", "batch_size": 20}, dataset_size=100, steps=8)
    assert scheme == Cohort(probability=0.2, dataset_size=100, steps=8)
    assert build_strategy({"type": "Fading", "ratio": 0.5}) == Fading(ratio=0.5)
    assert strategy_types()["Fading"] is Fading
    with pytest.raises(ValueError, match=r"strategy\.ratoi=0\.5.*ratio"):
        build_strategy({"type": "Fading", "ratoi": 0.5})

"""The best of a random number of runs, against enumeration of small mechanisms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as peer
from scipy.optimize import brentq

from dptrain.accounting import (
    NegativeBinomialTrials,
    PoissonTrials,
    TradeOff,
    one_of_runs,
    select_run,
)
from dptrain.accounting.losses import gaussian
from dptrain.contrib.selection.selection import SelectionCurve, _greatest
from dptrain.core import Kind
from tests.contrib.selection.mechanisms import (
    exact_trade_off,
    gaussian_trade_off,
    hockey_stick,
    random_pair,
)

LAWS = [
    NegativeBinomialTrials(0.3),
    NegativeBinomialTrials(0.05),
    NegativeBinomialTrials(0.1, 0.0),
    NegativeBinomialTrials(0.2, -0.5),
    NegativeBinomialTrials(0.3, 2.5),
    PoissonTrials(0.4),
    PoissonTrials(3.0),
    PoissonTrials(12.0),
]
EPSILON = np.array([0.0, 0.05, 0.3, 1.0, 2.0, 4.0])


def best_of(law, chances):
    """The law of the best of K runs by the plain sum over K; the last entry is that of no run.

    ``chances`` are of the outputs in the order of their scores, the best one last.
    """
    most = law.quantile(1 - 1e-13) + 50
    number = law.probabilities(most)
    up_to = np.concatenate([[0.0], np.cumsum(chances)])
    powers = np.minimum(up_to, 1.0)[:, None] ** np.arange(most + 1)
    found = np.diff(powers @ number)
    return np.append(found, number[0])


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.describe())
def test_no_selection_loses_more_than_is_claimed(law):
    """Hundreds of pairs of laws on a few outputs, in every order of scores that was drawn."""
    generator = np.random.default_rng(20211003620)
    tightest = math.inf
    for _ in range(150):
        p, q = random_pair(generator)
        run = exact_trade_off(p, q)
        chosen, other = best_of(law, p), best_of(law, q)
        for remove, (first, second) in ((True, (chosen, other)), (False, (other, chosen))):
            curve = SelectionCurve(run, law, remove=remove)
            for epsilon in EPSILON:
                truth = hockey_stick(first, second, epsilon)
                claimed = curve.delta(float(epsilon))
                assert claimed >= truth - 1e-12, (p, q, epsilon, remove)
                if truth > 1e-6:
                    tightest = min(tightest, claimed / truth)
    assert tightest < 1.5  # a bound that some mechanism nearly attains


@pytest.mark.parametrize("law", LAWS[:5], ids=lambda law: law.describe())
def test_randomized_response_with_the_worst_score(law):
    """The truth is the better answer: what makes choosing cost most."""
    for epsilon in (0.2, 1.0, 3.0):
        p = np.array([1.0, math.exp(epsilon)]) / (1.0 + math.exp(epsilon))
        run = exact_trade_off(p, p[::-1])
        # The pure bound of Papernot & Steinke 2022, Corollary 3: (2 + η) ε.
        pure = select_run(run, law, delta=1e-12).epsilon
        assert pure <= (2.0 + law.shape) * epsilon * 1.0002
        chosen, other = best_of(law, p), best_of(law, p[::-1])
        attained = np.abs(np.log(chosen[:2] / other[:2])).max()
        assert attained <= pure * 1.0002


def renyi_of_selection(orders, renyi, law):
    """Papernot & Steinke 2022, Theorem 2, written out."""
    logarithm = math.log(1.0 / law.stopping)
    price = np.min((1.0 - 1.0 / orders) * renyi + logarithm / orders)
    return renyi + (1.0 + law.shape) * price + math.log(law.mean) / (orders - 1.0)


ORDERS = np.concatenate([np.linspace(1.02, 12, 250), np.geomspace(12, 3000, 150)])


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("mean", [2.0, 10.0, 100.0])
def test_never_above_papernot_and_steinke(epsilon, mean):
    mu = brentq(lambda at: gaussian.epsilon(1e-5, at) - epsilon, 0.02, 20)
    run, renyi = gaussian_trade_off(mu), ORDERS * mu**2 / 2
    for shape in (0.0, 0.5, 1.0, 3.0):
        law = NegativeBinomialTrials.with_mean(mean, shape=shape)
        ours = select_run(run, law, delta=1e-5).epsilon
        theirs = renyi_of_selection(ORDERS, renyi, law)
        assert ours <= peer.compute_epsilon(ORDERS, theirs, 1e-5)[0]
        # A divergence of a larger order is a bound as well, which it knows.
        account = peer._compute_rdp_repeat_and_select(ORDERS, renyi, mean, shape)
        theirs = np.minimum.accumulate(theirs[::-1])[::-1]
        assert theirs == pytest.approx(account, rel=1e-6)
    # Theorem 6, as dp_accounting has it.
    ours = select_run(run, PoissonTrials(mean), delta=1e-5).epsilon
    theirs = peer._compute_rdp_repeat_and_select(ORDERS, renyi, mean, math.inf)
    assert ours <= peer.compute_epsilon(ORDERS, theirs, 1e-5)[0]


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1.0, 2.0])
def test_of_a_bare_guarantee(shape):
    """(ε, δ) becomes ((2+η) ε, E[K] δ) at most: 3 ε for the stopping of Liu & Talwar 2019."""
    law = NegativeBinomialTrials.with_mean(20.0, shape=shape)
    for epsilon, delta in ((0.5, 1e-7), (2.0, 1e-8), (8.0, 1e-6)):
        run = TradeOff(
            epsilon=(epsilon,),
            remove=(delta,),
            add=(delta,),
            floor=1e-6,
            kind=Kind.VERIFIED,
            accountant="one point",
        )
        found = select_run(run, law, delta=20.0 * delta * (1 + 1e-6))
        assert found.epsilon <= (2.0 + shape) * epsilon * 1.0002
        assert found.epsilon >= epsilon
        assert found.kind is Kind.VERIFIED
        assert select_run(run, law, delta=19.0 * delta).epsilon == math.inf


def test_the_greatest_chance_is_read_off_the_corners():
    generator = np.random.default_rng(3)
    runs = [exact_trade_off(*random_pair(generator)) for _ in range(50)]
    runs += [gaussian_trade_off(0.3), gaussian_trade_off(4.0)]
    rates = np.concatenate([[0.0], np.geomspace(1e-14, 1.0, 500)])
    for run in runs:
        found, truth = _greatest(run, rates), run.true_positive_rate(rates)
        assert (found >= truth * (1 - 1e-13)).all()
        assert found == pytest.approx(truth, rel=1e-8)


def test_more_trials_cost_more_and_one_costs_nothing():
    run = gaussian_trade_off(0.5)
    alone = gaussian.epsilon(1e-5, 0.5)
    found = [
        select_run(run, NegativeBinomialTrials.with_mean(mean), delta=1e-5).epsilon
        for mean in (1.0001, 2, 5, 20, 100)
    ]
    assert found == sorted(found)
    assert alone <= found[0] < 1.01 * alone


def test_a_uniform_draw_of_the_configuration_averages():
    generator = np.random.default_rng(5)
    pairs = [random_pair(generator) for _ in range(3)]
    mixed = one_of_runs([exact_trade_off(*pair) for pair in pairs])
    p, q = (np.concatenate([pair[side] / 3 for pair in pairs]) for side in (0, 1))
    at, remove, add = mixed.sides
    for epsilon, first, second in zip(at, remove, add, strict=True):
        assert first == pytest.approx(hockey_stick(p, q, epsilon), rel=1e-9, abs=1e-13)
        assert second == pytest.approx(hockey_stick(q, p, epsilon), rel=1e-9, abs=1e-13)
    same = exact_trade_off(*pairs[0])
    assert one_of_runs([same, same]) is same


def test_refusals():
    run = gaussian_trade_off(0.5)
    with pytest.raises(ValueError, match="at least one"):
        one_of_runs([])
    with pytest.raises(TypeError, match="trials"):
        select_run(run, 10, delta=1e-5)
    with pytest.raises(ValueError, match="delta"):
        select_run(run, PoissonTrials(3.0), delta=0.0)

"""A budget over adaptively chosen releases, against enumeration of whole interactions."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import norm

from dptrain.accounting import BudgetFilter, TradeOff
from dptrain.accounting.losses import gaussian
from dptrain.contrib.selection import delta_at, least_mu, least_slack
from dptrain.core import Kind
from tests.contrib.selection.mechanisms import (
    exact_trade_off,
    gaussian_trade_off,
    hockey_stick,
    random_pair,
)

GRID = np.concatenate([np.linspace(0.0, 3.0, 61), [4.0, 6.0]])


def bare(epsilon, delta, kind=Kind.VERIFIED):
    return TradeOff(
        epsilon=(epsilon,), remove=(delta,), add=(delta,), floor=1e-6, kind=kind, accountant="point"
    )


def gaussian_delta(epsilon, mu):
    """Balle & Wang's formula as it stands."""
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def binned_gaussian(generator, mu):
    """Which of a few intervals N(μ, 1) or N(0, 1) falls into, and a little mass of one world."""
    edges = np.sort(generator.normal(mu / 2, 1.0, int(generator.integers(1, 4))))
    laws = [np.diff([0.0, *norm.cdf(edges - shift), 1.0]) for shift in (mu, 0.0)]
    lost = generator.choice([0.0, 0.002, 0.05])
    p, q = ([*(law * (1.0 - lost)), *told] for law, told in
            zip(laws, ([lost, 0.0], [0.0, lost]), strict=True))  # fmt: skip
    return np.array(p), np.array(q)


def interaction(generator, budget, spent=(), depth=3):
    """Laws of everything released, in both worlds, and whether some release was refused.

    At every node a mechanism is drawn anew, and a d for it: they depend on all that came out.
    """
    if depth == 0:
        return np.ones(1), np.ones(1), False
    passing = BudgetFilter(mu=budget.mu, slack=budget.slack)
    for each in spent:
        passing.spend(each)
    for _ in range(4):  # what does not fit is not made; something else is tried
        scale = passing.left.mu * generator.uniform(0.4, 1.3)
        kind = generator.random()
        if kind < 0.7:
            p, q = binned_gaussian(generator, max(scale, 0.01))
        else:
            p, q = random_pair(generator)
        if generator.random() < 0.5:
            p, q = q, p
        release = exact_trade_off(p, q)
        least = max(release.remove[-1], release.add[-1])
        wanted = least * 1.01 + passing.left.slack * generator.choice([1e-3, 0.3, 0.6])
        if wanted >= 1.0:
            continue
        charge = passing.price(release, slack=wanted)
        if passing.fits(charge):
            break
    else:
        return np.ones(1), np.ones(1), True
    parts = [interaction(generator, budget, (*spent, charge), depth - 1) for _ in p]
    first = np.concatenate([p[i] * part[0] for i, part in enumerate(parts)])
    second = np.concatenate([q[i] * part[1] for i, part in enumerate(parts)])
    return first, second, any(part[2] for part in parts)


@pytest.mark.slow
def test_no_adaptive_tree_that_passes_exceeds_the_budget():
    """240 interactions of up to three releases, enumerated whole, in both directions."""
    generator = np.random.default_rng(20)
    closest, beyond_gaussian, refused = math.inf, 0, 0
    for _ in range(240):
        budget = BudgetFilter(mu=generator.uniform(0.3, 2.0), slack=generator.uniform(0.01, 0.2))
        p, q, some = interaction(generator, budget, depth=2 + (generator.random() < 0.2))
        refused += some
        claimed = budget.delta(GRID)
        for first, second in ((p, q), (q, p)):
            truth = np.array([hockey_stick(first, second, at) for at in GRID])
            assert (truth <= claimed + 1e-12).all()
            closest = min(closest, float(np.min((claimed - truth)[:30] / claimed[:30])))
            beyond_gaussian += bool((truth > gaussian_delta(GRID, budget.mu) + 1e-9).any())
    # The test could fail: budgets are used up, and without Δ the claim would be false.
    assert refused > 60
    assert beyond_gaussian > 30
    assert closest < 0.1


def test_gaussian_releases_spend_squares_and_the_total_is_reached():
    budget = BudgetFilter(mu=1.0, slack=1e-6)
    for mu in (0.6, 0.5, 0.4):
        charge = budget.charge(gaussian_trade_off(mu))
        assert mu * (1 - 1e-4) <= charge.mu <= mu * (1 + 1e-4)
    left = math.sqrt(1.0 - 0.36 - 0.25 - 0.16)
    assert budget.left.mu == pytest.approx(left, rel=1e-3)
    with pytest.raises(ValueError, match="does not fit: μ = "):
        budget.charge(gaussian_trade_off(left * 1.01))
    budget.charge(gaussian_trade_off(left * 0.99))
    assert len(budget.charges) == 4
    # Their product is the Gaussian of √Σμ², which is next to the budget: nothing is given away.
    truth = gaussian_delta(GRID, math.sqrt(0.77 + (0.99 * left) ** 2))
    assert (truth <= budget.delta(GRID)).all()
    assert (budget.delta(GRID[:41]) <= 1.02 * truth[:41] + 1e-6).all()


def test_charges_of_powers_of_two_fill_the_budget_exactly():
    budget = BudgetFilter(mu=1.0, slack=0.5)
    quarter = dataclasses.replace(budget.left, mu=0.5, slack=0.125)
    for _ in range(4):
        budget.spend(quarter)
    assert budget.left.mu == budget.left.slack == 0.0
    assert budget.fits(dataclasses.replace(quarter, mu=0.0, slack=0.0))
    assert not budget.fits(dataclasses.replace(quarter, mu=1e-150, slack=0.0))
    assert not budget.fits(dataclasses.replace(quarter, mu=0.0, slack=5e-324))


@pytest.mark.slow
def test_the_slack_is_that_of_a_dense_grid():
    """Of small mechanisms, whose chords are their profiles, and of bare guarantees."""
    generator = np.random.default_rng(21)
    for _ in range(60):
        p, q = random_pair(generator)
        release = exact_trade_off(p, q)
        top = release.epsilon[-1] + 40.0
        at = np.log(np.linspace(1.0, math.exp(release.epsilon[-1]), 20001))
        at = np.concatenate([at, np.linspace(0.0, top, 20001), release.epsilon])
        for mu in (0.05, 0.4, 1.0, 3.0):
            truth = max(
                float(np.max(
                    np.maximum(a[None] - np.exp(at)[:, None] * b[None], 0.0).sum(1)
                    - gaussian_delta(at, mu)
                ))
                for a, b in ((p, q), (q, p))
            )  # fmt: skip
            assert truth - 1e-13 <= least_slack(release, mu) <= truth + 1e-5
    point = bare(1.5, 1e-3)
    at = np.append(np.linspace(0.0, 5.0, 100001), 60.0)
    for mu in (0.3, 1.0, 2.0):
        truth = float(np.max(delta_at(point, at, remove=True) - gaussian_delta(at, mu)))
        assert truth - 1e-13 <= least_slack(point, mu) <= truth + 1e-7


@pytest.mark.parametrize("mu", [1e-4, 0.03, 0.7, 5.0])
def test_the_least_mu_of_a_gaussian_is_its_own(mu):
    release = gaussian_trade_off(mu)
    assert least_mu(release, 1e-4 * mu) == pytest.approx(mu, rel=1e-3)
    assert least_slack(release, 0.0) == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-8)
    assert least_mu(release, 1.0) == 0.0
    assert least_mu(release, 0.0) == math.inf
    # Where d is allowed, the Gaussian may be smaller, by no more than d moves its δ.
    allowed = 0.1 * (2 * norm.cdf(mu / 2) - 1)
    less = least_mu(release, allowed)
    assert mu * 0.8 < less < mu
    assert least_slack(release, less) <= allowed < least_slack(release, less * (1 - 1e-6))


def test_a_release_is_dominated_in_the_rounding_too():
    """The charge, for every γ from below 1 on, by exact sums over outputs."""
    generator = np.random.default_rng(22)
    for _ in range(100):
        p, q = random_pair(generator)
        release = exact_trade_off(p, q)
        charge = BudgetFilter(mu=9.0, slack=0.9).price(release)
        for first, second in ((p, q), (q, p)):
            for at in (-2.0, -0.5, 0.0, 0.3, 1.0, 2.5):
                allowed = gaussian_delta(at, charge.mu) if charge.mu else max(1 - math.exp(at), 0)
                assert hockey_stick(first, second, at) <= allowed + charge.slack + 1e-13


def test_stopping_by_the_composed_losses_would_be_exceeded():
    """Not a filter: let a release pass while the composed δ(ε) of what has run is at most δ.

    First a randomized response, at whose better half another one follows and at whose worse half
    the data with probability δ: both pass, and together they lose more than δ.
    """
    first, epsilon, delta = 0.5, 0.8, 0.01
    good = 1.0 / (1.0 + math.exp(-first))
    p, q = np.array([good, 1.0 - good]), np.array([1.0 - good, good])

    def loss_beyond(second):
        """Of the pair of responses."""
        right = 1.0 / (1.0 + math.exp(-second))
        r, s = np.array([right, 1.0 - right]), np.array([1.0 - right, right])
        return hockey_stick(np.outer(p, r).ravel(), np.outer(q, s).ravel(), epsilon), (r, s)

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if loss_beyond(middle)[0] <= delta else (low, middle)
    composed, response = loss_beyond(low)
    telling = np.array([delta, 0.0, 1.0 - delta]), np.array([0.0, delta, 1.0 - delta])
    other = hockey_stick(*(np.outer(a, b).ravel() for a, b in ((p, telling[0]), (q, telling[1]))),
                         epsilon)  # fmt: skip
    assert composed <= delta
    assert other <= delta * (1 + 1e-12)
    whole = [np.concatenate([law[0] * response[i], law[1] * telling[i]])
             for i, law in enumerate((p, q))]  # fmt: skip
    truth = hockey_stick(*whole, epsilon)
    assert truth == pytest.approx(delta * (2.0 - good), rel=1e-6)
    assert truth > 1.3 * delta
    # A filter of the same total refuses one of the two.
    budget = BudgetFilter.of(epsilon=epsilon, delta=delta)
    prices = [budget.price(exact_trade_off(*pair)) for pair in ((p, q), response, telling)]
    assert sum(each.mu**2 for each in prices[:2]) > budget.mu**2
    assert sum(each.slack for each in prices) > budget.slack


def test_a_total_is_what_was_asked_for():
    for epsilon, delta, share in ((1.0, 1e-5, 0.5), (8.0, 1e-6, 0.1), (0.2, 1e-3, 0.9)):
        budget = BudgetFilter.of(epsilon=epsilon, delta=delta, share=share)
        assert float(gaussian_delta(epsilon, budget.mu)) + budget.slack <= delta
        assert float(budget.delta(epsilon)) == pytest.approx(delta, rel=1e-8)
        assert budget.epsilon(delta) == pytest.approx(epsilon, rel=1e-6)
        assert budget.epsilon(delta * share) == math.inf
        assert gaussian.delta(epsilon, budget.left.mu) <= delta


def test_refusals():
    budget = BudgetFilter(mu=1.0, slack=1e-6)
    with pytest.raises(ValueError, match="estimate"):
        budget.charge(bare(1.0, 1e-7, Kind.ESTIMATE))
    with pytest.raises(ValueError, match="too small for this release"):
        budget.charge(bare(1.0, 1e-7), slack=1e-9)
    with pytest.raises(ValueError, match="does not fit"):
        budget.charge(bare(0.1, 1e-5))
    with pytest.raises(TypeError, match="release"):
        budget.charge(1.0)
    with pytest.raises(TypeError, match="charge"):
        budget.spend(1.0)
    with pytest.raises(ValueError, match="mu"):
        BudgetFilter(mu=0.0, slack=0.1)
    with pytest.raises(ValueError, match="share"):
        BudgetFilter.of(epsilon=1.0, delta=1e-5, share=1.0)
    assert not budget.charges

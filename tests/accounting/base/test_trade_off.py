"""Attack rates and μ against every test of small pairs of laws, closed forms and quadrature."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from dptrain.accounting import Profile, TradeOff, account, profile, trade_off
from dptrain.core import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson
from dptrain.strategies import BandMF, Identity
from tests.oracles.random_mechanisms import subjects


def hockey_stick(p, q, epsilons):
    """δ of (p, q) at each ε, of laws on finitely many outcomes."""
    return np.maximum(p[None, :] - np.exp(epsilons)[:, None] * q[None, :], 0.0).sum(axis=1)


def limits_of(p, q, epsilons, floor=1e-3):
    sides = {"remove": hockey_stick(p, q, epsilons), "add": hockey_stick(q, p, epsilons)}
    return TradeOff(
        epsilon=tuple(epsilons.tolist()),
        floor=floor,
        kind=Kind.EXACT,
        accountant="sums",
        **{name: tuple(np.minimum(side, 1.0).tolist()) for name, side in sides.items()},
    )


def random_pair(rng, outcomes=7):
    p, q = rng.dirichlet(np.full(outcomes, 0.7), size=2) + 1e-6
    return p / p.sum(), q / q.sum()


def best_tests(p, q):
    """False and true positive rates of the likelihood-ratio tests (Neyman & Pearson)."""
    order = np.argsort(q / p)
    return (np.concatenate([[0.0], np.cumsum(law[order])]) for law in (q, p))


def gaussian_curve(alpha, mu):
    """The least false negative rate under μ-GDP."""
    return norm.cdf(norm.isf(np.minimum(alpha, 1.0)) - mu)


@pytest.mark.parametrize("seed", range(12))
def test_no_likelihood_ratio_test_does_better_than_is_claimed(seed):
    """All 2^7 tests of a random pair; with δ at every likelihood ratio the bound is attained."""
    rng = np.random.default_rng(seed)
    p, q = random_pair(rng)
    chosen = np.array(list(itertools.product((0.0, 1.0), repeat=len(p))))
    fpr, tpr = np.clip(chosen @ q, 0, 1), chosen @ p
    some = limits_of(p, q, np.unique(rng.uniform(0, 6, size=5).round(3)))
    assert (tpr <= some.true_positive_rate(fpr) + 1e-14).all()
    assert (tpr - fpr).max() <= some.advantage + 1e-14
    both = (fpr >= some.floor) & (1 - tpr >= some.floor)
    assert (1 - tpr >= gaussian_curve(fpr, some.mu) - 1e-12)[both].all()
    every = limits_of(p, q, np.unique(np.abs(np.log(p / q))))
    at, reached = best_tests(p, q)
    np.testing.assert_allclose(every.true_positive_rate(np.clip(at, 0, 1)), reached, atol=1e-12)
    np.testing.assert_allclose(every.advantage, np.abs(p - q).sum() / 2, rtol=1e-12)
    assert every.mu <= some.mu * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_mu_is_the_least_that_the_best_tests_allow(seed):
    """By the Neyman-Pearson curve of a random pair: at its corners and where it meets the floor."""
    p, q = random_pair(np.random.default_rng(100 + seed))
    found = limits_of(p, q, np.unique(np.abs(np.log(p / q))), floor=0.01)
    at, reached = best_tests(p, q)
    ends = [(0.01, np.interp(0.01, at, reached)), (np.interp(0.99, reached, at), 0.99)]
    kept = (at >= 0.01) & (reached <= 0.99)
    pairs = [*ends, *zip(at[kept], reached[kept], strict=True)]
    needed = max(norm.ppf(y) - norm.ppf(x) for x, y in pairs)
    assert found.mu == pytest.approx(needed, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_regret_and_floor_are_distances_of_the_curves(seed):
    """By bisection on a grid of α: κ with f(α + κ) - κ ≤ G(α); and f(α) ≥ G(α + floor) - floor."""
    p, q = random_pair(np.random.default_rng(200 + seed))
    floor = 0.02
    found = limits_of(p, q, np.array([0.0, 0.1, 0.3, 0.8, 1.5, 3.0]), floor=floor)
    alpha = np.linspace(0, 1, 40_001)
    low, high = 0.0, 1.0
    for _ in range(30):
        kappa = (low + high) / 2
        shifted = 1 - found.true_positive_rate(np.minimum(alpha + kappa, 1.0)) - kappa
        inside = (shifted <= gaussian_curve(alpha, found.mu)).all()
        low, high = (low, kappa) if inside else (kappa, high)
    assert found.regret == pytest.approx(high, abs=1e-4)  # the grid of α is 2.5e-5
    assert found.regret >= low - 1e-12
    least = 1 - found.true_positive_rate(alpha)
    assert (least >= gaussian_curve(alpha + floor, found.mu) - floor - 1e-12).all()


def one_step(sigma, p):
    scheme = Poisson(probability=p, dataset_size=10_000, steps=1)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("sigma", [0.5, 2.0, 20.0])
def test_the_gaussian_mechanism_has_its_mu_and_no_regret(sigma):
    """μ = 1/σ. Tangents h apart in the threshold meet about μh²/8 above the curve, in quantiles."""
    subject, mu = one_step(sigma, 0.5), 1.0 / sigma
    shown = account(subject, delta=1e-6, accountant="gaussian")
    found = trade_off(subject, shown, accountant="gaussian", points=401)
    h = np.diff(found.epsilon).max() / mu
    assert mu <= found.mu <= mu * (1 + 1.05 * h**2 / 8)
    # The derivative of δ(ε)/(1 + e^ε) in μ is at most φ(0)/2.
    assert 0 <= found.regret <= 0.2 * (found.mu - mu) + 1e-9
    rates = np.array([1e-5, 1e-3, 0.1, 0.5, 0.9])
    true = norm.cdf(norm.ppf(rates) + mu)
    reached = found.true_positive_rate(rates)
    assert (reached >= true).all()
    np.testing.assert_allclose(reached, true, rtol=2e-3)
    fine = trade_off(subject, shown, accountant="gaussian", points=4001)
    assert mu <= fine.mu <= mu * (1 + 1.05 * h**2 / 800)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_randomized_response_in_closed_form(epsilon):
    """f(α) = max(0, 1 - e^ε α, e^-ε (1 - α)), whose corner has both rates 1/(1 + e^ε)."""
    lie = 1 / (1 + math.exp(epsilon))
    law = np.array([1 - lie, lie])
    found = limits_of(law, law[::-1], np.array([0.0, epsilon / 2, epsilon]), floor=1e-6)
    assert found.mu == pytest.approx(2 * norm.isf(lie), rel=1e-9)
    assert found.advantage == pytest.approx(math.tanh(epsilon / 2), rel=1e-12)
    alpha = np.linspace(0, 1, 11)
    curve = np.maximum(1 - math.exp(epsilon) * alpha, math.exp(-epsilon) * (1 - alpha))
    np.testing.assert_allclose(found.true_positive_rate(alpha), 1 - curve, atol=1e-13)
    alone = TradeOff(
        epsilon=(epsilon,), remove=(0.0,), add=(0.0,), floor=1e-6, kind=Kind.EXACT, accountant="x"
    )
    np.testing.assert_allclose(alone.true_positive_rate(alpha), 1 - curve, atol=1e-13)
    assert alone.mu is None
    assert "one (ε, δ)" in alone.refusal


@pytest.mark.parametrize(("sigma", "p"), [(0.7, 0.1), (1.0, 0.01), (2.0, 0.3)])
def test_a_sampled_gaussian_by_its_thresholds(sigma, p):
    """Its likelihood ratio grows with y, so the best tests are y > t, with rates in closed form."""
    subject = one_step(sigma, p)
    found = trade_off(subject, account(subject, delta=1e-5))
    t = np.linspace(-8, 8, 4001) * sigma + 0.5
    fpr = norm.sf(t / sigma)
    tpr = (1 - p) * fpr + p * norm.sf((t - 1) / sigma)
    assert (found.true_positive_rate(fpr) >= tpr).all()
    kept = fpr >= 1e-5
    np.testing.assert_allclose(found.true_positive_rate(fpr[kept]), tpr[kept], rtol=2e-3)
    kept &= 1 - tpr >= 1e-5
    needed = (norm.ppf(tpr[kept]) - norm.ppf(fpr[kept])).max()
    assert needed <= found.mu <= needed * 1.005


@pytest.mark.parametrize("family", ["poisson", "balls_in_bins"])
def test_attacks_on_small_mechanisms_stay_below_the_bound(family):
    """Likelihood-ratio tests of what is released by runs of a step or two, integrated."""
    seen = 0
    for _, subject in subjects(family, 0, 12):
        pair = subject.pair()
        if pair.numbers > 2 or seen == 2:
            continue
        seen += 1
        side = pair.evidence(size=1, seed=0).remove
        order = np.argsort(-side.losses)
        tpr = np.cumsum(side.masses[order])
        fpr = np.cumsum((side.masses * np.exp(-side.losses))[order])
        with pytest.warns(UserWarning, match="is not below"):  # δ above 1/N: N is 10 here
            shown = account(subject.mechanism, delta=0.2, adjacency=subject.adjacency)
        found = trade_off(subject.mechanism, shown, floor=1e-4)
        picked = np.linspace(0, len(tpr) - 1, 2000).astype(int)
        bound = found.true_positive_rate(np.minimum(fpr[picked], 1.0))
        assert (tpr[picked] * (1 - side.error) <= bound + 1e-12).all()
        both = (fpr[picked] >= 1e-4) & (1 - tpr[picked] >= 1e-4 + side.error)
        gaussian = 1 - gaussian_curve(fpr[picked], found.mu)
        assert (tpr[picked] <= gaussian + side.error)[both].all()
    assert seen


@pytest.mark.slow
def test_no_epsilon_beyond_the_guarantees_matters():
    """Above δ bounds at ε with e^ε > e^ε₀ + 1 cut nothing off (the theorem's last part)."""
    subject = MatrixMechanism(
        scheme=Poisson(probability=0.05, dataset_size=1000, steps=40),
        strategy=Identity(),
        noise_multiplier=1.0,
    )
    shown = account(subject, delta=1e-5)
    near = trade_off(subject, shown)
    more = np.concatenate([near.epsilon, near.epsilon[-1] + np.linspace(0.1, 20, 100)])
    far = TradeOff.of(shown, profile(subject, more))
    rates = np.geomspace(1e-5, 1, 50)
    np.testing.assert_allclose(
        near.true_positive_rate(rates), far.true_positive_rate(rates), rtol=1e-12
    )


def test_only_a_proven_profile_counts():
    subject = one_step(1.0, 0.1)
    shown, curve = account(subject, delta=1e-5), profile(subject)
    assert TradeOff.of(shown, curve).mu is not None
    drawn = dataclasses.replace(curve, kind=Kind.CONFIDENCE)
    alone = TradeOff.of(shown, drawn)
    assert alone == TradeOff.of(shown)
    assert alone.epsilon == (shown.epsilon,)
    expected = math.exp(shown.epsilon) * 0.01 + shown.delta
    assert alone.true_positive_rate(0.01) == pytest.approx(expected, rel=1e-12)
    guessed = dataclasses.replace(shown, kind=Kind.ESTIMATE)
    assert TradeOff.of(guessed, curve).kind is Kind.ESTIMATE
    verified = dataclasses.replace(shown, kind=Kind.VERIFIED)
    assert TradeOff.of(verified, curve).kind is Kind.VERIFIED


def test_without_noise_every_attack_succeeds():
    subject = one_step(0.0, 0.5)
    found = trade_off(subject, account(subject, delta=1e-5))
    assert found.advantage == 1.0
    assert (found.true_positive_rate([0.0, 0.5]) == 1.0).all()
    assert found.mu is None
    noisy = one_step(0.05, 1.0)  # 20-GDP: both rates below 1e-5 at once
    loud = trade_off(noisy, account(noisy, delta=1e-5))
    assert loud.mu is None
    assert "floor" in loud.refusal
    assert loud.regret is None


def test_a_simulated_guarantee_has_its_point():
    scheme = MinSep.for_batch_size(batch_size=200, dataset_size=4000, min_sep=4, steps=60)
    subject = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=4), noise_multiplier=2.0)
    shown = dataclasses.replace(
        account(subject, delta=1e-5, accountant="min-sep-renyi"), kind=Kind.VERIFIED
    )
    found = trade_off(subject, shown)
    assert found.kind is Kind.VERIFIED
    assert found.mu is None


def test_json_both_ways_and_what_is_wrong_is_named():
    subject = one_step(1.0, 0.1)
    shown = account(subject, delta=1e-5)
    found = trade_off(subject, shown, points=21)
    assert TradeOff.from_json(found.to_json()) == found
    assert found.summary()["mu"] == found.mu
    assert f"{math.ceil(found.mu * 1e4) / 1e4:.4g}" in str(found)
    with pytest.raises(ValueError, match=r"missing or unknown \['floor'\]"):
        TradeOff.from_json(found.to_json().replace('"floor": 1e-05, ', ""))
    with pytest.raises(ValueError, match="strictly ascending"):
        dataclasses.replace(found, epsilon=(1.0,) * len(found.epsilon))
    with pytest.raises(ValueError, match="values for"):
        dataclasses.replace(found, add=(0.5,))
    with pytest.raises(ValueError, match="floor=0"):
        trade_off(subject, shown, floor=0.0)
    with pytest.raises(ValueError, match="not"):
        trade_off(one_step(2.0, 0.1), shown)
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        found.true_positive_rate(1.5)


def test_bounds_that_disagree_are_brought_together():
    """Of loose numbers the tightest reading counts: a bound in one direction serves both."""
    curve = Profile(
        epsilon=np.array([0.0, 1.0, 2.0]),
        remove=np.array([1.0, 0.9, 0.05]),
        add=np.array([0.3, 0.2, 0.1]),
        kind=Kind.UPPER_BOUND,
        accountant="x",
    )
    shown = dataclasses.replace(account(one_step(1.0, 0.1), delta=1e-5), epsilon=math.inf)
    found = TradeOff.of(shown, curve)
    assert found.advantage <= 0.3 * (1 + 1e-12)
    alpha = np.linspace(0, 1, 1001)
    lines = [0.05 + math.exp(2) * alpha, 0.3 + alpha]
    lines += [1 - math.exp(-e) * (1 - d - alpha) for e, d in ((1, 0.2), (2, 0.1))]
    np.testing.assert_allclose(
        found.true_positive_rate(alpha), np.clip(np.min(lines, axis=0), alpha, 1), atol=1e-12
    )

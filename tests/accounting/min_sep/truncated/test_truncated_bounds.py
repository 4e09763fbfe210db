"""What cutting batches of b-min-sep sampling costs at most, against brute force over all draws."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import binom

from dptrain.accounting import account, accountant_named, calibrate, find_accountants
from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.min_sep import curve as curves
from dptrain.accounting.min_sep import law as laws
from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.law import RarelyCut
from dptrain.accounting.min_sep.renyi import MinSepRenyi
from dptrain.accounting.min_sep.truncated import FullBatches
from dptrain.accounting.min_sep.truncated.curve import truncated_curve
from dptrain.core import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson
from dptrain.strategies import BandMF, Dense
from dptrain.testing import AccountantContract
from tests.oracles import true_delta
from tests.oracles.enumeration import min_sep_cold, min_sep_warm, toeplitz

EPSILONS = np.array([0.0, 0.1, 0.4, 1.0, 2.0, 4.0])


def banded(*coefficients):
    return BandMF(bands=len(coefficients), coefficients=coefficients)


def whole(mechanism):
    scheme = dataclasses.replace(mechanism.scheme, max_batch_size=None)
    return dataclasses.replace(mechanism, scheme=scheme)


def drawn_mechanism(rng, size, steps):
    """A random small mechanism, with a cap that is met often, or not at all."""
    b = int(rng.integers(1, 4))
    scheme = MinSep(
        probability=float(rng.choice([0.03, 0.2, 0.6, 1.0])),
        min_sep=b,
        dataset_size=size,
        steps=steps,
        warm_start=bool(rng.random() < 0.5),
        max_batch_size=int(rng.integers(1, size + 1)),
    )
    strategy = banded(1.0, *rng.uniform(0.0, 0.9, int(rng.integers(1, min(b, steps) + 1)) - 1))
    return MatrixMechanism(
        scheme=scheme, strategy=strategy, noise_multiplier=float(rng.uniform(0.5, 2.5))
    )


def truth(mechanism, rng, *, cut=True):
    """The pair of laws of the run on numbers: the example's gradients are 1, others' random."""
    scheme = mechanism.scheme
    largest = scheme.max_batch_size if cut else scheme.dataset_size
    law = true_delta.truncated_min_sep(
        scheme.dataset_size, scheme.steps, scheme.probability, scheme.min_sep, largest,
        warm=scheme.warm_start,
    )  # fmt: skip
    others = rng.choice([-1.0, -1.0, 1.0, 0.3], size=(scheme.dataset_size - 1, 1))
    gradients = np.vstack([[[1.0]], others]), np.vstack([[[0.0]], others])
    matrix = toeplitz(mechanism.strategy.first_column(scheme.steps), scheme.steps)
    return true_delta.of_runs((law, law), gradients, matrix, mechanism.noise_multiplier)


def stated(mechanism, remove, add):
    """Values of δ(ε) of whole batches, and what the accountants add to them."""
    curve = truncated_curve(mechanism)
    more = curve.losses(mechanism.noise_multiplier, EPSILONS)
    return np.asarray(remove) + more[0], np.asarray(add) + more[1]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    "seed", [*range(24), *(pytest.param(i, marks=pytest.mark.slow) for i in range(24, 90))]
)
def test_bounds_are_above_brute_force_over_everybodys_draws(seed):
    """Exact δ of whole batches plus the loss, and the accountants' own values, for ≤ 2 numbers."""
    rng = np.random.default_rng([7, seed])
    steps = 1 + seed % 2
    mechanism = drawn_mechanism(rng, int(rng.integers(2, 5)), steps)
    pair = truth(mechanism, rng)
    lower = pair.evidence(size=0, seed=0).lower(EPSILONS)
    # Nobody else's gradient matters while nothing is cut.
    law = (min_sep_warm if mechanism.scheme.warm_start else min_sep_cold)(
        steps, mechanism.scheme.probability, mechanism.scheme.min_sep
    )
    matrix = toeplitz(mechanism.strategy.first_column(steps), steps)
    uncut = true_delta.of_patterns(law, matrix, mechanism.noise_multiplier)
    known = uncut.evidence(size=0, seed=0)
    exact = [[side.value(e) for e in EPSILONS] for side in (known.remove, known.add)]
    profile = MinSepRenyi().profile(mechanism, EPSILONS)
    for least, bound, claimed in zip(
        lower, stated(mechanism, *exact), (profile.remove, profile.add), strict=True
    ):
        assert (bound * (1 + 1e-2) + 1e-12 >= least).all()
        assert (claimed >= least).all()


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 12))]
)
def test_bounds_are_above_longer_runs(seed):
    """Up to four steps of three examples, simulated: lower limits of 6 standard deviations."""
    rng = np.random.default_rng([8, seed])
    mechanism = drawn_mechanism(rng, 3, 3 + seed % 2)
    lower = truth(mechanism, rng).lower(EPSILONS, size=60_000, seed=seed)
    profile = MinSepRenyi().profile(mechanism, EPSILONS)
    for least, claimed in zip(lower, (profile.remove, profile.add), strict=True):
        assert (claimed >= least).all()


def exact(mechanism, sigma):
    """The profile of whole batches in both directions, integrated."""
    scheme = mechanism.scheme
    law = (min_sep_warm if scheme.warm_start else min_sep_cold)(
        scheme.steps, scheme.probability, scheme.min_sep
    )
    matrix = toeplitz(mechanism.strategy.first_column(scheme.steps), scheme.steps)
    return true_delta.of_patterns(law, matrix, sigma).evidence(size=0, seed=0)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    "seed", [*range(16), *(pytest.param(i, marks=pytest.mark.slow) for i in range(16, 80))]
)
def test_two_steps_hold_at_any_cap(seed):
    rng = np.random.default_rng([9, seed])
    mechanism = drawn_mechanism(rng, int(rng.integers(2, 5)), 1 + seed % 2)
    sigma, gap = mechanism.noise_multiplier, EPSILONS[1:]
    lower = truth(mechanism, rng).evidence(size=0, seed=0).lower(gap)
    plain, doubled = exact(mechanism, sigma), exact(mechanism, sigma / 2)
    for side, least in enumerate(lower):
        first = (doubled.remove, plain.remove)[side]
        second = (plain.add, doubled.add)[side]
        for share in (0.1, 0.4, 0.8):
            for epsilon, true in zip(gap, least, strict=True):
                rest = math.exp((1 - share) * epsilon) * second.value(share * epsilon)
                bound = first.value((1 - share) * epsilon) + rest
                assert true <= bound * (1 + 2e-2) + 1e-12


def test_two_steps_without_doubling_would_be_false():
    """A full step of a large batch: who is drawn is nearly always kept and displaces another."""
    p, sigma, epsilon = 0.3, 1.0, 6.0
    limit = -math.log1p(-p)
    kept = p * 0.9
    worlds = (
        true_delta.World(np.array([kept, 1 - kept]), np.array([[v], [0.0]])) for v in (2.0, -1.0)
    )
    pair = true_delta.TruePair((true_delta.Branch(1.0, *worlds),), sigma)
    (true,), (other,) = pair.evidence(size=0, seed=0).lower([epsilon + limit])
    scheme = MinSep(probability=p, min_sep=1, dataset_size=100, steps=1, max_batch_size=9)
    mechanism = MatrixMechanism(scheme=scheme, strategy=banded(1.0), noise_multiplier=sigma)
    without, doubled = exact(mechanism, sigma), exact(mechanism, sigma / 2)
    assert without.remove.value(epsilon) < 0.1 * true
    assert true <= doubled.remove.value(epsilon)
    assert other <= without.remove.value(epsilon)
    curve = truncated_curve(mechanism)
    assert curve.two_steps(0, sigma, epsilon + limit) >= true
    assert curve.two_steps(1, sigma, epsilon + limit) >= other


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(("p", "b", "steps"), [(0.2, 2, 5), (0.5, 3, 5), (0.05, 1, 4), (0.3, 7, 4)])
def test_a_pattern_that_avoids_steps_is_nearly_as_likely(p, b, steps, warm):
    """f ≤ g Π(1 + ρ_t e^{u_t - h_t}) for every output and every set of steps to be avoided."""
    rng, sigma = np.random.default_rng(4), 0.8
    coefficients = [1.0, 0.6, 0.3][: min(b, 3)]
    matrix = toeplitz(coefficients, steps)
    law = (min_sep_warm if warm else min_sep_cold)(steps, p, b)
    scheme = MinSep(
        probability=p, min_sep=b, dataset_size=9, steps=steps, warm_start=warm, max_batch_size=2
    )
    odds = FullBatches.of(scheme).odds
    outputs = np.concatenate(
        [2.0 * rng.standard_normal((30, steps)), 3.0 * matrix.T[:2], [0 * matrix[0]]]
    )
    means = law.patterns @ matrix.T
    terms = np.exp((outputs @ means.T - (means**2).sum(axis=1) / 2) / sigma**2) * law.probabilities
    gain = np.exp((outputs @ matrix - (matrix**2).sum(axis=0) / 2) / sigma**2)
    for full in itertools.product((0, 1), repeat=steps):
        at = np.array(full, dtype=bool)
        avoiding = ~law.patterns[:, at].any(axis=1)
        f, g = terms.sum(axis=1), terms[:, avoiding].sum(axis=1)
        assert (f <= g * np.prod(1.0 + odds * gain[:, at], axis=1) * (1 + 1e-12)).all()


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("p", "b", "largest"), [(0.3, 2, 1), (0.3, 2, 2), (1.0, 3, 1), (0.1, 9, 3), (0.4, 1, 4)]
)
def test_full_steps_by_enumeration(p, b, largest, warm):
    steps, size = 4, 4
    scheme = MinSep(
        probability=p, min_sep=b, dataset_size=size, steps=steps, warm_start=warm,
        max_batch_size=largest,
    )  # fmt: skip
    law = (min_sep_warm if warm else min_sep_cold)(steps, p, b)
    full = drawn = 0.0
    for everybody in itertools.product(range(len(law.probabilities)), repeat=size):
        chance = math.prod(law.probabilities[list(everybody)])
        at = law.patterns[list(everybody[1:])].sum(axis=0) >= largest
        full += chance * at.sum()
        drawn += chance * (at * law.patterns[everybody[0]]).sum()
    found = FullBatches.of(scheme)
    assert full * (1 - 1e-12) <= found.steps <= full * (1 + 1e-8) + 1e-280
    assert drawn * (1 - 1e-12) <= found.drawn <= drawn * (1 + 1e-8) + 1e-280


def production(largest):
    return MinSep.for_batch_size(
        batch_size=1793, dataset_size=14_745_600, min_sep=256, steps=7200, max_batch_size=largest
    )


def test_full_steps_at_the_size_of_production():
    scheme = production(2048)
    p0 = 1793 / 14_745_600
    tail = math.exp(logsumexp(binom.logpmf(np.arange(2048, 4000), scheme.dataset_size - 1, p0)))
    found = FullBatches.of(scheme)
    assert found.drawn == pytest.approx(7200 * p0 * tail, rel=1e-6)
    assert found.steps == pytest.approx(7200 * tail, rel=1e-6)
    assert found.drawn < 0.14 * 1.301e-8  # of the δ that is asked for in practice


def test_the_default_follows_from_how_often_batches_are_cut():
    def default(largest):
        asked = MatrixMechanism(
            scheme=production(largest), strategy=banded(1.0, 0.5), noise_multiplier=1.0
        )
        (found,) = find_accountants(asked)
        return found.name

    assert accountant_named("truncated-min-sep-importance") is accountant_named(
        "min-sep-importance"
    )
    assert accountant_named("truncated-min-sep-renyi") is accountant_named("min-sep-renyi")
    assert default(2048) == "min-sep-importance"
    assert default(1850) == "min-sep-importance"
    asked = MatrixMechanism(
        scheme=production(1850), strategy=banded(1.0, 0.5), noise_multiplier=1.0
    )
    assert MinSepImportance().cost(asked) is Cost.HOURS
    with pytest.raises(ValueError, match=r"larger max_batch_size.*min-sep-renyi"):
        calibrate(scheme=asked.scheme, strategy=asked.strategy, epsilon=10.0, delta=1.301e-8)


def small(largest=110, **options):
    return MinSep(
        probability=0.05, min_sep=4, dataset_size=1000, steps=24, max_batch_size=largest, **options
    )


@pytest.mark.slow
def test_a_cap_of_the_whole_dataset_changes_nothing():
    asked = MatrixMechanism(scheme=small(1000), strategy=banded(1.0, 0.5), noise_multiplier=1.0)
    ours, theirs = MinSepRenyi(), MinSepRenyi()
    found, expected = ours.profile(asked, EPSILONS), theirs.profile(whole(asked), EPSILONS)
    np.testing.assert_array_equal(found.remove, expected.remove)
    np.testing.assert_array_equal(found.add, expected.add)
    plain = theirs.guarantee(whole(asked), delta=1e-5)
    assert ours.guarantee(asked, delta=1e-5).epsilon == plain.epsilon


def test_terms_are_those_of_whole_batches_and_the_loss():
    asked = MatrixMechanism(scheme=small(), strategy=banded(1.0, 0.5), noise_multiplier=1.0)
    sigma, epsilon = 1.0, 1.0
    cut = RarelyCut(asked.scheme, truncated_curve(asked)).terms(sigma)(epsilon)
    plain = MinSepImportance().law(whole(asked)).terms(sigma)(epsilon)
    losses = truncated_curve(asked).losses(sigma, np.array([epsilon]))
    for (loss,), direction in zip(losses, ("remove", "add"), strict=True):
        assert loss > 0.0
        assert cut[direction].ceiling == plain[direction].ceiling + loss
        drawn, without = (
            each[direction].draw(np.random.default_rng(3), 200) for each in (cut, plain)
        )
        np.testing.assert_array_equal(drawn, without + loss)
        assert (drawn <= cut[direction].ceiling).all()


@pytest.mark.slow
def test_dear_orders_come_last_under_a_cap_too(monkeypatch):
    """Order 2 alone is quick here: the first σ is by that, the better one by all orders."""
    scheme = MinSep(probability=0.02, min_sep=4, dataset_size=1000, steps=40, max_batch_size=120)
    asked = MatrixMechanism(scheme=scheme, strategy=banded(1.0, 0.5, 0.3), noise_multiplier=1.0)
    monkeypatch.setattr(laws, "_QUICK_WORK", 40 * 4)
    monkeypatch.setattr(curves, "_NO_WORK", 0)  # large orders by two copies only
    bounds = MinSepImportance().law(asked)
    quick = bounds.least_sigma(6.0, 1e-6, progress=False)
    better = bounds.better_sigma(quick, 6.0, 1e-6, progress=False)
    needed = MinSepRenyi().calibrate(asked, epsilon=6.0, delta=1e-6).noise_multiplier
    assert needed < 0.9 * quick
    assert better == pytest.approx(needed, rel=2e-3)
    assert truncated_curve(asked).epsilon(quick, 1e-6) <= 6.0
    # Messages are made once for a σ, whatever is asked of it.
    assert bounds.at(1.0) is bounds.at(1.0)


def test_no_loss_beyond_what_an_absent_example_could_have():
    """From -log Pr[x = 0] on only steps at which the example itself is drawn count."""
    asked = MatrixMechanism(scheme=small(), strategy=banded(1.0), noise_multiplier=1.0)
    curve = truncated_curve(asked)
    limit = curve.whole.law.add_limit
    around = np.array([limit * (1 - 1e-9), limit])
    below, beyond = curve.losses(1.0, around)[1]
    assert beyond == pytest.approx(
        float(curve.batches.drawn * curve.unamplified(1.0, around)[1]), rel=1e-9
    )
    assert below > 1.5 * beyond


def test_batches_that_are_never_cut_have_no_full_steps():
    with pytest.raises(ValueError, match="max_batch_size=None"):
        FullBatches.of(dataclasses.replace(small(), max_batch_size=None))


def test_refusals_name_the_reason():
    for member in (MinSepRenyi(), MinSepImportance()):
        for scheme, strategy, reason in (
            (
                Poisson(probability=0.1, dataset_size=9, steps=2, max_batch_size=4),
                banded(1.0),
                "max_batch_size",
            ),
            (small(), Dense(matrix=np.eye(24)), "banded Toeplitz"),
            (small(), banded(1.0, 0.5, 0.4, 0.3, 0.2), "at most b bands"),
        ):
            found = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
            assert reason in (member.refusal(found) or "")
    wide = MinSep(
        probability=1e-6, min_sep=10**6, dataset_size=1000, steps=10**6, max_batch_size=90
    )
    found = MatrixMechanism(scheme=wide, strategy=banded(1.0), noise_multiplier=1.0)
    assert "smaller min_sep" in (MinSepRenyi().refusal(found) or "")


class TestRenyiContract(AccountantContract):
    delta = 1e-4
    deepest_delta = 1e-7

    def accountant(self):
        return MinSepRenyi()

    def mechanism(self):
        return MatrixMechanism(scheme=small(), strategy=banded(1.0, 0.5), noise_multiplier=1.0)

    def refused_mechanism(self):
        return dataclasses.replace(self.mechanism(), strategy=banded(1.0, 0.5, 0.4, 0.3, 0.2))


class TestImportanceContract(AccountantContract):
    simulated = True
    delta = 1e-4
    deepest_delta = 1e-6

    def accountant(self):
        return MinSepImportance(seed=11, progress=False)

    def mechanism(self):
        return MatrixMechanism(scheme=small(), strategy=banded(1.0, 0.5), noise_multiplier=1.0)

    def refused_mechanism(self):
        return dataclasses.replace(self.mechanism(), strategy=banded(1.0, 0.5, 0.4, 0.3, 0.2))


@pytest.mark.slow
def test_a_cap_that_is_rarely_met_costs_hardly_any_noise():
    strategy = banded(1.0, 0.5)
    options = {"strategy": strategy, "epsilon": 1.0, "delta": 1e-5}
    cut = calibrate(scheme=small(), accountant=MinSepImportance(seed=1), **options)
    plain = calibrate(
        scheme=dataclasses.replace(small(), max_batch_size=None),
        accountant=MinSepImportance(seed=1),
        **options,
    )
    assert cut.guarantee.kind is Kind.VERIFIED
    assert cut.guarantee.certificate["law"]["max_batch_size"] == 110
    assert cut.mechanism.noise_multiplier <= 1.02 * plain.mechanism.noise_multiplier


def test_where_batches_are_often_cut_the_statement_says_what_to_do():
    asked = MatrixMechanism(scheme=small(60), strategy=banded(1.0, 0.5), noise_multiplier=1.0)
    found = MinSepRenyi().guarantee(asked, delta=1e-5)
    gaussian = account(asked, delta=1e-5, accountant="gaussian")
    assert found.epsilon <= gaussian.epsilon * (1 + 1e-6)
    assert any("a larger max_batch_size" in note for note in found.notes)

"""Revealed user draws against enumeration of the draws, of controllers and of whole graphs."""

import functools
import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from dptrain.accounting import account, accountants_for, calibrate, find_accountants
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.accounting.users.revealed import RevealedDraws
from dptrain.accounting.users.revealed_law import _DecayingWindow, revealed_law
from dptrain.accounting.users.squared_norm_grid import SquaredNormGrid
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.schemes.min_sep import MinSep
from dptrain.sampling.schemes.shuffled import Shuffled
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.user_fixed import UserFixed
from dptrain.sampling.users.user_min_sep import UserMinSep
from dptrain.strategies import BSR, BandMF, Dense, Identity
from dptrain.strategies.trees.tree import TreeRestart
from dptrain.testing import AccountantContract
from tests.helpers.min_sep_losses import min_sep_means
from tests.oracles.enumeration import toeplitz
from tests.oracles.quadrature import gaussian_delta

EPSILONS = np.array([0.0, 0.4, 1.5])


def graph(k=2):
    """Facts of a graph are all that accountants read."""
    return AttributionGraph(
        examples=800, users=800, edges=800, max_examples=k, fingerprint="0" * 64
    )


def mechanism(k, p, b, n, *, sigma=1.3, strategy=None, exclusion="sampling"):
    scheme = UserMinSep(
        graph=graph(k), probability=p, min_sep=b, steps=n, batch_size=10, exclusion=exclusion
    )
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def given(matrix, x, sigma, epsilon):
    shift = float(np.linalg.norm(matrix @ np.asarray(x, float))) / sigma
    return gaussian_delta(epsilon, shift) if shift > 0 else 0.0


def by_enumeration(k, p, b, matrix, sigma, epsilon):
    """E_x[δ_Gauss(ε; ‖C x‖/σ)] over all draws of a user with exactly k examples."""
    total = 0.0
    for draws in itertools.product(range(k + 1), repeat=len(matrix)):
        x = [0 if any(draws[max(0, t - b + 1) : t]) else draw for t, draw in enumerate(draws)]
        chance = math.prod(binom.pmf(draws, k, p))
        total += chance * given(matrix, x, sigma, epsilon)
    return total


def proven(mechanism, **asked):
    """What follows without samples: from revealed draws, or from the sensitivity."""
    names = "revealed-draws" + "-any-blocking" * (mechanism.scheme.exclusion == "participation")
    found = (account(mechanism, accountant=name, **asked) for name in (names, "gaussian"))
    return min(found, key=lambda each: (each.epsilon, each.delta))


class TestRevealedDraws(AccountantContract):
    def accountant(self):
        return RevealedDraws()

    def mechanism(self):
        return mechanism(2, 0.02, 4, 60, sigma=2.0, strategy=BSR(bands=3))

    def refused_mechanism(self):
        return mechanism(2, 0.02, 4, 60, strategy=BSR(bands=5))


class TestRevealedDrawsAnyBlocking(AccountantContract):
    def accountant(self):
        return RevealedDraws()

    def mechanism(self):
        return mechanism(
            2, 0.02, 4, 30, sigma=2.0, strategy=BSR(bands=3), exclusion="participation"
        )

    def refused_mechanism(self):
        return mechanism(2, 0.02, 4, 30, strategy=BSR(bands=5), exclusion="participation")


class TestGaussianForUsers(AccountantContract):
    def accountant(self):
        return UnsampledGaussian()

    def mechanism(self):
        return mechanism(3, 0.02, 20, 60, sigma=6.0, strategy=BSR(bands=30))


MATRICES = {
    "identity": (np.eye(4), 2),
    "cut columns": (toeplitz([1.0, 0.5], 4), 2),
    "three bands": (toeplitz([1.0, 0.6, 0.3], 5), 3),
    "signs": (toeplitz([1.0, -0.7], 4), 2),
    "unequal": (np.diag([0.3, 1.0, 0.7, 2.0]), 1),
}


@pytest.mark.sample(every=13)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("k", "p"), [(1, 0.3), (2, 0.05), (3, 0.4)])
def test_delta_against_enumeration(name, k, p):
    matrix, bands = MATRICES[name]
    for b in (bands, bands + 1):
        both = mechanism(k, p, b, len(matrix), strategy=Dense(matrix=matrix))
        found = RevealedDraws().profile(both, EPSILONS)
        np.testing.assert_array_equal(found.remove, found.add)
        for epsilon, delta in zip(EPSILONS, found.delta, strict=True):
            exact = max(
                by_enumeration(fewer, p, b, matrix, 1.3, epsilon) for fewer in range(1, k + 1)
            )
            assert exact <= delta
            # Norms are rounded up to 64 levels, unless they are all equal.
            assert delta <= exact * (1 + (1e-8 if name == "identity" else 0.05))


@pytest.mark.slow
def test_fewer_examples_can_be_worse():
    # p = .5, b = 2: whoever has six examples draws one nearly always and is nearly always barred.
    grid = SquaredNormGrid.of(
        np.ones(400), examples=6, probability=0.5, most=7200.0, operations=1e6
    )
    means = [
        float(revealed_law(grid, examples=k, probability=0.5, min_sep=2) @ grid.squared())
        for k in (1, 6)
    ]
    # Per step (1-p)^k E[X²], .25 and .164, and E[X²] = 10.5 at the first.
    np.testing.assert_allclose(means, [0.5 + 399 * 0.25, 10.5 + 399 * 10.5 / 64], rtol=1e-9)
    claims = [proven(mechanism(k, 0.5, 2, 400, sigma=20.0), epsilon=0.1).delta for k in (1, 6)]
    assert claims[1] >= claims[0]
    shifts = np.sqrt(grid.squared()[1:]) / 20.0
    law = revealed_law(grid, examples=6, probability=0.5, min_sep=2)[1:]
    assert claims[0] > 1.05 * law @ [gaussian_delta(0.1, shift) for shift in shifts]


def test_law_of_the_sum_by_simulation():
    # n = 200, b = 7, k = 3: mean and chance of 0 at 6 sigma, mass 1.
    n, b, k, p, runs = 200, 7, 3, 0.02, 40_000
    grid = SquaredNormGrid.of(np.ones(n), examples=k, probability=p, most=9.0 * 29, operations=1e6)
    law = revealed_law(grid, examples=k, probability=p, min_sep=b)
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    assert law[-1] < 1e-90
    rng = np.random.default_rng(20)
    draws = rng.binomial(k, p, size=(runs, n))
    last = np.full(runs, -b)
    total = np.zeros(runs)
    for t in range(n):
        drawn = draws[:, t] > 0
        total += np.where(t - last >= b, draws[:, t] ** 2, 0)
        last[drawn] = t
    mean = float(law[:-1] @ np.arange(grid.size))
    assert abs(total.mean() - mean) <= 6 * total.std() / math.sqrt(runs)
    for level in (0, 5, 12):
        exact = law[: level + 1].sum()
        seen = (total <= level).mean()
        assert abs(seen - exact) <= 6 * math.sqrt(exact * (1 - exact) / runs) + 1e-9


@pytest.mark.parametrize("operations", [1.0, 1e5, 1e9])
def test_coarse_grids_bound_fine_ones_and_lose_no_mass(operations):
    norms = np.geomspace(0.02, 1.0, 60)
    options = {"examples": 2, "probability": 0.03}
    fine = SquaredNormGrid.of(norms, most=4.0 * norms.sum(), operations=1e12, **options)
    grid = SquaredNormGrid.of(norms, most=4.0 * norms.sum(), operations=operations, **options)
    law, best = (revealed_law(g, min_sep=1, **options) for g in (grid, fine))
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    assert law[-1] < 1e-90 or grid.unit * (grid.size - 1) >= grid.most
    exact = norms.sum() * (2 * 0.03 * 0.97 + 4 * 0.03**2)
    assert exact <= best @ fine.squared() <= law @ grid.squared() * (1 + 1e-9)
    assert best @ fine.squared() <= exact + 60 * 0.06 * fine.unit


@pytest.mark.parametrize("width", [0, 1, 3, 20])
def test_window_sums(width):
    rng = np.random.default_rng(3)
    vectors, decay = rng.random((17, 4)), 0.8
    window = _DecayingWindow(width, decay, 4)
    for t, vector in enumerate(vectors):
        total, left = window.push(vector)
        expected = sum((decay**i * vectors[t - i] for i in range(min(width, t + 1))), np.zeros(4))
        np.testing.assert_allclose(total, expected, rtol=1e-14)
        gone = decay**width * vectors[t - width] if t >= width else np.zeros(4)
        np.testing.assert_allclose(left, gone, rtol=1e-14)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("exclusion", ["sampling", "participation"])
def test_monotone_and_below_the_unamplified_bound(exclusion):
    claim = functools.partial(mechanism, exclusion=exclusion, strategy=BandMF(bands=3))
    delta = [proven(claim(k, 0.03, 5, 40, sigma=3.0), epsilon=1.0).delta for k in (1, 2, 4)]
    assert delta[0] < delta[1] < delta[2]
    delta = [proven(claim(2, p, 5, 40, sigma=3.0), epsilon=1.0).delta for p in (0.01, 0.02, 0.04)]
    assert delta[0] < delta[1] < delta[2]
    for p in (0.001, 0.3, 1.0):
        both = claim(2, p, 5, 40, sigma=3.0)
        for deep in (1e-3, 1e-12, 1e-250):
            best = proven(both, delta=deep).epsilon
            assert 0 < best <= account(both, delta=deep, accountant="gaussian").epsilon


def test_blocking_others_is_never_better_than_own_draws():
    for p in (0.05, 0.5):
        own = proven(mechanism(2, p, 4, 30, sigma=4.0), epsilon=0.7).delta
        other = mechanism(2, p, 4, 30, sigma=4.0, exclusion="participation")
        assert own <= proven(other, epsilon=0.7).delta


def test_single_examples_against_the_amplified_estimate():
    # One example a user: hiding the coins helps, using none of the randomness does not.
    n, b, p = 24, 4, 0.05
    both = mechanism(1, p, b, n, sigma=1.5, strategy=BSR(bands=3))
    alone = MinSep(probability=p, min_sep=b, dataset_size=1000, steps=n, warm_start=False)
    amplified = min_sep_means(
        MatrixMechanism(scheme=alone, strategy=BSR(bands=3), noise_multiplier=1.5),
        [0.5, 1.0],
        samples=100_000,
        seed=5,
    )
    revealed = RevealedDraws().profile(both, [0.5, 1.0]).delta
    plain = UnsampledGaussian().profile(both, [0.5, 1.0]).delta
    highest = np.maximum(
        amplified.remove + 6 * amplified.remove_error, amplified.add + 6 * amplified.add_error
    )
    assert (highest < revealed).all()
    assert (revealed < plain).all()


def test_gaussian_counts_all_examples_of_a_user_in_a_batch():
    both = mechanism(3, 0.5, 4, 12, sigma=5.0)
    alone = MinSep(probability=0.5, min_sep=4, dataset_size=1000, steps=12)
    single = MatrixMechanism(scheme=alone, strategy=Identity(), noise_multiplier=5.0 / 3.0)
    found = account(both, delta=1e-6, accountant="gaussian").epsilon
    assert found == pytest.approx(account(single, delta=1e-6, accountant="gaussian").epsilon)


def test_fixed_and_shuffled_batches_are_gaussian_by_themselves():
    user = UserFixed(graph=graph(5), batch_size=10, min_sep=8, steps=40, max_participations=3)
    found = account(
        MatrixMechanism(scheme=user, strategy=BSR(bands=4), noise_multiplier=2.0), delta=1e-5
    )
    norm = float(BSR(bands=4).bind(40).column_norms(40).max())
    assert found.accountant == "gaussian"
    assert found.kind is Kind.UPPER_BOUND
    shift = math.sqrt(3.0) * norm / 2.0  # at most one example a batch, three batches
    assert gaussian_delta(found.epsilon, shift) == pytest.approx(1e-5, rel=1e-6)
    # Order kept: exactly five steps apart, so 0 and 4 of the first column never meet.
    kept = Shuffled(batch_size=20, dataset_size=100, epochs=2, reshuffle=False)
    matrix = np.eye(10)
    matrix[9, 2] = matrix[9, 3] = 0.9
    by_hand = max(float(np.linalg.norm(matrix[:, s] + matrix[:, s + 5])) for s in range(5))
    both = MatrixMechanism(scheme=kept, strategy=Dense(matrix=matrix), noise_multiplier=1.0)
    found = account(both, delta=1e-5)
    assert found.accountant == "gaussian"
    assert gaussian_delta(found.epsilon, by_hand) == pytest.approx(1e-5, rel=1e-6)
    again = Shuffled(batch_size=20, dataset_size=100, epochs=2)
    both = MatrixMechanism(scheme=again, strategy=Dense(matrix=matrix), noise_multiplier=1.0)
    worst = max(
        float(np.linalg.norm(matrix[:, s] + matrix[:, t])) for s in range(5) for t in range(5, 10)
    )
    assert gaussian_delta(account(both, delta=1e-5).epsilon, worst) <= 1e-5 * (1 + 1e-6)


def test_choice_and_reasons():
    short = mechanism(2, 0.02, 4, 40, strategy=BSR(bands=3))
    assert find_accountants(short)[0].name == "user-min-sep-importance"
    wide = mechanism(2, 0.02, 4, 40, strategy=BSR(bands=6))
    assert account(wide, delta=1e-5).accountant == "gaussian"
    reasons = {a.name: a.reason for a in accountants_for(wide)}
    assert "fewer bands or a larger min_sep" in reasons["revealed-draws"]
    tree = mechanism(2, 0.02, 4, 40, strategy=TreeRestart(height=3))
    assert account(tree, delta=1e-5).accountant == "revealed-draws"  # not square
    unused = mechanism(2, 0.02, 4, 40, exclusion="participation")
    assert find_accountants(unused)[0].name == "user-min-sep-importance"
    found = account(unused, delta=1e-5, accountant="revealed-draws")
    assert found.accountant == "revealed-draws"
    assert found.kind is Kind.UPPER_BOUND
    assert any("does not use Conjecture 6.2" in note for note in found.notes)


@pytest.mark.slow
def test_statement_is_about_users():
    found = account(mechanism(2, 0.02, 4, 40), delta=1e-5, accountant="revealed-draws")
    text = str(found)
    assert "for each user with up to 2 training examples" in text
    assert "contribution of any one user with up to 2 training examples is left out" in text
    assert "Which examples belong to which users is assumed to be public" in text
    with pytest.warns(UserWarning, match=r"1/\(number of users\) = 0.00125 \(800 users\)"):
        calibrate(
            scheme=mechanism(2, 0.02, 4, 40).scheme,
            strategy=Identity(),
            epsilon=1.0,
            delta=1 / 800,
        )


def test_a_thousand_steps():
    both = mechanism(2, 0.004, 32, 1000, sigma=1.0, strategy=BandMF(bands=32))
    found = account(both, delta=2e-6, accountant="revealed-draws")
    # Half of what it costs to use no randomness, and never below one certain participation's ε …
    assert found.epsilon < 0.5 * account(both, delta=2e-6, accountant="gaussian").epsilon

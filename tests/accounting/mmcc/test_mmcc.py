"""MMCC against enumeration of all participation patterns, and against what it must reduce to."""

import itertools
import math

import numpy as np
import pytest

from dptrain.accounting.losses import gaussian
from dptrain.accounting.mmcc.mmcc import MMCC, equal_split
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, CyclicPoisson, MinSep, Poisson
from dptrain.strategies import BSR, Dense, Identity, SquareRoot, Tree, TreeRestart
from dptrain.testing import AccountantContract
from tests.oracles import quadrature
from tests.oracles.enumeration import Law, monte_carlo_delta, poisson

pytestmark = pytest.mark.filterwarnings("ignore:delta=.* is not below:UserWarning")


def mechanism(strategy, *, steps, probability=0.1, sigma=2.0, cycle=None):
    common = {"probability": probability, "dataset_size": 1000, "steps": steps}
    scheme = Poisson(**common) if cycle is None else CyclicPoisson(cycle=cycle, **common)
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)


def matrix_of(strategy, steps):
    return strategy.bind(steps).columns(steps, np.arange(steps))


class TestContract(AccountantContract):
    def accountant(self):
        return MMCC()

    def mechanism(self):
        return mechanism(BSR(bands=2), steps=12, sigma=3.0)

    def refused_mechanism(self):
        scheme = BallsInBins(bins=3, epochs=2, dataset_size=1000)
        return MatrixMechanism(scheme=scheme, strategy=BSR(bands=2), noise_multiplier=1.0)


class TestContractOfCyclicSampling(AccountantContract):
    def accountant(self):
        return MMCC()

    def mechanism(self):
        return mechanism(SquareRoot(), steps=4, sigma=2.0, cycle=2)

    def refused_mechanism(self):
        scheme = CyclicPoisson(
            probability=0.1, cycle=2, dataset_size=1000, steps=6, max_batch_size=99
        )
        return MatrixMechanism(scheme=scheme, strategy=SquareRoot(), noise_multiplier=1.0)


@pytest.mark.parametrize(("p", "sigma"), [(0.01, 0.8), (0.1, 2.0)])
def test_independent_noise_is_poisson(p, sigma):
    run = mechanism(Identity(), steps=200, probability=p, sigma=sigma)
    exact = PoissonPLD().guarantee(run, delta=1e-6).epsilon
    found = MMCC().guarantee(run, delta=1e-6).epsilon
    assert exact <= found * (1 + 1e-4)
    assert found == pytest.approx(exact, rel=1e-3)
    assert MMCC().reserved(run)


def test_min_sep_of_one_is_poisson():
    scheme = MinSep(probability=0.1, min_sep=1, dataset_size=1000, steps=9)
    run = MatrixMechanism(scheme=scheme, strategy=SquareRoot(), noise_multiplier=3.0)
    same = mechanism(SquareRoot(), steps=9, sigma=3.0)
    assert MMCC().guarantee(run, delta=1e-5).epsilon == pytest.approx(
        MMCC().guarantee(same, delta=1e-5).epsilon, rel=1e-12
    )


@pytest.mark.parametrize(
    "strategy", [SquareRoot(), Tree(), Dense(matrix=((1.0, 0.0), (-0.5, 2.0)))]
)
def test_certain_participation_is_a_gaussian(strategy):
    steps = 2 if isinstance(strategy, Dense) else 6
    run = mechanism(strategy, steps=steps, probability=1.0, sigma=4.0)
    mu = np.linalg.norm(np.abs(matrix_of(strategy, steps)).sum(axis=1)) / 4.0
    exact = gaussian.epsilon(1e-6, mu)
    found = MMCC().guarantee(run, delta=1e-6).epsilon
    assert exact * (1 - 1e-9) <= found <= exact * 1.03


@pytest.mark.parametrize(("bands", "cycle"), [(2, 2), (3, 4)])
def test_bands_within_the_cycle_are_subsampled_gaussians(bands, cycle):
    run = mechanism(BSR(bands=bands), steps=24, cycle=cycle)
    exact = PoissonPLD().guarantee(run, delta=1e-6).epsilon
    assert MMCC().guarantee(run, delta=1e-6).epsilon == pytest.approx(exact, rel=2e-3)
    assert MMCC().reserved(run)


def random_matrix(rng, steps, kind):
    if kind == "dense":
        return np.tril(rng.random((steps, steps)) ** 2) + np.eye(steps) * rng.uniform(0.3, 1.0)
    if kind == "sparse":
        return np.tril(rng.random((steps, steps)) * (rng.random((steps, steps)) < 0.5), -1) + (
            np.eye(steps)
        )
    return np.asarray(matrix_of(SquareRoot(), steps))


def as_dense(matrix):
    return Dense(matrix=matrix)


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("seed", range(30))
def test_never_below_monte_carlo(seed):
    # δ(ε) at the claimed ε must not be provably above δ: 6 standard errors, 60 directions.
    rng = np.random.default_rng([5, seed])
    steps = int(rng.integers(2, 6))
    kind = ("dense", "sparse", "root")[seed % 3]
    matrix = random_matrix(rng, steps, kind)
    p, sigma = float(rng.choice([0.05, 0.2, 0.5, 0.9])), float(rng.choice([1.5, 3.0, 8.0]))
    delta = float(rng.choice([1e-3, 1e-2, 0.1]))
    run = mechanism(as_dense(matrix), steps=steps, probability=p, sigma=sigma)
    epsilon = MMCC().guarantee(run, delta=delta).epsilon
    found = monte_carlo_delta(poisson(steps, p), matrix, sigma, epsilon, size=40_000, seed=seed)
    for direction in found:
        assert direction.mean - 6 * direction.error <= delta
    if seed % 5:
        return
    # Its profile claims a δ at ε of its own, per direction.
    profile = MMCC().profile(run, [0.0, 0.5 * epsilon])
    for at, *claims in zip(profile.epsilon, profile.remove, profile.add, strict=True):
        found = monte_carlo_delta(poisson(steps, p), matrix, sigma, at, size=40_000, seed=seed)
        for direction, claim in zip(found, claims, strict=True):
            assert direction.mean - 6 * direction.error <= claim


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_quadrature_of_two_steps(remove, sigma):
    matrix = np.array([[1.0, 0.0], [0.7, 1.0]])
    run = mechanism(as_dense(matrix), steps=2, probability=0.3, sigma=sigma)
    epsilons = np.array([0.0, 0.2, 0.6, 1.5]) / sigma
    profile = MMCC().profile(run, epsilons)
    claims = profile.remove if remove else profile.add
    for epsilon, claim in zip(epsilons, claims, strict=True):
        exact = quadrature.delta(poisson(2, 0.3), matrix, sigma, epsilon, remove=remove)
        assert exact <= claim


def test_close_to_the_truth_where_noise_is_large():
    # As σ grows p̃ tends to p, and the rows to what they are without a past.
    matrix = np.array([[1.0, 0.0], [0.7, 1.0]])
    run = mechanism(as_dense(matrix), steps=2, probability=0.3, sigma=100.0)
    epsilon = MMCC().guarantee(run, delta=1e-3).epsilon
    law = poisson(2, 0.3)

    def exact(at):
        return max(
            quadrature.delta(law, matrix, 100.0, at, remove=remove) for remove in (True, False)
        )

    # Half of δ is spent on events.
    assert exact(epsilon) <= 5e-4 * (1 + 1e-6)
    assert exact(epsilon / 1.3) > 5e-4


@pytest.mark.parametrize("cycle", [1, 2])
def test_signs_make_no_difference(cycle):
    signed = np.array([[1.0, 0, 0, 0], [-0.6, 1, 0, 0], [0.3, -0.5, 1, 0], [0.1, 0.2, -0.7, 1]])
    runs = [
        mechanism(as_dense(m), steps=4, sigma=2.0, cycle=cycle) for m in (signed, np.abs(signed))
    ]
    claims = [MMCC().guarantee(run, delta=1e-4).epsilon for run in runs]
    assert claims[0] == claims[1]
    # The example may sign its gradients so that nothing cancels: x = (1, -1, 1, -1) here.
    plain = monte_carlo_delta(poisson(4, 0.1), np.abs(signed), 2.0, 0.1, size=50_000, seed=3)
    profile = MMCC().profile(runs[0], [0.1])
    assert plain[0].mean - 6 * plain[0].error <= profile.delta[0]


def law_of_part(part, cycle, steps, p):
    turns = range(part, steps, cycle)
    patterns, probabilities = [], []
    for coins in itertools.product((0, 1), repeat=len(turns)):
        x = np.zeros(steps)
        x[list(turns)] = coins
        patterns.append(x)
        probabilities.append(math.prod(p if coin else 1 - p for coin in coins))
    return Law(np.array(patterns), np.array(probabilities))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("seed", range(12))
def test_every_part_of_a_cycle_is_covered(seed):
    rng = np.random.default_rng([6, seed])
    steps, cycle = int(rng.integers(4, 9)), int(rng.integers(2, 4))
    matrix = random_matrix(rng, steps, ("dense", "root")[seed % 2])
    p, sigma = float(rng.choice([0.1, 0.5])), float(rng.choice([2.0, 6.0]))
    strategy = SquareRoot() if seed % 2 else as_dense(matrix)
    run = mechanism(strategy, steps=steps, probability=p, sigma=sigma, cycle=cycle)
    assert MMCC().reserved(run) is None
    epsilon = MMCC().guarantee(run, delta=1e-2).epsilon
    for part in range(cycle):
        law = law_of_part(part, cycle, steps, p)
        for found in monte_carlo_delta(law, matrix, sigma, epsilon, size=40_000, seed=seed):
            assert found.mean - 6 * found.error <= 1e-2


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(("strategy", "steps"), [(BSR(bands=4), 40), (SquareRoot(), 30)])
@pytest.mark.parametrize("cycle", [None, 2, 3])
def test_toeplitz_shortcuts_cost_little(strategy, steps, cycle):
    short = mechanism(strategy, steps=steps, sigma=5.0, cycle=cycle)
    full = mechanism(as_dense(matrix_of(strategy, steps)), steps=steps, sigma=5.0, cycle=cycle)
    shortcut = MMCC().guarantee(short, delta=1e-6).epsilon
    assert shortcut == pytest.approx(MMCC().guarantee(full, delta=1e-6).epsilon, rel=1e-2)


@pytest.mark.parametrize("strategy", [Tree(), TreeRestart(height=3)])
@pytest.mark.parametrize("steps", [7, 8])
def test_trees_are_covered(strategy, steps):
    rng = np.random.default_rng(steps)
    run = mechanism(strategy, steps=steps, probability=0.2, sigma=3.0)
    matrix = matrix_of(strategy, steps)
    epsilon = MMCC().guarantee(run, delta=1e-2).epsilon
    law = poisson(steps, 0.2)
    means = law.patterns @ matrix.T
    drawn = rng.choice(len(means), size=40_000, p=law.probabilities)
    noise = 3.0 * rng.standard_normal((40_000, len(matrix)))

    def losses(y):
        exponents = (y @ means.T - (means**2).sum(axis=1) / 2) / 9.0
        return np.log(np.exp(exponents) @ law.probabilities)

    for values in (losses(means[drawn] + noise), -losses(noise)):
        terms = -np.expm1(np.minimum(epsilon - values, 0.0))
        assert terms.mean() - 6 * terms.std() / math.sqrt(terms.size) <= 1e-2


def test_amplifies():
    # Against one certain participation, as in Choquette-Choo et al. 2024, Fig. 2.
    run = mechanism(TreeRestart(height=3), steps=64, probability=1 / 64, sigma=20.0)
    alone = gaussian.epsilon(1e-6, math.sqrt(3.0) / 20.0)
    assert MMCC().guarantee(run, delta=1e-6).epsilon < 0.3 * alone
    assert MMCC().kind_of(run) is Kind.UPPER_BOUND


def test_equal_split_solves_for_both_halves():
    # δ_2 = (1 + 1/10 log(1/δ_1)) · a: a toy with the shape of the real one, for many a at once.
    scales = np.array([0.5, 1e-3, 1e-7, 1e-14])
    found = equal_split(lambda d: np.minimum(scales * (1.0 - 0.1 * math.log(d)), 1.0), 4)
    for value, scale in zip(found, scales, strict=True):
        if value < 1.0:
            assert value / 2 == pytest.approx(scale * (1.0 - 0.1 * math.log(value / 2)), rel=1e-3)
    # Where even the least δ_1 is too much: it is charged.
    assert equal_split(lambda d: np.zeros(1), 1)[0] == pytest.approx(1e-18, rel=1e-6)


def test_refuses_what_does_not_fit_into_memory():
    huge = mechanism(SquareRoot(), steps=20_000)
    assert "fewer bands" in MMCC().refusal(huge)
    assert MMCC().refusal(mechanism(BSR(bands=16), steps=20_000)) is None

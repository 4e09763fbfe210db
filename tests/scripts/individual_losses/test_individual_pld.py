"""Individual ε against dp_accounting, composed distributions, quadrature and closed forms."""

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.composition import HeterogeneousComposition
from dptrain.accounting.losses.subsampled_gaussian import spread, subsampled_gaussian_on_grid
from dptrain.accounting.poisson import poisson_curve
from dptrain.contrib.individual.norm_grid import NormGrid
from dptrain.core.guarantee import Adjacency
from scripts.paper.individual_losses.loss_transform import log_ratio
from scripts.paper.individual_losses.pld import IndividualPLD

GRID = NormGrid()
SIZE = len(GRID.values)


def history(seed):
    """Rate, σ, δ and a random history of a few norms."""
    rng = np.random.default_rng(seed)
    q, sigma = float(10 ** rng.uniform(-3, -0.7)), float(rng.uniform(0.5, 3))
    delta = float(10 ** rng.uniform(-9, -4))
    counts = np.zeros((1, SIZE), np.uint32)
    columns = rng.choice(np.arange(250, SIZE), rng.integers(2, 9), replace=False)
    counts[0, columns] = rng.integers(1, 200, columns.size)
    return q, sigma, delta, counts


def at_norms(pairs):
    """Counts of one example from (norm, count) pairs."""
    counts = np.zeros((1, SIZE), np.uint32)
    for norm, count in pairs:
        counts[0, GRID.bucket(norm)] += count
    return counts


def composed(q, sigma, counts, remove):
    """Our other composition, an upper bound that is tight to about 1e-6."""
    columns = np.flatnonzero(counts)
    sigmas = sigma / GRID.values[columns]
    spreads = [spread(probability=q, sigma=s, remove=remove) for s in sigmas]
    total = sum(int(n) * s.variance for n, s in zip(counts[columns], spreads, strict=True))
    window = max(30 * math.sqrt(total), *(s.high - s.low for s in spreads))
    h = max(math.sqrt(total / counts.sum()) / 300, window / (1 << 17))
    return HeterogeneousComposition(
        (subsampled_gaussian_on_grid(probability=q, sigma=float(s), spacing=h, remove=remove), n)
        for s, n in zip(sigmas, counts[columns].tolist(), strict=True)
    )


@pytest.mark.sample(every=26)
@pytest.mark.parametrize("seed", range(12))
def test_random_histories(seed):
    """Against dp_accounting and against our other composition, by one accountant: its tables of
    all norms and tilts are what takes time.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    q, sigma, delta, counts = history(seed)
    ours = float(IndividualPLD(probability=q, noise_multiplier=sigma).epsilon(counts, delta)[0])
    total = None
    for column in np.flatnonzero(counts[0]):
        step = pld.from_gaussian_mechanism(
            sigma / GRID.values[column],
            sampling_prob=q,
            value_discretization_interval=ours / 12_000,
            log_mass_truncation_bound=-60,
        ).self_compose(int(counts[0, column]), 1e-16)
        total = step if total is None else total.compose(step, 1e-16)
    theirs = total.get_epsilon_for_delta(delta)
    # Theirs is rounded up too: by 2e-5 of ε at this interval.
    assert theirs * (1 - 2e-5) <= ours <= 1.02 * theirs
    other = max(composed(q, sigma, counts[0], remove).epsilon(delta) for remove in (True, False))
    assert other * (1 - 2e-6) <= ours <= 1.002 * other


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("remove", [True, False])
def test_delta_of_each_direction(remove):
    q, sigma, _, counts = history(13)
    accountant = IndividualPLD(probability=q, noise_multiplier=sigma)
    direction = accountant._directions[0 if remove else 1]
    exact = composed(q, sigma, counts[0], remove)
    for epsilon in (0.0, 0.3, 1.5):
        ours = np.exp(direction.log_delta(counts[:, 1:], np.array([epsilon]), lambda n: None)[0])
        other = float(exact.delta(np.array([epsilon]))[0])
        assert other * (1 - 1e-5) <= ours <= 1.004 * other, epsilon
        assert float(accountant.delta(counts, epsilon)[0]) >= ours, epsilon


def two_steps(q, sigma, norms, epsilon):
    """max over directions of δ of two steps, by a sum over both outputs."""
    x = np.linspace(-12, 16, 2001)
    spacing = 28 / 2000
    shifts = [norm / sigma for norm in norms]
    ratios = [log_ratio(x, np.array(shift), q) for shift in shifts]
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) * spacing
    total = np.add.outer(ratios[0], ratios[1])
    weight = np.multiply.outer(density, density)
    remove = np.sum(weight * np.maximum(np.exp(total) - math.exp(epsilon), 0.0))
    add = np.sum(weight * np.maximum(1.0 - np.exp(epsilon + total), 0.0))
    return max(remove, add)


@pytest.mark.sample(every=16)
@pytest.mark.parametrize(
    ("q", "sigma", "norms", "epsilon"),
    [
        (0.1, 1.0, (1.0, 0.5), 0.5),
        (0.1, 1.0, (1.0, 0.5), 0.0),
        (0.5, 2.0, (0.3, 0.7), 0.1),
        (0.01, 0.5, (1.0, 1.0), 1.0),
        (0.001, 1.0, (1.0, 0.2), 0.01),
    ],
)
def test_brute_force_of_two_steps(q, sigma, norms, epsilon):
    rounded = GRID.values[GRID.bucket(norms)]
    exact = two_steps(q, sigma, rounded, epsilon)
    counts = at_norms([(norms[0], 1), (norms[1], 1)])
    found = IndividualPLD(probability=q, noise_multiplier=sigma).delta(counts, epsilon)[0]
    assert exact * (1 - 1e-4) <= found <= 1.02 * exact


def one_step(q, sigma, epsilon):
    """δ of remove for one step of norm 1."""
    at = sigma * (math.log1p(math.expm1(epsilon) / q) + 0.5 / sigma**2)
    p = (1 - q) * ndtr(-at) + q * ndtr(1 / sigma - at)
    return p - math.exp(epsilon) * ndtr(-at)


@pytest.mark.sample(every=31)
@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("q", "loose"), [(0.3, 1.003), (0.01, 1.005), (1e-3, 1.1)])
def test_one_step(q, sigma, loose):
    # The transform of a single step hardly decays: looser, and never below.
    counts = at_norms([(1.0, 1)])
    raw = IndividualPLD(probability=q, noise_multiplier=sigma)
    for delta in (1e-4, 1e-6, 1e-12):
        steps = raw._directions[0].epsilon(
            counts[:, 1:], np.log([delta]), np.zeros(1), lambda n: None
        )[0]  # without the cap
        capped = float(raw.epsilon(counts, delta)[0])
        assert one_step(q, sigma, capped) <= delta * (1 + 1e-5), delta
        assert steps == 0.0 or one_step(q, sigma, steps / loose - 1e-6) >= delta, delta


@pytest.mark.slow
@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("q", "sigma", "steps"),
    [(0.01, 1.0, 1000), (0.001, 0.5, 1000), (0.1, 2.0, 100), (0.001, 1.0, 10), (0.02, 0.7, 20_000)],
)
def test_all_norms_at_the_clip_are_the_worst_case(q, sigma, steps):
    accountant = IndividualPLD(probability=q, noise_multiplier=sigma)
    curve = poisson_curve(Adjacency.ZERO_OUT, probability=q, steps=steps, sensitivity=1.0)
    full, less = at_norms([(1.0, steps)]), at_norms([(1.0, steps - 1), (0.99, 1)])
    for delta in (1e-5, 1e-10):
        worst = curve.epsilon(sigma, delta)
        found = accountant.epsilon(np.concatenate([full, less]), delta)
        assert found[0] == worst, delta
        assert found[1] <= worst, delta
        uncapped = accountant._directions[0].epsilon(
            full[:, 1:], np.log([delta]), np.zeros(1), lambda n: None
        )[0]
        assert worst * (1 - 1e-6) <= uncapped <= 1.01 * worst, delta


@pytest.mark.slow
def test_monotone_in_counts_and_norms():
    accountant = IndividualPLD(probability=0.01, noise_multiplier=0.8)
    more = np.concatenate([at_norms([(0.4, n), (0.9, 30)]) for n in (100, 120, 150, 300, 1000)])
    larger = np.concatenate([at_norms([(r, 500)]) for r in (0.01, 0.1, 0.3, 0.31, 0.5, 1.0)])
    for counts in (more, larger):
        found = accountant.epsilon(counts, 1e-6)
        assert np.all(np.diff(found) >= -1e-4 * found[1:])
        assert found[-1] > found[0]


@pytest.mark.parametrize("delta", [1e-5, 1e-30])
def test_no_sampling_is_one_gaussian(delta):
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 5, (4, SIZE)).astype(np.uint16)
    accountant = IndividualPLD(probability=1.0, noise_multiplier=40.0)
    mu = np.sqrt((counts * GRID.values**2).sum(axis=1)) / 40.0
    exact = [gaussian.epsilon(delta, float(m)) for m in mu]
    np.testing.assert_allclose(accountant.epsilon(counts, delta), exact, rtol=1e-9)
    each = accountant.epsilon(counts, np.full(4, delta))
    np.testing.assert_allclose(each, exact, rtol=1e-9)
    np.testing.assert_allclose(accountant.gaussian_mu(counts, floor=1e-8), mu, rtol=1e-12)
    np.testing.assert_allclose(accountant.delta(counts, 1.0), gaussian.delta(1.0, mu), rtol=1e-6)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("delta", [1e-15, 1e-30])
def test_deep_delta(delta):
    q, sigma, counts = 0.2, 2.0, at_norms([(1.0, 40), (0.3, 100)])
    ours = float(IndividualPLD(probability=q, noise_multiplier=sigma).epsilon(counts, delta)[0])
    other = max(composed(q, sigma, counts[0], remove).epsilon(delta) for remove in (True, False))
    assert other * (1 - 2e-6) <= ours <= 1.002 * other


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("delta", [1e-40, 1e-100, 1e-200])
def test_deep_delta_of_one_step(delta):
    accountant = IndividualPLD(probability=0.5, noise_multiplier=2.0)
    found = accountant._directions[0].epsilon(
        at_norms([(1.0, 1)])[:, 1:], np.log([delta]), np.zeros(1), lambda n: None
    )[0]
    assert one_step(0.5, 2.0, found) <= delta * (1 + 1e-6) <= one_step(0.5, 2.0, found / 1.002)


@pytest.mark.slow
def test_scales_that_differ_by_a_thousand_and_order():
    accountant = IndividualPLD(probability=0.02, noise_multiplier=0.6)
    rows = [
        at_norms([(r, 2000)]) for r in (1.0, 0.001, 0.03, 0.3)
    ] + [np.zeros((1, SIZE), np.uint32), at_norms([(0.001, 1990), (1.0, 10)])]  # fmt: skip
    counts = np.concatenate(rows)
    together = accountant.epsilon(counts, 1e-7)
    alone = [float(accountant.epsilon(row, 1e-7)[0]) for row in rows]
    np.testing.assert_allclose(together, alone, rtol=2e-4)
    assert together[4] == 0.0
    for row, found in zip(rows[1:4], together[1:4], strict=True):
        other = max(composed(0.02, 0.6, row[0], r).epsilon(1e-7) for r in (True, False))
        assert other * (1 - 2e-6) <= found <= 1.002 * other


def test_delta_and_epsilon_are_inverse():
    rows = [history(seed)[3] for seed in range(6)]
    counts = np.concatenate(rows)
    accountant = IndividualPLD(probability=0.03, noise_multiplier=1.1)
    deltas = np.geomspace(1e-3, 1e-9, 6)
    epsilons = accountant.epsilon(counts, deltas)
    found = accountant.delta(counts, epsilons)
    assert np.all(found <= deltas * 1.01)
    assert np.all(found >= deltas * 0.98)


@pytest.mark.slow
def test_gaussian_mu_dominates():
    counts = np.concatenate([at_norms([(1.0, 4000)]), at_norms([(0.2, 9000)])])
    accountant = IndividualPLD(probability=0.02, noise_multiplier=1.0)
    floor = 1e-7
    mu = accountant.gaussian_mu(counts, floor=floor)
    slack = np.full(2, np.inf)
    for epsilon in np.linspace(0.0, 8.0, 33):
        found = accountant.delta(counts, epsilon)
        known = gaussian.delta(epsilon, mu)
        assert np.all((found <= floor) | (found <= 1.03 * known))
        slack = np.where(found > floor, np.minimum(slack, known / found), slack)
    # Somewhere it is tight.
    assert np.all(slack < 1.1)
    # Central limit: near q √(T (e^{1/σ²} - 1)).
    assert mu[0] == pytest.approx(0.02 * math.sqrt(4000 * (math.e - 1)), rel=0.3)
    # No looking deeper makes it smaller.
    assert np.all(accountant.gaussian_mu(counts, floor=1e-10) >= mu * (1 - 1e-3))


@pytest.mark.slow
def test_total_variation_of_nothing_much():
    # δ(0) is below δ: ε is 0.
    counts = at_norms([(0.001, 1)])
    accountant = IndividualPLD(probability=0.001, noise_multiplier=10.0)
    assert accountant.epsilon(counts, 1e-5)[0] == 0.0
    shift = GRID.values[1] / 10.0
    exact = 0.001 * (2 * ndtr(shift / 2) - 1)
    found = accountant.delta(counts, 0.0)[0]
    assert exact * (1 - 1e-9) <= found <= 1.01 * exact
    assert ndtri(0.5 + 0.5 * exact / 0.001) == pytest.approx(shift / 2, rel=1e-3)


def test_refuses_bad_input():
    counts = at_norms([(1.0, 3)])
    for wrong in ({"probability": 0.0}, {"probability": 1.1}, {"probability": math.nan}):
        with pytest.raises(ValueError, match="probability"):
            IndividualPLD(noise_multiplier=1.0, **wrong)
    for sigma in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="noise_multiplier"):
            IndividualPLD(probability=0.1, noise_multiplier=sigma)
    accountant = IndividualPLD(probability=0.1, noise_multiplier=1.0)
    for bad, error in (
        (counts[0], ValueError),
        (counts[:, 1:], ValueError),
        (counts.astype(float), TypeError),
        (counts.astype(int) - 1, ValueError),
    ):
        with pytest.raises(error, match="counts"):
            accountant.epsilon(bad, 1e-5)
        with pytest.raises(error, match="counts"):
            accountant.delta(bad, 1.0)
    for delta in (0.0, 1.0, math.nan, [1e-5, 1e-5]):
        with pytest.raises(ValueError, match="delta"):
            accountant.epsilon(counts, delta)
    for epsilon in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="epsilon"):
            accountant.delta(counts, epsilon)
    for floor in (0.0, 1.0):
        with pytest.raises(ValueError, match="floor"):
            accountant.gaussian_mu(counts, floor=floor)
    assert accountant.epsilon(counts[:0], 1e-5).shape == (0,)

"""δ(ε) as a whole: it falls, is convex in e^ε, lies between brackets, and needs little memory."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.special import ndtr

from dptrain.accounting import account, profile, registered_accountants
from dptrain.accounting.base.curve import DeterministicAccountant, convex_envelope
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.loss_distribution import LossDistribution
from dptrain.accounting.losses.tilted_curve import Masses
from dptrain.accounting.poisson.curves import SubsampledGaussianCurve
from dptrain.core.guarantee import Adjacency
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson, RandomAllocation, Shuffled
from dptrain.sampling.schemes.cyclic_poisson import CyclicPoisson
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.user_cyclic import UserCyclic
from dptrain.sampling.users.user_min_sep import UserMinSep
from dptrain.strategies import BSR, Identity

# Plain DP-SGD from one step to many, from hardly any noise to much.
PLAIN = [
    (1e-4, 100_000, 0.3), (1e-4, 100_000, 1.0), (1e-4, 100_000, 50.0), (1e-4, 1, 0.6),
    (1 / 300, 1500, 0.4778), (1 / 300, 1500, 0.6), (0.01, 10_000, 1.0), (0.01, 1, 0.3),
    (0.1, 100, 1.0), (0.5, 1, 0.3), (0.5, 10, 3.0), (0.5, 1000, 20.0), (0.5, 100_000, 50.0),
]  # fmt: skip
# Neighbors around 0, an even grid, and far tails.
GRID = np.unique(
    np.concatenate([[0.0], np.geomspace(1e-9, 1e-1, 41), np.linspace(0, 12, 241), [20, 30, 50]])
)


def plain(q: float, steps: int, sigma: float) -> MatrixMechanism:
    scheme = Poisson(probability=q, dataset_size=10**6, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


def assert_shape(epsilon: np.ndarray, delta: np.ndarray) -> None:
    """It falls within [0, 1], and every value is at most on the chord of its neighbors."""
    assert (delta >= 0).all()
    assert (delta <= 1).all()
    assert (np.diff(delta) <= 0).all()
    left, here, right = epsilon[:-2], epsilon[1:-1], epsilon[2:]
    share = np.exp(here - right) * np.expm1(left - here) / np.expm1(left - right)
    chord = delta[:-2] * (1 - share) + delta[2:] * share
    # A few units of rounding of the greatest of the three.
    assert (delta[1:-1] <= chord + 1e-14 * delta[:-2]).all()


# --- every accountant without simulation --------------------------------------------------------


def cyclic(**options: Any) -> CyclicPoisson:
    return CyclicPoisson(probability=0.2, cycle=4, dataset_size=1000, steps=60, **options)


def mechanisms() -> list[MatrixMechanism]:
    """With a public size for add-remove, without for the others."""
    return [each for size in (None, 1000) for each in _mechanisms(size)]


def _mechanisms(size: int | None) -> list[MatrixMechanism]:
    poisson = Poisson(probability=0.05, dataset_size=1000, steps=30, nominal_size=size)
    graph = AttributionGraph(
        examples=800, users=800, edges=800, max_examples=2, fingerprint="0" * 64
    )
    users, groups = (
        UserMinSep(
            graph=graph, probability=0.05, min_sep=4, steps=12, batch_size=50, exclusion=each
        )
        for each in ("sampling", "participation")
    )
    slots = UserCyclic.for_batch_size(
        graph=AttributionGraph.from_lists([[e // 2] for e in range(800)]),
        batch_size=40,
        cycle=4,
        steps=12,
    )
    pairs = [
        (poisson, Identity(), 0.8),
        (poisson, BSR(bands=3), 2.0),
        (
            Poisson(
                probability=0.05, dataset_size=1000, steps=60, max_batch_size=70, nominal_size=size
            ),
            Identity(),
            0.8,
        ),
        (cyclic(nominal_size=size, assignment="independent"), BSR(bands=3), 1.0),
        (
            cyclic(nominal_size=size, assignment="independent", max_batch_size=70),
            BSR(bands=3),
            1.0,
        ),
        (BallsInBins(bins=20, epochs=2, dataset_size=1000), Identity(), 1.0),
        (BallsInBins(bins=20, epochs=2, dataset_size=1000), BSR(bands=2), 2.0),
        (
            RandomAllocation(steps_per_epoch=20, participations=1, epochs=2, dataset_size=1000),
            Identity(),
            1.0,
        ),
        (MinSep(probability=0.05, min_sep=4, dataset_size=1000, steps=40), BSR(bands=4), 2.0),
        (
            MinSep(probability=0.05, min_sep=4, dataset_size=1000, steps=40, max_batch_size=60),
            BSR(bands=4),
            2.0,
        ),
        (Shuffled(batch_size=100, dataset_size=1000, epochs=2), BSR(bands=2), 3.0),
        (users, BSR(bands=4), 2.0),
        (groups, BSR(bands=4), 2.0),
        (dataclasses.replace(users, min_sep=1, burn_in=0), Identity(), 1.0),
        (slots, BSR(bands=4), 1.0),
        (dataclasses.replace(slots, max_batch_size=60), BSR(bands=4), 1.0),
    ]
    return [
        MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
        for scheme, strategy, sigma in pairs
        if scheme.nominal_size == size
    ]


# Some of these bounds take their time for every ε.
SPARSE = np.unique(np.concatenate([[0.0, 1e-6, 1e-3], np.linspace(0, 5, 13), [20]]))
DEAR = ("mmcc", "conditional-composition")
PROVEN = [
    pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name in DEAR else [])
    for each in registered_accountants()
    if isinstance(each, DeterministicAccountant)
]


@pytest.mark.slow
@pytest.mark.sample(every=3)
@pytest.mark.parametrize("accountant", PROVEN)
def test_every_profile_falls_and_is_convex(accountant: DeterministicAccountant) -> None:
    covered = [each for each in mechanisms() if accountant.obstacle(each) is None]
    assert covered
    for mechanism in covered:
        found = accountant.profile(mechanism, SPARSE)
        for direction in (found.remove, found.add):
            assert_shape(SPARSE, direction)


# --- plain DP-SGD -------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "truth"), [(0.4778, 2.53e-3), (0.6, 3.2e-6)])
def test_a_known_delta(sigma: float, truth: float) -> None:
    assert account(plain(1 / 300, 1500, sigma), epsilon=4.0).delta == pytest.approx(truth, rel=0.02)


@pytest.mark.sample(every=26)
@pytest.mark.parametrize(("q", "steps", "sigma"), PLAIN)
def test_plain_dp_sgd_has_no_jumps_and_asks_for_little_memory(q, steps, sigma) -> None:
    tracemalloc.start()
    found = profile(plain(q, steps, sigma), GRID)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150e6
    curve = SubsampledGaussianCurve(q, steps, 1.0)
    raw = curve.delta(sigma, GRID)
    mu = math.sqrt(steps) / sigma
    for direction, before in zip((found.remove, found.add), raw, strict=True):
        assert_shape(GRID, direction)
        # Below the mechanism without sampling; and down to the resolution of doubles the envelope
        # mends nothing but rounding.
        assert (direction <= gaussian.delta(GRID, mu) + 1e-30).all()
        seen = direction > 1e-13
        assert (before[seen] <= direction[seen] * 1.001).all()


@pytest.mark.slow
@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("q", "steps", "sigma"),
    [(1 / 300, 1500, 0.4778), (1 / 300, 1500, 0.6), (0.01, 1000, 1.0), (0.2, 50, 2.0), (0.5, 4, 1)],
)
def test_between_the_brackets_of_dp_accounting(q, steps, sigma) -> None:
    epsilon = np.array([0.0, 0.01, 0.3, 1.0, 2.0, 3.0, 3.9, 4.0, 4.1, 5.0])
    deltas = []
    for pessimistic in (False, True):
        single = privacy_loss_distribution.from_gaussian_mechanism(
            sigma,
            sampling_prob=q,
            value_discretization_interval=1e-4,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
        )
        composed = single.self_compose(steps)
        deltas.append(np.array([composed.get_delta_for_epsilon(e) for e in epsilon]))
    found = profile(plain(q, steps, sigma), epsilon).delta
    # Its tails are cut at 1e-15 or so.
    assert (found >= deltas[0] * (1 - 1e-6) - 1e-13).all()
    assert (found <= deltas[1] * (1 + 1e-3) + 1e-13).all()


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize("remove", [True, False])
def test_many_rare_participations_are_resolved(remove: bool) -> None:
    # Single losses reach 14 with a chance of 1e-41, the bulk of the total has a deviation of .04:
    # a tilt that follows the former cannot resolve the latter.
    single = privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sampling_prob=1e-4, value_discretization_interval=1e-5
    )
    theirs = single.self_compose(100_000)
    curve = SubsampledGaussianCurve(1e-4, 100_000, 1.0)
    for delta in (1e-3, 1e-5, 1e-8):
        epsilon = curve.composition(1.0, remove=remove).epsilon(delta)
        assert epsilon <= theirs.get_epsilon_for_delta(delta) * 1.003


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("sigma", [0.4778, 0.6])
def test_composed_losses_by_simulation(sigma: float, remove: bool) -> None:
    q, steps, runs = 1 / 300, 1500, 12_000
    rng = np.random.default_rng([7, int(1e4 * sigma), remove])
    totals = np.zeros(runs)
    for _ in range(steps):
        y = sigma * rng.standard_normal(runs)
        if remove:
            y += rng.random(runs) < q
        totals += np.log1p(q * np.expm1((2 * y - 1) / (2 * sigma**2)))
    losses = totals if remove else -totals
    composed = SubsampledGaussianCurve(q, steps, 1.0).composition(sigma, remove=remove)
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        terms = -np.expm1(np.minimum(epsilon - losses, 0.0))
        slack = 6 * terms.std() / math.sqrt(runs) + 60 / runs
        assert float(composed.delta(epsilon)) == pytest.approx(terms.mean(), abs=slack)


def brackets(q: float, sigma: float, doublings: int, remove: bool) -> tuple[list, float]:
    """Losses of 2^doublings steps rounded down and up to 1/200, by sums of positive terms only."""
    h, grid = 0.005, np.arange(-80, 5200)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = sigma**2 * np.log((np.exp(h * grid) - (1 - q)) / q) + 0.5
    x = np.where(np.isnan(x), -np.inf, x)
    right = [ndtr(-(x - shift) / sigma) for shift in (0.0, 1.0)]
    left = [ndtr((x - shift) / sigma) for shift in (0.0, 1.0)]
    mass = [
        np.where(x[1:] > shift, r[:-1] - r[1:], t[1:] - t[:-1])
        for shift, r, t in zip((0.0, 1.0), right, left, strict=True)
    ]
    cells = (1 - q) * mass[0] + q * mass[1] if remove else mass[0][::-1]
    lowest = int(grid[0]) if remove else -int(grid[-1])
    lost = float(right[1][-1]) if remove else 0.0
    for _ in range(doublings):
        cells, lowest = np.convolve(cells, cells), 2 * lowest
    count = 2**doublings
    losses = h * (lowest + np.arange(cells.size))
    return [(cells, losses), (cells, losses + h * count)], lost * count


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize(("q", "sigma"), [(0.05, 0.8), (0.3, 1.5)])
def test_far_tails_lie_between_brackets(q: float, sigma: float, remove: bool) -> None:
    (low, high), lost = brackets(q, sigma, 2, remove)
    composed = SubsampledGaussianCurve(q, 4, 1.0).composition(sigma, remove=remove)
    limit = 25.0 if remove else -4 * math.log1p(-q)
    for epsilon in np.linspace(0.0, limit, 41):
        lower, upper = (
            float(cells @ -np.expm1(np.minimum(epsilon - losses, 0.0)))
            for cells, losses in (low, high)
        )
        found = float(composed.delta(epsilon))
        assert found >= lower * (1 - 1e-6)
        # Normal tails beyond 13.5 deviations count as δ.
        assert found <= upper * 1.01 + lost + 1e-37


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize(("q", "steps", "sigma"), PLAIN)
def test_epsilon_is_where_the_curve_meets_delta(q, steps, sigma, remove) -> None:
    composed = SubsampledGaussianCurve(q, steps, 1.0).composition(sigma, remove=remove)
    for delta in (0.3, 1e-2, 1e-5, 3.7e-11, 1e-13, 1e-20, 1e-33):
        epsilon = composed.epsilon(delta)
        assert float(composed.delta(epsilon)) <= delta
        if epsilon > 0:
            assert float(composed.delta(epsilon * (1 - 1e-6))) >= delta * (1 - 1e-3)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("largest", [None, 110])
def test_far_below_the_cut_tails_the_bound_without_sampling_holds(adjacency, largest) -> None:
    # Published coins: two gradients of one step are at most 2 apart, 1 if nothing is replaced.
    sigma, steps, size = 1.0, 1000, 10_000
    public = size if adjacency is Adjacency.ADD_REMOVE else None
    options: dict[str, Any] = {
        "probability": 0.01, "dataset_size": size, "steps": steps, "nominal_size": public,
    }  # fmt: skip
    scheme = Poisson(**options, max_batch_size=largest)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)
    replaced = adjacency is Adjacency.REPLACE_ONE
    displaced = adjacency is Adjacency.ADD_REMOVE and largest is not None
    apart = 2.0 if replaced or displaced else 1.0
    found = account(mechanism, delta=1e-300, adjacency=adjacency)
    without = gaussian.epsilon(1e-300, apart * math.sqrt(steps) / sigma)
    assert 0.0 < found.epsilon <= without
    assert any("without sampling" in note for note in found.notes)
    shallow = account(mechanism, delta=1e-5, adjacency=adjacency)
    assert shallow.epsilon < found.epsilon
    assert not any("without sampling" in note for note in shallow.notes)


# --- the pieces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_envelope_is_the_least_of_all_chords(seed: int) -> None:
    rng = np.random.default_rng(seed)
    epsilon = np.sort(rng.random(30)) * 3
    delta = np.exp(-3 * epsilon) * (1 + rng.random(30))
    gamma, falling = np.exp(epsilon), np.minimum.accumulate(delta)
    expected = falling.copy()
    for i in range(30):
        for j in range(i + 1, 30):
            share = (gamma[i : j + 1] - gamma[i]) / (gamma[j] - gamma[i])
            chord = falling[i] * (1 - share) + falling[j] * share
            expected[i : j + 1] = np.minimum(expected[i : j + 1], chord)
    np.testing.assert_allclose(convex_envelope(epsilon, delta), expected, rtol=1e-12)


def test_the_envelope_at_large_and_equal_epsilons() -> None:
    epsilon = np.array([0.0, 0.0, 700.0, 1000.0, 1000.0, 1500.0])
    delta = np.array([0.5, 0.6, 1e-3, 1e-300, 1e-200, 0.0])
    found = convex_envelope(epsilon, delta)
    assert found[0] == found[1] == 0.5
    assert found[3] == found[4] <= 1e-300
    # From 0 to 1000 the chord is 1e-130 of the way at 700: .5 is all that it says there.
    assert found[2] == 1e-3
    np.testing.assert_array_equal(convex_envelope(np.array([2.0]), np.array([0.1])), [0.1])


def test_a_coarser_grid_and_charged_losses_are_upper_bounds() -> None:
    rng = np.random.default_rng(4)
    log_mass = np.log(rng.dirichlet(np.full(60, 0.1)) * 0.99)
    law = LossDistribution(0.05, -21, log_mass, 0.01)
    masses = Masses(law, 3)

    def delta(each: Masses, epsilon: float) -> float:
        terms = -np.expm1(np.minimum(epsilon - each.losses, 0.0))
        return float(np.exp(each.log_mass) @ terms) + each.infinity

    doubled, cut = masses.doubled(), masses.cut(0.05)
    for each in (doubled, cut):
        assert each.count == 3
        assert np.exp(each.log_mass).sum() + each.infinity == pytest.approx(1.0, rel=1e-12)
        for epsilon in np.linspace(-2, 3, 101):
            assert delta(each, epsilon) >= delta(masses, epsilon) * (1 - 1e-12)
    # Both laws of the pair keep their mass.
    means = [float(np.exp(each.log_mass) @ np.exp(-each.losses)) for each in (masses, doubled)]
    assert means[1] == pytest.approx(means[0], rel=1e-12)
    assert 0.01 < cut.infinity <= 0.06
    assert masses.cut(0.0) is masses

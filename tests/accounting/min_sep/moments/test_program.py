"""The reduced program of moments, against sums over patterns and the program over all states."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dptrain.accounting.min_sep import moments
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.moments import kernel, program
from dptrain.accounting.min_sep.moments.states import States, state_count, waiting_count
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import log_ratio
from tests.oracles import enumeration

COMPILED = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not kernel.available(), reason="numba")),
]


def law_of(c, p, b, n, warm) -> MinSepLaw:
    return MinSepLaw(
        coefficients=np.asarray(c, float), probability=p, min_sep=b, steps=n, warm_start=warm
    )


def random_law(rng, most_sep: int, most_steps: int) -> MinSepLaw:
    b = int(rng.integers(1, most_sep + 1))
    c = rng.random(int(rng.integers(1, b + 1))) + 0.1
    p = float(rng.choice([1.0, 0.3, 0.02]))
    return law_of(c, p, b, int(rng.integers(1, most_steps + 1)), bool(rng.integers(2)))


def patterns(law: MinSepLaw) -> tuple[np.ndarray, np.ndarray]:
    walk = enumeration.min_sep_warm if law.warm_start else enumeration.min_sep_cold
    found = walk(law.steps, law.probability, law.min_sep)
    return found.patterns, found.probabilities


def shifts_of(law: MinSepLaw) -> tuple[np.ndarray, np.ndarray]:
    x, chance = patterns(law)
    return x @ enumeration.toeplitz(law.coefficients, law.steps).T, chance


def by_tuples(law: MinSepLaw, sigma: float, order: int) -> float:
    """log Σ over tuples of patterns of their chance times e^{Σ_{k<l} <Cx^k, Cx^l>/σ²}."""
    shifts, chance = shifts_of(law)
    gram = shifts @ shifts.T / sigma**2
    total = 0.0
    for chosen in itertools.combinations_with_replacement(range(len(chance)), order):
        counts = np.unique(chosen, return_counts=True)[1]
        ways = math.factorial(order) / math.prod(math.factorial(int(m)) for m in counts)
        overlap = sum(gram[k, m] for k, m in itertools.combinations(chosen, 2))
        total += ways * float(np.prod(chance[list(chosen)])) * math.exp(overlap)
    return math.log(total)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("order", [2, 3, 4])
def test_reduced_moments_equal_the_sum_over_tuples_of_patterns(order, compiled) -> None:
    rng = np.random.default_rng(order)
    for _ in range(12):
        law = random_law(rng, 4, 5 if order == 4 else 7)
        if len(patterns(law)[1]) > (14 if order == 4 else 40):
            continue
        sigma = 0.7 + rng.random()
        truth = by_tuples(law, sigma, order)
        found = moments.log_moment(law, sigma, order, compiled=compiled)
        # It is rounded up, by no more than what a few thousand roundings of weights come to.
        assert truth - 1e-12 <= found <= truth + 1e-10


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("order", [2, 3])
def test_moments_with_a_cost_equal_the_sum_over_tuples_of_patterns(order, compiled) -> None:
    rng = np.random.default_rng(20 + order)
    for _ in range(12):
        law, sigma = random_law(rng, 4, 7), 0.7 + rng.random()
        cost = rng.random(law.steps)
        cost[law.bands - 1 : law.steps - law.bands + 1] = 0.5
        (x, chance), (shifts, _) = patterns(law), shifts_of(law)
        paid = np.exp(-x @ cost) * chance
        if len(chance) > 40:
            continue
        total = 0.0
        for chosen in itertools.product(range(len(chance)), repeat=order):
            pairs = itertools.combinations(chosen, 2)
            overlap = sum(float(shifts[k] @ shifts[m]) for k, m in pairs)
            total += float(np.prod(paid[list(chosen)])) * math.exp(overlap / sigma**2)
        found = moments.log_moment(law, sigma, order, cost=cost, compiled=compiled)
        assert math.log(total) - 1e-12 <= found <= math.log(total) + 1e-10
    dear = np.full(law.steps, 1e4)
    assert moments.log_moment(law, sigma, order, cost=dear, compiled=compiled) == math.inf


@pytest.mark.parametrize("copies", [2, 3])
def test_large_orders_are_above_the_sum_over_tuples_of_patterns(copies) -> None:
    rng = np.random.default_rng(30 + copies)
    gaps = []
    for _ in range(20):
        law, sigma = random_law(rng, 4, 5), 0.5 + 3.0 * rng.random()
        if len(patterns(law)[1]) > 14:
            continue
        for order in range(copies, 7):
            truth = by_tuples(law, sigma, order)
            found = moments.log_large_moment(law, sigma, order, copies)
            assert found >= truth * (1 - 1e-12) - 1e-12
            gaps.append(found - truth)
            assert order > copies or found <= truth + 1e-10
    assert len(gaps) > 20
    # Much noise: the next power of 1/σ² is what is given away.
    law = law_of([1.0, 0.5], 0.3, 2, 5, True)
    found, truth = moments.log_large_moment(law, 20.0, 5, copies), by_tuples(law, 20.0, 5)
    assert truth <= found <= 1.02 * truth


def test_foreseen_and_rough_moments_are_near_the_true_ones() -> None:
    law, sigma = law_of([1.0, 0.6, 0.2], 0.02, 4, 400, True), 3.0
    true = [0.0, *(moments.log_moment(law, sigma, order) for order in (2, 3, 4))]
    assert (
        moments.foreseen(true[:2]) <= moments.foreseen(true[:3]) == pytest.approx(true[3], rel=0.1)
    )
    rough = moments.rough_large_moments(law, sigma, true[1])
    for order in (2, 8, 20):
        by_two = moments.log_large_moment(law, sigma, order, 2)
        assert rough[order] == pytest.approx(by_two, rel=0.1)


def over_all_states(law: MinSepLaw, sigma: float, order: int) -> float:
    """log A by a forward program over the waits of all copies, a dictionary of their tuples."""
    b, p = law.min_sep, law.probability
    bars = range(b if law.warm_start else 1)
    start = [(1.0 if wait == 0 else p) for wait in bars]
    mass: dict[tuple[int, ...], float] = {}
    for waits in itertools.product(bars, repeat=order):
        key, chance = tuple(sorted(waits)), math.prod(start[wait] for wait in waits)
        mass[key] = mass.get(key, 0.0) + chance / sum(start) ** order
    for t in range(law.steps):
        gram, after = law.overlaps(t) / sigma**2, {}
        for waits, weight in mass.items():
            free = waits.count(0)
            overlap = sum(gram[b - wait] for wait in waits if wait)
            for taking in range(free + 1):
                chance = math.comb(free, taking) * p**taking * (1.0 - p) ** (free - taking)
                exponent = taking * (taking - 1) / 2 * gram[0] + taking * overlap
                left = [0] * (free - taking) + [wait - 1 for wait in waits if wait]
                key = tuple(sorted(left + [b - 1] * taking))
                after[key] = after.get(key, 0.0) + weight * chance * math.exp(exponent)
        mass = after
    return math.log(math.fsum(mass.values()))


@pytest.mark.parametrize("compiled", COMPILED)
def test_reduced_moments_equal_the_program_over_all_states(compiled) -> None:
    rng = np.random.default_rng(9)
    for _ in range(8):
        law, sigma = random_law(rng, 6, 60), 0.7 + rng.random()
        for order in range(2, 6):
            truth = over_all_states(law, sigma, order)
            found = moments.log_moment(law, sigma, order, compiled=compiled)
            # 1e-8 at most from skipping settled steps.
            assert found == pytest.approx(truth, rel=1e-10, abs=1.1e-8)


@pytest.mark.parametrize(("b", "order"), [(1, 2), (1, 5), (2, 3), (5, 2), (5, 4)])
def test_states_are_the_multisets_with_a_free_copy(b, order) -> None:
    states = States.of(b, order)
    named = list(itertools.combinations_with_replacement(range(b), order - 1))
    assert state_count(b, order) == len(named) == states.starts[-1]
    every = sum(1 for _ in itertools.combinations_with_replacement(range(b), order))
    assert waiting_count(b, order) == every == np.arange(1, b + 1) @ np.diff(states.starts)
    assert sorted(states.own.tolist()) == list(range(len(named)))
    for row in range(len(named)):
        assert named[states.own[row]] == tuple(states.ages[row].tolist())
        assert (
            tuple(sorted(min(age + 1, b - 1) for age in states.ages[row]))
            == named[states.rest[row]]
        )
    ways = [len(set(itertools.permutations((*ages, b - 1)))) for ages in named]
    np.testing.assert_array_equal(states.orderings, ways)


def test_skipped_steps_add_nothing_but_rounding(monkeypatch) -> None:
    law, sigma = law_of([1.0, 0.6, 0.2], 0.1, 3, 3000, True), 0.9
    for order in (2, 3):
        skipped = moments.log_moment(law, sigma, order, compiled=False)
        with monkeypatch.context() as patch:
            patch.setattr(program, "_SETTLED", -1.0)
            whole = moments.log_moment(law, sigma, order, compiled=False)
        # 1e-8 at most from skipping, and float64's own.
        assert abs(skipped - whole) < 1.1e-8 + 1e-13 * whole
        # A loose notion of "settled" still bounds from above.
        with monkeypatch.context() as patch:
            patch.setattr(program, "_SETTLED", 1.0)
            early = moments.log_moment(law, sigma, order, compiled=False)
        assert whole - 1e-13 * whole <= early <= whole + 1.0


def test_values_beyond_float64_are_rescaled_or_refused() -> None:
    # p = 1 and b = 1: every copy takes part always, log A_2 = n ‖c‖²/σ².
    always = law_of([1.0], 1.0, 1, 2000, False)
    assert moments.log_moment(always, 0.5, 2) == pytest.approx(8000.0, rel=1e-12)
    assert moments.log_moment(always, 0.05, 2) == math.inf
    assert moments.affordable(always, 0.05).largest == 1
    assert "e^300" in moments.affordable(always, 0.05).reason


def test_limits_are_stated_in_bytes(monkeypatch) -> None:
    law = law_of([1.0], 0.1, 256, 2000, True)  # too few periods for settled messages
    found = moments.affordable(law, 1.0)
    assert found.largest >= (3 if kernel.available() else 2)
    monkeypatch.setattr(program, "MOST_BYTES", program.bytes_needed(law, 2))
    assert moments.affordable(law, 1.0).largest == 2
    assert "GiB" in moments.affordable(law, 1.0).reason
    monkeypatch.setattr(program, "MOST_BYTES", program.bytes_needed(law, 2) - 1)
    assert moments.affordable(law, 1.0).largest == 1


def test_no_loss_of_the_add_direction_is_above_its_limit() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        law = random_law(rng, 4, 7)
        x, chance = patterns(law)
        absent = math.fsum(chance[~x.any(axis=1)])
        if absent <= 1e-12:
            assert law.add_limit == math.inf or law.add_limit > 20.0
            continue
        assert -math.log(absent) <= law.add_limit * (1 + 1e-12) + 1e-12
        assert law.add_limit <= -math.log(absent) * (1 + 1e-9) + 1e-10 / absent
        # Far on the side of large losses too.
        outputs = 3.0 * rng.standard_normal((law.steps, 200)) - 5.0
        assert (-log_ratio(law, 0.8, outputs) <= law.add_limit + 1e-9).all()
        curve = MinSepRenyiCurve(law)
        beyond = np.array([law.add_limit * (1 + 1e-9), law.add_limit + 1.0])
        assert (curve.add(0.8, beyond) == 0.0).all()
        assert curve.add(0.8, np.array([0.9 * law.add_limit]))[0] >= 0.0


def test_bounds_are_above_brute_force_in_both_directions() -> None:
    """δ(ε) of random small mechanisms, by sums over patterns of a fine sample of outputs."""
    rng = np.random.default_rng(6)
    for _ in range(6):
        law, sigma = random_law(rng, 3, 4), 0.8 + rng.random()
        shifts, chance = shifts_of(law)
        size = 40_000
        z = sigma * rng.standard_normal((size, law.steps))

        def loss(y, shifts=shifts, chance=chance, sigma=sigma):
            exponents = y @ shifts.T / sigma**2 - (shifts**2).sum(axis=1) / (2 * sigma**2)
            return np.log(np.exp(exponents) @ chance)

        outputs = z + shifts[rng.choice(len(chance), size=size, p=chance / chance.sum())]
        curve = MinSepRenyiCurve(law)
        grid = np.array([0.1, 0.5, 1.0, 2.0])
        remove, add = curve.delta(sigma, grid)
        for values, bound in ((loss(outputs), remove), (-loss(z), add)):
            for epsilon, most in zip(grid, bound, strict=True):
                terms = np.maximum(-np.expm1(epsilon - values), 0.0)
                error = 6.0 * terms.std() / math.sqrt(size)
                assert terms.mean() - error <= most + 1e-12

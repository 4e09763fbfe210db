"""Settled messages of b-min-sep sampling: their bound, their draws, and when they are used."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dptrain.accounting.min_sep import importance_terms, moments
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.importance_terms import TiltedMinSep
from dptrain.accounting.min_sep.moments import kernel, program, settled
from dptrain.accounting.min_sep.moments.settled import settle
from dptrain.accounting.min_sep.moments.settled_draws import SettledPatterns
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import log_ratio
from tests.accounting.min_sep.moments.test_program import by_tuples, law_of, patterns, shifts_of
from tests.accounting.min_sep.moments.test_tilted import AS_MIN_SEP, KNOWN

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs numba")

SMALL = {
    "warm": law_of([0.8, 0.5, 0.3], 0.2, 3, 7, True),
    "cold": law_of([0.8, 0.5, 0.3], 0.3, 3, 7, False),
    "few bands": law_of([0.9, 0.4], 0.1, 3, 6, True),
    "two": law_of([0.9, 0.7], 0.6, 2, 5, True),
    "Poisson": law_of([0.9], 0.3, 1, 5, True),
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settled messages for runs of two periods, too."""
    monkeypatch.setattr(settled, "_LEAST_PERIODS", 1)


@pytest.fixture
def always(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settled messages wherever there are some."""
    monkeypatch.setattr(program, "_LONG_WORK", -1)
    monkeypatch.setattr(program, "_LONG_PERIODS", 1)
    monkeypatch.setattr(importance_terms, "_MOST_MESSAGES", -1)


@pytest.mark.sample(every=3)
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_settled_moments_are_above_the_sum_over_tuples_of_patterns(name: str, order: int) -> None:
    law = SMALL[name]
    for sigma in (0.8, 1.7):
        if len(patterns(law)[1]) ** order > 10**6:
            continue
        truth, found = by_tuples(law, sigma, order), settle(law, sigma, order).log_moment
        assert truth - 1e-12 <= found
        if name == "Poisson":  # neither end differs from the middle
            assert found <= truth + 1e-10


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("warm", [True, False])
def test_ends_of_long_runs_weigh_little(order: int, warm: bool) -> None:
    law = law_of([0.8, 0.5, 0.3], 0.05, 4, 2000, warm)
    exact = moments.log_moment(law, 1.3, order, compiled=False)
    found = settle(law, 1.3, order)
    # 500 periods of which the two at the ends count for a little more than they should.
    assert exact - 1e-9 <= found.log_moment <= exact * (1.0 + 4.0 / 500.0)
    assert 2000 * found.uneven <= 1e-6


@pytest.mark.parametrize("order", [2, 3, 4])
def test_no_state_grows_faster_than_the_bound_says(order: int) -> None:
    """The step over all multisets of ages, as the theorem writes it, state by state."""
    law, sigma, b, p = law_of([0.8, 0.5, 0.3], 0.1, 4, 400, True), 1.1, 4, 0.1
    found = settle(law, sigma, order)
    c = law.coefficients
    g = [float(c[d:] @ c[: c.size - d]) / sigma**2 if d < c.size else 0.0 for d in range(b)]

    def message(ages: tuple[int, ...]) -> float:
        wait = b - 1 - max(ages)
        waits = sorted(b - 1 - age - wait for age in ages)
        places = [math.comb(w + i - 1, i) for i, w in enumerate(waits) if i]
        return float(found.messages[sum(places)]) / found.growth**wait

    values = []
    for ages in itertools.combinations_with_replacement(range(b), order):
        free, barred = ages.count(b - 1), [age for age in ages if age < b - 1]
        pull, total = sum(g[age + 1] for age in barred), 0.0
        for j in range(free + 1):
            after = [age + 1 for age in barred] + [b - 1] * (free - j) + [0] * j
            weight = math.comb(free, j) * p**j * (1 - p) ** (free - j)
            total += weight * math.exp(j * (j - 1) / 2 * g[0] + j * pull) * message(tuple(after))
        values.append(message(ages))
        assert total / values[-1] == pytest.approx(found.growth, rel=1e-12 + found.uneven)
    assert found.log_least <= math.log(min(values)) + 1e-12
    assert found.log_most >= math.log(max(values)) - 1e-12


@pytest.mark.sample(every=3)
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_settled_draws_times_weights_have_the_tilted_law(name: str, order: int) -> None:
    law, sigma, size = SMALL[name], 1.3, 40_000
    x, chance = patterns(law)
    shifts = shifts_of(law)[0]
    gram = shifts @ shifts.T / sigma**2
    expected: dict[tuple[int, ...], float] = {}
    for chosen in itertools.product(range(len(x)), repeat=order):
        overlap = sum(gram[k, m] for k, m in itertools.combinations(chosen, 2))
        key = tuple(x[list(chosen)].sum(axis=0).astype(int).tolist())
        weight = float(np.prod(chance[list(chosen)])) * math.exp(overlap)
        expected[key] = expected.get(key, 0.0) + weight
    drawing = SettledPatterns(law, sigma, order)
    times, lanes, log_weights = drawing.events(np.random.default_rng(order), size)
    assert (log_weights <= 1e-12).all()
    counts = np.zeros((size, law.steps), dtype=int)
    np.add.at(counts, (lanes, times), 1)
    weights = np.exp(log_weights + drawing.log_moment)
    keys, place = np.unique(counts, axis=0, return_inverse=True)
    sums = np.bincount(place.ravel(), weights=weights)
    seen = {tuple(key): value / size for key, value in zip(keys.tolist(), sums, strict=True)}
    assert set(seen) <= set(expected)
    top = math.exp(drawing.log_moment)
    for key, mean in expected.items():
        # 6 sigma in Bernstein's form: terms are at most ``top``.
        error = 6 * math.sqrt(mean * top / size) + 12 * top / size
        assert abs(seen.get(key, 0.0) - mean) <= error, key


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("warm", [True, False])
def test_weights_average_to_the_moment(order: int, warm: bool) -> None:
    law, size = law_of([0.8, 0.5, 0.3], 0.05, 5, 60, warm), 40_000
    drawing = SettledPatterns(law, 1.3, order)
    weights = np.exp(drawing.events(np.random.default_rng(order), size)[2] + drawing.log_moment)
    exact = math.exp(moments.log_moment(law, 1.3, order, compiled=False))
    assert abs(weights.mean() - exact) <= 6 * weights.std() / math.sqrt(size)
    assert drawing.variation < 1e-5


@pytest.mark.parametrize("order", [2, 3])
def test_starts_are_drawn_in_proportion_to_their_message(order: int) -> None:
    law, b, size = law_of([0.9, 0.7, 0.5], 0.1, 3, 60, True), 3, 40_000
    drawing = SettledPatterns(law, {2: 0.6, 3: 0.8}[order], order)
    starts = np.array(list(itertools.product(range(b), repeat=order)))
    message = np.exp(drawing._log_message(np.sort(starts, axis=1)))
    assert message.max() > 1.5 * message.min()
    chance = np.where(starts == 0, 1.0, law.probability).prod(axis=1) * message
    chance /= chance.sum()
    expected: dict[tuple[int, ...], float] = {}
    for start, p in zip(np.sort(starts, axis=1).tolist(), chance.tolist(), strict=True):
        expected[tuple(start)] = expected.get(tuple(start), 0.0) + p
    drawn = drawing._first(np.random.default_rng(order), size)
    for start, p in expected.items():
        seen = int((drawn == start).all(axis=1).sum())
        assert abs(seen - size * p) <= 6 * math.sqrt(size * p * (1 - p)) + 12, start


@pytest.mark.sample(every=3)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("epsilon", [1.0, 6.0])
def test_settled_terms_average_to_a_known_delta(epsilon: float) -> None:
    from dptrain.accounting.poisson import PoissonPLD

    known = float(PoissonPLD().profile(KNOWN, [epsilon]).remove[0])
    tilted = TiltedMinSep(MinSepRenyiCurve(AS_MIN_SEP), 1.2)
    terms = tilted.remove(epsilon)
    assert any(isinstance(tilted._patterns_of(order), SettledPatterns) for order in (3, 4))
    rng = np.random.default_rng(7)
    drawn = np.concatenate([terms.draw(rng, 4096) for _ in range(10)])
    assert 0.0 <= drawn.min() <= drawn.max() <= terms.ceiling * (1 + 1e-9)
    assert terms.ceiling >= known
    error = drawn.std() / math.sqrt(drawn.size)
    assert abs(drawn.mean() - known) <= 6 * error + 1e-4 * known  # 6 sigma and the PLD's grid


@pytest.mark.parametrize("engine", ["auto", "cuda"])
def test_settled_terms_average_to_those_of_all_messages(
    engine: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    law, sigma, epsilon, means = law_of([0.8, 0.5, 0.3], 0.1, 5, 120, True), 1.3, 5.0, []
    for name in ("all", "settled"):
        if name == "settled":
            request.getfixturevalue("always")
        tilted = TiltedMinSep(MinSepRenyiCurve(law), sigma, engine, device="cpu")
        largest = tilted._log_range(3, epsilon)
        monkeypatch.setattr(tilted, "_best_order", lambda _, largest=largest: (3, largest))
        terms = tilted.remove(epsilon)
        drawn = np.concatenate([terms.draw(np.random.default_rng(i), 2048) for i in range(8)])
        assert isinstance(tilted._patterns_of(3), SettledPatterns) == (name == "settled")
        assert drawn.max() <= terms.ceiling
        means.append((drawn.mean(), drawn.var() / drawn.size))
    (one, a), (two, b) = means
    assert math.sqrt(a + b) < 0.1 * one
    assert abs(one - two) <= 6 * math.sqrt(a + b)


@pytest.mark.usefixtures("always")
def test_settled_bounds_are_above_brute_force_in_both_directions() -> None:
    rng, size = np.random.default_rng(6), 40_000
    for law in SMALL.values():
        sigma = 0.8 + rng.random()
        shifts, chance = shifts_of(law)
        z = sigma * rng.standard_normal((size, law.steps))
        outputs = z + shifts[rng.choice(len(chance), size=size, p=chance / chance.sum())]
        grid = np.array([0.1, 0.5, 1.0, 2.0])
        remove, add = MinSepRenyiCurve(law).delta(sigma, grid)
        tilted = TiltedMinSep(MinSepRenyiCurve(law), sigma)
        for losses, bound, side in (
            (log_ratio(law, sigma, outputs.T), remove, "remove"),
            (-log_ratio(law, sigma, z.T), add, "add"),
        ):
            for epsilon, most in zip(grid, bound, strict=True):
                terms = np.maximum(-np.expm1(epsilon - losses), 0.0)
                error = 6.0 * terms.std() / math.sqrt(size)
                assert terms.mean() - error <= most + 1e-12
                assert terms.mean() - error <= tilted.both(float(epsilon))[side].ceiling + 1e-12


def test_long_runs_have_orders_that_no_program_fits() -> None:
    long = law_of(np.ones(512), 4.2e-5, 512, 100_000, True)
    assert moments.affordable(long, math.inf).largest == 4
    assert [moments.settles(long, order) for order in (2, 3, 4, 5)] == [False, True, True, False]
    assert settled.bytes_needed(long, 4) < 1 << 30
    # Nothing settles in a few periods, and at p = 1 nothing ever does.
    assert not settled.covers(law_of(np.ones(512), 4.2e-5, 512, 2000, True), 3)
    assert not settled.covers(law_of(np.ones(512), 1.0, 512, 100_000, True), 3)
    # A program that is cheap is exact.
    assert not moments.settles(law_of([1.0], 0.01, 4, 100_000, True), 4)


def test_what_is_hopeless_is_given_up() -> None:
    law = law_of([1.0, 1.0], 0.3, 2, 4000, True)
    assert settle(law, 0.3, 3).log_moment == math.inf


@pytest.mark.usefixtures("always")
def test_samples_of_an_uneven_chain_count_as_their_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "_MOST_SWEEPS", 0)
    law: MinSepLaw = law_of([0.8, 0.5, 0.3], 0.1, 5, 120, True)
    exact = moments.log_moment(law, 1.3, 3, compiled=False)
    assert settle(law, 1.3, 3).log_moment >= exact  # messages of 1 bound, too
    tilted = TiltedMinSep(MinSepRenyiCurve(law), 1.3)
    monkeypatch.setattr(tilted, "_best_order", lambda _: (3, tilted._log_range(3, 5.0)))
    terms = tilted.remove(5.0)
    assert (terms.draw(np.random.default_rng(1), 64) == terms.ceiling).all()

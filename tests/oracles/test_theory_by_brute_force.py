"""Lemmas of docs/theory that all else rests on, on small laws where everything can be summed up."""

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import norm

Array = npt.NDArray[np.float64]
GAMMAS = np.exp(np.linspace(-3.0, 3.0, 25))
ROUNDING = 1e-12  # sums of at most 10^4 products of numbers that add up to 1


def hockey_stick(p: Array, q: Array, gamma: float) -> float:
    return float(np.maximum(p - gamma * q, 0.0).sum())


def law(rng: np.random.Generator, size: int) -> Array:
    return rng.dirichlet(np.full(size, 0.5))


def kernel(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """A random post-processing: each row is a law."""
    return rng.dirichlet(np.full(columns, 0.5), size=rows)


@pytest.mark.parametrize("seed", range(20))
def test_one_direction_gives_the_other(seed: int) -> None:
    """Equation (3), and that a post-processing loses in both directions."""
    rng = np.random.default_rng(seed)
    p, q = law(rng, 7), law(rng, 7)
    through = kernel(rng, 7, 5)
    for gamma in GAMMAS:
        other = 1.0 - gamma + gamma * hockey_stick(q, p, 1.0 / gamma)
        assert hockey_stick(p, q, gamma) == pytest.approx(other, abs=ROUNDING)
        for first, second in ((p, q), (q, p)):
            lost = hockey_stick(first @ through, second @ through, gamma)
            assert lost <= hockey_stick(first, second, gamma) + ROUNDING


@pytest.mark.parametrize("seed", range(20))
def test_dominated_steps_compose_whatever_the_past(seed: int) -> None:
    """Two steps, each a post-processing of a fixed pair; which one depends on the first output."""
    rng = np.random.default_rng(seed)
    pairs = [(law(rng, 4), law(rng, 4)) for _ in range(2)]
    first = kernel(rng, 4, 5)
    second = [kernel(rng, 4, 3) for _ in range(5)]
    joint, product = [], []
    for world in (0, 1):
        before = pairs[0][world] @ first
        joint.append(np.stack([before[y] * (pairs[1][world] @ second[y]) for y in range(5)]))
        product.append(np.outer(pairs[0][world], pairs[1][world]))
    for gamma in GAMMAS:
        for one, two in ((0, 1), (1, 0)):
            attained = hockey_stick(joint[one], joint[two], gamma)
            assert attained <= hockey_stick(product[one], product[two], gamma) + ROUNDING


@pytest.mark.parametrize("seed", range(20))
def test_hiding_never_costs_and_publishing_averages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = law(rng, 4)
    p, q = (np.stack([law(rng, 6) for _ in range(4)]) for _ in range(2))
    for gamma in GAMMAS:
        given = sum(w * hockey_stick(p[h], q[h], gamma) for h, w in enumerate(weights))
        published = hockey_stick(weights[:, None] * p, weights[:, None] * q, gamma)
        assert published == pytest.approx(given, abs=ROUNDING)
        assert hockey_stick(weights @ p, weights @ q, gamma) <= given + ROUNDING


@pytest.mark.parametrize("seed", range(20))
def test_mass_at_the_ends_of_a_cell_loses_more_alone_and_composed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses, mass = np.sort(rng.uniform(-1.0, 2.0, 6)), law(rng, 6)
    ends = np.array([-1.0, 2.0])
    down = (mass @ np.exp(-losses) - np.exp(-ends[1])) / (np.exp(-ends[0]) - np.exp(-ends[1]))
    coarse = np.array([down, 1.0 - down])
    assert coarse @ np.exp(-ends) == pytest.approx(mass @ np.exp(-losses), rel=1e-12)
    others, beside = rng.uniform(-1.0, 1.0, 5), law(rng, 5)
    for epsilon in np.linspace(-2.0, 3.0, 21):
        for more, weight in ((np.zeros(1), np.ones(1)), (others, beside)):
            fine = np.maximum(-np.expm1(epsilon - losses[:, None] - more), 0.0)
            rough = np.maximum(-np.expm1(epsilon - ends[:, None] - more), 0.0)
            assert mass @ fine @ weight <= coarse @ rough @ weight + ROUNDING


@pytest.mark.parametrize("seed", range(20))
def test_a_spread_ratio_loses_more_in_both_directions(seed: int) -> None:
    """Each value split in two with the mean kept: alone, in two copies, and in a mean of two."""
    rng = np.random.default_rng(seed)
    values, mass = rng.gamma(1.0, size=5), law(rng, 5)
    values /= mass @ values
    apart = rng.uniform(0.0, 1.0, 5)
    low, high = values * (1.0 - apart), values * (1.0 + 2.0 * apart)
    spread, weights = np.concatenate([low, high]), np.concatenate([mass * 2 / 3, mass / 3])
    pairs = [
        ((values, mass), (spread, weights)),
        *(
            (
                (join(values[:, None], values).ravel(), np.outer(mass, mass).ravel()),
                (join(spread[:, None], spread).ravel(), np.outer(weights, weights).ravel()),
            )
            for join in (np.multiply, lambda a, b: 0.3 * a + 0.7 * b)
        ),
    ]
    for (a, p), (b, q) in pairs:
        assert b @ q == pytest.approx(1.0, abs=1e-12)
        for gamma in GAMMAS:
            assert np.maximum(a - gamma, 0) @ p <= np.maximum(b - gamma, 0) @ q + ROUNDING
            assert np.maximum(1 - gamma * a, 0) @ p <= np.maximum(1 - gamma * b, 0) @ q + ROUNDING


@pytest.mark.parametrize("seed", range(6))
def test_numbers_lose_more_than_shifts_that_turn_with_the_past(seed: int) -> None:
    """Two rows; a hidden pattern's shift has its number's size, and a sign by pattern and past.

    The grid is the same for both, and its error (integrands with a kink, spacing h = 0.05, is of
    order h²) is far below the difference to be seen.
    """
    rng = np.random.default_rng(seed)
    h = 0.05
    y = np.arange(-7.0, 9.0, h)
    noise = norm.pdf(y) * h
    weights = law(rng, 4)
    sizes = rng.uniform(0.0, 2.0, (4, 2))
    signs = rng.choice([-1.0, 1.0], (4, 3))  # of row 1, and of row 2 for either sign of y_1
    numbers, turned = np.zeros((y.size, y.size)), np.zeros((y.size, y.size))
    for w, size, sign in zip(weights, sizes, signs, strict=True):
        numbers += w * np.outer(ratio(y, size[0]), ratio(y, size[1]))
        later = np.where(y > 0, sign[1], sign[2])[:, None] * size[1]
        turned += w * ratio(y, sign[0] * size[0])[:, None] * ratio(y[None, :], later)
    q = np.outer(noise, noise)
    for gamma in GAMMAS:
        for sign in (1.0, -1.0):
            attained = (q * np.maximum(sign * (turned - gamma), 0.0)).sum()
            assert attained <= (q * np.maximum(sign * (numbers - gamma), 0.0)).sum() + h**2


def ratio(y: Array, shift: npt.ArrayLike) -> Array:
    """Of N(shift, 1) to N(0, 1)."""
    return np.exp(y * np.asarray(shift) - np.square(shift) / 2.0)


@pytest.mark.parametrize(("p", "steps"), [(0.05, 1), (0.3, 1), (0.2, 2)])
def test_who_may_be_absent_loses_at_most_the_chance_of_taking_part(p: float, steps: int) -> None:
    """Poisson sampling, very little noise: nearly attained by remove, and nothing left to add."""
    sigma, h = 0.2, 0.01
    y = np.arange(-3.0, 4.0, h)
    noise = norm.pdf(y / sigma) / sigma * h
    one = 1.0 - p + p * ratio(y / sigma, 1.0 / sigma)
    q, lam = noise, one
    for _ in range(steps - 1):
        q, lam = np.outer(q, noise).ravel(), np.outer(lam, one).ravel()
    part = 1.0 - (1.0 - p) ** steps
    for epsilon in np.linspace(0.0, 2.0, 9):
        remove = float((q * np.maximum(lam - np.exp(epsilon), 0.0)).sum())
        add = float((q * np.maximum(1.0 - np.exp(epsilon) * lam, 0.0)).sum())
        assert 0.8 * part < remove <= part * (1 + 1e-6)
        assert add <= part + 1e-6
        if epsilon >= -np.log1p(-part):
            assert add == 0.0


@pytest.mark.parametrize(("sigma", "beta"), [(2.0, 0.05), (5.0, 0.01)])
def test_a_bound_for_the_worst_step_is_none_for_all_of_them(sigma: float, beta: float) -> None:
    """Two bins, independent noise, the second epoch: steps 3 and 4, without the example.

    The bin that takes part next is the first before step 3 and the second before step 4; log odds
    of it are L_3 and L_4. The larger of their quantiles at 1 - β fails more often than β.
    """
    rng = np.random.default_rng(5)
    size = 400_000
    y = sigma * rng.normal(size=(size, 3))
    third = (y[:, 0] - y[:, 1]) / sigma**2
    fourth = (y[:, 1] - y[:, 0] - y[:, 2]) / sigma**2 + 0.5 / sigma**2
    quantiles = (
        norm.isf(beta) * np.sqrt(2.0) / sigma,
        norm.isf(beta) * np.sqrt(3.0) / sigma + 0.5 / sigma**2,
    )
    worst = max(quantiles)
    failed = ((third > worst) | (fourth > worst)).mean()
    assert abs((fourth > quantiles[1]).mean() - beta) < 6 * np.sqrt(beta / size)
    assert abs((third > quantiles[0]).mean() - beta) < 6 * np.sqrt(beta / size)
    assert failed > beta + 6 * np.sqrt(beta / size)
    # Both at once hardly ever happens: what speaks for one bin speaks against the other.
    exact = beta + norm.sf(worst * sigma / np.sqrt(2.0))
    assert abs(failed - exact) < 6 * np.sqrt(exact / size)


@pytest.mark.parametrize("levels", [(0, 1), (1, 0), (1, 1)])
def test_a_larger_mixing_law_loses_more(levels: tuple[int, ...]) -> None:
    """Mass moved to larger means of one sign, by closed forms of half lines."""
    means = np.array([0.0, 0.5, 1.5])
    weights = np.array([0.5, 0.3, 0.2])
    larger = weights.copy()
    for place, moved in enumerate(levels):
        larger[place] -= 0.1 * moved
        larger[place + 1] += 0.1 * moved
    y = np.arange(-9.0, 11.0, 0.002)
    q = norm.pdf(y) * 0.002
    before, after = (w @ np.stack([ratio(y, m) for m in means]) for w in (weights, larger))
    assert (np.diff(before) >= 0).all()
    for gamma in GAMMAS:
        for sign in (1.0, -1.0):
            small = float((q * np.maximum(sign * (before - gamma), 0.0)).sum())
            large = float((q * np.maximum(sign * (after - gamma), 0.0)).sum())
            assert small <= large + 1e-9

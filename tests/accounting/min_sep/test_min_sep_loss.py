"""Losses of b-min-sep against enumeration of every participation pattern, and in law."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from dptrain.accounting.min_sep.law import MinSepLaw, participations
from dptrain.accounting.min_sep.min_sep_losses import MinSepLosses, log_ratio, sample_losses
from dptrain.accounting.min_sep.recursion import LinearRecursion, make_recursion
from dptrain.accounting.simulation.simulation import DIRECTIONS, loss_chunks

COEFFICIENTS = {
    "decreasing": [1.0, 0.6, 0.3],
    "bump": [0.5, 1.1, 0.2],
    "hole": [0.7, 0.0, 0.9],
    "four": [0.8, 0.3, 0.9, 0.4],
    "one": [1.3],
}


def make_law(
    c: list[float] | np.ndarray, p: float, b: int, n: int, warm: bool = False
) -> MinSepLaw:
    return MinSepLaw(coefficients=np.asarray(c), probability=p, min_sep=b, steps=n, warm_start=warm)


def patterns(p: float, b: int, n: int, warm: bool) -> dict[tuple[int, ...], float]:
    """Probability of every participation pattern, by walking the sampler's tree state by state."""
    starts = {0: 1.0}
    if warm:
        total = 1 + (b - 1) * p
        starts = {s: (1 / total if s == 0 else p / total) for s in range(b)}
    result: dict[tuple[int, ...], float] = {}

    def walk(t: int, barred: int, taken: tuple[int, ...], weight: float) -> None:
        if weight == 0.0:
            return
        if t == n:
            result[taken] = result.get(taken, 0.0) + weight
        elif barred:
            walk(t + 1, barred - 1, taken, weight)
        else:
            walk(t + 1, b - 1, (*taken, t), weight * p)
            walk(t + 1, 0, taken, weight * (1 - p))

    for barred, weight in starts.items():
        walk(0, barred, (), weight)
    assert math.isclose(sum(result.values()), 1.0, abs_tol=1e-12)
    return result


def dense(c: list[float], n: int) -> np.ndarray:
    return sum(v * np.eye(n, k=-k) for k, v in enumerate(c[:n]))


def enumerated(
    c: list[float], p: float, b: int, n: int, warm: bool, sigma: float, y: np.ndarray
) -> np.ndarray:
    """log Σ_x Pr[x] N(y; Cx, σ²) / N(y; 0, σ²), straight from the densities."""
    matrix, terms = dense(c, n), []
    for taken, weight in patterns(p, b, n, warm).items():
        x = np.zeros(n)
        x[list(taken)] = 1
        mean = (matrix @ x)[:, None]
        log_density = -((y - mean) ** 2).sum(0) / (2 * sigma**2)
        terms.append(math.log(weight) + log_density + (y**2).sum(0) / (2 * sigma**2))
    return np.logaddexp.reduce(np.stack(terms), axis=0)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", sorted(COEFFICIENTS))
@pytest.mark.parametrize(("n", "extra"), [(1, 0), (2, 1), (5, 0), (8, 0), (8, 2)])
@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("sigma", [0.15, 0.8])
def test_recursion_equals_enumeration(
    name: str, warm: bool, n: int, extra: int, p: float, sigma: float
) -> None:
    c = COEFFICIENTS[name]
    b = len(c) + extra
    rng = np.random.default_rng(1)
    # Outputs near P and near Q alike, so that both directions' losses are covered.
    matrix = dense(c, n)
    x = rng.random((n, 40)) < 0.4
    x[:, 20:] = False
    y = matrix @ x + sigma * rng.standard_normal((n, 40))
    expected = enumerated(c, p, b, n, warm, sigma, y)
    got = log_ratio(make_law(c, p, b, n, warm), sigma, y)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10 * max(1, abs(expected).max()))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("bands", "b", "n", "p"),
    [(1, 1, 700, 0.05), (4, 4, 97, 0.2), (16, 20, 700, 0.1), (40, 50, 300, 0.7), (5, 9, 3, 0.5)],
)
def test_linear_recursion_equals_logarithmic(
    bands: int, b: int, n: int, p: float, warm: bool
) -> None:
    law = make_law(1 / np.sqrt(np.arange(1, bands + 1)), p, b, n, warm)
    y = 1.3 * np.random.default_rng(2).standard_normal((n, 50)) + 0.2
    linear = log_ratio(law, 1.3, y, log_space=False)
    logarithmic = log_ratio(law, 1.3, y, log_space=True)
    np.testing.assert_allclose(linear, logarithmic, rtol=0, atol=1e-10)


def test_tiny_noise_takes_the_logarithmic_recursion() -> None:
    def pick(sigma: float, p: float = 0.1, warm: bool = True) -> object:
        return make_recursion(
            probability=p, min_sep=4, warm_start=warm, lanes=1, norm=1.0, sigma=sigma
        )

    assert isinstance(pick(1.0), LinearRecursion)
    assert not isinstance(pick(0.05), LinearRecursion)
    assert not isinstance(pick(1.0, p=1.0, warm=False), LinearRecursion)
    # Every loss must be finite where float64 could not hold f itself (‖c‖²/σ² = 10⁴).
    law = make_law([1.0], 0.5, 1, 50)
    for direction in DIRECTIONS:
        losses = sample_losses(law, [0.01], direction, np.random.default_rng(3), 100)
        assert np.isfinite(losses).all()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("b", "n", "p"), [(1, 6, 0.3), (3, 8, 0.4), (3, 8, 1.0), (4, 2, 0.7)])
def test_participations_have_the_law_of_the_sampler(b: int, n: int, p: float, warm: bool) -> None:
    size = 40_000
    times, lanes = participations(make_law([1.0], p, b, n, warm), np.random.default_rng(4), size)
    assert (np.diff(times) >= 0).all()
    taken: list[list[int]] = [[] for _ in range(size)]
    for t, lane in zip(times.tolist(), lanes.tolist(), strict=True):
        taken[lane].append(t)
    expected = patterns(p, b, n, warm)
    counts: dict[tuple[int, ...], int] = {}
    for pattern in map(tuple, taken):
        counts[pattern] = counts.get(pattern, 0) + 1
    assert set(counts) <= set(expected)
    # 6 sigma per pattern, plus 3 counts for the Poisson tail of rare ones: error < 1e-7 in all.
    for pattern, probability in expected.items():
        deviation = counts.get(pattern, 0) - size * probability
        assert abs(deviation) <= 6 * math.sqrt(size * probability * (1 - probability)) + 3


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ["bump", "four"])
@pytest.mark.parametrize("sigmas", [[1.2], [2.0, 1.2]])
def test_sampled_losses_have_mean_ratio_one(name: str, warm: bool, sigmas: list[float]) -> None:
    # E_Q[P/Q] = 1 and E_P[Q/P] = 1. n = 70 spans three blocks. 6 sigma: error 2e-9 each.
    c = COEFFICIENTS[name]
    law = make_law(c, 0.2, len(c) + 1, 70, warm)
    for seed, direction in enumerate(DIRECTIONS):
        losses = sample_losses(law, [4 * s for s in sigmas], direction, rng(seed), 100_000)
        ratio = np.exp(-losses)
        error = ratio.std(axis=1) / math.sqrt(losses.shape[1])
        assert (abs(ratio.mean(axis=1) - 1) < 6 * error).all()
        assert (losses.mean(axis=1) > 0).all()  # both are Kullback-Leibler divergences


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seed))


@functools.cache
def direct_losses(direction: str, sigma: float) -> np.ndarray:
    """Losses at n = 45 with dense matrices, patterns by the definition and the log recursion."""
    c, p, b, n, size = [0.5, 1.1, 0.2], 0.4, 4, 45, 60_000
    source = np.random.default_rng(9)
    x = np.zeros((n, size))
    if direction == "remove":
        barred = np.zeros(size)
        for t in range(n):
            taken = (barred == 0) & (source.random(size) < p)
            x[t] = taken
            barred = np.where(taken, b - 1, np.maximum(barred - 1, 0))
    y = dense(c, n) @ x + sigma * source.standard_normal((n, size))
    sign = 1 if direction == "remove" else -1
    return sign * log_ratio(make_law(c, p, b, n), sigma, y)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sigmas", [[0.9], [1.4, 0.9]])
def test_sampled_losses_have_the_law_of_direct_simulation(
    direction: str, sigmas: list[float]
) -> None:
    law = make_law([0.5, 1.1, 0.2], 0.4, 4, 45)
    ours = sample_losses(law, sigmas, direction, rng(5), 60_000)  # type: ignore[arg-type]
    for sigma, row in zip(sigmas, ours, strict=True):
        theirs = direct_losses(direction, sigma)
        # Two-sample Kolmogorov-Smirnov: Pr[D > x] ≤ 2 exp(-m x²/... ) = 1e-8 at x = 3.1 sqrt(2/m).
        grid = np.sort(np.concatenate([row, theirs]))
        gap = np.searchsorted(np.sort(row), grid) - np.searchsorted(np.sort(theirs), grid)
        assert abs(gap).max() / len(row) < 3.1 * math.sqrt(2 / len(row))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.7, 1.0])
@pytest.mark.parametrize(("bands", "b", "n"), [(3, 4, 45), (3, 3, 2), (20, 23, 70), (1, 1, 32)])
@pytest.mark.parametrize("sigmas", [[1.3], [2.0, 1.3]])
def test_both_directions_are_the_ratio_of_the_outputs_drawn(
    bands: int, b: int, n: int, p: float, warm: bool, sigmas: list[float]
) -> None:
    # The draws are replayed (participations, then z from the last block of rows to the first) and
    # y = C x + σ z is formed with a dense matrix.
    c = [0.5, 1.1, *np.linspace(0.9, 0.1, 18)][:bands]
    law, size = make_law(c, p, b, n, warm), 40
    source = rng(11)
    x, z = np.zeros((n, size)), np.zeros((n, size))
    x[participations(law, source, size)] = 1
    for stop in range(n, 0, -law.block_rows):
        start = max(0, stop - law.block_rows)
        z[start:stop] = source.standard_normal((stop - start, size))
    both = sample_losses(law, sigmas, "both", rng(11), size)
    for index, sigma in enumerate(sigmas):
        remove = log_ratio(law, sigma, dense(c, n) @ x + sigma * z)
        add = -log_ratio(law, sigma, sigma * z)
        np.testing.assert_allclose(both[0, index], remove, rtol=0, atol=1e-10)
        np.testing.assert_allclose(both[1, index], add, rtol=0, atol=1e-10)
    alone = sample_losses(law, sigmas, "remove", rng(11), size)
    np.testing.assert_allclose(alone, both[0], rtol=0, atol=1e-10)


def test_losses_do_not_depend_on_the_number_of_threads() -> None:
    law = make_law([1.0, 0.5], 0.2, 3, 20, True)
    samples = 3 * law.lanes + 17
    both = [
        np.concatenate(
            list(loss_chunks(MinSepLosses(law), [1.0], seed=[7, 1], samples=samples, threads=k)),
            axis=2,
        )
        for k in (1, 3)
    ]
    np.testing.assert_array_equal(both[0], both[1])
    assert both[0].shape == (2, 1, samples)
    assert np.unique(both[0][0]).size == samples  # no stream is used twice
    first = next(iter(loss_chunks(MinSepLosses(law), [1.0], seed=[7, 2], samples=9, threads=1)))
    assert not np.isin(first, both[0]).any()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("bands", "b", "n"), [(16, 16, 2000), (1, 1, 7200), (256, 256, 7200)])
def test_memory_of_a_chunk_is_bounded(bands: int, b: int, n: int) -> None:
    import tracemalloc

    law = make_law(np.ones(bands), 1 / (b + 5), b, n, True)
    tracemalloc.start()  # numpy reports its arrays; torch's are the window of b rows
    sample_losses(law, [50.0], "both", rng(1), law.lanes)
    peak = tracemalloc.get_traced_memory()[1] + 2 * 8 * b * law.lanes
    tracemalloc.stop()
    assert peak < 160e6
    if b == 16:
        assert peak < 8 * n * law.lanes  # the outputs are never held at once


def test_squared_norms_and_sensitivity_match_the_dense_matrix() -> None:
    law = make_law([0.7, 0.0, 0.9], 0.5, 3, 8)
    matrix = dense([0.7, 0.0, 0.9], 8)
    np.testing.assert_allclose(law.squared_norms, (matrix**2).sum(0), rtol=1e-14)
    best = max(
        np.linalg.norm(matrix[:, list(taken)].sum(1)) for taken in patterns(0.5, 3, 8, False)
    )
    assert law.sensitivity == pytest.approx(best, rel=1e-14)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("coefficients", [1.0, 1.0, 1.0, 1.0], "bands must not exceed"),
        ("coefficients", [1.0, -0.1], "coefficients"),
        ("coefficients", [math.nan], "coefficients"),
        ("coefficients", [0.0], "coefficients"),
        ("probability", 0.0, "probability=0.0"),
        ("probability", 1.1, "probability=1.1"),
        ("steps", 0, "steps=0"),
    ],
)
def test_bad_law_is_refused(field: str, value: object, message: str) -> None:
    good = dict(coefficients=[1.0], probability=0.5, min_sep=3, steps=5, warm_start=True)
    with pytest.raises(ValueError, match=message):
        MinSepLaw(**{**good, field: value})  # type: ignore[arg-type]


def test_outputs_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        log_ratio(make_law([1.0], 0.5, 1, 5), 1.0, np.zeros((4, 2)))

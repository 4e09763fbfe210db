"""Losses and participations of b-min-sep against enumeration of every pattern."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.accounting.min_sep.pair import MinSepLaw, participations
from dptrain.accounting.min_sep.recursion import log_ratio

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

"""Terms of shifted noise: their mean and the bound on their squares, against exact integrals."""

from __future__ import annotations

import dataclasses
import importlib.util
import math

import numpy as np
import pytest

from dptrain.accounting.min_sep import importance_terms
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.importance_terms import TiltedMinSep
from dptrain.accounting.min_sep.law import _raised
from dptrain.accounting.min_sep.moments import rough_large_moments
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.shifted_terms import best_shift, direction, shifted_draws
from dptrain.accounting.simulation.draws import SharedDraws
from dptrain.accounting.simulation.estimate import rough_excess
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.accounting.simulation.verdicts import Rule, judge
from tests.accounting.min_sep.test_min_sep_bounds import law_of
from tests.oracles import enumeration, quadrature

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
BANDS = (1.0, 0.6, 0.3)


def oracle(law: MinSepLaw) -> tuple[enumeration.Law, np.ndarray]:
    """Patterns by enumeration, and the matrix."""
    walk = enumeration.min_sep_warm if law.warm_start else enumeration.min_sep_cold
    patterns = walk(law.steps, law.probability, law.min_sep)
    return patterns, enumeration.toeplitz(np.asarray(law.coefficients), law.steps)


def unit_of(law: MinSepLaw) -> np.ndarray:
    along = oracle(law)[1].sum(axis=1)
    return along / np.linalg.norm(along)


def terms_at(law: MinSepLaw, sigma: float, epsilon: float, tau: float, z: np.ndarray) -> np.ndarray:
    """(dP/dR)(1 - e^{ε-L})_+ at normals z, shape (k, n), from the sum over patterns."""
    patterns, matrix = oracle(law)
    loss = enumeration.log_ratio(patterns, matrix, sigma, sigma * z)
    to_shifted = tau**2 / 2 - tau * (z @ unit_of(law))
    return np.exp(loss + to_shifted) * np.maximum(1.0 - np.exp(epsilon - loss), 0.0)


def plane() -> tuple[np.ndarray, float]:
    """A grid of normals of two steps, and the area of a cell."""
    line = np.linspace(-11.0, 17.0, 1401)
    x, y = np.meshgrid(line, line)
    return np.stack([x.ravel(), y.ravel()], axis=1), float(line[1] - line[0]) ** 2


TWO_STEPS = [
    law_of(BANDS[:1], 0.3, 1, 2, True),
    law_of(BANDS[:2], 0.1, 2, 2, True),
    law_of(BANDS[:2], 0.5, 2, 2, False),
    law_of(BANDS[:2], 0.05, 3, 2, True),
]


@pytest.mark.parametrize("law", TWO_STEPS)
@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 0.5), (1.5, 1.0), (3.0, 0.3), (0.7, 2.0)])
def test_squares_of_shifted_terms_stay_below_their_bound(law, sigma, epsilon) -> None:
    z, area = plane()
    patterns, matrix = oracle(law)
    known = quadrature.delta(patterns, matrix, sigma, epsilon, remove=True)
    loss = enumeration.log_ratio(patterns, matrix, sigma, sigma * z)
    for order in (2.0, 5.0, 12.0):
        for mu in (0.05, 0.3, 1.0):
            if order * mu > 6.0:
                continue
            shift = best_shift(law, sigma, epsilon, order=order, mu=mu, worth=100.0)
            density = np.exp(-(z**2).sum(axis=1) / 2) / (2 * math.pi) * area
            shifted = density * np.exp(shift.tau * (z @ unit_of(law)) - shift.tau**2 / 2)
            terms = np.exp(loss) * density / shifted * np.maximum(1 - np.exp(epsilon - loss), 0)
            # Trapezoids with a kink.
            assert float(terms @ shifted) == pytest.approx(known, rel=1e-3, abs=1e-12)
            assert float(terms**2 @ shifted) <= math.exp(2 * shift.log_root) * (1 + 1e-3)
            assert known <= math.exp(shift.log_root) * (1 + 1e-9)


def test_a_bound_on_squares_is_near_them_where_noise_is_large() -> None:
    """What is given away is that of the conversion from a Rényi divergence, and little else."""
    law, sigma, epsilon = law_of(BANDS[:2], 0.2, 2, 2, True), 4.0, 0.3
    mu = math.sqrt(MinSepRenyiCurve(law).log_moment(sigma, 2))
    shift = best_shift(law, sigma, epsilon, order=epsilon / mu**2, mu=mu, worth=100.0)
    z, area = plane()
    density = np.exp(-((z - shift.tau * unit_of(law)) ** 2).sum(axis=1) / 2) / (2 * math.pi) * area
    squares = float(terms_at(law, sigma, epsilon, shift.tau, z) ** 2 @ density)
    assert squares <= math.exp(2 * shift.log_root) <= 100.0 * squares


def test_large_orders_end_where_they_show_nothing_more() -> None:
    """At so much noise the best order is above ten million, and δ below any that is asked for."""
    law = law_of(BANDS[:2], 0.2, 4, 100, True)
    curve = MinSepRenyiCurve(law)
    remove, _ = curve.delta(3000.0, np.array([4.0]))
    assert 0.0 <= remove[0] <= 1e-100
    # Without an order that float64 has room for, orders begin where they did.
    assert rough_large_moments(law, 0.05, 1.0) == {}


LONGER = [
    law_of(BANDS, 0.1, 3, 10, True),
    law_of(BANDS[:2], 0.3, 2, 7, False),
    law_of(BANDS[:1], 0.05, 3, 9, True),
]


@pytest.mark.parametrize("law", LONGER)
@pytest.mark.parametrize(("sigma", "epsilon"), [(2.0, 0.3), (3.0, 0.2), (1.2, 1.0)])
def test_squares_of_longer_runs(law, sigma, epsilon) -> None:
    rng = np.random.default_rng(5)
    mu = math.sqrt(MinSepRenyiCurve(law).log_moment(sigma, 2))
    shift = best_shift(law, sigma, epsilon, order=2.0 + epsilon / mu**2, mu=mu, worth=100.0)
    z = rng.standard_normal((20_000, law.steps)) + shift.tau * unit_of(law)
    squares = terms_at(law, sigma, epsilon, shift.tau, z) ** 2
    error = squares.std() / math.sqrt(squares.size)
    assert squares.mean() <= math.exp(2 * shift.log_root) + 6 * error


@needs_numba
@pytest.mark.parametrize("law", TWO_STEPS)
@pytest.mark.parametrize("remove", [True, False])
def test_drawn_terms_average_to_a_known_delta(law, remove) -> None:
    sigma, epsilon = 1.5, 0.4
    patterns, matrix = oracle(law)
    known = quadrature.delta(patterns, matrix, sigma, epsilon, remove=remove)
    tilted = TiltedMinSep(MinSepRenyiCurve(law), sigma)
    losses = tilted._raised_losses if remove else tilted._losses_along
    np.testing.assert_allclose(direction(law), unit_of(law), atol=1e-15)
    draw = shifted_draws(losses, law, epsilon, 1.0 if remove else -1.0, remove=remove)
    drawn = draw(np.random.default_rng(6), 60_000)
    assert drawn.min() >= 0.0
    error = drawn.std() / math.sqrt(drawn.size)
    assert abs(drawn.mean() - known) <= 6 * error
    assert error <= 0.05 * known


@needs_numba
def test_raised_losses_are_those_of_the_noise_or_a_little_more() -> None:
    law, sigma = LONGER[0], 1.3
    tilted = TiltedMinSep(MinSepRenyiCurve(law), sigma)
    unit, along = direction(law), np.linspace(-5.0, 5.0, 100)
    raised = tilted._raised_losses(unit, np.random.default_rng(3), along)
    other = -tilted._losses_along(unit, np.random.default_rng(3), along)  # from below
    assert (raised >= other).all()
    np.testing.assert_allclose(raised, other, atol=1e-9)
    one = law_of([1.0], 0.3, 1, 1, True)  # z itself is what is asked for
    tilted = TiltedMinSep(MinSepRenyiCurve(one), sigma)
    spoiled = tilted._raised_losses(direction(one), np.random.default_rng(3), np.array([17.0]))
    assert spoiled == math.inf
    draw = shifted_draws(tilted._raised_losses, one, 1.0, 17.0)
    assert (draw(np.random.default_rng(4), 20) >= 1e100).any()


# A run whose best order is beyond what is drawn: remove is shown by a shift.
SMALL = law_of(BANDS, 0.05, 4, 60, True)


@needs_numba
def test_a_shift_is_used_where_larger_orders_promise_more() -> None:
    tilted = TiltedMinSep(MinSepRenyiCurve(SMALL), 3.0)
    small, large = tilted.remove(0.5), tilted.remove(3.0)
    assert not small.bounded
    assert large.bounded
    both = _raised(small, 0.25)
    assert not both.bounded
    assert both.ceiling == small.ceiling + 0.25
    drawn = small.draw(np.random.default_rng(1), 50_000)
    assert drawn.max() > small.ceiling  # no term has that bound
    error = (drawn**2).std() / math.sqrt(drawn.size)
    assert (drawn**2).mean() <= small.ceiling**2 + 6 * error
    known = MinSepRenyiCurve(SMALL).delta(3.0, np.array([0.5]))[0][0]
    assert drawn.mean() <= known


@needs_numba
def test_both_kinds_of_terms_have_one_mean(monkeypatch) -> None:
    shifted = TiltedMinSep(MinSepRenyiCurve(SMALL), 3.0).remove(0.5)
    monkeypatch.setattr(importance_terms, "_DEARER", 1e-30)
    copies = TiltedMinSep(MinSepRenyiCurve(SMALL), 3.0).remove(0.5)
    assert copies.bounded
    assert copies.rough is not None
    drawn = [
        draw(np.random.default_rng(7), 60_000) for draw in (shifted.draw, copies.draw, copies.rough)
    ]
    errors = [each.std() / math.sqrt(each.size) for each in drawn]
    for each, error in zip(drawn[1:], errors[1:], strict=True):
        assert abs(each.mean() - drawn[0].mean()) <= 6 * math.hypot(error, errors[0])
    assert errors[0] < 0.05 * drawn[0].mean()


@needs_numba
@pytest.mark.slow
def test_false_claims_by_shifted_terms_are_rare() -> None:
    """q = .2 for a mechanism whose δ is a little above what is claimed."""
    law, sigma, epsilon = TWO_STEPS[1], 1.5, 0.4
    patterns, matrix = oracle(law)
    known = quadrature.delta(patterns, matrix, sigma, epsilon, remove=True)
    tilted = TiltedMinSep(MinSepRenyiCurve(law), sigma)
    shift = best_shift(law, sigma, epsilon, order=6.0, mu=0.2, worth=100.0)
    draw = shifted_draws(tilted._raised_losses, law, epsilon, shift.tau)
    terms = WeightedTerms(math.exp(shift.log_root), 1024, draw, bounded=False)
    rule = Rule(known * 0.999, 0.2, 10**6, ample=256)
    accepted = 0
    for seed in range(200):
        row = judge(terms, rule, draws=SharedDraws(seed, 1), stream=[], progress=lambda _: None)
        assert row["ceiling"] == terms.ceiling
        accepted += row["accepted"]
    assert accepted <= 200 * 0.2 + 6 * math.sqrt(200 * 0.2 * 0.8)


def test_rough_terms_that_miss_what_counts_are_not_trusted() -> None:
    def rare(rng: np.random.Generator, size: int) -> np.ndarray:
        return (rng.random(size) < 0.02).astype(float)

    rule, draws = Rule(0.01, 1e-6, 10**7), SharedDraws(1, 1)
    terms = WeightedTerms(1.0, 4096, rare)
    seen = rough_excess(terms, rule, draws, [0])
    for rough in (lambda _, size: np.zeros(size), rare):
        again = dataclasses.replace(terms, rough=rough)
        assert rough_excess(again, rule, draws, [0]) == pytest.approx(seen, abs=0.5)
        assert seen > 0.0

"""The bound of one run: never below what a private mechanism reaches, and reached by some."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import expit
from scipy.stats import binom, norm

from dptrain.auditing import (
    StatedCurve,
    audit_one_run,
    one_run_curve_p_value,
    one_run_p_value,
)
from tests.oracles.guessing import most_correct


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.05])
def test_no_private_mechanism_guesses_better(epsilon, delta):
    """Each canary's coin told with probability δ, else by randomized response; and all at once."""
    m = 30
    right = expit(epsilon)
    for v in range(m + 1):
        bound = one_run_p_value(canaries=m, guesses=m, correct=v, epsilon=epsilon, delta=delta)
        apart = binom.sf(v - 1, m, delta + (1 - delta) * right)
        together = delta + (1 - delta) * binom.sf(v - 1, m, right)
        assert bound >= apart - 1e-12
        assert bound >= together - 1e-12
        if delta == 0:
            assert bound == pytest.approx(apart, rel=1e-12)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("canaries", "guesses"), [(1, 1), (3, 1), (3, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.05), (1.0, 1e-3), (1.0, 0.05), (3.0, 0.01)])
def test_no_mechanism_at_all_guesses_better(canaries, guesses, epsilon, delta):
    for v in range(1, guesses + 1):
        best = most_correct(
            canaries=canaries, guesses=guesses, correct=v, curve=[(epsilon, delta, delta)]
        )
        bound = one_run_p_value(
            canaries=canaries, guesses=guesses, correct=v, epsilon=epsilon, delta=delta
        )
        assert bound >= best - 1e-7
        if guesses == 1 and bound < 1:  # nothing is given away
            assert bound == pytest.approx(best, abs=1e-7)


@pytest.mark.parametrize(
    "curve",
    [
        [(0.0, 0.38, 0.38), (1.0, 0.13, 0.13), (2.0, 0.021, 0.021)],
        [(0.0, 0.2, 0.2), (0.5, 0.1, 0.02), (1.0, 0.05, 0.0)],
    ],
)
def test_no_mechanism_under_a_curve_guesses_better(curve):
    stated = StatedCurve(
        epsilon=np.array([e for e, _, _ in curve]),
        remove=np.array([d for _, d, _ in curve]),
        add=np.array([d for _, _, d in curve]),
    )
    for v in (1, 2, 3):
        best = most_correct(canaries=3, guesses=3, correct=v, curve=curve)
        bound = one_run_curve_p_value(canaries=3, guesses=3, correct=v, curve=stated)
        assert bound >= best - 1e-7
        assert bound <= min(
            one_run_p_value(canaries=3, guesses=3, correct=v, epsilon=e, delta=max(remove, add))
            for e, remove, add in curve
        )


def test_what_delta_buys_is_a_linear_program():
    """Shares of each count of hits that are lifted to v, at a price of one a hit."""
    for m, r, v, epsilon, delta in [(40, 20, 15, 0.5, 1e-3), (40, 40, 39, 1.0, 0.01)]:
        right = expit(epsilon)
        lifts = np.arange(1, v + 1)
        shares = binom.pmf(v - lifts, r, right)
        solved = linprog(
            -np.ones(v),
            A_ub=lifts[None].astype(float),
            b_ub=[m * delta / (1 + math.exp(epsilon))],
            bounds=list(zip(np.zeros(v), shares, strict=True)),
        )
        found = one_run_p_value(canaries=m, guesses=r, correct=v, epsilon=epsilon, delta=delta)
        assert found == pytest.approx(binom.sf(v - 1, r, right) - solved.fun, rel=1e-7)


@pytest.mark.slow
def test_a_true_curve_is_rejected_as_rarely_as_stated():
    """Gaussian canaries at μ = 1, 400 runs of 1,000: 6 sigma; and with a quarter of the noise."""
    rng, alpha, times = np.random.default_rng(8), 0.05, 400
    epsilon = np.linspace(0.0, 6.0, 25)
    delta = norm.cdf(0.5 - epsilon) - np.exp(epsilon) * norm.cdf(-0.5 - epsilon)
    curve = StatedCurve(epsilon=epsilon, remove=delta, add=delta)
    rejected = {1.0: 0, 0.25: 0}
    for sigma in rejected:
        for _ in range(times if sigma == 1.0 else 20):
            taken = rng.random(1000) < 0.5
            found = audit_one_run(
                taken + sigma * rng.standard_normal(1000),
                taken,
                delta=1e-5,
                alpha=alpha,
                guesses=[500, 200],
                curve=curve,
            )
            rejected[sigma] += found.curve_p_value < alpha
    assert rejected[1.0] <= alpha * times + 6 * math.sqrt(alpha * (1 - alpha) * times)
    assert rejected[0.25] >= 15


@pytest.mark.slow
def test_bounds_exceed_the_true_epsilon_as_rarely_as_stated():
    """Randomized response, 400 runs of 300 canaries: 6 sigma."""
    rng, alpha, times, epsilon = np.random.default_rng(6), 0.05, 400, 1.0
    failed, shown = 0, []
    for _ in range(times):
        taken = rng.random(300) < 0.5
        told = np.where(rng.random(300) < expit(epsilon), taken, ~taken)
        found = audit_one_run(told + 0.1 * rng.random(300), taken, delta=0.0, alpha=alpha)
        failed += found.epsilon_lower > epsilon
        shown.append(found.epsilon_lower)
    assert failed <= alpha * times + 6 * math.sqrt(alpha * (1 - alpha) * times)
    assert np.median(shown) > 0.4


def test_all_correct_shows_the_most():
    taken = np.arange(64) % 2 == 0
    found = audit_one_run(taken.astype(float), taken, delta=0.0, alpha=0.05, guesses=[64])
    assert (found.correct, found.epsilon_lower) == (64, found.most)
    # e^ε/(1+e^ε) to the 64th is the chance of it.
    assert expit(found.most) ** 64 == pytest.approx(0.05, rel=1e-2)


def test_a_large_delta_shows_nothing():
    taken = np.arange(64) % 2 == 0
    assert audit_one_run(taken * 1.0, taken, delta=0.1, alpha=0.05).epsilon_lower == 0.0


@pytest.mark.parametrize(
    ("change", "said"),
    [({"guesses": [3]}, "guesses=3"), ({"guesses": [66]}, "guesses=66"), ({"alpha": 0}, "alpha=0")],
)
def test_mistakes_are_told(change, said):
    taken = np.arange(64) % 2 == 0
    with pytest.raises(ValueError, match=said):
        audit_one_run(taken * 1.0, taken, **{"delta": 0.0, "alpha": 0.05, **change})

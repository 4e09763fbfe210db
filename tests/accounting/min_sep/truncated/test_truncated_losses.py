"""Truncated b-min-sep losses against enumeration, identities and limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import binom

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import log_ratio
from dptrain.accounting.min_sep.truncated import TruncatedMinSepLosses
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies import BandMF, Dense
from dptrain.testing import AccountantContract
from tests.oracles.enumeration import min_sep_cold, min_sep_warm, toeplitz


def scheme(p=0.3, b=3, size=12, steps=6, largest=3, warm=True):
    return MinSep(
        probability=p,
        min_sep=b,
        dataset_size=size,
        steps=steps,
        max_batch_size=largest,
        warm_start=warm,
    )


def losses(coefficients, **options):
    return TruncatedMinSepLosses(scheme(**options), np.asarray(coefficients, float))


def banded(*coefficients):
    return BandMF(bands=len(coefficients), coefficients=coefficients)


def pattern_pairs(p, b, steps, largest, warm, others):
    """(x, y, probability) for every pattern of draws and every outcome of the lotteries."""
    law = (min_sep_warm if warm else min_sep_cold)(steps, p, b)
    found = []
    for drawn, chance in zip(law.patterns, law.probabilities, strict=True):
        at_risk = [t for t in range(steps) if drawn[t] and others[t] >= largest]
        for outcome in itertools.product((0, 1), repeat=len(at_risk)):
            x, y, weight = drawn.copy(), np.zeros(steps), chance
            for t, stays in zip(at_risk, outcome, strict=True):
                keep = largest / (others[t] + 1)
                weight *= keep if stays else 1 - keep
                x[t], y[t] = (2.0, -1.0) if stays else (0.0, 0.0)
            found.append((x, y, weight))
    x, y, weights = zip(*found, strict=True)
    assert math.isclose(math.fsum(weights), 1.0)
    return np.array(x), np.array(y), np.array(weights)


def log_density(means, weights, outputs, sigma):
    """log of the mixture over N(0, σ²I), outputs (k, n)."""
    exponents = (outputs @ means.T - (means**2).sum(axis=1) / 2) / sigma**2
    return logsumexp(exponents, b=weights, axis=1)


class TestContract(AccountantContract):
    simulated = True
    delta = 1e-3
    deepest_delta = 2e-4

    def accountant(self):
        return MinSepImportance(seed=5, progress=False, profile_samples=30_000)

    def mechanism(self):
        law = scheme(p=0.2, b=2, size=300, steps=6, largest=55)
        return MatrixMechanism(scheme=law, strategy=banded(1.0, 0.5), noise_multiplier=1.5)

    def refused_mechanism(self):
        law = scheme(b=2)
        return MatrixMechanism(scheme=law, strategy=banded(1.0, 0.5, 0.2), noise_multiplier=1.5)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("p", "b", "coefficients", "steps"),
    [
        (0.3, 3, [1.0, 0.7, 0.4], 6),
        (0.6, 2, [1.0, 0.5], 5),
        (0.4, 1, [0.8], 4),
        (0.2, 4, [1.0, 0.3, 0.2, 0.6], 6),
        (0.5, 9, [1.0, 0.5, 0.3, 0.3, 0.1], 3),
    ],
)
def test_ratio_by_enumeration(p, b, coefficients, steps, warm):
    rng, sigma, largest = np.random.default_rng(3), 0.9, 3
    pair = losses(coefficients, p=p, b=b, steps=steps, largest=largest, warm=warm)
    matrix = toeplitz(coefficients, steps)
    for others in ([0] * steps, [5] * steps, *rng.integers(0, 8, (4, steps))):
        x, y, weights = pattern_pairs(p, b, steps, largest, warm, others)
        outputs = 2.0 * rng.standard_normal((20, steps))
        exact = log_density(x @ matrix.T, weights, outputs, sigma) - log_density(
            y @ matrix.T, weights, outputs, sigma
        )
        numbers = np.repeat(np.asarray(others)[:, None], 20, axis=1)
        found = pair.log_ratio(sigma, outputs.T, numbers)
        np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("warm", [True, False])
def test_a_cap_of_the_whole_dataset_is_min_sep(warm):
    coefficients, sigma = [1.0, 0.6, 0.2], 0.8
    pair = losses(coefficients, p=0.25, b=4, size=9, steps=40, largest=9, warm=warm)
    law = MinSepLaw(
        coefficients=np.array(coefficients), probability=0.25, min_sep=4, steps=40, warm_start=warm
    )
    rng = np.random.default_rng(1)
    outputs, others = rng.standard_normal((40, 30)), rng.integers(0, 9, (40, 30))
    np.testing.assert_allclose(
        pair.log_ratio(sigma, outputs, others), log_ratio(law, sigma, outputs), atol=1e-10
    )
    assert pair.sensitivity == law.sensitivity


@pytest.mark.parametrize(
    "options",
    [
        {"p": 0.3, "b": 3, "size": 12, "steps": 20, "largest": 2},
        {"p": 0.5, "b": 2, "size": 8, "steps": 9, "largest": 3, "warm": False},
        {"p": 1.0, "b": 3, "size": 9, "steps": 12, "largest": 3},
    ],
)
def test_the_mean_of_the_inverse_ratio_is_one(options):
    # E_Q[P/Q] = 1 and E_P[Q/P] = 1: outputs, numbers of others and ratios belong together.
    pair = losses([0.6, 0.3], **options)
    drawn = pair.draw([3.0], "both", np.random.default_rng(7), 60_000)[:, 0]
    for direction in drawn:
        inverse = np.exp(-direction)
        error = inverse.std() / math.sqrt(inverse.size)
        assert abs(inverse.mean() - 1.0) < 6 * error
        assert error < 0.01


def test_rows_do_not_depend_on_the_company():
    pair = losses([1.0, 0.5], steps=8)
    together = pair.draw([0.7, 1.5], "both", np.random.default_rng(2), 50)
    for index, sigma in enumerate((0.7, 1.5)):
        alone = pair.draw([sigma], "both", np.random.default_rng(2), 50)
        np.testing.assert_array_equal(together[:, index], alone[:, 0])
        for row, direction in enumerate(("remove", "add")):
            single = pair.draw([sigma], direction, np.random.default_rng(2), 50)
            np.testing.assert_allclose(single[0], alone[row, 0], rtol=1e-12, atol=1e-12)


def mixed_delta(size, p, largest, sigma, epsilon):
    """One step: δ of both directions, averaged over the number of others, by a fine grid."""
    x = np.arange(-14, 14, 1e-3)
    base = np.exp(-0.5 * (x / sigma) ** 2) * 1e-3 / (sigma * math.sqrt(2 * math.pi))
    total = np.zeros(2)
    for r in range(size):
        full = r >= largest
        q = p * (largest / (r + 1) if full else 1.0)
        v, u = (2.0, -1.0) if full else (1.0, 0.0)
        dense = [base * (1 - q + q * np.exp((s * x - s**2 / 2) / sigma**2)) for s in (v, u)]
        weight = binom.pmf(r, size - 1, p)
        for index, (a, b) in enumerate((dense, dense[::-1])):
            total[index] += weight * np.maximum(a - math.exp(epsilon) * b, 0.0).sum()
    return total


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.0])
def test_one_step_is_the_mixture_over_the_number_of_others(epsilon):
    size, p, largest, sigma = 10, 0.4, 3, 1.2
    pair = losses([1.0], p=p, b=1, size=size, steps=1, largest=largest)
    drawn = pair.draw([sigma], "both", np.random.default_rng(11), 400_000)[:, 0]
    for direction, exact in zip(drawn, mixed_delta(size, p, largest, sigma, epsilon), strict=True):
        terms = hockey_stick(direction, epsilon)
        error = terms.std() / math.sqrt(terms.size)
        assert abs(terms.mean() - exact) < 6 * error + 1e-6
        assert error < 0.05 * exact


@pytest.mark.slow
def test_vectors_are_no_worse_than_numbers():
    """The step of the proof from vectors to numbers, for gradients of random directions."""
    rng, steps, sigma, gamma = np.random.default_rng(5), 4, 1.0, 1.3
    matrix = toeplitz([1.0, 0.6], steps)
    others = np.array([1, 4, 6, 2])
    x, y, weights = pattern_pairs(0.4, 2, steps, 3, False, others)
    noise = rng.standard_normal((200_000, steps, 2))

    def divergences(p_means, q_means):
        log_p, log_q = (
            log_density(
                means.reshape(len(means), -1), weights, noise.reshape(len(noise), -1), sigma
            )
            for means in (p_means, q_means)
        )
        return [np.maximum(np.exp(a) - gamma * np.exp(b), 0.0) for a, b in (
            (log_p, log_q), (log_q, log_p)
        )]  # fmt: skip

    along = np.array([1.0, 0.0])
    worst = divergences(*((matrix @ each.T).T[:, :, None] * along for each in (x, y)))
    for _ in range(6):
        own, displaced = (
            np.stack([np.cos(angle), np.sin(angle)], axis=1)
            for angle in rng.uniform(0, 2 * math.pi, (2, steps))
        )
        # x = 2: own - displaced; x = 1: own; y = -1: -displaced.
        p_parts = (x > 0)[:, :, None] * own - (x == 2)[:, :, None] * displaced
        q_parts = y[:, :, None] * displaced
        found = divergences(
            *(np.einsum("ts,isd->itd", matrix, each) for each in (p_parts, q_parts))
        )
        for one, other in zip(found, worst, strict=True):
            error = math.hypot(one.std(), other.std()) / math.sqrt(len(one))
            assert one.mean() <= other.mean() + 6 * error


def test_refusals_name_the_reason():
    member = MinSepImportance()
    for law, strategy, reason in (
        (scheme(), Dense(matrix=np.eye(6)), "banded Toeplitz"),
        (scheme(b=1), banded(1.0, 0.5), "at most b bands"),
    ):
        found = MatrixMechanism(scheme=law, strategy=strategy, noise_multiplier=1.0)
        assert reason in (member.refusal(found) or "")


def test_outputs_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="expected"):
        losses([1.0]).log_ratio(1.0, np.zeros((6, 2)), np.zeros((5, 2)))

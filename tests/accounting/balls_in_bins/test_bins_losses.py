"""Balls-in-bins simulation in b dimensions against quadrature, identities and known truths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.accounting.balls_in_bins.bins_losses import BallsInBinsLosses, dominating_factor
from dptrain.accounting.balls_in_bins.importance import BallsInBinsImportance
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.renyi.gram import gram_matrix
from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep
from dptrain.strategies import BSR, BandMF, Identity
from dptrain.strategies.strategy import Strategy
from tests.helpers.min_sep_losses import min_sep_means
from tests.helpers.plain_means import estimate
from tests.oracles import enumeration, quadrature


def losses_of(strategy: Strategy, steps: int, bins: int) -> BallsInBinsLosses:
    return BallsInBinsLosses(strategy.bind(steps), steps, bins)


def draw(law: BallsInBinsLosses, sigma: float, size: int, seed: int = 1) -> np.ndarray:
    """Losses of one σ: shape (direction, size)."""
    return law.draw([sigma], "both", np.random.default_rng(seed), size)[:, 0]


def agrees(losses: np.ndarray, epsilon: float, truth: float, error: float = 0.0) -> None:
    terms = hockey_stick(losses, epsilon)
    spread = 6 * terms.std() / math.sqrt(terms.size)  # 6 sigma: false once in 5e8
    assert abs(terms.mean() - truth) < spread + error
    assert spread < 0.2 * truth  # the comparison has power


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("coefficients", "bins"), [((1.0,), 2), ((1.0, 0.5), 2), ((0.9, 0.6, 0.4), 3)]
)
def test_losses_agree_with_quadrature(coefficients: tuple[float, ...], bins: int) -> None:
    sigma, epsilon = 1.3, 0.2
    strategy = BandMF(bands=len(coefficients), coefficients=coefficients)
    matrix, law = enumeration.toeplitz(coefficients, bins), enumeration.balls_in_bins(bins, 1)
    losses = draw(losses_of(strategy, bins, bins), sigma, 200_000)
    for direction, each in zip(DIRECTIONS, losses, strict=True):
        truth = quadrature.delta(law, matrix, sigma, epsilon, remove=direction == "remove")
        agrees(each, epsilon, truth, error=1e-3 * truth)


def test_one_bin_is_the_gaussian() -> None:
    law = losses_of(BSR(bands=3), 4, 1)
    mu = math.sqrt(gram_matrix(BSR(bands=3).bind(4), steps=4, bins=1)[0, 0]) / 2.0
    for losses in draw(law, 2.0, 200_000):
        for epsilon in (0.0, 1.0, 2.5):
            agrees(losses, epsilon, float(gaussian.delta(epsilon, mu)))


@pytest.mark.parametrize(
    ("strategy", "steps", "bins"),
    [(Identity(), 30, 30), (BSR(bands=5), 80, 40), (BSR(bands=60), 60, 20), (BSR(bands=4), 90, 90)],
)
def test_the_ratio_has_mean_one_under_both_laws(strategy: Strategy, steps: int, bins: int) -> None:
    law = losses_of(strategy, steps, bins)
    sigma = 1.2 * law.sensitivity
    for losses in draw(law, sigma, 100_000):  # E_P[Q/P] = E_Q[P/Q] = 1
        ratio = np.exp(-losses)
        assert abs(ratio.mean() - 1.0) < 6 * ratio.std() / math.sqrt(ratio.size)
        assert ratio.std() > 1e-3


@pytest.mark.parametrize("strategy", [Identity(), BSR(bands=3), BSR(bands=80)])
def test_each_loss_is_that_of_its_output(strategy: Strategy) -> None:
    # The same stream read again: bins first, then the normals in the order of the blocks.
    law, sigma, size = losses_of(strategy, 80, 40), 2.0, 3000
    losses = draw(law, sigma, size, seed=9)
    rng = np.random.default_rng(9)
    chosen, noise = rng.integers(40, size=size), rng.standard_normal((size, 40))
    means = law.factor
    for direction, each in zip(DIRECTIONS, losses, strict=True):
        y = sigma * noise + (means[chosen] if direction == "remove" else 0.0)
        exponents = (y @ means.T - (means**2).sum(axis=1) / 2) / sigma**2
        loss = np.logaddexp.reduce(exponents, axis=1) - math.log(40)
        expected = loss if direction == "remove" else -loss
        np.testing.assert_allclose(each, expected, rtol=0, atol=1e-11)


def test_large_exponents_are_summed_with_a_common_factor_taken_out() -> None:
    # Below sigma·16 exponents leave the range of exp; the two ways agree where both are possible.
    law = losses_of(BSR(bands=3), 60, 30)
    ratio = 14.0
    small = draw(law, law.sensitivity / ratio, 2000)
    assert np.isfinite(small).all()
    # With so little noise the output shows the bin: L is about ‖m‖²/(2σ²) - log b in remove.
    assert np.median(small[0]) > ratio**2 / 2 - math.log(30) - 4 * ratio
    assert (small[1] > 0).mean() > 0.9


def test_noise_too_small_for_the_rounding_reports_no_privacy() -> None:
    law = losses_of(BSR(bands=3), 60, 30)
    for sigma in (1e-9, 1e-200):
        assert law.rounding(law.sensitivity / sigma) > law.slack
        assert (draw(law, sigma, 5) == math.inf).all()
    assert law.rounding(16.0) <= law.slack


def test_losses_of_a_sigma_do_not_depend_on_the_others_or_on_the_direction() -> None:
    law = losses_of(BSR(bands=40), 40, 20)
    sigmas = [3.0, 3.5, 4.0]
    many = law.draw(sigmas, "both", np.random.default_rng(2), 3000)
    alone = law.draw(sigmas[1:2], "both", np.random.default_rng(2), 3000)
    np.testing.assert_array_equal(many[:, 1:2], alone)
    for index, direction in enumerate(DIRECTIONS):
        one = law.draw(sigmas, direction, np.random.default_rng(2), 3000)
        np.testing.assert_array_equal(one, many[index])


@pytest.mark.parametrize("gram", [np.ones((6, 6)), np.diag([1.0, 1e-8, 3.0]), np.eye(200)])
def test_the_factor_dominates_even_a_singular_gram_matrix(gram: np.ndarray) -> None:
    factor = dominating_factor(gram, steps=100)
    excess = factor @ factor.T - gram
    trace = np.trace(gram)
    assert np.linalg.eigvalsh(excess).min() > 1e-12 * trace  # far above eigvalsh's rounding
    assert np.abs(excess).max() < 1e-10 * trace
    np.testing.assert_array_equal(factor, np.tril(factor))


def test_a_banded_factor_keeps_its_zeros() -> None:
    law = losses_of(BSR(bands=4), 512, 256)
    # Cyclic bands fill the last three rows only; the blocks before them start where they do.
    assert [rows.start for rows in law._rows] == [0, 61, 125, 0]


def mechanism(scheme: object, strategy: Strategy, sigma: float) -> MatrixMechanism:
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)  # type: ignore[arg-type]


def test_it_agrees_with_the_simulation_in_steps() -> None:
    grid = np.array([0.1, 0.5, 1.0])
    strategy = BandMF(bands=3, coefficients=(0.9, 0.5, 0.7))
    for scheme in (
        BallsInBins(bins=6, epochs=3, dataset_size=100),
        MinSep(probability=1.0, min_sep=6, steps=16, dataset_size=100),
    ):
        m = mechanism(scheme, strategy, 2.0)
        ours = estimate(BallsInBinsImportance(), m, grid, samples=100_000, seed=4)
        theirs = min_sep_means(m, grid, samples=100_000, seed=5)
        for direction in DIRECTIONS:
            gap = getattr(ours, direction) - getattr(theirs, direction)
            errors = [getattr(each, direction + "_error") for each in (ours, theirs)]
            assert (abs(gap) < 6 * np.hypot(*errors)).all()


def test_what_it_cannot_hold_is_refused() -> None:
    def refusal(scheme: object) -> str:
        return BallsInBinsImportance().refusal(mechanism(scheme, Identity(), 1.0)) or ""

    assert "bins exceed" in refusal(BallsInBins(bins=10_000, epochs=1, dataset_size=100_000))
    assert "steps times bins" in refusal(BallsInBins(bins=8000, epochs=6, dataset_size=100_000))
    cold = MinSep(probability=1.0, min_sep=4, steps=8, dataset_size=50, warm_start=False)
    assert "warm start" in refusal(cold)


@pytest.mark.slow
def test_bsr_with_four_bands_has_the_known_epsilon() -> None:
    # The truth at δ = 1e-5 is about .401 (remove) and .391 (add), by others' simulations.
    scheme = BallsInBins(bins=100, epochs=1, dataset_size=1000)
    subject = mechanism(scheme, BSR(bands=4), 2.0)
    at = [0.371, 0.391, 0.401, 0.431]
    found = estimate(BallsInBinsImportance(), subject, at, samples=4_000_000, seed=3)
    for values, errors, at in (
        (found.remove, found.remove_error, 2),
        (found.add, found.add_error, 1),
    ):
        assert abs(values[at] - 1e-5) < 6 * errors[at]
        assert values[0] - 6 * errors[0] > 1e-5 or at == 1
        assert values[3] + 6 * errors[3] < 1e-5

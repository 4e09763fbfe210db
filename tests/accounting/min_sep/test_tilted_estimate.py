"""Estimates from tilted samples against exact answers."""

import numpy as np
import pytest

from dptrain import BallsInBins, BandMF, Identity, MatrixMechanism, MinSep, Poisson
from dptrain.accounting import calibrate
from dptrain.accounting.losses import hockey_stick
from dptrain.accounting.min_sep import TiltedEstimate, min_sep_law
from tests.helpers.min_sep_losses import MinSepLosses

DELTA = 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 6.0])
@pytest.mark.parametrize(
    "scheme",
    [
        Poisson(probability=0.05, dataset_size=10_000, steps=60),
        BallsInBins(bins=20, epochs=1, dataset_size=10_000),
    ],
    ids=["poisson", "bins"],
)
def test_near_an_exact_answer(scheme, epsilon):
    # The law of either is one of b-min-sep sampling, and is composed exactly for one band.
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    exact = calibrate(scheme=scheme, strategy=Identity(), epsilon=epsilon, delta=DELTA)
    found = TiltedEstimate(epsilon, DELTA).noise(min_sep_law(mechanism))
    assert found == pytest.approx(exact.mechanism.noise_multiplier, rel=0.03)


@pytest.mark.slow
def test_where_delta_falls_by_orders_of_magnitude_within_a_step_of_sigma():
    # The tilt that suits δ = 2e-3 shows nothing of δ = 1e-5. A certificate is above the truth, by
    # 1 % a point of its grid and two points at least; the estimate has to be near it.
    scheme = MinSep.for_batch_size(batch_size=100, dataset_size=10_000, min_sep=25, steps=400)
    strategy = BandMF(bands=4)
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    certified = calibrate(scheme=scheme, strategy=strategy, epsilon=8.0, delta=1e-5)
    found = TiltedEstimate(8.0, 1e-5).noise(min_sep_law(mechanism))
    assert found == pytest.approx(certified.mechanism.noise_multiplier, rel=0.05)


@pytest.mark.slow
def test_tilting_leaves_the_mean():
    # Against plain samples of the law itself, where δ is large enough for them; fixed seeds.
    scheme = MinSep.for_batch_size(batch_size=10, dataset_size=200, min_sep=6, steps=60)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=6), noise_multiplier=1.0)
    law, sigma, epsilon = min_sep_law(mechanism), 1.0, 2.0
    losses = MinSepLosses(law).draw([sigma], "remove", np.random.default_rng(0), 40_000)[0]
    plain = hockey_stick(losses, epsilon)
    estimate = TiltedEstimate(epsilon, 1e-3, samples=40_000)
    for tilt in ((1.0, 1.0), (2.0, 1.0), (1.0, 1.5), (3.0, 1.3)):
        terms = estimate._terms(law, sigma, tilt, estimate.samples)
        error = np.hypot(plain.std(), terms.std()) / 200
        assert abs(terms.mean() - plain.mean()) < 6 * error, tilt


@pytest.mark.slow
def test_starting_nearby_changes_little():
    scheme = MinSep.for_batch_size(batch_size=10, dataset_size=2000, min_sep=6, steps=100)
    estimate = TiltedEstimate(2.0, 1e-5)
    laws = [
        min_sep_law(
            MatrixMechanism(
                scheme=scheme, strategy=BandMF(bands=6, overlap=k), noise_multiplier=1.0
            )
        )
        for k in (0.0, 0.2)
    ]
    first = estimate.noise(laws[0])
    second = estimate.noise(laws[1], start=first)
    # Less overlap takes less noise: ‖c‖ = 1 for both.
    assert second < first
    assert estimate.noise(laws[1], start=1.3 * second) == pytest.approx(second, rel=0.01)
    assert estimate.delta_at(laws[1], second) == pytest.approx(1e-5, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("off", [1e-6, 1e-2, 0.3, 100.0])
def test_a_bad_start_is_left(off):
    # Of a σ far too small a tilt may see nothing at all: that is no reason to lower it further.
    scheme = MinSep.for_batch_size(batch_size=10, dataset_size=2000, min_sep=6, steps=100)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=6), noise_multiplier=1.0)
    law, estimate = min_sep_law(mechanism), TiltedEstimate(2.0, 1e-5)
    right = estimate.noise(law)
    assert estimate.noise(law, start=off * right) == pytest.approx(right, rel=0.03)


@pytest.mark.slow
def test_a_tilt_of_another_law_is_left():
    # From a law of rare participations without bands to one where everybody takes part at once.
    rare = Poisson(probability=0.002, dataset_size=10_000, steps=300)
    often = BallsInBins(bins=4, epochs=1, dataset_size=10_000)
    laws = [
        min_sep_law(MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0))
        for scheme in (rare, often)
    ]
    alone = TiltedEstimate(1.0, DELTA).noise(laws[1])
    estimate = TiltedEstimate(1.0, DELTA)
    first = estimate.noise(laws[0])
    assert estimate.noise(laws[1], start=first) == pytest.approx(alone, rel=0.03)
    exact = calibrate(scheme=often, strategy=Identity(), epsilon=1.0, delta=DELTA)
    assert alone == pytest.approx(exact.mechanism.noise_multiplier, rel=0.03)

"""C chosen for the sampling that amplifies it."""

import dataclasses

import numpy as np
import pytest

from dptrain import (
    BallsInBins,
    BandMF,
    CyclicPoisson,
    MatrixMechanism,
    MinSep,
    Poisson,
    Shuffled,
)
from dptrain.accounting import accountant_named, calibrate, restate
from dptrain.accounting.min_sep import TiltedEstimate, min_sep_law
from dptrain.core import Kind
from dptrain.planning import amplified_band_mf
from dptrain.strategies import MomentumSGD, Strategy
from tests.helpers.schedules import linear_decay

STEPS, BANDS, TARGET = 80, 8, {"epsilon": 6.0, "delta": 1e-4}
SCHEME = MinSep.for_batch_size(batch_size=20, dataset_size=1000, min_sep=BANDS, steps=STEPS)
QUICK = {"samples": 1024, "progress": False}


@pytest.fixture(scope="module")
def estimated():
    return amplified_band_mf(scheme=SCHEME, certify=False, **TARGET, **QUICK)


def dense_rmse(strategy: Strategy, workload_matrix: np.ndarray) -> float:
    c = np.pad(strategy.coefficients, (0, STEPS - strategy.bands))
    lag = np.subtract.outer(np.arange(STEPS), np.arange(STEPS))
    dense = np.where(lag >= 0, c[np.maximum(lag, 0)], 0.0)
    return float(np.linalg.norm(workload_matrix @ np.linalg.inv(dense)) / np.sqrt(STEPS))


def momentum_matrix(beta: float, rates: tuple[float, ...]) -> np.ndarray:
    """Entry (t, j): Σ_{s=j}^{t} η_s β^{s-j}."""
    entries = np.zeros((STEPS, STEPS))
    for j in range(STEPS):
        entries[j:, j] = np.cumsum(np.array(rates[j:]) * beta ** np.arange(STEPS - j))
    return entries


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [False, True])
def test_certified_and_better(schedule):
    rates = linear_decay(STEPS)
    workload = MomentumSGD(momentum=0.9, learning_rates=rates) if schedule else None
    matrix = momentum_matrix(0.9, rates) if schedule else np.tril(np.ones((STEPS, STEPS)))
    more = {} if workload is None else {"workload": workload}
    choice = amplified_band_mf(scheme=SCHEME, accountant="min-sep-renyi", **TARGET, **more, **QUICK)
    assert choice.strategy.overlap > 0
    assert choice.ordinary.overlap == 0
    errors = {}
    for each in (choice.strategy, choice.ordinary):
        # σ by the accountant once more; RMSE and sensitivity from dense matrices.
        found = calibrate(scheme=SCHEME, strategy=each, accountant="min-sep-renyi", **TARGET)
        sigma = found.mechanism.noise_multiplier
        errors[each] = dense_rmse(each, matrix) * sigma / SCHEME.expected_batch_size
        assert np.linalg.norm(each.coefficients) == pytest.approx(1.0, rel=1e-12)
        full = each.sensitivity(steps=STEPS, max_participations=10, min_sep=BANDS)
        assert full == pytest.approx(10**0.5, rel=1e-9)
    assert choice.error == pytest.approx(errors[choice.strategy], rel=1e-9)
    assert choice.ordinary_error == pytest.approx(errors[choice.ordinary], rel=1e-9)
    assert choice.error < 0.99 * choice.ordinary_error
    assert choice.gain == pytest.approx(1 - choice.error / choice.ordinary_error)
    assert choice.calibration.mechanism.strategy == choice.strategy


@pytest.mark.slow
def test_two_certificates_count_twice():
    """The one that says less noise is taken, and either may be wrong: both are part of δ."""
    target = {"epsilon": 6.0, "delta": 9e-4}
    choice = amplified_band_mf(
        scheme=SCHEME, accountant="min-sep-importance", **target, **QUICK, certify=True
    )
    assert choice.strategy.overlap > 0
    kept = [choice.calibration.guarantee, choice.ordinary_calibration.guarantee]
    evidence = [each.certificate for each in kept]
    assert [each.kind for each in kept] == [Kind.VERIFIED] * 2
    violated = max(each["violated"] for each in evidence)
    wrong = sum(each["failure_probability"] for each in evidence)
    assert violated + wrong * (1 - violated) <= target["delta"]
    for each in kept:
        assert each.delta == target["delta"]
        assert "for each of 2 attempts" in str(each)
        again = restate(each)
        assert (again.epsilon, again.delta, again.kind) == (6.0, 9e-4, Kind.VERIFIED)


def test_an_accountant_that_may_be_wrong_says_how_attempts_count():
    sure, simulating = accountant_named("min-sep-renyi"), accountant_named("min-sep-importance")
    assert sure.among(5) is sure
    assert simulating.among(5).attempts == 5

    class Lucky(type(sure)):
        name, kind = "lucky", Kind.CONFIDENCE

    assert Lucky().among(1).name == "lucky"
    with pytest.raises(ValueError, match=r"lucky.*Lucky\.among"):
        Lucky().among(2)
    with pytest.raises(ValueError, match="attempts"):
        simulating.among(0)


@pytest.mark.slow
def test_never_worse_whatever_was_estimated(monkeypatch):
    # An estimate that says that overlap needs no noise at all proposes what is worse.
    def flattering(self, law, start=None):
        del self, start
        return 1.0 / law.coefficients.sum() ** 12

    monkeypatch.setattr(TiltedEstimate, "noise", flattering)
    choice = amplified_band_mf(scheme=SCHEME, accountant="min-sep-renyi", **TARGET, **QUICK)
    assert choice.error <= choice.ordinary_error
    assert choice.strategy.overlap == 0 or choice.error < choice.ordinary_error

    def of_ordinary(self, law, start=None):
        """Only the ordinary one is worth anything."""
        del self, start
        first = law.coefficients[1:].sum() / law.coefficients[0]
        return 1.0 if first > 1.5 else 1e6

    monkeypatch.setattr(TiltedEstimate, "noise", of_ordinary)
    plain = amplified_band_mf(scheme=SCHEME, certify=False, **TARGET, **QUICK)
    assert plain.error <= plain.ordinary_error
    assert plain.gain >= 0


@pytest.mark.slow
def test_says_what_was_chosen(estimated):
    choice = estimated
    assert choice.calibration is None
    assert amplified_band_mf(scheme=SCHEME, certify=False, **TARGET, **QUICK) == choice
    value = choice.strategy.to_dict()
    read = Strategy.from_dict(value)
    assert read == choice.strategy
    assert read.coefficient_hash == choice.strategy.coefficient_hash
    other = dataclasses.replace(choice.strategy, coefficients=choice.ordinary.coefficients)
    assert other.coefficient_hash != choice.strategy.coefficient_hash
    # The declaration is short, and names the same optimum.
    declared = BandMF(
        bands=BANDS,
        overlap=choice.strategy.overlap,
        overlap_decay=choice.strategy.overlap_decay,
    ).bind(STEPS)
    np.testing.assert_allclose(declared.coefficients, choice.strategy.coefficients, rtol=1e-6)


@pytest.mark.slow
def test_other_schemes(estimated):
    bins = BallsInBins(bins=30, epochs=4, dataset_size=1000)
    chosen = amplified_band_mf(scheme=bins, bands=4, certify=False, **TARGET, **QUICK)
    assert chosen.error <= chosen.ordinary_error
    cut = dataclasses.replace(SCHEME, max_batch_size=60)
    shorter = amplified_band_mf(scheme=cut, certify=False, **TARGET, **QUICK)
    assert shorter.strategy == estimated.strategy
    one = Poisson(probability=0.05, dataset_size=1000, steps=30)
    alone = amplified_band_mf(scheme=one, certify=False, **TARGET, **QUICK)
    assert alone.strategy == alone.ordinary == BandMF(bands=1).bind(30)
    assert alone.gain == 0


def test_bad_input():
    def refused(match, **changed):
        arguments = {"scheme": SCHEME, "certify": False, **TARGET, **QUICK, **changed}
        with pytest.raises((TypeError, ValueError), match=match):
            amplified_band_mf(**arguments)

    refused("scheme=", scheme="MinSep")
    refused("CyclicPoisson", scheme=CyclicPoisson.for_batch_size(
        batch_size=20, dataset_size=1000, cycle=8, steps=STEPS))  # fmt: skip
    refused("Shuffled", scheme=Shuffled(batch_size=20, dataset_size=1000, epochs=2))
    for epsilon in (0.0, -1.0, float("nan"), "8", None):
        refused("epsilon", epsilon=epsilon)
    for delta in (0.0, 1.0, 1.5, float("nan"), "1e-5"):
        refused("delta", delta=delta)
    refused("bands=9 exceeds min_sep=8", bands=9)
    refused("bands", bands=0)
    refused("samples", samples=10)
    refused("seed", seed=-1)
    refused("workload", workload="sums")
    rates = linear_decay(STEPS + 1)
    refused("81 entries", workload=MomentumSGD(learning_rates=rates))


@pytest.mark.slow
def test_estimates_are_those_of_the_law(estimated):
    mechanism = MatrixMechanism(scheme=SCHEME, strategy=estimated.strategy, noise_multiplier=1.0)
    sigma = TiltedEstimate(6.0, 1e-4, samples=16384, seed=1).noise(min_sep_law(mechanism))
    found = estimated.error * SCHEME.expected_batch_size / estimated.strategy.rmse(STEPS)
    assert found == pytest.approx(sigma, rel=0.05)

"""Moments of orders 2 and 3 of balls-in-bins by sums over pairs and triples of bins."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dptrain.accounting import find_accountants
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.moments import affordable, periodic, program
from dptrain.accounting.min_sep.moments.states import state_count
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.renyi.bins import RenyiOrders
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins
from dptrain.strategies import BandMF, Identity


def law_of(bins: int, steps: int, bands: int) -> MinSepLaw:
    coefficients = np.linspace(1.0, 0.3, bands)
    return MinSepLaw(
        coefficients=coefficients, probability=1.0, min_sep=bins, steps=steps, warm_start=True
    )


@pytest.mark.parametrize(
    ("bins", "steps", "bands"), [(7, 7, 3), (7, 21, 3), (10, 25, 4), (5, 12, 1), (4, 4, 2)]
)
def test_periodic_moments_by_all_tuples_of_bins(bins: int, steps: int, bands: int) -> None:
    """n below, at and above whole epochs; triples are a bound, by what the largest overlaps add."""
    law, sigma = law_of(bins, steps, bands), 1.3
    matrix = sum(np.diag(np.full(steps - k, value), -k) for k, value in enumerate(law.coefficients))
    means = np.stack([matrix[:, i::bins].sum(axis=1) for i in range(bins)])
    gram = means @ means.T / sigma**2
    truth = {}
    for order in (2, 3):
        tuples = itertools.product(range(bins), repeat=order)
        truth[order] = math.log(
            math.fsum(
                math.exp(sum(gram[i, j] for i, j in itertools.combinations(each, 2)))
                for each in tuples
            )
            / bins**order
        )
    assert periodic.covers(law, 3)
    # A few thousand positive terms, each within some ulp, and padded by as much.
    assert 0.0 <= periodic.log_moment(law, sigma, 2) - truth[2] <= 1e-11
    largest = max(gram[i, (i + d) % bins] for d in range(bands) for i in range(bins))
    assert periodic.log_moment(law, sigma, 3) >= truth[3]
    assert periodic.log_moment(law, sigma, 3) <= math.log(
        math.exp(truth[3]) + bands**2 * 4 * math.exp(3 * largest) / bins**2
    )


def test_what_is_not_covered() -> None:
    """Three bins that meet around the ring, other probabilities, cold starts, other orders."""
    assert not periodic.covers(law_of(9, 25, 4), 3)
    assert not periodic.covers(law_of(10, 25, 4), 4)
    for change in (
        {"probability": 0.9, "warm_start": True},
        {"probability": 1.0, "warm_start": False},
    ):
        law = MinSepLaw(coefficients=np.ones(2), min_sep=9, steps=30, **change)  # type: ignore[arg-type]
        assert not periodic.covers(law, 2)


def test_periodic_moments_are_those_of_the_program() -> None:
    """A hundred bins, two epochs: order 3 loses a hundredth of its logarithm at most here."""
    coefficients = BandMF(bands=8).bind(200).first_column(200)
    law = MinSepLaw(
        coefficients=coefficients, probability=1.0, min_sep=100, steps=200, warm_start=True
    )
    sigma = 1.5 * float(np.linalg.norm(coefficients))
    for order, loss in ((2, 1e-9), (3, 1e-2)):
        exact = program.log_moment(law, sigma, order, compiled=program.available())
        found = periodic.log_moment(law, sigma, order)
        # The program rounds up too, by less than 1e-9 of its logarithm.
        assert exact - 1e-9 <= found <= exact * (1.0 + loss) + 1e-9


def test_a_bound_is_not_called_exact() -> None:
    """Two epochs of a thousand bins: order 2 is a sum over pairs, and triples are bounded."""
    coefficients = BandMF(bands=8).bind(2000).first_column(2000)
    law = MinSepLaw(
        coefficients=coefficients, probability=1.0, min_sep=1000, steps=2000, warm_start=True
    )
    assert state_count(1000, 3) * law.steps > 10**7  # else the program would answer
    orders = RenyiOrders(np.zeros(4), np.ones(4, dtype=np.int64), 3)
    told = {order: MinSepRenyiCurve(law).describe(orders, order) for order in (2, 3)}
    assert told == {2: "(exact)", 3: "(by pairs and triples of bins)"}


def test_a_weight_beyond_float64_is_no_order() -> None:
    assert periodic.log_moment(law_of(7, 7, 3), 0.05, 2) == math.inf


def test_thousands_of_bins_are_amplified_by_default() -> None:
    """Section 7.4 of Dong & Ganesh 2026 with balls in bins: one epoch of 8,224 steps."""
    scheme = BallsInBins(bins=8224, epochs=1, dataset_size=14_745_600)
    strategy = BandMF(bands=256).bind(8224)
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    (member,) = find_accountants(mechanism)
    assert member.name == "min-sep-importance"
    curve = member.law(mechanism).curve  # type: ignore[attr-defined]
    norm = float(np.linalg.norm(strategy.first_column(8224)))
    assert affordable(curve.law, 0.45 * norm).largest == 3
    # Without amplification it takes σ = .612 ‖c‖.
    assert curve.remove(0.45 * norm, np.array([10.0]))[0] < 1.301e-8


def test_fewer_bins_and_independent_noise_are_answered_as_before() -> None:
    for strategy, name in ((BandMF(bands=4).bind(60), "balls-in-bins-importance"),):
        scheme = BallsInBins(bins=30, epochs=2, dataset_size=3000)
        mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
        assert [each.name for each in find_accountants(mechanism)] == [name]
    scheme = BallsInBins(bins=9000, epochs=1, dataset_size=90_000)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    assert "allocation-pld" in [each.name for each in find_accountants(mechanism)]
    assert all(each.kind is not Kind.CONFIDENCE for each in find_accountants(mechanism))

"""BandMF with workloads and with coefficients that are given."""

import json

import numpy as np
import pytest

from dptrain.strategies import BandMF, Strategy
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.workloads import PREFIX_SUMS, DenseWorkload
from dptrain.testing.strategy_contract import StrategyContract
from tests.helpers.schedules import linear_decay

N = 10


class TestScheduleMax(StrategyContract):
    def make_strategy(self):
        rates = linear_decay(N)
        return BandMF(bands=3, objective="max", workload=MomentumSGD(learning_rates=rates))


class TestDenseWorkload(StrategyContract):
    def make_strategy(self):
        return BandMF(bands=3, workload=DenseWorkload(entries=PREFIX_SUMS.matrix(N)))


def test_the_workload_decides_the_coefficients():
    plain = BandMF(bands=4).bind(50)
    assert plain == BandMF(bands=4, workload=PREFIX_SUMS).bind(50)
    assert (
        plain.coefficients
        == BandMF(bands=4, workload=MomentumSGD(momentum=0.0)).bind(50).coefficients
    )
    for workload in (MomentumSGD(), MomentumSGD(learning_rates=linear_decay(50))):
        own = BandMF(bands=4, workload=workload).bind(50)
        assert own.rmse(50, workload) < plain.rmse(50, workload)
        assert own.rmse(50) > plain.rmse(50)
        assert own.coefficient_hash != plain.coefficient_hash
    worst = BandMF(bands=4, objective="max", workload=workload).bind(50)
    assert worst.max_error(50, workload) < own.max_error(50, workload)


def test_a_dense_copy_of_prefix_sums_gives_the_same_coefficients():
    copy = DenseWorkload(entries=PREFIX_SUMS.matrix(40))
    np.testing.assert_allclose(
        BandMF(bands=5, workload=copy).bind(40).coefficients,
        BandMF(bands=5).bind(40).coefficients,
        atol=1e-6,
    )


def test_values_written_before_workloads_existed_are_read():
    value = BandMF(bands=2).bind(9).to_dict()
    del value["workload"]
    assert Strategy.from_dict(value) == BandMF(bands=2).bind(9)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((1.0, -0.5), "coefficients: entry 1 is -0.5: must be finite and not negative"),
        ((1.0, float("nan")), r"coefficients\[1\]=nan must be finite"),
        ((float("inf"), 1.0), r"coefficients\[0\]=inf must be finite"),
        ((0.0, 1.0), "entry 0 is 0: must be positive"),
        ((1.0,), "coefficients has 1 entries and bands=2"),
    ],
)
def test_refuses_coefficients(coefficients, message):
    with pytest.raises((TypeError, ValueError), match=message):
        BandMF(bands=2, coefficients=coefficients)


def test_refuses_coefficients_whose_inverse_blows_up():
    # C^-1 of 1 + 2x has the coefficients (-2)^t, and 2^20 is the first above 10^6.
    rising = BandMF(bands=2, coefficients=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"BandMF\(bands=2\) diverges: at step 20 "):
        rising.bind(21)
    assert rising.bind(20).steps == 20
    value = json.loads(json.dumps(rising.bind(20).to_dict())) | {"steps": 21}
    with pytest.raises(ValueError, match="at step 20 "):
        Strategy.from_dict(value)


def test_refuses_a_workload_of_another_length():
    strategy = BandMF(bands=2, workload=MomentumSGD(learning_rates=linear_decay(9)))
    with pytest.raises(
        (TypeError, ValueError), match="learning_rates has 9 entries, but the run has 10 steps"
    ):
        strategy.bind(10)
    with pytest.raises((TypeError, ValueError), match="matrix of 3 steps, but the run has 4"):
        BandMF(bands=2, workload=DenseWorkload(entries=np.eye(3))).bind(4)
    with pytest.raises(
        (TypeError, ValueError), match=r"workload=<class.*must be a dptrain.Workload"
    ):
        BandMF(bands=2, workload=MomentumSGD)
    with pytest.raises((TypeError, ValueError), match="workload='prefix'"):
        BandMF(bands=2, workload="prefix")


def test_refuses_a_schedule_too_long_for_matrices():
    strategy = BandMF(bands=2, workload=MomentumSGD(learning_rates=linear_decay(5000)))
    with pytest.raises(ValueError, match=r"steps=5000.*MomentumSGD.*at most 4000 steps"):
        strategy.bind(5000)

"""The individual report: what it says, and its file."""

import csv
import math
import stat
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dptrain import MatrixMechanism, Poisson
from dptrain.contrib.individual.report import IndividualReport
from dptrain.core.guarantee import Kind
from dptrain.individual import GDPFilter, GDPOdometer
from dptrain.strategies import Identity
from tests.helpers.engine import everything_every_step, images, make, small_net, train
from tests.helpers.individual_reports import DELTA, report

FILTER = GDPFilter(target_epsilon=0.8, target_delta=DELTA, max_steps=1000)


def spent_run(ratios, steps, sigma=10.0):
    """What a report reads of a run in which example i had the norm ratio ``ratios[i]``."""
    ratios = np.asarray(ratios, dtype=float)
    scheme = Poisson(probability=1.0, dataset_size=len(ratios), steps=steps)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)
    record = FILTER.record(mechanism)
    for step in range(steps):
        record.admit(step=step, part=0, indices=np.arange(len(ratios)), ratios=ratios)
        record.commit(step, 1)
    return types.SimpleNamespace(
        guarantee=None, individual=record, stated_individual=record, individual_filter=FILTER
    )


def gaussian_delta(epsilon, mu):
    """Dong, Roth & Su, Cor. 2.13."""
    return norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)


def test_a_report_of_a_ledger_says_what_was_spent():
    """478 full-norm steps at σ = 100 are 4 at σ = 10: of 6 steps the last two are missed."""
    found = IndividualReport.of(spent_run([1.0, 0.5, 0.0], steps=6))
    assert found.delta == DELTA
    for epsilon, steps, ratio in zip(found.epsilon[:2], (4, 6), (1.0, 0.5), strict=True):
        mu = ratio * math.sqrt(steps) / 10
        assert gaussian_delta(epsilon, mu) == pytest.approx(DELTA, rel=1e-6)
    assert found.epsilon[2] == 0
    assert found.active_counts == (3, 3, 3, 3, 2, 2)
    assert (found.filter, found.kind) == (FILTER.name, Kind.UPPER_BOUND)
    assert found.bound == pytest.approx(0.8, rel=1e-9)
    assert (found.epsilon <= found.bound).all()
    other = IndividualReport.of(spent_run([1.0], steps=4), delta=1e-3)
    assert gaussian_delta(other.epsilon[0], 0.2) == pytest.approx(1e-3, rel=1e-6)


def test_a_report_of_a_run_is_that_of_its_ledger():
    data = images()
    individual = GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=4)
    private = make(
        small_net(), data, scheme=everything_every_step(len(data), 4), individual=individual
    )
    train(private, steps=3)
    found = IndividualReport.of(private)
    assert np.array_equal(found.epsilon, private.individual.epsilons(1e-3))
    assert found != IndividualReport.of(private, 1e-4)
    assert len(found.active_counts) == 3
    assert found.size == len(data)
    before = found.epsilon.copy()
    train(private)
    assert np.array_equal(found.epsilon, before)  # a value, not a view of the record


def test_the_bound_of_an_odometer_is_that_of_all_rounds_as_in_the_guarantee():
    data = images()
    individual = GDPOdometer.for_epsilons((1.0, 2.0), target_delta=1e-3, max_steps=6)
    private = make(
        small_net(), data, scheme=everything_every_step(len(data), 6), individual=individual
    )
    train(private, steps=2)
    state = private.state_dict()
    assert IndividualReport.of(private).bound == pytest.approx(2.0, rel=1e-6)
    private.individual.open_round()
    train(private, steps=4)
    private.load_state_dict(state)  # one round is open again, but more has been released
    found = IndividualReport.of(private)
    assert "2 of 2 rounds" in found.condition
    assert found.bound == private.get_epsilon() == pytest.approx(2.0, rel=1e-6)
    assert len(found.active_counts) == 2


def test_a_run_without_a_filter_has_no_report():
    data = images()
    private = make(small_net(), data, scheme=everything_every_step(len(data), 2))
    with pytest.raises(ValueError, match="no individual filter"):
        IndividualReport.of(private, 1e-3)
    with pytest.raises(TypeError, match="must be the result of make_private"):
        IndividualReport.of(private.optimizer, 1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": np.ones((2, 2))}, "shape"),
        ({"epsilon": np.array([])}, "shape"),
        ({"epsilon": np.array([0.1, math.nan])}, "NaN for example 1"),
        ({"epsilon": np.array([-0.1, 0.1])}, "negative or NaN for example 0"),
        ({"active": np.ones(3, dtype=bool)}, "one boolean per example"),
        ({"active": np.ones(6)}, "one boolean per example"),
        ({"delta": 0.0}, "strictly between"),
    ],
)
def test_what_is_no_report_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        report(**changes)


def test_a_report_cannot_be_changed_and_does_not_show_itself():
    epsilon = np.array([0.12345, 0.2])
    value = report(epsilon=epsilon, active_counts=(77771,))
    epsilon[0] = 9
    assert value.epsilon[0] == 0.12345
    with pytest.raises(ValueError, match="read-only"):
        value.epsilon[0] = 0
    for text in (repr(value), str(value), f"{value}"):
        assert "not for release" in text
        assert "0.12" not in text
        assert "77771" not in text


# The file.


def test_the_file_warns_in_every_way(tmp_path):
    path = report().save(tmp_path)
    assert "NOT_FOR_RELEASE" in path.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# NOT FOR RELEASE")
    assert '"note": "not for release' in lines[1]
    table = list(csv.reader(lines[2:]))
    assert table[0] == ["example", "epsilon", "active", "note"]
    assert table[1] == ["0", "0.1", "1", "not for release"]
    assert table[6] == ["5", "0.6", "0", "not for release"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary file is left


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.floats(min_value=0, allow_infinity=True),
            st.booleans(),
        ),
        min_size=1,
    ),
    bound=st.one_of(st.none(), st.floats(min_value=0, allow_infinity=True)),
    delta=st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True),
    counts=st.lists(st.integers(min_value=0)),
)
def test_a_file_reads_back_exactly(tmp_path_factory, rows, bound, delta, counts):
    epsilon, active = zip(*rows, strict=True)
    value = report(
        epsilon=epsilon,
        active=active,
        delta=delta,
        bound=bound,
        active_counts=counts,
    )
    folder = tmp_path_factory.mktemp("report")
    assert IndividualReport.load(value.save(folder)) == value


def test_numpy_numbers_are_written_as_plain_ones(tmp_path):
    value = report(delta=np.float64(1e-5), bound=np.float64(0.8), active_counts=np.array([6, 5]))
    path = value.save(tmp_path / "a.csv")
    assert "np." not in path.read_text(encoding="utf-8")
    assert IndividualReport.load(path) == value


def test_nothing_is_overwritten_unasked(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("mine")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="overwrite=True"):
        report().save(path)
    assert path.read_text() == "mine"
    report().save(path, overwrite=True)
    assert IndividualReport.load(path) == report()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = report().save(tmp_path)
    with pytest.raises(UnicodeEncodeError):
        report(condition="\ud800").save(path, overwrite=True)
    assert IndividualReport.load(path) == report()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"folder .*nowhere does not exist"):
        report().save(tmp_path / "nowhere" / "a.csv")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# NOT FOR RELEASE", "# released", "does not start"),
        ('"format": 1', '"format": 9', "format 9"),
        ("example,epsilon", "example,eps", "columns"),
        ("3,0.4,1,not for release\n", "", "5 of 6 examples"),
        ("3,0.4,1,", "7,0.4,1,", "example 3"),
        ("3,0.4,1,", "3,0.4,yes,", "example 3"),
        ("3,0.4,1,", "3,much,1,", "much"),
        ("3,0.4,1,", "3,nan,1,", "NaN for example 3"),
        ('"kind": "upper bound"', '"kind": "sure"', "sure"),
        ('"delta": "1e-05", ', "", "delta"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, old, new, words):
    path = report().save(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        IndividualReport.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        IndividualReport.load(tmp_path / "a.csv")


# The summary.


def test_the_summary_begins_with_the_warning():
    """101 examples of ε = 0, 0.01, …, 1: the quantiles are their levels."""
    grid = np.arange(101) / 100
    value = report(epsilon=grid, active=grid < 0.5, active_counts=(101, 60))
    text = value.summary()
    assert text.startswith("not for release")
    assert "least 0, 5 % 0.05, 25 % 0.25, median 0.5, 75 % 0.75, 95 % 0.95, most 1" in text
    assert "50 of 101 (49.5%)" in text
    assert "101 could in the first step, 60 in the last" in text
    assert "bound of the run: ε = 0.8, a proven upper bound" in text
    infinite = report(epsilon=(0.1, math.inf, math.inf), active_counts=(), bound=None).summary()
    assert "median inf" in infinite
    assert "nan" not in infinite
    assert "bound of the run" not in infinite


def test_the_summary_of_an_estimate_says_so():
    assert "ESTIMATE" in report(kind=Kind.ESTIMATE).summary()

"""A profile beside its guarantee: neither above it, nor zero where it is a bound."""

import dataclasses
import json
import re

import numpy as np
import pytest

from dptrain.accounting import Profile, account, profile
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting.plots import plot_privacy
from dptrain.reporting.published_profile import as_shown
from dptrain.reporting.report import privacy_report
from dptrain.sampling import Poisson
from dptrain.strategies import Identity

GRID = np.array([0.0, 1.0, 2.0, 3.0, 400.0])


def mechanism(sigma=1.0, p=0.05):
    scheme = Poisson(probability=p, dataset_size=1000, steps=20)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


@pytest.fixture
def shown():
    return dataclasses.replace(account(mechanism(), delta=1e-4), epsilon=2.0, delta=1e-4)


def curve(remove, add=None, kind=Kind.UPPER_BOUND):
    remove = np.array(remove)
    add = remove / 2 if add is None else np.array(add)
    return Profile(epsilon=GRID, remove=remove, add=add, kind=kind, accountant="x")


def test_beyond_its_epsilon_the_guarantee_bounds_the_profile(shown):
    found = as_shown(curve([0.5, 0.01, 3e-4, 2e-4, 1e-9]), shown)
    np.testing.assert_array_equal(found.remove, [0.5, 0.01, 1e-4, 1e-4, 1e-9])
    np.testing.assert_array_equal(found.add, [0.25, 0.005, 1e-4, 1e-4, 5e-10])
    assert found.kind is Kind.UPPER_BOUND


def test_no_later_bound_is_above_an_earlier_one(shown):
    found = as_shown(curve([0.5, 1e-5, 1e-5, 8e-5, 1e-9]), shown)
    np.testing.assert_array_equal(found.remove, [0.5, 1e-5, 1e-5, 1e-5, 1e-9])
    drawn = as_shown(curve([0.5, 1e-5, 1e-5, 8e-5, 1e-9], kind=Kind.CONFIDENCE), shown)
    assert drawn.remove[3] == 8e-5  # each bound may be false by itself


@pytest.mark.parametrize(
    ("of_profile", "of_guarantee", "borrowed", "kind"),
    [
        (Kind.EXACT, Kind.UPPER_BOUND, True, Kind.UPPER_BOUND),
        (Kind.EXACT, Kind.UPPER_BOUND, False, Kind.EXACT),
        (Kind.CONFIDENCE, Kind.VERIFIED, True, Kind.CONFIDENCE),
        (Kind.UPPER_BOUND, Kind.CONFIDENCE, True, Kind.CONFIDENCE),
        (Kind.EXACT, Kind.ESTIMATE, False, Kind.ESTIMATE),
    ],
)
def test_what_is_borrowed_is_shown_as_the_guarantee_was(
    shown, of_profile, of_guarantee, borrowed, kind
):
    values = [0.5, 0.01, 3e-4 if borrowed else 5e-5, 1e-6, 1e-9]
    found = as_shown(curve(values, kind=of_profile), dataclasses.replace(shown, kind=of_guarantee))
    assert found.kind is kind


def test_a_bound_that_vanished_is_no_zero(shown, tmp_path):
    """Gaussian noise leaves some δ at every ε; 1e-300 bounds what double precision loses."""
    gone = curve([0.5, 0.01, 1e-4, 1e-9, 0.0])
    as_json, as_text = privacy_report(shown, tmp_path / "bound", profile=gone)
    published = json.loads(as_json.read_text())["profile"]
    assert published["delta_remove"][-1] == published["delta_add"][-1] == 1e-300
    assert "| 400 | ≤ 1e-300 | ≤ 1e-300 |" in as_text.read_text()
    _, as_text = privacy_report(
        shown, tmp_path / "estimate", profile=dataclasses.replace(gone, kind=Kind.ESTIMATE)
    )
    assert "| 400 | 0 | 0 |" in as_text.read_text()
    subject = mechanism(sigma=100.0)
    assert profile(subject, [400.0], accountant="gaussian").delta[0] == 0.0
    assert account(subject, epsilon=400.0, accountant="gaussian").delta == 1e-300


def test_the_row_of_the_guarantee_is_the_guarantee(tmp_path):
    """What is printed at its own ε has the guarantee's digits, and is not above."""
    subject = mechanism(sigma=0.8)
    shown = account(subject, delta=3.47947e-4)
    found = profile(subject, shown.epsilon * np.linspace(0, 2, 81))
    _, as_text = privacy_report(shown, tmp_path, profile=found)
    text = as_text.read_text()
    row = next(
        re.split(r" *\| *", line)[2:4]
        for line in text.splitlines()
        if line.startswith(f"| {shown.epsilon:.6g} |")
    )
    assert max(float(cell.lstrip("≤ ")) for cell in row) <= float(f"{shown.delta:.6g}")
    # A profile on a coarser grid than the guarantee's would be above: it is capped.
    loose = dataclasses.replace(found, remove=np.minimum(1.0, 1.01 * found.remove))
    assert loose.remove[40] > shown.delta
    assert as_shown(loose, shown).remove[40] == shown.delta


def axes_of(monkeypatch, *arguments):
    """The axes that were drawn."""
    import dptrain.reporting.plots as plots

    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    plot_privacy(*arguments, "unused.png")
    return drawn[0].axes[0]


def test_the_picture_passes_through_the_guarantee(shown, monkeypatch):
    axes = axes_of(monkeypatch, curve([0.5, 0.01, 3e-4, 2e-4, 1e-9]), shown)
    removed = next(line for line in axes.lines if line.get_label() == "contribution removed")
    x, y = removed.get_data()
    assert y[x == shown.epsilon] == shown.delta == 1e-4


@pytest.mark.parametrize(
    ("smallest", "delta", "bottom"),
    [(1e-312, 1e-4, 1e-16), (1e-9, 1e-4, 0.5e-9), (1e-312, 1e-20, 1e-21)],
)
def test_the_axis_ends_where_nobody_looks(shown, monkeypatch, smallest, delta, bottom):
    found = curve([0.5, 0.01, 1e-4, 1e-8, smallest], add=[0.5, 0.01, 1e-4, 1e-8, smallest])
    axes = axes_of(monkeypatch, found, dataclasses.replace(shown, delta=delta))
    assert axes.get_ylim()[0] == pytest.approx(bottom)
    assert axes.get_ylim()[1] <= 2


@pytest.mark.parametrize(("epsilon", "least", "most"), [(2.0, 9.2, 9.4), (30.0, 30.1, 33.0)])
def test_the_axis_of_epsilon_ends_with_the_curves(shown, monkeypatch, epsilon, least, most):
    """δ = exp(-4ε) falls below 1e-16 at ε = 9.21; the guarantee is always in the picture."""
    grid = np.linspace(0, 50, 501)
    found = dataclasses.replace(curve(np.exp(-4 * grid)), epsilon=grid)
    axes = axes_of(monkeypatch, found, dataclasses.replace(shown, epsilon=epsilon))
    left, right = axes.get_xlim()
    assert left == 0
    assert least < right < most

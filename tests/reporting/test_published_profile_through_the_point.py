"""The curve that is published with a certified point: a lower hull that goes through it."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from dptrain.accounting import Profile, TradeOff, account, profile
from dptrain.accounting.losses import gaussian
from dptrain.contrib.accountants import MinSepAnyMatrix
from dptrain.core.guarantee import Guarantee, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting.plots import plot_privacy
from dptrain.reporting.published_profile import as_shown, chance, chords
from dptrain.reporting.report import privacy_report
from dptrain.sampling import MinSep, Poisson
from dptrain.strategies import Identity

CHANCE, OF_POINT = 1e-6, 3e-7


@pytest.fixture(scope="module")
def stated() -> Guarantee:
    scheme = Poisson(probability=0.05, dataset_size=1000, steps=20)
    subject = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    return account(subject, delta=1e-4)


def point(stated, epsilon, delta, kind=Kind.VERIFIED, told=OF_POINT):
    certificate = None if told is None else {"failure_probability": told}
    return dataclasses.replace(
        stated, epsilon=epsilon, delta=delta, kind=kind, certificate=certificate
    )


def curve(epsilon, remove, add=None, kind=Kind.CONFIDENCE, told=CHANCE):
    remove = np.asarray(remove, float)
    add = remove / 3 if add is None else np.asarray(add, float)
    return Profile(np.asarray(epsilon, float), remove, add, kind, "x", told)


def hull(epsilon, delta, at):
    """The least chord of any two bounds, and the bounds before, in plain e^ε at one ε."""
    known = [(0.0, 1.0), *zip(epsilon, delta, strict=True)]
    least = min(bound for where, bound in known if where <= at)
    for left, high in known:
        for right, low in known:
            if left < at < right and low < high:
                share = (math.exp(at) - math.exp(left)) / (math.exp(right) - math.exp(left))
                least = min(least, high + share * (low - high))
    return least


def random_case(seed):
    """Bounds that fall on the whole, with noise, on an uneven grid; a point somewhere below."""
    rng = np.random.default_rng(seed)
    epsilon = np.sort(rng.uniform(0.0 if seed % 2 else 0.3, 4.0, 12))
    if seed % 2:
        epsilon[0] = 0.0
    remove = np.minimum(np.exp(-2 * epsilon) * rng.uniform(0.8, 4.0, 12), 1.0)
    add = remove * rng.uniform(0.01, 1.0, 12)
    at = epsilon[5] if seed % 3 == 0 else rng.uniform(0.1, 4.5)
    return epsilon, remove, add, float(at), float(math.exp(-2 * at) * rng.uniform(0.05, 1.5))


@pytest.mark.parametrize("seed", range(12))
def test_the_curve_is_the_lower_hull_of_all_bounds_and_the_point(stated, seed) -> None:
    epsilon, remove, add, at, delta = random_case(seed)
    shown = as_shown(curve(epsilon, remove, add), point(stated, at, delta))
    drawn = chords(shown)
    for side, values in (("remove", remove), ("add", add)):
        corners = (np.append(epsilon, at), np.append(values, delta))
        for found in (shown, drawn):
            expected = [hull(*corners, each) for each in found.epsilon]
            np.testing.assert_allclose(getattr(found, side), expected, rtol=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_the_curve_passes_through_the_point_or_below(stated, seed) -> None:
    epsilon, remove, add, at, delta = random_case(seed)
    shown = as_shown(curve(epsilon, remove, add), point(stated, at, delta))
    for found in (shown, chords(shown)):
        here = found.epsilon == at
        assert here.any()
        assert (found.delta[here] <= delta).all()


def test_the_chord_to_the_point_is_no_staircase(stated) -> None:
    """Two bounds and a point in the middle of e^ε: half of what is left, by hand."""
    shown = as_shown(curve([0.0, math.log(5.0)], [0.5, 0.4]), point(stated, math.log(3.0), 0.1))
    drawn = chords(shown)
    # Halfway from e^0 = 1 to 3 in e^ε, between .5 and .1; beyond the point nothing is above it.
    assert np.interp(math.log(2.0), drawn.epsilon, drawn.remove) == pytest.approx(0.3, abs=1e-5)
    assert shown.remove[-1] == 0.1
    assert len(drawn.epsilon) > 900


LABELS = [
    (Kind.CONFIDENCE, CHANCE, Kind.VERIFIED, OF_POINT, Kind.CONFIDENCE, CHANCE + OF_POINT),
    (Kind.CONFIDENCE, CHANCE, Kind.CONFIDENCE, OF_POINT, Kind.CONFIDENCE, CHANCE + OF_POINT),
    (Kind.CONFIDENCE, CHANCE, Kind.UPPER_BOUND, OF_POINT, Kind.CONFIDENCE, CHANCE),
    (Kind.CONFIDENCE, CHANCE, Kind.EXACT, None, Kind.CONFIDENCE, CHANCE),
    (Kind.CONFIDENCE, CHANCE, Kind.VERIFIED, None, Kind.CONFIDENCE, None),
    (Kind.CONFIDENCE, CHANCE, Kind.ESTIMATE, OF_POINT, Kind.ESTIMATE, None),
    (Kind.CONFIDENCE, None, Kind.VERIFIED, OF_POINT, Kind.CONFIDENCE, None),
    (Kind.UPPER_BOUND, None, Kind.VERIFIED, OF_POINT, Kind.CONFIDENCE, OF_POINT),
    (Kind.UPPER_BOUND, None, Kind.CONFIDENCE, OF_POINT, Kind.CONFIDENCE, OF_POINT),
    (Kind.UPPER_BOUND, None, Kind.EXACT, None, Kind.UPPER_BOUND, None),
    (Kind.EXACT, None, Kind.VERIFIED, OF_POINT, Kind.CONFIDENCE, OF_POINT),
    (Kind.EXACT, None, Kind.UPPER_BOUND, None, Kind.UPPER_BOUND, None),
    (Kind.EXACT, None, Kind.EXACT, None, Kind.EXACT, None),
    (Kind.ESTIMATE, None, Kind.VERIFIED, OF_POINT, Kind.ESTIMATE, None),
]


@pytest.mark.parametrize(("kind", "told", "of_point", "told_there", "expected", "total"), LABELS)
def test_a_curve_that_needs_the_point_has_both_chances_of_failure(
    stated, kind, told, of_point, told_there, expected, total
) -> None:
    """The union bound: nothing is left out, and what is certain costs nothing."""
    bounds = curve([0.0, 1.0, 2.0, 3.0], [0.5, 0.1, 0.05, 0.04], kind=kind, told=told)
    shown = as_shown(bounds, point(stated, 2.0, 1e-4, of_point, told_there))
    assert shown.kind is expected
    assert shown.failure_probability == (None if total is None else pytest.approx(total, rel=1e-12))
    assert shown.delta[2] == 1e-4


@pytest.mark.parametrize("kind", [Kind.CONFIDENCE, Kind.UPPER_BOUND, Kind.EXACT])
def test_a_point_above_the_curve_changes_nothing(stated, kind) -> None:
    """Gaussian noise by its formula: convex bounds stay as they are, and so does their label."""
    epsilon = np.linspace(0.0, 4.0, 41)
    values = gaussian.delta(epsilon, 1.0)
    bounds = curve(epsilon, values, values, kind, CHANCE if kind is Kind.CONFIDENCE else None)
    shown = as_shown(bounds, point(stated, epsilon[20], values[20] * 1.001))
    np.testing.assert_array_equal(shown.epsilon, epsilon)
    np.testing.assert_allclose(shown.remove, values, rtol=1e-15)
    assert shown.kind is kind
    assert (chords(shown) is shown) == (kind is not Kind.CONFIDENCE)
    assert shown.failure_probability == bounds.failure_probability
    if kind is Kind.EXACT:
        np.testing.assert_array_equal(shown.remove, values)
        # A value between two points of an exact curve would be a bound only.
        assert len(as_shown(bounds, point(stated, 1.234, 0.5)).epsilon) == 41


def test_a_point_whose_chance_is_untold_leaves_the_chance_untold(stated) -> None:
    """Also where it is needed at its own ε only, between two points of the grid."""
    epsilon = [0.0, 1.0, 2.0]
    bounds = curve(epsilon, [0.5, 0.1, 0.001])
    middle = hull(epsilon, bounds.remove, 1.5)
    for delta, told in ((0.9 * middle, None), (1.1 * middle, CHANCE)):
        shown = as_shown(bounds, point(stated, 1.5, delta, Kind.CONFIDENCE, None))
        assert shown.failure_probability == told
        assert shown.kind is Kind.CONFIDENCE
        assert shown.remove[2] == pytest.approx(min(delta, middle), rel=1e-12)


def test_showing_twice_charges_once(stated) -> None:
    bounds = curve([0.0, 1.0, 2.0, 3.0], [0.5, 0.1, 0.05, 0.04])
    once = as_shown(bounds, point(stated, 1.5, 1e-3))
    twice = as_shown(once, point(stated, 1.5, 1e-3))
    assert twice.failure_probability == once.failure_probability
    np.testing.assert_allclose(twice.delta, once.delta, rtol=1e-14)


def test_what_is_drawn_between_the_points_of_a_bound_is_one(stated) -> None:
    """The Gaussian's exact δ at eight ε: what the picture shows between is never below it."""
    epsilon = np.linspace(0.0, 5.0, 8)
    values = gaussian.delta(epsilon, 1.0)
    guarantee = point(stated, 2.6, float(gaussian.delta(np.array([2.6]), 1.0)[0]))
    drawn = chords(as_shown(curve(epsilon, values, values), guarantee))
    assert (drawn.remove >= gaussian.delta(drawn.epsilon, 1.0) * (1 - 1e-9)).all()
    straight = np.exp(np.interp(drawn.epsilon, epsilon, np.log(values)))
    # Lines in log δ, which look smoother, are no bounds.
    assert (straight < 0.99 * gaussian.delta(drawn.epsilon, 1.0)).any()


def test_the_statement_tells_the_chance_and_no_reader_takes_the_curve_for_proven(
    stated, tmp_path
) -> None:
    proven = curve([0.0, 1.0, 2.0, 3.0], [0.5, 0.1, 0.05, 0.04], kind=Kind.UPPER_BOUND, told=None)
    guarantee = point(stated, 2.0, 1e-4)
    as_json, as_text = privacy_report(guarantee, tmp_path, profile=proven)
    published = json.loads(as_json.read_text(encoding="utf-8"))["profile"]
    assert published["kind"] == "confidence bound"
    assert published["failure_probability"] == OF_POINT
    assert "not all of them hold is at most 3e-07" in as_text.read_text(encoding="utf-8")
    # What attacks can reach follows from proven curves and from the stated (ε, δ) alone.
    shown = as_shown(curve([0.0, 1.0, 2.0], [0.5, 0.1, 0.05]), guarantee)
    limits = TradeOff.of(guarantee, shown)
    assert limits.epsilon == (2.0,)
    assert limits.remove == limits.add == (1e-4,)
    assert limits.kind is Kind.VERIFIED


@pytest.mark.parametrize(
    ("value", "text"), [(1.1e-6, "1.1e-06"), (1.11e-6, "1.2e-06"), (0.25, "0.25"), (0.0, "0")]
)
def test_the_chance_is_rounded_up(value, text) -> None:
    assert chance(curve([0.0], [0.5], told=value)) == text


def test_a_certified_run_is_drawn_through_its_point(tmp_path, monkeypatch) -> None:
    """b-min-sep with few samples: the profile by itself is above the certified δ."""
    import dptrain.reporting.plots as plots

    scheme = MinSep(probability=0.2, min_sep=4, steps=20, dataset_size=40)
    plain = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    member = MinSepAnyMatrix(seed=3, profile_samples=2000, progress=False, threads=1)
    found = member.calibrate(plain, epsilon=1.0, delta=0.01)
    assert found.kind is Kind.VERIFIED
    assert found.certificate is not None
    bounds = member.profile(plain.with_noise(found.noise_multiplier), np.linspace(0.0, 2.0, 8))
    assert np.interp(1.0, bounds.epsilon, bounds.delta) > found.delta
    shown = as_shown(bounds, found)
    total = member.failure_probability + found.certificate["failure_probability"]
    assert shown.failure_probability == pytest.approx(total, rel=1e-12)
    figures: list = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    plot_privacy(bounds, found, tmp_path / "unused.png")
    axes = figures[0].axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    (marker,) = (line for label, line in lines.items() if "guarantee" in label)
    assert marker.get_data() == ([1.0], [0.01])
    removed = lines["contribution removed"]
    x, y = removed.get_data()
    assert y[x == 1.0] == 0.01
    assert (np.diff(y) <= 0).all()
    assert chance(shown) in axes.get_title()


def test_deterministic_curves_keep_their_values(stated) -> None:
    scheme = Poisson(probability=0.05, dataset_size=1000, steps=20)
    subject = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    found = profile(subject, stated.epsilon * np.linspace(0, 2, 81))
    shown = as_shown(found, stated)
    np.testing.assert_array_equal(shown.epsilon, found.epsilon)
    for side in ("remove", "add"):
        before, after = getattr(found, side), getattr(shown, side)
        floored = np.maximum(before, 1e-300)
        assert (after <= floored).all()
        np.testing.assert_allclose(after, floored, rtol=1e-3)
    assert shown.kind is found.kind
    assert shown.failure_probability is None

"""Progress of verdicts: how much there is to do is known from the start."""

import io
import itertools

import numpy as np
import pytest
from tqdm import tqdm

from dptrain.accounting.min_sep.importance_terms import WeightedTerms
from dptrain.accounting.simulation import estimate, verdicts
from dptrain.accounting.simulation.draws import SharedDraws
from dptrain.accounting.simulation.estimate import estimate_depth
from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.accounting.simulation.verdicts import Rule, verify_points

DRAWS = SharedDraws(1, threads=1, progress=True)
RULE = Rule(violated=0.1, failure=1e-3, most=10**6)


@pytest.fixture
def bars(monkeypatch):
    """Every bar that is opened; a list of (n, total) after each update hangs on it."""
    opened = []

    class Bar(tqdm):
        def __init__(self, **options):
            options |= {"disable": False, "delay": 0.0, "mininterval": 0.0, "file": io.StringIO()}
            super().__init__(**options)
            self.seen = []
            opened.append(self)

        def update(self, n=1):
            super().update(n)
            self.seen.append((self.n, self.total))

    for module in (verdicts, estimate):
        monkeypatch.setattr(module, "tqdm", Bar)
    return opened


def terms_until(last):
    """Terms that are all 0 up to this depth, and all at the ceiling beyond."""

    def at(depth):
        value = 0.0 if depth <= last else 0.5
        one = WeightedTerms(ceiling=0.5, lanes=100, draw=lambda _, size: np.full(size, value))
        return dict.fromkeys(DIRECTIONS, one)

    return at


@pytest.mark.parametrize("last", [0, 3, 7, 8, 20, 63, 64, 900])
@pytest.mark.parametrize("most", [1, 8, 9, 64, 700])
def test_an_estimate_ends_at_its_total(bars, last, most):
    found = estimate_depth(terms_until(last), RULE, DRAWS, 2, most=most)
    assert found == min(last, most - 1)
    for n, total in bars[0].seen:
        assert n <= total
    assert bars[0].n == bars[0].total


@pytest.mark.parametrize("last", [2, 9])
def test_verdicts_are_counted_as_they_form(bars, last):
    points = [1.0, 2.0, 3.0, 4.0]

    def at(point):
        return {"remove": terms_until(last)(point)["remove"], "add": terms_until(9)(point)["add"]}

    rows = verify_points(points, at, RULE, DRAWS, 2)
    assert [row["accepted"] for row in rows] == [point <= last for point in points][: len(rows)]
    assert all(row["add"]["point"] == 4.0 for row in rows)
    counts = [n for n, _ in bars[0].seen]
    assert {total for _, total in bars[0].seen} == {5}
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(counts))
    assert 0 < counts[0] < 1  # the first verdict has only begun
    assert counts[-1] == (4 if last == 2 else 5)  # the add direction, and the points up to 3


def test_the_add_direction_is_shown_from_the_last_point_on(bars):
    """Rejected at 4 and 3 it is accepted at 2, and the remove direction is asked no further."""

    def at(point):
        return {"remove": terms_until(9)(point)["remove"], "add": terms_until(2)(point)["add"]}

    points = [1.0, 2.0, 3.0, 4.0]
    rows = verify_points(points, at, RULE, DRAWS, 2)
    assert [row["point"] for row in rows] == [1.0, 2.0]
    assert all(row["accepted"] and row["add"]["point"] == 2.0 for row in rows)
    none = {"remove": terms_until(9)(1.0)["remove"], "add": terms_until(0)(1.0)["add"]}
    assert verify_points(points, lambda _: none, RULE, DRAWS, 2) == []

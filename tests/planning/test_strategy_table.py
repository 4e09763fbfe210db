"""The table of families: its figures, its order and its refusals."""

import json

import numpy as np
import pytest

from dptrain.planning.strategy_table import compare_strategies, written
from dptrain.strategies import (
    BSR,
    BandMF,
    Identity,
    MomentumSGD,
    RunShape,
    proposals,
    strategy_types,
)

SMALL = {"steps": 24, "bands": (1, 4), "parameters": 5000, "progress": False}


@pytest.mark.slow
def test_every_family_is_in_it():
    found = compare_strategies(**SMALL, epochs=2, dense=True)
    missing = set(strategy_types()) - {type(r.strategy).__name__ for r in found.rows}
    assert missing == set()
    assert len({row.name for row in found.rows}) == len(found.rows)


def test_figures_are_those_of_dense_matrices():
    three = [Identity(), BSR(bands=4), BandMF(bands=4)]
    found = compare_strategies(three, **SMALL, epochs=2, timed=False)
    sums = np.tril(np.ones((24, 24)))
    for row in found.rows:
        dense = row.strategy.columns(24, np.arange(24))
        errors = np.linalg.norm(sums @ np.linalg.inv(dense), axis=1)
        assert row.rmse == pytest.approx(np.sqrt(np.mean(errors**2)))
        assert row.max_error == pytest.approx(errors.max())
        # Two participations 12 apart, further than there are bands: orthogonal columns.
        assert row.sensitivity == pytest.approx(np.sqrt(2) * np.linalg.norm(dense[:, 0]))
        assert row.exact
        assert row.seconds is None
        assert row.bytes == (row.strategy.bands - 1) * 5000 * 4
    assert [row.error for row in found.rows] == sorted(row.error for row in found.rows)


def test_identity_by_hand():
    # Errors of prefix sums under independent noise: sqrt(1), …, sqrt(n).
    (row,) = compare_strategies([Identity()], **SMALL, timed=False).rows
    assert row.rmse == pytest.approx(np.sqrt(25 / 2))
    assert row.max_error == pytest.approx(np.sqrt(24))
    assert row.sensitivity == 1
    assert compare_strategies([Identity()], **SMALL, epochs=4, timed=False).rows[0].sensitivity == 2


@pytest.mark.slow
def test_large_buffers_are_timed_on_fewer_parameters():
    found = compare_strategies([BSR(bands=20)], steps=30, parameters=10**11, progress=False)
    (row,) = found.rows
    assert row.bytes == 19 * 10**11 * 4
    assert row.timed_parameters < 10**8
    assert row.seconds > 0
    assert "scaled up" in str(found)
    assert "TB" in str(found)


def test_workload_reaches_the_optimizer():
    momentum = MomentumSGD(momentum=0.9)
    for strategy in proposals(RunShape(steps=24, bands=(4,), workload=momentum)):
        if hasattr(strategy, "workload"):
            assert strategy.workload == momentum


def test_json_and_markdown():
    found = compare_strategies([Identity(), BSR(bands=4)], **SMALL)
    value = json.loads(json.dumps(found.to_dict()))
    assert [row["name"] for row in value["rows"]] == [row.name for row in found.rows]
    assert "| BSR(bands=4) |" in found.to_markdown()
    assert "BSR(bands=4)" in str(found)


def test_names_are_constructor_calls():
    assert written(Identity()) == "Identity()"
    assert written(BandMF(bands=3, objective="max")) == "BandMF(bands=3, objective='max')"
    for strategy in proposals(RunShape(steps=24, bands=(4,))):
        assert written(strategy).startswith(type(strategy).__name__ + "(")


def test_refuses_what_is_no_strategy():
    with pytest.raises(ValueError, match="strategies has 1"):
        compare_strategies([1], steps=10)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 25}, "at most 24"),
        ({"epochs": 2, "min_sep": 3}, "give epochs, or the other two"),
        ({"max_participations": 2}, "without min_sep"),
        ({"max_participations": 5, "min_sep": 6}, "use at most 4"),
        ({"parameters": 0}, "parameters=0"),
        ({"bands": (0,)}, "bands=0"),
        ({"bands": (25,)}, "bands=25 exceeds"),
        ({"steps": 2.5}, "steps=2.5"),
    ],
)
def test_refuses(options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        compare_strategies(**{**SMALL, **options})

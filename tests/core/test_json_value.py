"""What is read from dictionaries and JSON ends in a value, or in a ValueError of one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

import dptrain
from dptrain.clipping.base.styles import Automatic, ClippingStyle, PerGroup
from dptrain.core.guarantee import Guarantee
from dptrain.individual import GDPFilter, IndividualFilter
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.workloads import Workload
from tests.core.test_checks_bad_arguments import MECHANISM
from tests.helpers.bad_values import INF, NAN

NO_VALUES: list[Any] = [
    None, 5, "x", [], [1], {}, {1: 2},
    {"type": None}, {"type": []}, {"type": {}}, {"type": "nonsense"}, {"type": "Identity", "x": 1},
]  # fmt: skip
NO_FIELDS: list[Any] = [
    None, True, "x", [], {}, -1, 0, 1.5, NAN, INF, 1e308, 10**30,
    [None], [["a"]], {"family": "workload"}, {"family": []}, {"type": "Poisson"},
]  # fmt: skip
VALUES: list[tuple[type[Any], Any]] = [
    (Scheme, MECHANISM.scheme),
    (Scheme, dptrain.MinSep(probability=0.1, min_sep=2, dataset_size=10, steps=3)),
    (Strategy, dptrain.BandMF(bands=2).bind(3)),
    (Strategy, dptrain.BLT(buffers=1).bind(3)),
    (Strategy, dptrain.Dense(epochs=1).bind(3)),
    (Workload, MomentumSGD()),
    (ClippingStyle, Automatic()),
    (ClippingStyle, PerGroup({"a": ("*",)})),
    (IndividualFilter, GDPFilter(target_epsilon=1.0, target_delta=1e-3, max_steps=3)),
    (dptrain.MatrixMechanism, MECHANISM),
]


def in_one_line(read: Any, value: Any) -> None:
    said = "read"
    try:
        read(value)
    except ValueError as error:
        said = str(error)
    assert said
    assert "\n" not in said


@pytest.mark.parametrize(("family", "value"), VALUES, ids=lambda v: getattr(v, "__name__", None))
def test_from_dict(family: type[Any], value: Any) -> None:
    whole = value.to_dict()
    assert family.from_dict(whole) == value
    for wrong in NO_VALUES:
        with pytest.raises(ValueError, match=r"."):
            family.from_dict(wrong)
    for field in whole:
        for wrong in NO_FIELDS:
            in_one_line(family.from_dict, {**whole, field: wrong})


@pytest.mark.parametrize("value", [MECHANISM, dptrain.account(MECHANISM, delta=1e-3)])
def test_from_json(value: Any) -> None:
    kind = type(value)
    whole = json.loads(value.to_json())
    assert kind.from_json(value.to_json()) == value
    for wrong in ("", "{", "null", "5", '"x"', "[]", "{}", "[" * 5000, '{"a": 1}', "\x00"):
        with pytest.raises(ValueError, match=r"."):
            kind.from_json(wrong)
    for wrong in (None, 5, [], {}):
        with pytest.raises(TypeError, match="text="):
            kind.from_json(wrong)
    for field in whole:
        for wrong in NO_FIELDS:
            in_one_line(kind.from_json, json.dumps({**whole, field: wrong}))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("epsilon", -1.0), ("epsilon", NAN), ("epsilon", "1"), ("epsilon", True),
        ("delta", 1.5), ("delta", -1e-9), ("delta", None), ("noise_multiplier", -1.0),
        ("steps_planned", 0), ("steps_planned", 2.5), ("steps_executed", -1), ("kind", "proven"),
        ("adjacency", 3), ("notes", "one"), ("notes", [5]), ("scheme", {}), ("certificate", []),
    ],
)  # fmt: skip
def test_a_guarantee_that_means_nothing_is_not_read(field: str, wrong: Any) -> None:
    guarantee = dptrain.account(MECHANISM, delta=1e-3)
    value = {**json.loads(guarantee.to_json()), field: wrong}
    with pytest.raises(ValueError, match=r"."):
        Guarantee.from_json(json.dumps(value))

"""What may join a family: each mistake is refused in one line that names it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import pytest

from dptrain.core import JsonValue, checked_member


class _Shape(JsonValue, ABC, family="shape of the tests"):
    @abstractmethod
    def area(self) -> float:
        """Any number."""


def _frozen(name, bases=(_Shape,), **fields):
    body = {"__annotations__": dict.fromkeys(fields, float), "area": lambda self: 1.0}
    return dataclasses.dataclass(frozen=True)(type(name, bases, {**body, **fields}))


def _check(member):
    checked_member(member, _Shape, call="register_shape")


def test_takes_a_frozen_dataclass_of_the_family():
    _check(_frozen("Square", side=2.0))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: 3, TypeError, "must be a subclass"),
        (lambda: int, TypeError, "must be a subclass"),
        (lambda: _frozen("Value")(), TypeError, "hand over its class"),
        (lambda: _Shape, TypeError, "abstract, since it lacks area"),
        (lambda: type("Vague", (_Shape, ABC), {}), TypeError, "abstract, since it lacks area"),
        (lambda: type("Plain", (_Shape,), {"area": None}), TypeError, "frozen dataclass"),
        (
            lambda: dataclasses.dataclass(type("Mutable", (_Shape,), {"area": None})),
            TypeError,
            "frozen dataclass",
        ),
        (lambda: _frozen("_Hidden"), ValueError, "underscore"),
        (lambda: _frozen("Mixed", (_Shape, ABC)), ValueError, "ABC"),
        (lambda: _frozen("Reserved", type=1.0), ValueError, "reserved name"),
    ],
)
def test_refuses_in_one_line(make, error, says):
    with pytest.raises(error, match=says) as caught:
        _check(make())
    assert str(caught.value).startswith("register_shape(")
    assert "\n" not in str(caught.value)


def test_refuses_a_class_whose_name_has_passed_to_another():
    first = _frozen("Disc")
    _frozen("Disc")  # the same module and name: as when it is loaded again
    with pytest.raises(ValueError, match="choose another"):
        _check(first)


def test_a_value_that_would_be_read_as_another_is_not_stored():
    kept = _frozen("Ring", side=1.0)
    body = {"__module__": "elsewhere", "area": lambda self: 2.0, "__annotations__": {"side": float}}
    twin = dataclasses.dataclass(frozen=True)(type("Ring", (_Shape, ABC), body))
    assert _Shape.from_dict(kept().to_dict()) == kept()
    with pytest.raises(
        TypeError, match=r"elsewhere\.Ring cannot be stored: .* choose another name"
    ):
        twin(side=1.0).to_dict()

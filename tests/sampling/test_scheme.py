"""A scheme's class is what accountants go by: it is final, and its name is its own."""

from __future__ import annotations

import dataclasses

import pytest

from dptrain.configuration import check_scheme
from dptrain.configuration.typed import members_of
from dptrain.core.json_value import JsonValue
from dptrain.sampling import ExchangeableScheme, Poisson, Scheme, UserScheme
from dptrain.strategies import Strategy


@pytest.mark.parametrize("name", sorted(members_of(Scheme)))
def test_a_scheme_cannot_be_subclassed(name):
    """Or its child's draws, whatever they are, would have the parent's guarantee."""
    with pytest.raises(TypeError, match="cannot be subclassed"):
        type("Child", (members_of(Scheme)[name],), {})
    assert "Child" not in members_of(Scheme)


def test_the_bases_can_be():
    for base in (Scheme, ExchangeableScheme, UserScheme):
        child = type("_Private", (base,), {})  # the underscore keeps it out of the registry
        assert issubclass(child, Scheme)


@pytest.mark.parametrize(("base", "name"), [(Scheme, "Poisson"), (Strategy, "BandMF")])
def test_a_name_cannot_be_taken_over(base, name):
    """Else a checkpoint of the one would be read as the other, with an equal hash."""
    before = JsonValue._families[base._family][name]
    with pytest.raises(TypeError, match="already exists"):
        dataclasses.dataclass(frozen=True)(type(name, (base,), {}))
    assert JsonValue._families[base._family][name] is before


def test_the_same_class_may_be_made_again():
    """As when its module is loaded anew, or by ``dataclass(slots=True)``."""
    members = JsonValue._families["scheme"]
    again = type("Poisson", (ExchangeableScheme,), {"__module__": Poisson.__module__})
    assert members["Poisson"] is again
    members["Poisson"] = Poisson


@pytest.mark.parametrize("name", ["TruncatedPoisson", "TruncatedMinSep"])
def test_files_of_an_earlier_layout_are_told_what_to_write(name):
    fields = {"probability": 0.1, "dataset_size": 9, "steps": 3, "max_batch_size": 2}
    now = f"use {name.removeprefix('Truncated')} with max_batch_size"
    with pytest.raises(ValueError, match=f"'{name}' belongs to an earlier format: {now}"):
        Scheme.from_dict({"type": name, **fields})
    with pytest.raises(
        ValueError, match=rf"scheme\.type={name} belongs to an earlier format: {now}"
    ):
        check_scheme({"type": name, "batch_size": 2, "max_batch_size": 3})

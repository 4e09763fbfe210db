"""Accountants from elsewhere: how they come in, and when they answer by themselves."""

import dataclasses

import pytest

import dptrain
from dptrain import Adjacency, Guarantee, Kind
from dptrain.accounting import (
    DeterministicAccountant,
    UnsampledGaussian,
    account,
    accountant_named,
    accountants_for,
    calibrate,
    find_accountants,
    register_accountant,
    registered_accountants,
)
from dptrain.accounting.base import registry
from dptrain.accounting.unamplified import GaussianCurve
from dptrain.commands.cli import main
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting.support_table import support_table
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, Identity, SquareRoot
from dptrain.testing import AccountantContract


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._known()))


def poisson(nominal_size=None):
    scheme = Poisson(probability=0.1, dataset_size=500, steps=20, nominal_size=nominal_size)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)


def unanswered():
    """A pair for which none of ours answers by itself."""
    scheme = MinSep(probability=0.1, min_sep=2, dataset_size=500, steps=20)
    return MatrixMechanism(scheme=scheme, strategy=SquareRoot(), noise_multiplier=1.0)


class Generous(DeterministicAccountant):
    """States far too little: what must not answer unasked where one of ours does."""

    name = "generous"
    kind = Kind.UPPER_BOUND
    adjacencies = tuple(Adjacency)
    truncation = True
    sensitivity = 1e-3

    def refusal(self, mechanism):
        return None

    def curve(self, mechanism):
        return GaussianCurve(self.sensitivity)


def elsewhere(package, **body):
    """An accountant of another package."""
    return type("Elsewhere", (Generous,), {"__module__": f"{package}.accountants", **body})()


def names(mechanism, adjacency=None):
    return [member.name for member in find_accountants(mechanism, adjacency=adjacency)]


def test_it_answers_where_nobody_did():
    with pytest.raises(ValueError, match="no accountant covers"):
        account(unanswered(), delta=1e-3)
    register_accountant(Generous())
    shown = account(unanswered(), delta=1e-3)
    assert shown.accountant == "generous"
    assert Guarantee.from_json(shown.to_json()) == shown
    found = calibrate(
        scheme=unanswered().scheme, strategy=SquareRoot(), epsilon=1.0, delta=1e-3
    ).guarantee
    assert found.accountant == "generous"
    assert "generous" in [each.name for each in accountants_for(unanswered())]


@pytest.mark.parametrize("nominal_size", [None, 600])
def test_it_replaces_none_of_ours_unasked(nominal_size):
    before = account(poisson(nominal_size), delta=1e-5)
    register_accountant(Generous())
    assert account(poisson(nominal_size), delta=1e-5) == before
    (mine,) = (each for each in accountants_for(poisson(nominal_size)) if each.name == "generous")
    assert mine.refusal is None
    assert "dptrain has an accountant of its own" in mine.reason
    asked = account(poisson(nominal_size), delta=1e-5, accountant="generous")
    assert asked.epsilon < before.epsilon
    assert asked.adjacency is poisson(nominal_size).adjacency


def test_one_that_refines_replaces_none_of_ours_unasked():
    register_accountant(elsewhere("later", refines=True))
    assert names(poisson()) == ["poisson-pld"]
    bins = BallsInBins(bins=10, epochs=2, dataset_size=2000)
    pair = MatrixMechanism(scheme=bins, strategy=BSR(bands=2), noise_multiplier=2.0)
    assert names(pair) == ["balls-in-bins-importance"]


def test_packages_are_asked_in_the_order_in_which_they_came():
    register_accountant(elsewhere("first", name="a"))
    register_accountant(elsewhere("second", name="b"))
    register_accountant(elsewhere("first", name="c"))
    assert names(unanswered()) == ["a", "c"]
    reasons = {each.name: each.reason for each in accountants_for(unanswered())}
    assert "first has an accountant of its own" in reasons["b"]


def test_of_one_package_the_least_bound_counts():
    register_accountant(elsewhere("first", name="wide", sensitivity=2.0))
    register_accountant(elsewhere("first", name="narrow", sensitivity=1.0))
    shown = account(unanswered(), delta=1e-3)
    alone = account(unanswered(), delta=1e-3, accountant="narrow")
    assert (shown.epsilon, shown.accountant) == (alone.epsilon, "narrow")


def test_it_serves_the_adjacencies_that_it_knows():
    with pytest.raises(
        ValueError, match=r"states zero_out, but adjacency='replace_one' was requested"
    ):
        account(poisson(), delta=1e-3, adjacency=Adjacency.REPLACE_ONE, accountant="gaussian")
    mine = elsewhere("first", adjacencies=(Adjacency.ADD_REMOVE,))
    assert mine.adjacency is Adjacency.ADD_REMOVE
    with pytest.raises(ValueError, match=r"adjacency='zero_out': .* states add_remove only"):
        mine.under(Adjacency.ZERO_OUT)


def test_an_adjacency_of_the_class_is_refused():
    """The field's default would silently replace it."""
    with pytest.raises(TypeError, match=r"adjacencies = \(Adjacency.ADD_REMOVE,\)"):
        type("Mine", (Generous,), {"adjacency": Adjacency.ADD_REMOVE})


def test_every_accountant_is_a_value():
    for member in registered_accountants():
        assert member == dataclasses.replace(member)
        assert hash(member) == hash(dataclasses.replace(member))
        assert accountant_named(member.name, member.adjacency) == member
    assert len({(each.name, each.adjacency) for each in registered_accountants()}) == len(
        registered_accountants()
    )


def test_what_is_no_accountant_is_refused():
    with pytest.raises(TypeError, match=r"the class itself: write UnsampledGaussian\(...\)"):
        register_accountant(UnsampledGaussian)
    for name in ("Generous", "my accountant", "", "a--b"):
        with pytest.raises(ValueError, match="lower-case words joined by hyphens"):
            register_accountant(elsewhere("first", name=name))
    with pytest.raises(TypeError, match="kind=None"):
        register_accountant(elsewhere("first", kind=None))


def test_options_that_are_no_fields_are_refused():
    """They would be lost where the accountant is made for another adjacency."""

    class Initialized(Generous):
        def __init__(self, sensitivity):
            self.__dict__.update(sensitivity=sensitivity, adjacency=Adjacency.ZERO_OUT)

    with pytest.raises(TypeError, match=r"declare its options as fields, under @dataclasses"):
        register_accountant(Initialized(2.0))


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match=r"already used by dptrain\..*UnsampledGaussian"):
        register_accountant(elsewhere("first", name="gaussian"))
    register_accountant(elsewhere("first", name="mine"))
    register_accountant(elsewhere("first", name="mine", sensitivity=3.0))  # a cell, run again
    assert accountant_named("mine").sensitivity == 3.0
    with pytest.raises(ValueError, match=r"used by first\."):
        register_accountant(elsewhere("second", name="mine"))


def test_nobody_gives_ours_other_options():
    """Else a package that is imported could loosen the proofs that answer by themselves."""
    ours = accountant_named("min-sep-importance")
    assert register_accountant(dataclasses.replace(ours)) == ours  # a module, loaded again
    with pytest.raises(ValueError, match="registered with other options"):
        register_accountant(dataclasses.replace(ours, failure_probability=0.5))
    assert accountant_named("min-sep-importance") == ours


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("gausian", "gaussian"),
        ("balls-in-bins-rényi", "balls-in-bins-renyi"),
        ("poisson_pld", "poisson-pld"),
        ("MMCC", "mmcc"),
        ("revealed draws", "revealed-draws"),
    ],
)
def test_a_misspelt_name_is_answered_by_the_nearest(given, near):
    with pytest.raises(ValueError, match=rf"did you mean {near}\?"):
        account(poisson(), delta=1e-3, accountant=given)


@pytest.mark.slow
def test_it_stands_in_the_support_table_by_name_where_ours_answers():
    before = support_table()
    register_accountant(Generous())
    found = support_table()
    assert len(found) == len(before)
    for row, as_it_was in zip(found, before, strict=True):
        mine = [answer for answer in row.answers if answer.accountant == "generous"]
        others = [answer for answer in row.answers if answer.accountant != "generous"]
        assert others == list(as_it_was.answers)
        # Under add-remove schemes that make N public are covered by nobody.
        assert len(mine) == 1 or (row.adjacency is Adjacency.ADD_REMOVE and not row.answers)
        for answer in mine:
            assert answer.by_name == any(not other.by_name for other in others)


def test_the_command_line_takes_its_name(capsys):
    register_accountant(Generous())
    words = "account --scheme Poisson batch_size=50 --strategy Identity --dataset-size 500"
    words += " --steps 20 --sigma 1 --delta 1e-5 --accountant generous"
    assert main(words.split()) == 0
    assert "accountant: generous" in capsys.readouterr().out


def test_it_is_public():
    assert dptrain.register_accountant is register_accountant


class TestContract(AccountantContract):
    """What the documentation tells strangers to run."""

    def accountant(self):
        return elsewhere("first", sensitivity=2.0)

    def mechanism(self):
        return poisson()


def test_a_name_of_an_earlier_version_finds_what_proves_it_now_and_stays_taken() -> None:
    assert accountant_named("cyclic-poisson-pld") == accountant_named("poisson-pld")

    class Taking(Generous):
        name = "cyclic-poisson-pld"

    with pytest.raises(ValueError, match=r"is already used by .*PoissonPLD; choose another"):
        register_accountant(Taking())

"""Where batches are cut, nobody answers who has a theorem about whole draws only.

With ``max_batch_size`` an example can displace another one, and coins of one batch depend on each
other: what is proven for the same scheme without it is false then (the last test). So every
accountant, and whatever else reads a scheme, has to answer for truncation by design or refuse.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import norm

from dptrain import (
    BSR,
    Adjacency,
    AttributionGraph,
    CyclicPoisson,
    Identity,
    MatrixMechanism,
    MinSep,
    Poisson,
    SquareRoot,
    UserCyclic,
    account,
)
from dptrain.accounting import (
    accountant_named,
    accountants_for,
    registered_accountants,
    to_dp_event,
)
from dptrain.accounting.base.curve import DeterministicAccountant
from dptrain.accounting.best_of import BestOf
from dptrain.accounting.min_sep.pair import min_sep_law
from dptrain.accounting.min_sep.truncated import TruncatedMinSepLosses
from dptrain.accounting.poisson.groups import group_curve, last_iterate_curve
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.core import Kind
from dptrain.core.json_value import JsonValue
from dptrain.sampling import Scheme

N, STEPS, LARGEST = 60, 12, 7

# Every scheme that can be cut, in the forms that some accountant takes for another one: MinSep with
# b = 1 is Poisson sampling, and with p = 1 balls-in-bins.
CUT = {
    "Poisson": Poisson(probability=0.1, dataset_size=N, steps=STEPS, max_batch_size=LARGEST),
    "Poisson of everybody": Poisson(
        probability=1.0, dataset_size=N, steps=STEPS, max_batch_size=LARGEST
    ),
    "Poisson, N private": Poisson(
        probability=0.1, dataset_size=N, steps=STEPS, max_batch_size=LARGEST, nominal_size=N
    ),
    "CyclicPoisson": CyclicPoisson(
        probability=0.3, cycle=3, dataset_size=N, steps=STEPS, max_batch_size=LARGEST
    ),
    "CyclicPoisson, N private": CyclicPoisson(
        probability=0.3,
        cycle=3,
        dataset_size=N,
        steps=STEPS,
        assignment="independent",
        max_batch_size=LARGEST,
        nominal_size=N,
    ),
    "MinSep": MinSep(
        probability=0.1, min_sep=3, dataset_size=N, steps=STEPS, max_batch_size=LARGEST
    ),
    "UserCyclic": UserCyclic.for_batch_size(
        graph=AttributionGraph.from_lists([[e] for e in range(N)]),
        batch_size=6.0,
        cycle=3,
        steps=STEPS,
        max_batch_size=LARGEST,
    ),
    "MinSep, b = 1": MinSep(
        probability=0.1, min_sep=1, dataset_size=N, steps=STEPS, max_batch_size=LARGEST
    ),
    "MinSep, p = 1": MinSep(
        probability=1.0, min_sep=3, dataset_size=N, steps=STEPS, max_batch_size=LARGEST
    ),
}
STRATEGIES = {"independent": Identity(), "bands": BSR(bands=3), "dense": SquareRoot()}

# Whose theorem is about cut batches, and of which scheme; the Gaussian bound uses no draws at all.
ANSWERS = {
    "poisson-pld": Poisson | CyclicPoisson,
    "user-poisson-pld": UserCyclic,
    "min-sep-importance": MinSep,
    "min-sep-renyi": MinSep,
    "gaussian": Scheme,
}


def mechanism(scheme: Scheme, strategy: str = "independent", sigma: float = 2.0):
    return MatrixMechanism(scheme=scheme, strategy=STRATEGIES[strategy], noise_multiplier=sigma)


def test_every_scheme_that_can_be_cut_is_here() -> None:
    own = [
        member
        for member in JsonValue._families[Scheme._family].values()
        if member.__module__.startswith("dptrain.")
    ]
    cut = {member for member in own if "max_batch_size" in member.__dataclass_fields__}
    assert cut == {type(scheme) for scheme in CUT.values()}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("accountant", registered_accountants(), ids=lambda member: member.name)
def test_an_accountant_answers_for_truncation_or_refuses(accountant, name, strategy) -> None:
    scheme = CUT[name]
    asked = mechanism(scheme, strategy)
    if not isinstance(scheme, ANSWERS.get(accountant.name, ())):
        # Its own ``refusal`` says so, not only the net below it: that may be asked by itself.
        assert accountant.refusal(asked) is not None
        assert accountant.obstacle(asked) is not None
        with pytest.raises(ValueError, match="does not cover"):
            accountant.guarantee(asked, delta=1e-3)
    assert accountant.truncation == (accountant.name in ANSWERS)


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("name", CUT)
def test_nobody_else_is_chosen(name, adjacency) -> None:
    for strategy in STRATEGIES:
        found = accountants_for(mechanism(CUT[name], strategy), adjacency=adjacency)
        assert {each.name for each in found if each.refusal is None} <= ANSWERS.keys()


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.startswith("truncated")])
def test_accountants_of_cut_batches_refuse_whole_ones(name) -> None:
    member = accountant_named(name)
    for scheme in (
        Poisson(probability=0.1, dataset_size=N, steps=STEPS),
        MinSep(probability=0.1, min_sep=3, dataset_size=N, steps=STEPS),
    ):
        assert member.refusal(mechanism(scheme)) is not None
    with pytest.raises(ValueError, match="no batch is ever cut"):
        TruncatedMinSepLosses(scheme, np.ones(1))


class Careless(DeterministicAccountant):
    """A stranger's accountant of Poisson sampling, written before batches could be cut."""

    name = "careless"
    kind = Kind.EXACT

    def refusal(self, mechanism):
        return None if isinstance(mechanism.scheme, Poisson) else "it needs Poisson"

    def curve(self, mechanism):
        return PoissonPLD().curve(mechanism)


def test_an_accountant_that_never_heard_of_truncation_refuses_it() -> None:
    asked = mechanism(CUT["Poisson"])
    assert Careless().refusal(asked) is None
    for member in (Careless(), BestOf.of([Careless()])):
        assert "max_batch_size=7" in str(member.obstacle(asked))
        with pytest.raises(ValueError, match="max_batch_size=7 truncates batches"):
            member.guarantee(asked, delta=1e-3)
        with pytest.raises(ValueError, match="max_batch_size=7 truncates batches"):
            member.calibrate(asked, epsilon=1.0, delta=1e-3)
        with pytest.raises(ValueError, match="max_batch_size=7 truncates batches"):
            member.profile(asked, [0.0, 1.0])


@pytest.mark.parametrize("name", CUT)
def test_curves_of_whole_draws_are_not_to_be_had(name) -> None:
    """What is called without asking an accountant first."""
    asked = mechanism(CUT[name])
    for curve in (group_curve, last_iterate_curve):
        with pytest.raises(ValueError, match=r"max_batch_size=|groups are bounded"):
            curve(asked, group_size=1)
    if not isinstance(asked.scheme, ANSWERS["poisson-pld"]):
        with pytest.raises(ValueError, match="max_batch_size=None"):
            PoissonPLD().curve(asked)
    else:
        private = asked.scheme.nominal_size is not None
        member = PoissonPLD(adjacency=Adjacency.ADD_REMOVE if private else Adjacency.ZERO_OUT)
        whole = mechanism(dataclasses.replace(asked.scheme, max_batch_size=None))
        assert member.curve(asked).epsilon(2.0, 1e-5) != member.curve(whole).epsilon(2.0, 1e-5)
    with pytest.raises(RuntimeError, match="does not cover truncated"):
        min_sep_law(asked)


@pytest.mark.parametrize("name", CUT)
def test_an_event_is_of_truncated_sampling_or_none(name) -> None:
    asked = mechanism(CUT[name])
    try:
        event = to_dp_event(asked)
    except ValueError:
        return
    assert name in ("Poisson", "Poisson of everybody")
    assert event.event.truncated_batch_size == LARGEST


def test_taken_for_whole_draws_the_guarantee_would_be_false() -> None:
    """p = 1, B = 1, one step, by hand: of two examples one is kept, by a fair coin.

    Without the first, of gradient 1, the second, of gradient -1, is always kept: the outputs are
    ½N(1) + ½N(-1) against N(-1), two means 2 apart. Poisson sampling of everybody would be N(1)
    against N(0). That claims less than the truth; what is stated does not.
    """
    sigma = 1.5
    scheme = Poisson(probability=1.0, dataset_size=2, steps=1, max_batch_size=1, nominal_size=2)
    asked = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)
    whole = MatrixMechanism(
        scheme=dataclasses.replace(scheme, max_batch_size=None),
        strategy=Identity(),
        noise_multiplier=sigma,
    )
    y = np.linspace(-30, 30, 200_001)
    with_it = 0.5 * norm.pdf(y, 1, sigma) + 0.5 * norm.pdf(y, -1, sigma)
    without = norm.pdf(y, -1, sigma)
    for epsilon in (1.5, 2.5):
        truth = float(np.trapezoid(np.maximum(with_it - math.exp(epsilon) * without, 0), y))
        assert account(whole, epsilon=epsilon).delta < 0.5 * truth
        assert account(asked, epsilon=epsilon).delta >= truth * (1 - 1e-4)

"""The best of several accountants per direction, on curves with known directions."""

import dataclasses

import numpy as np
import pytest

from dptrain.accounting.balls_in_bins.one_pick import AllocationPLD
from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.best_of import BestOf
from dptrain.accounting.losses import gaussian
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.core.guarantee import Adjacency, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, Poisson
from dptrain.strategies import BSR, Identity
from dptrain.testing import AccountantContract


def made(strategy, sigma=2.0, bins=8):
    scheme = BallsInBins(bins=bins, epochs=2, dataset_size=5_000)
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)


@dataclasses.dataclass(frozen=True)
class OneSided(Curve):
    """Two Gaussians, one a direction."""

    remove: float
    add: float

    def delta(self, sigma, epsilon):
        return gaussian.delta(epsilon, self.remove / sigma), gaussian.delta(
            epsilon, self.add / sigma
        )

    def epsilons(self, sigma, delta):
        return gaussian.epsilon(delta, self.remove / sigma), gaussian.epsilon(
            delta, self.add / sigma
        )

    def epsilon(self, sigma, delta):
        return max(self.epsilons(sigma, delta))

    def notes(self, sigma, delta):
        return (f"remark of {self.remove:g}",)


@dataclasses.dataclass(frozen=True)
class Stated(DeterministicAccountant):
    called: str
    remove: float
    add: float
    dear: Cost = Cost.INSTANT

    kind = Kind.UPPER_BOUND
    adjacencies = tuple(Adjacency)

    @property
    def name(self):
        return self.called

    def refusal(self, mechanism):
        return None

    def cost(self, mechanism):
        return self.dear

    def curve(self, mechanism):
        return OneSided(self.remove, self.add)


class TestBestOf(AccountantContract):
    def accountant(self):
        return BestOf.of([BallsInBinsRenyi(), UnsampledGaussian()])

    def mechanism(self):
        return made(BSR(bands=2))

    def refused_mechanism(self):
        scheme = Poisson(probability=0.1, dataset_size=5_000, steps=10)
        return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)


def test_directions_may_have_different_proofs():
    both = BestOf.of([Stated("a", 1.0, 3.0), Stated("b", 2.0, 0.5, dear=Cost.MINUTES)])
    mechanism = made(Identity())
    shown = both.guarantee(mechanism, delta=1e-6)
    assert shown.epsilon == gaussian.epsilon(1e-6, 0.5)
    assert shown.accountant == "best of a, b"
    assert "(remove, by a)" in shown.notes[0]
    assert "(add, by b)" in shown.notes[0]
    assert shown.notes[1:] == ("a: remark of 1", "b: remark of 2")
    grid = np.array([0.0, 1.0, 2.0])
    found = both.profile(mechanism, grid)
    np.testing.assert_array_equal(found.remove, gaussian.delta(grid, 0.5))
    np.testing.assert_array_equal(found.add, gaussian.delta(grid, 0.25))
    noise = both.calibrate(mechanism, epsilon=shown.epsilon, delta=1e-6).noise_multiplier
    assert noise == pytest.approx(2.0, rel=2e-4)
    assert both.cost(mechanism) is Cost.MINUTES


def test_what_is_exact_is_asked_alone():
    both = BestOf.of([BallsInBinsRenyi(), AllocationPLD()])
    mechanism = made(Identity())
    shown = both.guarantee(mechanism, delta=1e-6)
    assert shown.kind is Kind.EXACT
    assert shown.epsilon == AllocationPLD().guarantee(mechanism, delta=1e-6).epsilon
    assert "AllocationPLD" in [type(each).__name__ for each in both.asked(mechanism)]


def test_never_worse_than_its_members():
    mechanism = made(BSR(bands=3), bins=12)
    members = [BallsInBinsRenyi(), UnsampledGaussian()]
    found = BestOf(members).guarantee(mechanism, delta=1e-6)
    each = [member.guarantee(mechanism, delta=1e-6).epsilon for member in members]
    assert found.epsilon <= min(each)
    assert found.kind is Kind.UPPER_BOUND


def test_one_member_keeps_its_name():
    assert BestOf.of([AllocationPLD()]).name == AllocationPLD().name


def test_refuses_bad_members():
    with pytest.raises(ValueError, match="at least one"):
        BestOf.of([])
    other = Stated("c", 1.0, 1.0, adjacency=Adjacency.ADD_REMOVE)
    with pytest.raises(ValueError, match="all must use adjacency='zero_out'"):
        BestOf.of([AllocationPLD(), other])
    assert BestOf.of([AllocationPLD(), PoissonPLD()]).refusal(made(Identity()))

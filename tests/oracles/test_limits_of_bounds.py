"""What bounds must agree on where two schemes are one, and how they must move with σ and n."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from dptrain import (
    BSR,
    BallsInBins,
    CyclicPoisson,
    Identity,
    MatrixMechanism,
    MinSep,
    Poisson,
)
from dptrain.accounting import registered_accountants
from dptrain.accounting.base.accountant import Accountant, Profile
from dptrain.accounting.base.curve import DeterministicAccountant
from dptrain.core.guarantee import Adjacency
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy
from tests.oracles.random_mechanisms import FAMILIES, Subject, subjects
from tests.oracles.test_every_bound import seeded

EPSILONS = np.array([0.0, 0.2, 1.0, 3.0])


def mechanism(
    scheme: Scheme, strategy: Strategy | None = None, sigma: float = 1.1
) -> MatrixMechanism:
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def stated(subject: MatrixMechanism) -> dict[str, Profile]:
    """The profiles of all deterministic accountants that cover it under zero-out."""
    return {
        member.name: member.profile(subject, EPSILONS)
        for member in registered_accountants()
        if isinstance(member, DeterministicAccountant)
        and member.adjacency is Adjacency.ZERO_OUT
        and member.refusal(subject) is None
    }


def equal(one: Profile, other: Profile, tolerance: float = 1e-3) -> None:
    for mine, theirs in ((one.remove, other.remove), (one.add, other.add)):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=1e-7)


def deterministic(subject: Subject) -> list[Accountant]:
    return [
        member
        for member in registered_accountants()
        if isinstance(member, DeterministicAccountant)
        and member.adjacency is subject.adjacency
        and member.refusal(subject.mechanism) is None
    ]


@pytest.mark.parametrize("warm", [False, True])
def test_separation_of_one_is_poisson(warm: bool) -> None:
    poisson = Poisson(probability=0.2, dataset_size=30, steps=12)
    alike = MinSep(probability=0.2, min_sep=1, dataset_size=30, steps=12, warm_start=warm)
    exact = stated(mechanism(poisson))["poisson-pld"]
    equal(stated(mechanism(poisson))["mmcc"], exact)
    equal(stated(mechanism(alike))["mmcc"], exact)
    for name, found in stated(mechanism(alike)).items():
        assert (found.remove >= exact.remove * (1 - 1e-3)).all(), name
        assert (found.add >= exact.add * (1 - 1e-3)).all(), name
    one_part = CyclicPoisson(probability=0.2, cycle=1, dataset_size=30, steps=12)
    equal(stated(mechanism(one_part))["poisson-pld"], exact, 1e-9)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("strategy", [Identity(), BSR(bands=3)])
def test_sampling_with_certainty_is_balls_in_bins(strategy: Strategy) -> None:
    bins = mechanism(BallsInBins(bins=4, epochs=2, dataset_size=30), strategy)
    chain = mechanism(MinSep(probability=1.0, min_sep=4, dataset_size=30, steps=8), strategy)
    of_bins, of_chain = stated(bins), stated(chain)
    for name in ("balls-in-bins-renyi", "conditional-composition"):
        equal(of_bins[name], of_chain[name], 1e-12)


@pytest.mark.slow
def test_a_large_cut_is_no_cut() -> None:
    exact = stated(mechanism(Poisson(probability=0.2, dataset_size=30, steps=9)))["poisson-pld"]
    for largest in (30, 10**6):
        cut = Poisson(probability=0.2, dataset_size=30, steps=9, max_batch_size=largest)
        equal(stated(mechanism(cut))["poisson-pld"], exact, 1e-9)
    # Nearly never cut: Pr[Bin(29, 0.2) ≥ 25] is 1e-13.
    rare = Poisson(probability=0.2, dataset_size=30, steps=9, max_batch_size=25)
    equal(stated(mechanism(rare))["poisson-pld"], exact)
    member = next(m for m in registered_accountants() if m.name == "min-sep-importance")
    law = MinSep(probability=0.2, min_sep=1, dataset_size=30, steps=9, max_batch_size=30)
    uncut = mechanism(law)
    found = seeded(member, 3).profile(uncut, EPSILONS)
    assert (found.remove >= exact.remove * (1 - 1e-3)).all()
    assert (found.add >= exact.add * (1 - 1e-3)).all()


@pytest.mark.parametrize("largest", [1, 3, 7])
def test_certain_draws_that_are_cut_are_batches_of_fixed_size(largest: int) -> None:
    """One step, N = 8, B kept: P and Q by one-dimensional integration, worst w = -x and w = x."""
    q, sigma = largest / 8, 0.9
    scheme = Poisson(probability=1.0, dataset_size=8, steps=1, max_batch_size=largest)
    found = stated(mechanism(scheme, sigma=sigma))["poisson-pld"]
    y = np.arange(-12, 14, 1e-3)

    def density(mean: float) -> np.ndarray:
        return np.exp(-((y - mean) ** 2) / (2 * sigma**2)) / (sigma * np.sqrt(2 * np.pi))

    def mixture(mean: float) -> np.ndarray:
        return (1 - q) * density(0.0) + q * density(mean)

    for index, epsilon in enumerate(EPSILONS):
        remove = 1e-3 * np.maximum(mixture(2.0) - np.exp(epsilon) * mixture(1.0), 0.0).sum()
        add = 1e-3 * np.maximum(mixture(1.0) - np.exp(epsilon) * density(0.0), 0.0).sum()
        assert remove * (1 - 1e-5) - 1e-12 <= found.remove[index] <= remove * 1.01 + 1e-7
        assert add * (1 - 1e-5) - 1e-12 <= found.add[index] <= add * 1.01 + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_more_noise_is_more_private(family: str) -> None:
    for _, subject in subjects(family, 3, 5):
        louder = subject.mechanism.with_noise(1.4 * subject.mechanism.noise_multiplier)
        for member in deterministic(subject):
            before = member.profile(subject.mechanism, EPSILONS)
            after = member.profile(louder, EPSILONS)
            assert (after.delta <= before.delta * (1 + 1e-3) + 1e-10).all(), (member.name, subject)


LONGER: dict[str, Callable[[int], Scheme]] = {
    "poisson": lambda n: Poisson(probability=0.3, dataset_size=20, steps=n),
    "truncated": lambda n: Poisson(probability=0.3, dataset_size=20, steps=n, max_batch_size=7),
    "cyclic": lambda n: CyclicPoisson(probability=0.3, cycle=3, dataset_size=20, steps=n),
    "min_sep": lambda n: MinSep(probability=0.3, min_sep=3, dataset_size=20, steps=n),
    "epochs": lambda n: BallsInBins(bins=3, epochs=n // 3, dataset_size=20),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("kind", LONGER)
@pytest.mark.parametrize("bands", [1, 2])
def test_more_steps_are_less_private(kind: str, bands: int) -> None:
    strategy = Identity() if bands == 1 else BSR(bands=bands)
    runs = [stated(mechanism(LONGER[kind](n), strategy)) for n in (3, 9)]
    for shorter, longer in itertools.pairwise(runs):
        for name in shorter.keys() & longer.keys():
            # The least δ of a grid of splits is not quite monotone.
            assert (longer[name].delta >= shorter[name].delta * (1 - 1e-2) - 1e-9).all(), name


def test_directions_swap_with_the_worlds() -> None:
    """(Q, P) is the pair whose worlds are exchanged: integrals of the two agree at ε = 0, and
    δ of one at -ε is that of the other at ε (both are integrals of |P - e^ε Q|)."""
    for family in ("poisson", "truncated_poisson", "truncated_min_sep"):
        for seed, subject in subjects(family, 0, 6):
            pair = subject.pair()
            if pair.numbers > 1:
                continue
            evidence = pair.evidence(size=1, seed=seed)
            turned = pair.swapped().evidence(size=1, seed=seed)
            for epsilon in EPSILONS:
                assert evidence.remove.value(epsilon) == pytest.approx(
                    turned.add.value(epsilon), rel=1e-9, abs=1e-15
                )
                mirrored = 1 - np.exp(-epsilon) * (1 - evidence.add.value(epsilon))
                assert evidence.remove.value(-epsilon) == pytest.approx(mirrored, rel=1e-6)


def test_replacing_is_symmetric() -> None:
    for family in ("plain_poisson", "truncated_poisson", "truncated_cyclic"):
        for _, subject in subjects(family, 0, 12):
            if subject.adjacency is Adjacency.REPLACE_ONE:
                for member in deterministic(subject):
                    found = member.profile(subject.mechanism, EPSILONS)
                    np.testing.assert_allclose(found.remove, found.add, rtol=1e-9)

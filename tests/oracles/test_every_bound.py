"""Every accountant against what small random mechanisms really lose, in both directions."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import numpy.typing as npt
import pytest

from dptrain.accounting import registered_accountants
from dptrain.accounting.base.accountant import Accountant
from dptrain.accounting.simulation import SimulatedAccountant
from tests.oracles.random_mechanisms import FAMILIES, Subject, subjects
from tests.oracles.true_delta import Evidence

Array = npt.NDArray[np.float64]

SAMPLES = 40_000
DELTAS = (0.2, 0.03, 0.004)  # where profiles are compared, roughly
TARGETS = (0.05, 0.003)  # of guarantees
# Bounds on normal tails and grids are rounded up, so no tolerance is owed to anybody.
FIRST = 1  # mechanisms of a family in the default run


def seeded(member: Accountant, seed: int) -> Accountant:
    """The accountant; a simulating one with a fixed seed and few samples."""
    if isinstance(member, SimulatedAccountant):
        return dataclasses.replace(member, seed=seed, threads=1, progress=False)
    return member


def answering(subject: Subject, seed: int) -> list[Accountant]:
    """All that do not refuse it, under its adjacency: also those that answer only by name."""
    return [
        seeded(member, seed)
        for member in registered_accountants()
        if member.adjacency is subject.adjacency and member.refusal(subject.mechanism) is None
    ]


def compare(subject: Subject, seed: int) -> int:
    """Profiles and guarantees of every accountant; how many there were."""
    pair = subject.pair()
    evidence = pair.evidence(size=SAMPLES, seed=seed)
    epsilons = pair.evidence(size=5_000, seed=seed + 1_000).where(DELTAS)
    if pair.numbers <= 2:  # integrated: down to where δ is about 1e-10
        epsilons = np.unique(np.append(epsilons, [0.0, 2 * epsilons[-1] + 0.3]))
    members = answering(subject, seed)
    for member in members:
        weighted = isinstance(member, SimulatedAccountant)
        some = epsilons[-1:] if weighted else epsilons
        if weighted or seed % 2 == 0:  # the guarantees of every mechanism, every second's profiles
            check_profile(subject, member, evidence, some)
        targets = TARGETS[seed % 2 :][:1]
        # That of weighted samples takes a second or two.
        if not weighted or seed % 8 == 0:
            for delta in targets:
                check_guarantee(subject, member, evidence, delta)
    return len(members)


def check_profile(
    subject: Subject, member: Accountant, evidence: Evidence, epsilons: Array
) -> None:
    claimed = member.profile(subject.mechanism, epsilons)
    for direction, stated, true in zip(
        ("remove", "add"), (claimed.remove, claimed.add), evidence.lower(epsilons), strict=True
    ):
        assert (stated >= true).all(), (
            f"{member.name}, {direction}: states {stated}, true is at least {true} "
            f"at ε = {epsilons}; {subject}"
        )


def check_guarantee(subject: Subject, member: Accountant, evidence: Evidence, delta: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # δ is above 1/N
        stated = member.guarantee(subject.mechanism, delta=delta)
    assert stated.epsilon >= 0.0
    if not math.isinf(stated.epsilon):
        true = max(float(lower[0]) for lower in evidence.lower(stated.epsilon))
        assert true <= delta, (
            f"{member.name} guarantees ε = {stated.epsilon} at δ = {delta}, "
            f"where δ is at least {true}; {subject}"
        )


@pytest.mark.sample(every=25)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_accountant_states_too_little(family: str) -> None:
    for seed, subject in subjects(family, 0, FIRST):
        compare(subject, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_accountant_states_too_little_at_large(family: str) -> None:
    assert sum(compare(subject, seed) for seed, subject in subjects(family, FIRST)) > 0


def test_the_grid_is_large_and_reaches_every_accountant() -> None:
    reached: set[str] = set()
    total = 0
    for family in FAMILIES:
        for seed, subject in subjects(family):
            total += 1
            reached.update(member.name for member in answering(subject, seed))
    assert total >= 200
    assert reached == {member.name for member in registered_accountants()}

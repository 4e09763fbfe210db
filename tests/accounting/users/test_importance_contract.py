"""The simulating user-level accountant: contracts, refusals, attacks and limits."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.accounting.simulation import SimulatedAccountant
from dptrain.accounting.users.importance import UserMinSepImportance
from dptrain.accounting.users.revealed import RevealedDraws
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.schemes.min_sep import MinSep
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.user_min_sep import UserMinSep
from dptrain.strategies import BandMF, Dense, Identity
from dptrain.testing import AccountantContract
from tests.accounting.users import test_users_attack as attack
from tests.helpers.plain_means import estimate
from tests.oracles import user_level as oracle

ALONE = AttributionGraph.from_lists([[0], [0], [1], [2], [2]])
RING = AttributionGraph.from_lists([[i, (i + 1) % 6] for i in range(6)])


def mechanism(
    graph: AttributionGraph, *, sigma: float = 1.0, bands: int = 3, **changes: object
) -> MatrixMechanism:
    fields = {
        "probability": 0.05, "min_sep": 4, "steps": 24, "batch_size": 0.2,
        "exclusion": "sampling", "burn_in": 3,
    }  # fmt: skip
    scheme = UserMinSep(graph=graph, **{**fields, **changes})  # type: ignore[arg-type]
    strategy = BandMF(bands=bands).bind(scheme.steps) if bands > 1 else Identity()
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)


class _Contract(AccountantContract):
    simulated = True
    delta = 2e-3
    deepest_delta = 4e-4

    def accountant(self) -> SimulatedAccountant:
        return UserMinSepImportance(seed=1, progress=False, threads=1, profile_samples=30_000)


class TestOnADisjointGraph(_Contract):
    def mechanism(self) -> MatrixMechanism:
        return mechanism(ALONE)

    def refused_mechanism(self) -> MatrixMechanism:
        return mechanism(ALONE, min_sep=2)


class TestOnASharedGraph(_Contract):
    def mechanism(self) -> MatrixMechanism:
        return mechanism(RING)

    def refused_mechanism(self) -> MatrixMechanism:
        return mechanism(RING, exclusion="participation")


def _read_back(graph: AttributionGraph) -> AttributionGraph:
    return AttributionGraph.from_dict(graph.to_dict())


def test_refusals_say_why() -> None:
    detached = _read_back(RING)
    alone = _read_back(ALONE)
    member = UserMinSepImportance()
    for refused, why in (
        (mechanism(detached), "attach"),
        (mechanism(RING, min_sep=2), "bands <= min_sep"),
        (mechanism(RING, exclusion="participation"), "exclusion='sampling'"),
        (mechanism(ALONE, min_sep=2), "bands <= min_sep"),
    ):
        assert why in (member.refusal(refused) or "")
    example = MatrixMechanism(
        scheme=MinSep(probability=0.1, min_sep=4, steps=9, dataset_size=9),
        strategy=Identity(),
        noise_multiplier=1.0,
    )
    many = AttributionGraph.from_lists([[0]] * 65)
    assert "UserMinSep" in (member.refusal(example) or "")
    assert "at most 64" in (member.refusal(mechanism(many)) or "")
    assert member.refusal(mechanism(alone)) is None  # its facts say that it is disjoint


def test_the_law_reads_the_graph() -> None:
    star = AttributionGraph.from_lists([list(range(8)), *([i] for i in range(1, 8))])
    law = UserMinSepImportance().user_law(mechanism(star))
    assert (law.neighbors, law.burn_in) == (7, 0)
    assert law.examples == (1, 2)
    for exclusion in ("sampling", "participation"):
        own = UserMinSepImportance().user_law(mechanism(ALONE, exclusion=exclusion))
        assert (own.exclusion, own.burn_in, own.neighbors) == (exclusion, 3, 0)


@pytest.mark.parametrize("exclusion", ["sampling", "participation"])
def test_a_disjoint_graph_costs_what_is_attained(exclusion: str) -> None:
    """Two steps, one user of two examples: δ by quadrature over the chain."""
    graph = AttributionGraph.from_lists([[0], [0]])
    matrix = np.array([[1.0, 0.0], [0.4, 0.7]])
    scheme = UserMinSep(
        graph=graph, probability=0.2, min_sep=2, steps=2, batch_size=1, exclusion=exclusion,
        burn_in=1,
    )  # fmt: skip
    subject = MatrixMechanism(scheme=scheme, strategy=Dense(matrix=matrix), noise_multiplier=0.8)
    law = oracle.batch_law(
        ((0,), (0,)), p=0.2, b=2, steps=2, sampled=exclusion == "sampling", burn_in=1
    )
    truth = oracle.attained(oracle.revealed_mixtures(((0,), (0,)), law, 0), matrix, 0.8, 0.5)
    found = estimate(UserMinSepImportance(), subject, [0.5], seed=2)
    for value, error, expected in zip(
        (found.remove, found.add), (found.remove_error, found.add_error), truth, strict=True
    ):
        assert abs(value[0] - expected) <= 6 * error[0]


@pytest.mark.slow
def test_the_attack_on_the_theorem_is_covered() -> None:
    scheme = attack.scheme("sampling")
    subject = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=attack.SIGMA)
    accountant = UserMinSepImportance(seed=3, progress=False)
    assert accountant.user_law(subject).neighbors == 800
    found, error = attack.attained(scheme)
    assert found == pytest.approx(0.027, abs=1e-3)
    claimed = estimate(accountant, subject, [attack.EPSILON], samples=100_000, seed=3)
    assert claimed.remove[0] + 6 * claimed.remove_error[0] >= found - 6 * error
    assert accountant.profile(subject, [attack.EPSILON]).delta[0] >= found - 6 * error


def test_exposed_steps_lie_between_hiding_and_revealing_everything() -> None:
    """More neighbors cost more; with very many it is the bound that reveals all draws."""
    hidden, some, all_ = (
        estimate(
            UserMinSepImportance(),
            mechanism(graph, burn_in=0, bands=1, sigma=0.8, probability=0.03),
            [0.5],
            samples=60_000,
            seed=4,
        )
        for graph in (
            AttributionGraph.from_lists([[0], [0]]),
            AttributionGraph.from_lists([[0, 1], [0, 2], [1], [2]]),
            AttributionGraph.from_lists([[0, *range(1, 400)], [0], *([i] for i in range(1, 400))]),
        )
    )
    # The second and third graph have users of one example too.
    bound = RevealedDraws().profile(
        mechanism(ALONE, burn_in=0, bands=1, sigma=0.8, probability=0.03), [0.5]
    )
    errors = np.hypot(hidden.remove_error, all_.remove_error)
    assert hidden.remove < some.remove < all_.remove
    assert abs(all_.remove - bound.remove) <= 6 * errors + 0.02 * bound.remove
    assert all_.remove <= bound.remove + 6 * errors


def test_kind_is_what_a_simulation_can_say() -> None:
    assert UserMinSepImportance().kind_of(mechanism(RING)) is Kind.CONFIDENCE

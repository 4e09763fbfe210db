"""Weighted samples of a user: enumeration, quadrature, plain samples and the attack."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from dptrain.accounting import account, calibrate, find_accountants
from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.users import UserMinSepImportance
from dptrain.accounting.users import recursion as user_recursion
from dptrain.accounting.users.importance_terms import TiltedUser
from dptrain.accounting.users.law import UserLaw, band_columns
from dptrain.accounting.users.neighbors import paths_to_neighbors
from dptrain.accounting.users.revealed import RevealedDraws
from dptrain.accounting.users.tilted_chain import TiltedChain, log_moments
from dptrain.accounting.users.user_losses import UserLosses
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import AttributionGraph, UserMinSep
from dptrain.strategies import BandMF, Dense, Identity
from dptrain.testing import AccountantContract
from tests.accounting.users import test_users_attack as attack
from tests.accounting.users.test_importance_contract import ALONE, RING, mechanism
from tests.oracles import exposed_steps as claim
from tests.oracles import user_level as oracle
from tests.oracles.test_user_level import banded


class TestOnASharedGraph(AccountantContract):
    simulated = True
    delta = 1e-5
    deepest_delta = 1e-9

    def accountant(self) -> UserMinSepImportance:
        return UserMinSepImportance(seed=1, progress=False, threads=1, max_samples=100_000)

    def mechanism(self) -> MatrixMechanism:
        return mechanism(RING, steps=12)

    def refused_mechanism(self) -> MatrixMechanism:
        return mechanism(RING, exclusion="participation")


class TestOnADisjointGraph(AccountantContract):
    simulated = True
    delta = 1e-5
    deepest_delta = 1e-9

    def accountant(self) -> UserMinSepImportance:
        return UserMinSepImportance(seed=1, progress=False, threads=1, max_samples=100_000)

    def mechanism(self) -> MatrixMechanism:
        return mechanism(ALONE, exclusion="participation", steps=12)

    def refused_mechanism(self) -> MatrixMechanism:
        return mechanism(ALONE, min_sep=2)


def law_of(
    matrix: np.ndarray, *, examples: tuple[int, ...] = (2,), p: float = 0.2, b: int = 2, d: int = 0,
    exclusion: str = "sampling", burn_in: int = 0,
) -> UserLaw:  # fmt: skip
    return UserLaw(
        columns=band_columns(Dense(matrix=matrix), len(matrix)), examples=examples, probability=p,
        min_sep=b, exclusion=exclusion, neighbors=d, burn_in=burn_in,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("exclusion", "b", "burn_in"), [("sampling", 3, 0), ("sampling", 2, 2), ("participation", 3, 2)]
)
@pytest.mark.parametrize("compiled", [True, False])
def test_draws_of_users_have_the_tilted_law(
    exclusion: str, b: int, burn_in: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every outcome of the draws, burn-in included, by enumeration."""
    if not compiled:
        monkeypatch.setattr("dptrain.accounting.users.tilted_chain.compiles", lambda: False)
    k, p, kappa, steps = 2, 0.2, 0.3, 4
    matrix = banded(steps, 2, 4)
    law = law_of(matrix, p=p, b=b, exclusion=exclusion, burn_in=burn_in)
    norms = (matrix**2).sum(axis=0)
    single = [math.comb(k, j) * p**j * (1 - p) ** (k - j) for j in range(k + 1)]
    weights: dict[tuple[int, ...], float] = {}
    for draws in itertools.product(range(k + 1), repeat=burn_in + steps):
        x = claim.chain(draws, b, sampled=exclusion == "sampling")[burn_in:]
        weight = math.prod(single[r] for r in draws) * math.exp(kappa * norms @ np.square(x))
        weights[x] = weights.get(x, 0.0) + weight
    total = math.fsum(weights.values())
    chain = TiltedChain(law, k, kappa)
    # A few hundred positive products and sums, each within an ulp or so.
    assert chain.log_moment == pytest.approx(math.log(total), abs=1e-12)
    assert log_moments(law, k, np.array([0.0, kappa])) == pytest.approx(
        [0.0, math.log(total)], abs=1e-12
    )
    size = 40_000
    drawn, barred = chain.draw(np.random.default_rng(7), size)
    x = user_recursion.participations(law, drawn, barred)
    found, counts = np.unique(x.T, axis=0, return_counts=True)
    seen = {tuple(row): int(count) for row, count in zip(found.tolist(), counts, strict=True)}
    assert set(seen) <= set(weights)
    for pattern, weight in weights.items():
        share = weight / total
        error = 6 * math.sqrt(share * (1 - share) / size) + 20 / size
        assert abs(seen.get(pattern, 0) / size - share) <= error


def test_compiled_and_plain_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    law = law_of(banded(30, 3, 2), p=0.05, b=4)
    chain = TiltedChain(law, 2, 0.4)
    first = chain.draw(np.random.default_rng(1), 500)
    monkeypatch.setattr("dptrain.accounting.users.tilted_chain.compiles", lambda: False)
    second = chain.draw(np.random.default_rng(1), 500)
    # Sums in another order: a uniform number within an ulp of a boundary may go either way.
    assert (first[0] != second[0]).any(axis=0).sum() <= 1
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize(
    ("d", "k", "b", "p", "sigma", "epsilon"),
    [(0, 2, 2, 0.1, 0.9, 0.4), (1, 1, 2, 0.3, 0.8, 1.0), (3, 2, 2, 0.05, 1.5, 3.0),
     (40, 2, 1, 0.2, 0.7, 0.5)],
)  # fmt: skip
def test_weighted_terms_of_users_average_to_what_is_attained(
    d: int, k: int, b: int, p: float, sigma: float, epsilon: float
) -> None:
    """Both directions, against quadrature over every public outcome: δ from .1 down to 1e-4."""
    matrix = banded(2, min(b, 2), 3)
    mixtures = claim.claimed_mixtures(k, d, p=p, b=b, steps=2)
    truth = oracle.attained(mixtures, matrix, sigma, epsilon)
    terms = TiltedUser(law_of(matrix, examples=(k,), p=p, b=b, d=d), sigma).both(epsilon)
    for direction, known in zip(("remove", "add"), truth, strict=True):
        drawn = terms[direction].draw(np.random.default_rng(5), 100_000)
        assert drawn.min() >= 0.0
        assert drawn.max() <= terms[direction].ceiling < 1.0
        error = 6 * drawn.std() / math.sqrt(drawn.size)
        assert abs(drawn.mean() - known) <= error + 1e-5 * known
        assert error < 0.5 * known  # the comparison means something


@pytest.mark.parametrize(
    ("exclusion", "d", "burn_in"), [("sampling", 3, 0), ("sampling", 0, 5), ("participation", 0, 5)]
)
def test_weighted_and_plain_samples_of_users_agree(exclusion: str, d: int, burn_in: int) -> None:
    """Forty steps, a few bands, two numbers of examples at once: the larger loss of the two."""
    columns = band_columns(BandMF(bands=3).bind(40), 40)
    law = UserLaw(
        columns=columns, examples=(2,), probability=0.05, min_sep=4, exclusion=exclusion,
        neighbors=d, burn_in=burn_in,
    )  # fmt: skip
    sigma, epsilon = 1.6, 0.5
    losses = UserLosses(law).draw([sigma], "both", np.random.default_rng(2), 40_000)
    both = TiltedUser(law, sigma).both(epsilon)
    for row, direction in enumerate(("remove", "add")):
        plain = hockey_stick(losses[row, 0], epsilon)
        drawn = both[direction].draw(np.random.default_rng(3), 20_000)
        assert drawn.max() <= both[direction].ceiling
        error = 6 * math.hypot(plain.std() / 200.0, drawn.std() / math.sqrt(drawn.size))
        assert abs(plain.mean() - drawn.mean()) <= error < plain.mean()


def test_the_largest_term_covers_every_number_of_examples() -> None:
    """Near p = 1 whoever has fewer examples loses more."""
    matrix, sigma, epsilon = banded(2, 2, 3), 0.9, 0.4
    terms = TiltedUser(law_of(matrix, examples=(1, 2), p=0.9, b=2, d=1), sigma).both(epsilon)
    for k in (1, 2):
        mixtures = claim.claimed_mixtures(k, 1, p=0.9, b=2, steps=2)
        truth = oracle.attained(mixtures, matrix, sigma, epsilon)
        for direction, known in zip(("remove", "add"), truth, strict=True):
            drawn = terms[direction].draw(np.random.default_rng(5), 20_000)
            assert drawn.mean() >= known - 6 * drawn.std() / math.sqrt(drawn.size)


def test_log_space_and_scaled_programs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = band_columns(BandMF(bands=4).bind(60), 60)
    law = UserLaw(
        columns=columns, examples=(1, 3), probability=0.05, min_sep=6, exclusion="sampling",
        neighbors=3, burn_in=0,
    )  # fmt: skip
    subject = TiltedUser(law, 2.0)
    for direction in ("remove", "add"):
        first = subject.terms(1.0, direction).draw(np.random.default_rng(3), 150)
        with monkeypatch.context() as patch:
            patch.setattr(user_recursion, "compiles", lambda: False)
            second = subject.terms(1.0, direction).draw(np.random.default_rng(3), 150)
        np.testing.assert_allclose(first, second, rtol=1e-6, atol=1e-300)


def test_tiny_noise_draws_from_the_law_itself() -> None:
    """No tilt fits, or gains: terms in [0, 1] by the program in log space."""
    terms = TiltedUser(law_of(banded(5, 2, 2)), 0.01).both(0.5)
    for each in terms.values():
        assert each.ceiling == pytest.approx(1.0, abs=1e-2)
        drawn = each.draw(np.random.default_rng(3), 200)
        assert ((drawn >= 0.0) & (drawn <= each.ceiling)).all()


@pytest.mark.slow
def test_the_attack_is_covered_by_weighted_samples() -> None:
    """What is stated of a shared graph is above the attack, which the refused theorem is below."""
    scheme = attack.scheme("sampling")
    subject = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=attack.SIGMA)
    found, error = attack.attained(scheme)
    accountant = UserMinSepImportance(seed=3, progress=False)
    assert accountant.profile(subject, [attack.EPSILON]).delta[0] >= found - 6 * error
    terms = accountant.law(subject).terms(attack.SIGMA)(attack.EPSILON)["remove"]
    drawn = terms.draw(np.random.default_rng(2), 50_000)
    assert drawn.mean() + 6 * drawn.std() / math.sqrt(drawn.size) >= found - 6 * error


@pytest.mark.slow
def test_a_calibrated_user_is_not_above_what_plain_samples_show() -> None:
    """At δ = 1e-3 plain samples tell: the verified σ has δ near the target, and not above it."""
    subject = mechanism(RING)
    found = UserMinSepImportance(seed=5, progress=False).calibrate(subject, epsilon=1.0, delta=1e-3)
    proven = RevealedDraws().calibrate(subject, epsilon=1.0, delta=1e-3)
    assert found.kind is Kind.VERIFIED
    assert found.noise_multiplier < proven.noise_multiplier
    losses = (
        UserMinSepImportance()
        .law(subject)
        .losses.draw([found.noise_multiplier], "remove", np.random.default_rng(8), 200_000)
    )
    terms = hockey_stick(losses[0], 1.0)
    error = 6 * terms.std() / math.sqrt(terms.size)
    assert 0.6e-3 - error <= terms.mean() <= 1e-3 + error


def test_refusals_of_weighted_users_say_why() -> None:
    subject = mechanism(RING)
    assert UserMinSepImportance().refusal(subject) is None
    assert "bands <= min_sep" in (UserMinSepImportance().refusal(mechanism(RING, min_sep=2)) or "")
    large = mechanism(RING, steps=100_000, min_sep=2000, bands=1)
    assert "GiB" in (UserMinSepImportance().refusal(large) or "")


def circle(papers: int, extra: int = 0) -> AttributionGraph:
    """Neighboring papers share a user, and ``extra`` users share the first one with others."""
    pairs = [(e, (e + 1) % papers) for e in range(papers)]
    pairs += [(0, 10 + 7 * i) for i in range(extra)]
    users: list[list[int]] = [[] for _ in range(papers)]
    for user, pair in enumerate(pairs):
        for paper in pair:
            users[paper].append(user)
    return AttributionGraph.from_lists(users)


def of(graph: AttributionGraph, *, steps: int = 40, min_sep: int = 4, **options: Any) -> Any:
    scheme = UserMinSep(
        graph=graph, probability=0.01, min_sep=min_sep, steps=steps, batch_size=1.0, **options
    )
    bands = min(2, min_sep)
    return MatrixMechanism(scheme=scheme, strategy=BandMF(bands=bands), noise_multiplier=1.0)


def answers(subject: MatrixMechanism) -> str:
    return find_accountants(subject)[0].name


def test_samples_answer_where_draws_stay_hidden_and_time_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert answers(of(circle(400))) == "user-min-sep-importance"
    # Papers 0 and x: 99 others with 0, and two beside each; three steps show a draw.
    crowded = of(circle(800, extra=100))
    assert law_of_graph(crowded).exposed_share == pytest.approx(1 - 0.99 ** (3 * 103), rel=1e-6)
    assert answers(crowded) == "revealed-draws"
    assert "exposed" in (UserMinSepImportance().reserved(crowded) or "")
    assert answers(of(circle(400), exclusion="participation")) == "revealed-draws"
    alike = circle(400)
    detached = AttributionGraph(
        examples=400, users=400, edges=800, max_examples=2, fingerprint=alike.fingerprint
    )
    assert answers(of(detached)) == "revealed-draws"
    assert answers(of(ALONE)) == "user-min-sep-importance"
    assert answers(of(ALONE, exclusion="participation")) == "user-min-sep-importance"
    assert answers(of(circle(400), min_sep=1)) != "user-min-sep-importance"
    # A minute is enough for a few million samples of forty steps, were they too few.
    monkeypatch.setattr("dptrain.accounting.users.importance._FEWEST", 10**9)
    assert "too slow" in (UserMinSepImportance().reserved(of(circle(400))) or "")


def law_of_graph(subject: MatrixMechanism) -> UserLaw:
    return UserMinSepImportance().user_law(subject)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("extra", [0, 30])
def test_nothing_stated_by_default_is_above_what_needs_no_samples(extra: int) -> None:
    subject = of(circle(800, extra), steps=16)
    both = {"scheme": subject.scheme, "strategy": subject.strategy, "epsilon": 1.0, "delta": 1e-5}
    names = ("revealed-draws", "gaussian")
    plain = min(account(subject, delta=1e-5, accountant=name).epsilon for name in names)
    found = account(subject, delta=1e-5)
    assert found.accountant == "user-min-sep-importance"
    assert found.epsilon <= plain * (1 + 1e-9)
    shown = calibrate(**both)
    proven = min(calibrate(**both, accountant=name).mechanism.noise_multiplier for name in names)
    assert shown.guarantee.delta == 1e-5
    # One in a thousand of δ is kept for the verdict; σ is bisected to one in ten thousand.
    assert shown.mechanism.noise_multiplier <= proven * (1 + 1e-3)


def test_paths_to_neighbors_by_hand() -> None:
    graph = circle(40, extra=2)
    own = graph.examples_per_user()
    rows = [graph.members[a:b] for a, b in zip(graph.offsets[:-1], graph.offsets[1:], strict=True)]
    expected = sum(int(own[row].sum()) * len(row) for row in rows)
    assert paths_to_neighbors(graph) == expected
    assert paths_to_neighbors(ALONE) == 0

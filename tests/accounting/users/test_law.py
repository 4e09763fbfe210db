"""The simulated pair of a user against enumeration and quadrature."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.users import recursion as user_recursion
from dptrain.accounting.users.law import UserLaw, band_columns
from dptrain.accounting.users.neighbors import neighbor_facts, outside_neighbors
from dptrain.accounting.users.recursion import log_ratio, participations, rescale_interval
from dptrain.accounting.users.user_losses import UserLosses
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.strategies import BandMF, Dense
from tests.oracles import exposed_steps as claim
from tests.oracles import user_level as oracle
from tests.oracles.test_user_level import CHAIN, banded


def law_of(matrix: np.ndarray, **changes: object) -> UserLaw:
    fields = {
        "columns": band_columns(Dense(matrix=matrix), len(matrix)),
        "examples": (2,),
        "probability": 0.3,
        "min_sep": 3,
        "exclusion": "sampling",
        "neighbors": 2,
        "burn_in": 0,
    }
    return UserLaw(**{**fields, **changes})  # type: ignore[arg-type]


def ratio(mixture: oracle.Mixture, matrix: np.ndarray, sigma: float, y: np.ndarray) -> float:
    means = np.array(list(mixture), dtype=float) @ matrix.T
    exponents = (means @ y - (means**2).sum(1) / 2) / sigma**2
    return float(np.log(np.dot(list(mixture.values()), np.exp(exponents))))


def found_ratio(law: UserLaw, sigma: float, y: np.ndarray, codes: np.ndarray, log: bool) -> float:
    matrix = np.zeros((law.steps, law.steps))
    for i, k in itertools.product(range(law.steps), range(law.columns.shape[1])):
        if i + k < law.steps:
            matrix[i + k, i] = law.columns[i, k]
    halves = law.squared_norms / (2 * sigma**2)
    exponents = (matrix.T @ y) / sigma**2
    every = None if log else rescale_interval(law, law.examples[0], sigma)
    return float(
        log_ratio(
            law, law.examples[0], exponents[:, None].copy(), halves,
            codes[:, None].astype(np.uint8), rescale_every=every,
        )[0]
    )  # fmt: skip


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("p", [0.2, 1.0])
@pytest.mark.parametrize(("k", "b", "bands"), [(1, 2, 2), (2, 3, 3), (3, 1, 1), (2, 6, 2)])
def test_ratio_given_what_is_public(log: bool, p: float, k: int, b: int, bands: int) -> None:
    matrix, rng = banded(5, bands, 2), np.random.default_rng(4)
    law = law_of(matrix, examples=(k,), probability=p, min_sep=b)
    known = claim.known_law(k, 1, p=p, b=b, steps=5)
    patterns = list(known)
    for index in rng.choice(len(patterns), size=min(40, len(patterns)), replace=False):
        pattern = patterns[index]
        codes = np.array([0 if r is None else r + 1 for r in pattern])
        y = rng.normal(size=5) * 2
        expected = ratio(known[pattern][1], matrix, 0.9, y)
        assert found_ratio(law, 0.9, y, codes, log) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("exclusion", ["sampling", "participation"])
@pytest.mark.parametrize("burn_in", [0, 1, 2, 4])
def test_ratio_of_a_user_alone(log: bool, exclusion: str, burn_in: int) -> None:
    """Nothing public; the burn-in is summed over."""
    matrix, b, k, p = banded(4, 3, 7), 3, 2, 0.35
    law = law_of(
        matrix, probability=p, exclusion=exclusion, neighbors=0, burn_in=burn_in, min_sep=b
    )
    binomial = [math.comb(k, j) * p**j * (1 - p) ** (k - j) for j in range(k + 1)]
    mixture: oracle.Mixture = {}
    for draws in itertools.product(range(k + 1), repeat=burn_in + 4):
        x = claim.chain(draws, b, sampled=exclusion == "sampling")[burn_in:]
        mixture[x] = mixture.get(x, 0.0) + math.prod(binomial[r] for r in draws)
    rng = np.random.default_rng(1)
    for _ in range(10):
        y = rng.normal(size=4)
        found = found_ratio(law, 0.8, y, np.zeros(4), log)
        assert found == pytest.approx(ratio(mixture, matrix, 0.8, y), abs=1e-10)


def test_compiled_and_plain_programs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = band_columns(BandMF(bands=4).bind(300), 300)
    for exclusion, d in (("sampling", 3), ("participation", 0)):
        law = UserLaw(
            columns=columns, examples=(1, 3), probability=0.05, min_sep=6,
            exclusion=exclusion, neighbors=d, burn_in=0,
        )  # fmt: skip
        assert rescale_interval(law, 3, 0.7) is not None
        losses = UserLosses(law)
        first = losses.draw([0.7, 2.0], "both", np.random.default_rng(3), 150)
        with monkeypatch.context() as patch:
            patch.setattr(user_recursion, "compiles", lambda: False)
            second = losses.draw([0.7, 2.0], "both", np.random.default_rng(3), 150)
        np.testing.assert_allclose(first, second, atol=1e-10, rtol=1e-11)


def test_tiny_noise_takes_log_space() -> None:
    law = law_of(banded(5, 3, 2))
    assert rescale_interval(law, 2, 0.01) is None
    losses = UserLosses(law).draw([0.01], "both", np.random.default_rng(3), 50)
    assert np.isfinite(losses).all()


def test_one_sigma_does_not_depend_on_the_others() -> None:
    losses = UserLosses(law_of(banded(5, 3, 2)))
    alone = losses.draw([0.8], "both", np.random.default_rng(3), 50)
    beside = losses.draw([0.5, 0.8], "both", np.random.default_rng(3), 50)
    np.testing.assert_array_equal(alone[:, 0], beside[:, 1])


@pytest.mark.parametrize("d", [0, 1, 3])
@pytest.mark.parametrize(("k", "b", "bands", "p"), [(1, 2, 2, 0.3), (2, 2, 1, 0.1), (2, 1, 1, 0.4)])
def test_simulated_delta_is_the_claim(d: int, k: int, b: int, bands: int, p: float) -> None:
    """Draws of P and Q, exposed steps and counts, all at once, against quadrature."""
    matrix, sigma, epsilon = banded(2, bands, 3), 0.9, 0.4
    law = law_of(matrix, examples=(k,), probability=p, min_sep=b, neighbors=d)
    losses = UserLosses(law).draw([sigma], "both", np.random.default_rng(d), 200_000)[:, 0]
    truth = oracle.attained(claim.claimed_mixtures(k, d, p=p, b=b, steps=2), matrix, sigma, epsilon)
    for values, expected in zip(losses, truth, strict=True):
        terms = hockey_stick(values, epsilon)
        assert abs(terms.mean() - expected) <= 6 * terms.std() / math.sqrt(terms.size) + 1e-6
    # E_Q[P/Q] = 1, where the ratio has a moderate variance
    weights = np.exp(-losses[1])
    assert abs(weights.mean() - 1) <= 6 * weights.std() / math.sqrt(weights.size)


def test_the_largest_loss_covers_fewer_examples() -> None:
    matrix = np.diag([0.05] + 6 * [1.0])
    few, many, both = (
        UserLosses(law_of(matrix, examples=e, probability=0.8)).draw(
            [1.0], "both", np.random.default_rng(0), 2000
        )
        for e in ((1,), (2,), (1, 2))
    )
    terms = [hockey_stick(each[:, 0], 1.0).mean(axis=1) for each in (few, many, both)]
    assert (terms[2] >= np.maximum(terms[0], terms[1])).all()
    assert terms[0].max() > terms[1].max()  # fewer can be the worst


def test_draws_follow_their_law() -> None:
    law = law_of(banded(6, 2, 1), examples=(1, 3), probability=0.2, neighbors=4)
    rng = np.random.default_rng(5)
    one, three = law.draw_counts(rng, 100_000)
    assert (one <= three).all()
    for counts, k in ((one, 1), (three, 3)):
        expected = law.mass(k)
        for j in range(k + 1):
            share = (counts == j).mean(axis=1)
            error = math.sqrt(expected[j] * (1 - expected[j]) / 100_000)
            assert (abs(share - expected[j]) <= 6 * error).all()
    shown = law.draw_exposed(rng, 100_000)
    for t in range(6):
        reach = min(law.min_sep - 1, 5 - t)
        expected = 1 - (1 - 0.2) ** (4 * reach)
        error = math.sqrt(expected * (1 - expected) / 100_000)
        assert abs(shown[t].mean() - expected) <= 6 * error
    for exclusion in ("sampling", "participation"):
        same = law_of(banded(6, 2, 1), exclusion=exclusion, neighbors=0)
        x = participations(same, three[:, :200], np.zeros(200, dtype=np.int64))
        for lane in range(200):
            expected_x = claim.chain(three[:, lane].tolist(), 3, sampled=exclusion == "sampling")
            assert tuple(x[:, lane]) == expected_x


def test_outside_neighbors_of_random_graphs() -> None:
    rng = np.random.default_rng(2)
    for users in (3, 8, 20):
        lists = [
            sorted(rng.choice(users, size=rng.integers(1, 4), replace=False).tolist())
            for _ in range(15)
        ]
        present = sorted({u for own in lists for u in own})
        lists = [[present.index(u) for u in own] for own in lists]
        offsets = np.concatenate(([0], np.cumsum([len(own) for own in lists])))
        graph = AttributionGraph.from_csr(offsets, [u for own in lists for u in own])
        expected = [claim.outside_neighbors(lists, u) for u in range(len(present))]  # type: ignore[arg-type]
        assert outside_neighbors(graph).tolist() == expected
        assert neighbor_facts(graph).neighbors == max(expected)
    assert neighbor_facts(AttributionGraph.from_lists(CHAIN)).examples == (2, 3)


def test_bad_laws_are_refused() -> None:
    matrix = banded(5, 3, 2)
    for name, changes in (
        ("columns", {"min_sep": 2}),
        ("columns", {"columns": -np.ones((3, 1))}),
        ("probability", {"probability": 0.0}),
        ("examples", {"examples": ()}),
        ("neighbors", {"exclusion": "participation"}),
        ("burn_in", {"burn_in": 2}),
    ):
        with pytest.raises(ValueError, match=name):
            law_of(matrix, **changes)

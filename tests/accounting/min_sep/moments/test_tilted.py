"""Compiled draws from the tilted law of b-min-sep sampling, by enumeration and by identities."""

from __future__ import annotations

import importlib.util
import itertools
import math

import numpy as np
import pytest

from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.importance_terms import TiltedMinSep
from dptrain.accounting.min_sep.moments import log_moment, tilted
from dptrain.accounting.min_sep.moments.tilted import TiltedPatterns
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import log_ratio
from dptrain.accounting.poisson import PoissonPLD
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson
from dptrain.strategies import Identity
from tests.accounting.min_sep.test_engine_compiled_replayed import dense, replayed, source
from tests.accounting.min_sep.test_min_sep_bounds import patterns, strategy_matrix

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
SIGMA = 1.3


def make_law(c: list[float], p: float, b: int, n: int, warm: bool = True) -> MinSepLaw:
    return MinSepLaw(coefficients=np.array(c), probability=p, min_sep=b, steps=n, warm_start=warm)


LAWS = {
    "warm": make_law([0.8, 0.5, 0.3], 0.3, 3, 7),
    "cold": make_law([0.8, 0.5, 0.3], 0.3, 4, 8, False),
    "one band": make_law([0.9], 0.2, 3, 8),
    "Poisson": make_law([1.0], 0.4, 1, 6),
    "certain": make_law([0.7, 0.4], 1.0, 3, 8),
    "certain, cold": make_law([0.7, 0.4], 1.0, 3, 8, False),
    "longer bar than run": make_law([0.7, 0.4], 0.3, 6, 4),
}


def by_counts(law: MinSepLaw, order: int) -> tuple[dict[tuple[int, ...], float], float]:
    """Tilted probability of every vector of counts, and log A, over all tuples of patterns."""
    x, chance = patterns(law)
    shifts = x @ strategy_matrix(law).T
    gram = shifts @ shifts.T / SIGMA**2
    weights: dict[tuple[int, ...], float] = {}
    for chosen in itertools.product(range(len(x)), repeat=order):
        overlap = sum(gram[k, m] for k, m in itertools.combinations(chosen, 2))
        key = tuple(x[list(chosen)].sum(axis=0).astype(int).tolist())
        weight = float(np.prod(chance[list(chosen)])) * math.exp(overlap)
        weights[key] = weights.get(key, 0.0) + weight
    total = math.fsum(weights.values())
    return {key: weight / total for key, weight in weights.items()}, math.log(total)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(LAWS))
def test_compiled_draws_have_the_tilted_law(name: str, order: int) -> None:
    law, size = LAWS[name], 20_000
    expected, truth = by_counts(law, order)
    drawing = TiltedPatterns(law, SIGMA, order)
    assert drawing.log_moment == pytest.approx(truth, rel=1e-11, abs=1e-13)
    drawn = drawing.counts(np.random.default_rng(order), size)
    keys, seen = np.unique(drawn.T, axis=0, return_counts=True)
    counts = {tuple(key): int(number) for key, number in zip(keys.tolist(), seen, strict=True)}
    assert set(counts) <= set(expected)
    for key, p in expected.items():
        # 6 sigma, Bernstein's form for rare ones.
        assert abs(counts.get(key, 0) - size * p) <= 6 * math.sqrt(size * p * (1 - p)) + 12, key


@pytest.mark.parametrize("order", [4, 5, 6])
def test_many_copies_have_their_moment_and_law(order: int) -> None:
    law = make_law([0.8, 0.5], 0.25, 2, 4 if order == 4 else 3)
    expected, truth = by_counts(law, order)
    drawing = TiltedPatterns(law, SIGMA, order)
    assert drawing.log_moment == pytest.approx(truth, rel=1e-11)
    drawn = drawing.counts(np.random.default_rng(1), 20_000)
    for step in range(law.steps):
        p = sum(weight * key[step] for key, weight in expected.items())
        square = sum(weight * key[step] ** 2 for key, weight in expected.items())
        assert abs(drawn[step].mean() - p) <= 6 * math.sqrt((square - p**2) / 20_000)


@pytest.mark.parametrize("order", [5, 8])
def test_messages_of_many_copies_are_those_of_the_moment(order: int) -> None:
    law = make_law([0.8, 0.5, 0.3], 0.2, 4, 40)
    found = TiltedPatterns(law, 2.0, order).log_moment
    assert found == pytest.approx(log_moment(law, 2.0, order), rel=1e-9)


LONG = {
    "settled": make_law([0.8, 0.5, 0.3], 0.05, 5, 400),
    "Poisson": make_law([1.0], 0.02, 1, 150),
    "cold": make_law([0.8, 0.5, 0.3], 0.3, 4, 90, False),
}


@pytest.mark.parametrize("name", sorted(LONG))
def test_losses_are_those_of_the_patterns_and_noise_drawn(name: str) -> None:
    law = LONG[name]
    drawing = TiltedPatterns(law, SIGMA, 3)
    assert drawing._levels.shape[0] < law.steps or name == "cold"  # stretches did settle
    losses = drawing.losses(source(3), 128)[0]
    x, z = replayed(drawing, 3)
    exact = log_ratio(law, SIGMA, dense(law) @ x + SIGMA * z)
    reference = 1e-15 * law.steps * (1.0 + np.abs(exact))
    assert (np.abs(losses - exact) <= drawing.rounding + reference).all()
    assert drawing.rounding < 1e-7
    assert drawing.variation < 1e-6  # of the ceiling


def test_weights_of_what_is_drawn_average_to_one() -> None:
    # E_R[A (Q/P)^α] = 1, for any α: what is drawn has the density (P/Q)^α Q/A.
    law = make_law([0.8, 0.5, 0.3], 0.05, 5, 100)
    for order in (2, 3):
        drawing = TiltedPatterns(law, 2.0, order)
        losses = drawing.losses(np.random.default_rng(order), 40_000)[0]
        weights = np.exp(drawing.log_moment - order * losses)
        assert abs(weights.mean() - 1.0) <= 6 * weights.std() / math.sqrt(weights.size)


KNOWN = MatrixMechanism(
    scheme=Poisson(probability=0.05, dataset_size=1000, steps=80),
    strategy=Identity(),
    noise_multiplier=1.2,
)
AS_MIN_SEP = make_law([1.0], 0.05, 1, 80)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("epsilon", [1.0, 6.0])
def test_terms_average_to_a_known_delta_and_stay_below_their_ceiling(epsilon: float) -> None:
    known = float(PoissonPLD().profile(KNOWN, [epsilon]).remove[0])
    terms = TiltedMinSep(MinSepRenyiCurve(AS_MIN_SEP), 1.2).remove(epsilon)
    rng = np.random.default_rng(7)
    drawn = np.concatenate([terms.draw(rng, 4096) for _ in range(10)])
    assert drawn.min() >= 0.0
    assert drawn.max() <= terms.ceiling * (1 + 1e-9)
    assert terms.ceiling >= known
    error = drawn.std() / math.sqrt(drawn.size)
    assert error < 0.05 * known
    assert abs(drawn.mean() - known) <= 6 * error + 1e-4 * known  # 6 sigma and the PLD's grid


def test_messages_beyond_memory_leave_that_order_out(monkeypatch: pytest.MonkeyPatch) -> None:
    law = LONG["cold"]
    full = TiltedMinSep(MinSepRenyiCurve(law), 3.0)
    assert 3 in full._orders
    monkeypatch.setattr(tilted, "LEVEL_BYTES", 8 * 4 * 40)
    with pytest.raises(MemoryError, match="order 3"):
        TiltedPatterns(law, 3.0, 3)
    terms = TiltedMinSep(MinSepRenyiCurve(law), 3.0).remove(4.0)
    assert terms.draw(np.random.default_rng(1), 128).max() <= terms.ceiling


@pytest.mark.parametrize("sigma", [0.14, 0.3])
def test_messages_that_underflow_are_not_taken_for_settled(sigma: float) -> None:
    """0/0 is no growth; where all is certain the bound on what is drawn would be below 0."""
    law = MinSepLaw(coefficients=np.ones(1), probability=1.0, min_sep=5, steps=500, warm_start=True)
    assert TiltedPatterns(law, sigma, 2).variation >= 0.0

"""Weighted samples of balls-in-bins against enumeration, known δ and the deterministic bounds."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from dptrain.accounting import account
from dptrain.accounting.balls_in_bins.bins_losses import BallsInBinsLosses
from dptrain.accounting.balls_in_bins.conditional_composition import ConditionalComposition
from dptrain.accounting.balls_in_bins.importance import BallsInBinsImportance
from dptrain.accounting.balls_in_bins.importance_terms import TiltedBallsInBins
from dptrain.accounting.balls_in_bins.one_pick import AllocationPLD
from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.best_of import BestOf
from dptrain.accounting.dispatch import find_accountant
from dptrain.core.guarantee import Kind
from dptrain.core.json_value import digest
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep
from dptrain.strategies import BSR, Identity, SquareRoot
from dptrain.testing import AccountantContract


def made(*, bins=12, epochs=2, sigma=1.5, strategy=None) -> MatrixMechanism:
    scheme = BallsInBins(bins=bins, epochs=epochs, dataset_size=5_000)
    return MatrixMechanism(scheme=scheme, strategy=strategy or BSR(bands=3), noise_multiplier=sigma)


class TestBallsInBinsImportance(AccountantContract):
    """Seeds are fixed: what passes once passes always."""

    simulated = True
    delta = 1e-6
    deepest_delta = 1e-9

    def accountant(self):
        return BallsInBinsImportance(seed=11, progress=False)

    def mechanism(self):
        return made(bins=5)

    def refused_mechanism(self):
        scheme = MinSep(probability=0.5, min_sep=3, dataset_size=1000, steps=12)
        return MatrixMechanism(scheme=scheme, strategy=BSR(bands=3), noise_multiplier=1.5)


def tilted(bins=4, epochs=2, strategy=None) -> TiltedBallsInBins:
    return TiltedBallsInBins(BallsInBinsLosses(strategy or BSR(bands=3), bins * epochs, bins))


@pytest.mark.parametrize("strategy", [BSR(bands=3), SquareRoot(), Identity()])
def test_moments_equal_the_sum_over_all_tuples_of_bins(strategy) -> None:
    strategy = strategy.bind(8)
    found, sigma = tilted(strategy=strategy), 1.3
    matrix = strategy.columns(8, np.arange(8))
    means = np.stack([np.abs(matrix)[:, i::4].sum(axis=1) for i in range(4)])
    gram = means @ means.T / sigma**2
    for order in (2, 3, 5):
        total = 0.0
        for bins in itertools.product(range(4), repeat=order):
            total += math.exp(sum(gram[i, j] for i, j in itertools.combinations(bins, 2)))
        assert found.log_moment(sigma, order) == pytest.approx(
            math.log(total / 4**order), rel=1e-8, abs=1e-8
        )


def test_multisets_count_every_tuple_once() -> None:
    found = tilted(bins=6, epochs=1)
    for order, table in found._tables.items():
        assert len(table.bins) == math.comb(6 + order - 1, order)
        assert len(np.unique(table.bins, axis=0)) == len(table.bins)
        assert np.exp(table.log_count).sum() == pytest.approx(6.0**order, rel=1e-10)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("epsilon", [0.1, 0.8, 2.0])
def test_terms_average_to_a_known_delta_and_stay_below_their_ceiling(epsilon) -> None:
    """Independent noise, where the loss distribution is known to 1e-4 of ε."""
    mechanism = made(bins=10, epochs=1, sigma=0.9, strategy=Identity())
    grid = np.array([epsilon * (1 + 1e-3), epsilon, epsilon * (1 - 1e-3)])
    profile = AllocationPLD().profile(mechanism, grid[::-1])
    terms = TiltedBallsInBins(BallsInBinsLosses(Identity(), 10, 10)).at(0.9).both(epsilon)
    for direction, known in (("remove", profile.remove), ("add", profile.add)):
        drawn = terms[direction].draw(np.random.default_rng(3), 200_000)
        assert drawn.min() >= 0.0
        assert drawn.max() <= terms[direction].ceiling
        error = 6 * drawn.std() / math.sqrt(drawn.size)
        assert known.min() - error <= drawn.mean() <= known.max() + error
        assert 2 * error < drawn.mean()  # the comparison means something


def plain_delta(mechanism, epsilon, samples) -> tuple[float, float]:
    """δ of the worse direction and its standard error, from losses in all n dimensions."""
    scheme, rng = mechanism.scheme, np.random.default_rng(9)
    matrix = mechanism.strategy.columns(scheme.steps, np.arange(scheme.steps))
    b, sigma = scheme.min_sep, mechanism.noise_multiplier
    means = np.stack([matrix[:, i::b].sum(axis=1) for i in range(b)])
    y = sigma * rng.standard_normal((samples, scheme.steps))
    y += means[rng.integers(b, size=samples)]
    exponents = (y @ means.T - (means**2).sum(axis=1) / 2) / sigma**2
    top = exponents.max(axis=1)
    loss = top + np.log(np.exp(exponents - top[:, None]).mean(axis=1))
    terms = -np.expm1(np.minimum(epsilon - loss, 0.0))
    return float(terms.mean()), float(terms.std() / math.sqrt(samples))


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("strategy", "share"), [(BSR(bands=3), 0.9), (BSR(bands=20), 0.95)])
def test_the_default_is_tighter_than_what_is_proven_and_above_the_truth(strategy, share) -> None:
    mechanism, delta = made(bins=16, epochs=2, sigma=2.0, strategy=strategy), 1e-4
    member = find_accountant(mechanism)
    assert isinstance(member, BallsInBinsImportance)
    found = BallsInBinsImportance(seed=4, progress=False).guarantee(mechanism, delta=delta)
    assert found.kind is Kind.CONFIDENCE
    known = (BallsInBinsRenyi(), ConditionalComposition())
    proven = BestOf.of([m for m in known if m.reserved(mechanism) is None])
    assert found.epsilon < share * proven.guarantee(mechanism, delta=delta).epsilon
    true, error = plain_delta(mechanism, found.epsilon, 400_000)
    assert true - 6 * error <= delta
    # Five points of the grid lower, δ is above: no more than that is lost.
    true, error = plain_delta(mechanism, found.epsilon / 1.01**5, 2_000_000)
    assert true + 6 * error > 0.7 * delta


@pytest.mark.slow
def test_known_brackets_of_a_hundred_bins() -> None:
    """True are .401 (remove) and .391 (add); plain samples show .44, divergences .55."""
    mechanism = made(bins=100, epochs=1, sigma=2.0, strategy=BSR(bands=4))
    found = BallsInBinsImportance(seed=4, progress=False).guarantee(mechanism, delta=1e-5)
    assert 0.400 <= found.epsilon <= 0.435


@pytest.mark.slow
def test_where_no_sample_pays_the_proven_bound_stands() -> None:
    mechanism = made(bins=30, epochs=1, sigma=2.0)
    none = BallsInBinsImportance(max_samples=10, progress=False)
    proven = BestOf.of([BallsInBinsRenyi(), ConditionalComposition()])
    found = none.guarantee(mechanism, delta=1e-5)
    assert found.epsilon == proven.guarantee(mechanism, delta=1e-5).epsilon
    assert found.certificate["grid"] == []


def test_independent_noise_is_left_to_the_exact_accountant() -> None:
    mechanism = made(strategy=Identity())
    assert account(mechanism, delta=1e-5).kind is Kind.EXACT
    assert "allocation-pld" in BallsInBinsImportance().reserved(mechanism)


@pytest.mark.slow
def test_a_certificate_is_read_again_and_a_lowered_one_is_not(tmp_path) -> None:
    member = BallsInBinsImportance(seed=1, progress=False, cache=tmp_path)
    found = member.calibrate(made(bins=6), epsilon=1.0, delta=1e-4)
    assert found.kind is Kind.VERIFIED
    assert member.calibrate(made(bins=6), epsilon=1.0, delta=1e-4) == found
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    forged = {**kept, "grid": [], "ceiling": 0.009, "noise_multiplier": 0.009}
    del forged["digest"]
    path.write_text(json.dumps({**forged, "digest": digest(forged)}))
    with pytest.raises(ValueError, match="corrupt certificate"):
        member.calibrate(made(bins=6), epsilon=1.0, delta=1e-4)


def test_little_noise_widens_what_is_added_for_rounding() -> None:
    """Exponents of 10^6 are off by 10^-10 and more: the pads have to grow with them."""
    found = tilted(bins=20, epochs=2)
    usual, little = (found.overlap_error(sigma, 8) for sigma in (2.0, 0.002))
    assert usual < 1e-11
    # u·b·α²/2 products of means of norm √2 and above.
    assert little > 2.0**-53 * 20 * (64 / 2) * 2 / 0.002**2
    terms = found.at(0.05).both(1.0)["remove"]
    assert 0.0 <= terms.draw(np.random.default_rng(0), 100).max() <= terms.ceiling

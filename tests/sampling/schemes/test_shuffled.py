"""Shuffled: its law over whole runs, its epochs and what it promises an accountant."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.schemes.shuffled import Shuffled
from dptrain.strategies import Identity
from dptrain.testing.scheme_contract import ExchangeableSchemeContract, participation
from tests.oracles import batch_sequences as oracle

# (N, batch size, epochs): batches that fit, a smaller last one, the whole set, single examples.
CASES = [(4, 2, 2), (3, 2, 2), (4, 3, 2), (3, 3, 3), (3, 1, 1), (4, 1, 1), (2, 1, 2), (1, 1, 3)]
WHOLE_RUNS = [(*case, 2_000) for case in CASES]
WHOLE_RUNS += [pytest.param(*case, 20_000, marks=pytest.mark.slow) for case in CASES[1:3]]


def make(size: int, batch_size: int, epochs: int, *, reshuffle: bool = True) -> Shuffled:
    return Shuffled(batch_size=batch_size, dataset_size=size, epochs=epochs, reshuffle=reshuffle)


class _Contract(ExchangeableSchemeContract):
    """A random order makes indicators of places negatively associated (Joag-Dev & Proschan 1983),
    and sets of different epochs overlap hypergeometrically: Bernstein's inequality holds."""

    def large_scheme(self):
        scheme = self.scheme()
        scale = self.examples // scheme.dataset_size
        return dataclasses.replace(
            scheme,
            dataset_size=scheme.dataset_size * scale,
            batch_size=scheme.batch_size * scale,
        )

    def joint_probabilities(self):
        scheme = self.scheme()
        full = scheme.dataset_size // scheme.batch_size
        shares = [scheme.batch_size / scheme.dataset_size] * full
        if rest := scheme.dataset_size % scheme.batch_size:
            shares.append(rest / scheme.dataset_size)
        one = np.diag(shares)  # within an epoch, and across epochs if the order is kept
        across = np.outer(shares, shares) if scheme.reshuffle else one
        rows = range(scheme.epochs)
        return np.block([[one if i == j else across for j in rows] for i in rows])


class TestReshuffled(_Contract):
    def scheme(self):
        return make(50, 10, 3)


class TestOrderKept(_Contract):
    def scheme(self):
        return make(50, 10, 3, reshuffle=False)


class _SmallerLast(_Contract):
    def test_expected_batch_size(self):
        """The mean over an epoch is exact: all of its batches together are the dataset."""
        scheme = self.large_scheme()
        sizes = [len(batch) for batch in scheme.stream(self.seed)]
        assert sizes[-1] < scheme.expected_batch_size < sizes[0] == scheme.batch_size
        assert np.mean(sizes) == pytest.approx(scheme.expected_batch_size, rel=1e-12)


class TestReshuffledSmallerLast(_SmallerLast):
    def scheme(self):
        return make(50, 12, 3)


class TestOrderKeptSmallerLast(_SmallerLast):
    def scheme(self):
        return make(50, 12, 3, reshuffle=False)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("reshuffle", [True, False])
@pytest.mark.parametrize(("size", "batch_size", "epochs", "runs"), WHOLE_RUNS)
def test_whole_runs(size, batch_size, epochs, reshuffle, runs):
    scheme = make(size, batch_size, epochs, reshuffle=reshuffle)
    law = oracle.shuffled(size, batch_size, epochs, reshuffle=reshuffle)
    oracle.assert_runs_follow(scheme.stream, law, runs)
    vectors = scheme.sample_participation(np.random.default_rng(1), 10 * runs)
    oracle.assert_vectors_follow(vectors, law)
    oracle.assert_public_constants(scheme, law)


@pytest.mark.parametrize("reshuffle", [True, False])
@pytest.mark.parametrize(("size", "batch_size"), [(10, 5), (11, 4), (7, 7), (5, 1)])
def test_every_epoch_is_the_dataset_once(size, batch_size, reshuffle):
    scheme = make(size, batch_size, 3, reshuffle=reshuffle)
    per_epoch = scheme.steps_per_epoch
    assert per_epoch == len(range(0, size, batch_size))
    batches = list(scheme.stream(9))
    assert len(batches) == scheme.steps == 3 * per_epoch
    epochs = [batches[i : i + per_epoch] for i in range(0, scheme.steps, per_epoch)]
    for epoch in epochs:
        assert sorted(np.concatenate(epoch).tolist()) == list(range(size))
        assert [len(batch) for batch in epoch[:-1]] == [batch_size] * (per_epoch - 1)
        assert 1 <= len(epoch[-1]) <= batch_size
    if not reshuffle:
        for epoch in epochs[1:]:
            for one, again in zip(epochs[0], epoch, strict=True):
                np.testing.assert_array_equal(one, again)


def test_kept_order_is_separated_and_a_new_one_is_not():
    kept = make(100, 20, 6, reshuffle=False)
    assert (kept.min_sep, kept.max_participations) == (5, 6)
    taken = participation(kept.stream(0), 100)
    for gap in range(1, 5):
        assert not (taken[:, gap:] & taken[:, :-gap]).any()
    new = make(100, 20, 6)
    assert (new.min_sep, new.max_participations) == (1, 6)
    taken = participation(new.stream(0), 100)
    assert (taken[:, 1:] & taken[:, :-1]).any()  # the last of one epoch, the first of the next


@pytest.mark.parametrize("reshuffle", [True, False])
def test_no_accountant_takes_it_for_amplified(reshuffle):
    mechanism = MatrixMechanism(
        scheme=make(100, 20, 6, reshuffle=reshuffle), strategy=Identity(), noise_multiplier=1.0
    )
    for accountant in (PoissonPLD(), BallsInBinsRenyi(), MinSepImportance()):
        assert accountant.refusal(mechanism) is not None


def test_a_batch_size_that_nearly_divides():
    """ceil(N/steps_per_epoch) keeps the steps and brings batch_size/B̄ near 1, as documented."""
    for size in range(1, 60):
        for batch_size in range(1, size + 1):
            scheme = make(size, batch_size, 1)
            steps = scheme.steps_per_epoch
            weight = batch_size / scheme.expected_batch_size
            assert weight >= 1 - 1e-12
            assert weight == pytest.approx(1) if size % batch_size == 0 else steps > 1
            if steps > 1:
                assert weight < 1 + 1 / (steps - 1)
            better = make(size, -(-size // steps), 1)
            assert better.steps_per_epoch == steps
            assert better.batch_size / better.expected_batch_size < 1 + steps / size


def test_state_takes_at_most_8_bytes_an_example():
    stream = make(10**6, 1000, 2).stream(0)
    for _ in range(3):
        next(stream)
    tensors = [value for value in stream.state_dict().values() if hasattr(value, "nbytes")]
    assert 0 < sum(tensor.nbytes for tensor in tensors) <= 8 * 10**6
    arrays = [value for value in vars(stream).values() if isinstance(value, np.ndarray)]
    assert sum(a.nbytes if a.base is None else a.base.nbytes for a in arrays) <= 8 * 10**6


GOOD = {"batch_size": 4, "dataset_size": 10, "epochs": 2, "reshuffle": True}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", 0, "batch_size=0 must be at least 1"),
        ("batch_size", 4.5, "batch_size=4.5 must be an integer, not float"),
        ("batch_size", 11, "batch_size=11 .*largest possible batch size is 10"),
        ("dataset_size", 0, "dataset_size=0 must be at least 1"),
        ("dataset_size", 3, "batch_size=4 .*largest possible batch size is 3"),
        ("epochs", -1, "epochs=-1 must be at least 1"),
        ("epochs", True, "epochs=True must be an integer, not bool"),
        ("reshuffle", 1, "reshuffle=1 must be True or False"),
    ],
)
def test_bad_input(field, value, message):
    with pytest.raises((TypeError, ValueError), match=f"Shuffled: {message}"):
        Shuffled(**{**GOOD, field: value})

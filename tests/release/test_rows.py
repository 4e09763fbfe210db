"""Whose words are in a batch: from noisy sums, and from published weights.

On the reference, float32 noise in floating point, the attack names them, and how often it must is
computed. On the grid every number can come out for every batch, and the numbers that the attack
goes by are as many in words that are in the batch as in others.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import torch
from scipy.stats import binom

from dptrain import BandMF, Identity
from dptrain.noise import noise_stream
from tests.helpers.released import (
    Seen,
    adam,
    adapted,
    classifier,
    damped_adam,
    embedding_rows,
    in_floating_point,
    opacus_rows,
    published_weights,
)
from tests.oracles.reachable import LastBits, share_unreachable

SIGMA = 1.2161
SHARE = share_unreachable(SIGMA)
RARE = 1e-9  # chance of 6 sigma
MODES = {
    "default": {"seed": 5},
    "secure": {"seed": 5, "secure": True},
    "banded": {"seed": 5, "bands": 4, "steps": 4},
    "banded, secure": {"seed": 5, "bands": 4, "steps": 4, "secure": True},
}


def named(counts: torch.Tensor, seen: Seen) -> tuple[int, int]:
    """Words with any evidence: that are in the batch, and that are not."""
    return int((counts > 0)[seen.touched].sum()), int((counts > 0)[~seen.touched].sum())


def apart(scores: torch.Tensor, touched: torch.Tensor) -> float:
    """Standard deviations by which words of the batch rank higher than others do by chance."""
    a, b = scores[touched].double(), scores[~touched].double()
    wins = (a[:, None] > b).double().sum() + 0.5 * (a[:, None] == b).double().sum()
    pairs = len(a) * len(b)
    return float((wins - pairs / 2) / (pairs * (len(a) + len(b) + 1) / 12) ** 0.5)


def at_least(words: int, numbers: int) -> int:
    """So many words are found but with a chance of ``RARE``, if one number in 1/SHARE tells."""
    found = 1 - (1 - 0.9 * SHARE) ** numbers
    return int(binom.ppf(RARE, words, found))


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_named_in_floating_point(mode):
    with in_floating_point():
        steps = embedding_rows(SIGMA, **MODES[mode])
    assert len(steps) == MODES[mode].get("steps", 2)
    for seen in steps:
        words = int(seen.touched.sum())
        assert words >= 20  # secure batches have no seed: fewer has a chance of 1e-8
        right, wrong = named(seen.not_floats(), seen)
        assert wrong == 0
        assert right >= at_least(words, 128) >= words - 1


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_not_named_on_the_grid(mode):
    for seen in embedding_rows(SIGMA, **MODES[mode]):
        assert named(seen.not_on_grid(), seen) == (0, 0)
        assert abs(apart(seen.not_floats(), seen.touched)) < 6


@functools.cache
def learned(mode: str) -> LastBits:
    """From a stream of one's own, of nothing and of small sums, in batches of 32."""
    size, steps = 1 << 19, MODES[mode].get("steps", 2)
    strategy = BandMF(bands=4) if "banded" in mode else Identity()
    total = torch.from_numpy(np.random.default_rng(8).normal(0, 0.02, size).astype(np.float32))
    numbers = []
    for seed, sums in ((1, torch.zeros(size)), (2, total)):
        stream = noise_stream(
            strategy, steps=steps, like=[total], seed=seed, secure="secure" in mode
        )
        for _ in range(steps):
            (noisy,) = stream.release([sums.clone()], SIGMA)
            numbers.append(noisy)
    return LastBits.learn(torch.cat(numbers[:steps]) / 32, torch.cat(numbers[steps:]) / 32)


@pytest.mark.parametrize("mode", MODES)
def test_last_bits_tell_nothing_on_the_grid(mode):
    """Even to somebody who has learned at home what they are with a sum and without."""
    score = learned(mode).score
    for seen in embedding_rows(SIGMA, **MODES[mode]):
        assert abs(apart(score(seen.numbers).sum(dim=1), seen.touched)) < 6


def test_opacus_names_rows():
    """By what floats can be reached: no row wrong, and all right. σR = 1 gives nothing away so."""
    for seen in opacus_rows(SIGMA, seed=3):
        words = int(seen.touched.sum())
        right, wrong = named(seen.not_floats(), seen)
        assert wrong == 0
        assert right >= at_least(words, 128) >= words - 1
    for seen in opacus_rows(1.0, seed=3):
        assert named(seen.not_floats(), seen) == (0, 0)


@pytest.mark.parametrize("sigma", [1.0, SIGMA, 10.0])
def test_opacus_in_secure_mode_names_rows_by_their_last_bits(sigma):
    """A small sum of four floats has the last bits of the largest; with a gradient it has not."""
    from opacus.optimizers.optimizer import _generate_noise

    generator = torch.Generator().manual_seed(99)
    total = 0.02 * torch.randn(1 << 20, generator=generator)

    def noise():
        return _generate_noise(sigma, total, generator=generator, secure_mode=True)

    table = LastBits.learn(noise() / 32, (total + noise()) / 32)
    for seen in opacus_rows(sigma, seed=3, secure=True):
        scores = table.score(seen.numbers).sum(dim=1)
        right, wrong = named(scores, seen)
        assert right > 0.98 * int(seen.touched.sum())
        assert wrong < 0.02 * int((~seen.touched).sum())
        assert apart(scores, seen.touched) > 10


WEIGHTS = {
    "SGD": ({"make": classifier}, 60),
    "SGD, secure": ({"make": classifier, "secure": True}, 60),
    "LoRA": ({"make": adapted}, 64),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_published_weights_name_words_in_floating_point(name):
    """The first step is on weights of zero, which round nothing away; later ones keep some bits."""
    options, numbers = WEIGHTS[name]
    with in_floating_point():
        first, second = published_weights(SIGMA, seed=5, **options)
    for seen, least in ((first, at_least(int(first.touched.sum()), numbers)), (second, 40)):
        right, wrong = named(seen.not_floats(), seen)
        assert wrong == 0
        assert int(seen.touched.sum()) > 45
        assert right >= least > 38


@pytest.mark.parametrize("name", WEIGHTS)
def test_published_weights_name_nobody_on_the_grid(name):
    """The observer knows the grid, the weights before and the optimizer: all weights can be."""
    for seen in published_weights(SIGMA, seed=5, **WEIGHTS[name][0]):
        assert named(seen.not_on_grid(), seen) == (0, 0)
        assert abs(apart(seen.not_floats(), seen.touched)) < 6


def test_weights_of_adam_name_words_if_its_epsilon_is_large():
    """Its first step is g / (|g| + ε): with an ε of 1e-8 it shows a sign, and with 1 the bits."""
    with in_floating_point():
        (damped,) = published_weights(SIGMA, seed=5, step=damped_adam, steps=1)
        (usual,) = published_weights(SIGMA, seed=5, step=adam, steps=1)
    right, wrong = named(damped.not_floats(slack=32), damped)
    assert wrong == 0
    assert right > 0.9 * int(damped.touched.sum())
    assert named(usual.not_floats(slack=32), usual) == (0, 0)


@pytest.mark.parametrize("step", [adam, damped_adam])
def test_weights_of_adam_name_nobody_on_the_grid(step):
    (seen,) = published_weights(SIGMA, seed=5, step=step, steps=1)
    assert named(seen.not_on_grid(slack=32), seen) == (0, 0)
    assert abs(apart(seen.not_floats(slack=32), seen.touched)) < 6


@pytest.mark.parametrize("reference", [True, False])
def test_weights_in_bfloat16_round_away_what_the_attack_reads(reference):
    """On either path; which proves nothing about other attacks."""
    with in_floating_point() if reference else contextlib.nullcontext():
        steps = published_weights(SIGMA, seed=5, dtype=torch.bfloat16)
    for seen in steps:
        assert seen.numbers.dtype == torch.bfloat16
        assert named(seen.not_floats(), seen) == (0, 0)
        assert named(seen.not_on_grid(), seen) == (0, 0)

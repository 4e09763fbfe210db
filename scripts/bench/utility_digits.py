"""Test accuracy at equal privacy: stock Opacus, ours without and with correlated noise.

Three ways to train one small convolutional net on scikit-learn's digits (8×8 images, 1,437 for
training, 360 held out), with equal expected batch size, number of steps, clipping norm and δ:

  opacus    stock Opacus DP-SGD, Poisson batches, its PRV accountant
  identity  dptrain, Identity + Poisson
  bandmf    dptrain, BandMF + MinSep, noise certified by estimate-verify-release

The learning rate of each (ε, method) is the best of one grid on seeds that are not used again
(the tuning itself is not private, for none of the three); then five fresh seeds are run. All runs
are of the held-out images. Every finished run is a line of the results, so an interrupted contest
goes on where it stopped.

    PYTHONPATH=. python scripts/bench/utility_digits.py [--processes 2]
"""

from __future__ import annotations

import functools
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dptrain import BandMF, Identity, MinSep, Poisson
from dptrain.sampling import Scheme
from recipes.data import Split, digits
from recipes.models import vgg
from scripts.utility.command import run_contest
from scripts.utility.contest import ACCURACY, Contest, Job, Method, by_method
from scripts.utility.training import train

HERE = pathlib.Path(__file__).parent
SIZE, STEPS, BATCHES_PER_EPOCH, MIN_SEP, BANDS = 1437, 300, 15, 10, 10


@functools.cache
def split() -> Split:
    """The data, once a process."""
    return digits(image_size=8)


def network(seed: int) -> nn.Module:
    """The net with the seed's initial weights."""
    torch.manual_seed(seed)
    return vgg(in_channels=1, classes=10, image_size=8, channels=(16, 32), groups=4, hidden=32)


def run(
    contest: Contest,
    root: pathlib.Path,
    job: Job,
    noise: Any,
    device: str,
    earlier: dict[str, Any] | None,
) -> dict[str, Any]:
    """One training run on all training images."""
    logging.disable(logging.WARNING)
    return train(contest, split(), noise, rate=job.rate, seed=job.seed, device=device)


def _poisson(size: int) -> Scheme:
    return Poisson(probability=1 / BATCHES_PER_EPOCH, dataset_size=size, steps=STEPS)


def _min_sep(size: int) -> Scheme:
    return MinSep.for_batch_size(
        batch_size=size / BATCHES_PER_EPOCH, dataset_size=size, min_sep=MIN_SEP, steps=STEPS
    )


@functools.cache
def methods(epsilon: float) -> Mapping[str, Method]:
    """The same for every ε."""
    return {
        "opacus": Method(title="Opacus DP-SGD"),
        "identity": Method(
            title="dptrain Identity + Poisson", scheme=_poisson, strategy=Identity()
        ),
        "bandmf": Method(
            title=f"dptrain BandMF({BANDS}) + MinSep({MIN_SEP})",
            scheme=_min_sep,
            strategy=BandMF(bands=BANDS),
        ),
    }


CONTEST = Contest(
    title=f"Digits, {STEPS} steps, batch {SIZE / BATCHES_PER_EPOCH:.0f}",
    script=__file__,
    tables={
        "utility_digits": by_method(
            {
                "opacus": "Opacus DP-SGD",
                "identity": "`Identity` + `Poisson`",
                "bandmf": "`BandMF(10)` + `MinSep(10)`",
            },
            ACCURACY,
        ),
        "utility_digits_sigma": by_method(
            {"opacus": "Opacus: σ", "identity": "dptrain: σ"}, "{@.sigma:.4f}"
        ),
    },
    dataset_size=SIZE,
    network=network,
    methods=methods,
    epsilons=(1.0, 2.0, 4.0, 8.0),
    rates=(0.0075, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5),
    tuning_seeds=(100, 101),
    seeds=(0, 1, 2, 3, 4),
    steps=STEPS,
    epoch_length=BATCHES_PER_EPOCH,
    delta=1 / (2 * SIZE),
    max_grad_norm=1.0,
    momentum=0.9,
    run=run,
)


if __name__ == "__main__":
    assert __doc__ is not None
    title = __doc__.split("\n\n")[0]
    run_contest(CONTEST, title, HERE / "results/utility_digits", root=HERE)  # no files are read

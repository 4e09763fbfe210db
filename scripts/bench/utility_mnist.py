"""MNIST at equal privacy: stock Opacus, ours with independent noise, ours with correlated noise.

The network of Opacus's MNIST example, 8 epochs of expected batches of 512, δ = 1e-5, R = 1, SGD
with momentum .9:

  opacus   stock Opacus DP-SGD, Poisson batches, its PRV accountant
  poisson  dptrain, Identity + Poisson
  min-sep  dptrain, BandMF(16) + MinSep(16)

The learning rate of each (ε, method) is chosen on a tenth of the training set that its runs do not
train on; five fresh seeds then train on all of it, and are tested once. Every finished run is a
line of the results, so an interrupted contest goes on where it stopped.

    git clone https://github.com/rasbt/mnist-pngs
    PYTHONPATH=. python scripts/bench/utility_mnist.py --root mnist-pngs

One ε and one seed of each method, at the learning rates that were chosen, take some minutes:

    PYTHONPATH=. python scripts/bench/utility_mnist.py --root mnist-pngs \\
        --fresh --epsilons 3 --seeds 7 --results again
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping

import torch
from torch import nn

from dptrain import BandMF, Identity, MinSep, Poisson
from dptrain.sampling import Scheme
from recipes.data import mnist
from scripts.bench.step_networks import MnistCnn
from scripts.utility.command import run_contest
from scripts.utility.contest import ACCURACY, Contest, Method, by_method

HERE = pathlib.Path(__file__).parent
SIZE, BATCH, EPOCHS = 60_000, 512, 8
STEPS = round(EPOCHS * SIZE / BATCH)
MIN_SEP = BANDS = 16


def network(seed: int) -> nn.Module:
    """Opacus's net with the seed's weights."""
    torch.manual_seed(seed)
    return MnistCnn(10)


def _poisson(size: int) -> Scheme:
    return Poisson(probability=BATCH / SIZE, dataset_size=size, steps=STEPS)


def _min_sep(size: int) -> Scheme:
    return MinSep.for_batch_size(
        batch_size=size * BATCH / SIZE, dataset_size=size, min_sep=MIN_SEP, steps=STEPS
    )


@functools.cache
def methods(epsilon: float) -> Mapping[str, Method]:
    """The same for every ε."""
    return {
        "opacus": Method(title="Opacus DP-SGD"),
        "poisson": Method(title="dptrain Identity + Poisson", scheme=_poisson, strategy=Identity()),
        "min-sep": Method(
            title=f"dptrain BandMF({BANDS}) + MinSep({MIN_SEP})",
            scheme=_min_sep,
            strategy=BandMF(bands=BANDS),
        ),
    }


CONTEST = Contest(
    title="MNIST, 8 epochs",
    script=__file__,
    tables={
        "utility_mnist": by_method(
            {
                "opacus": "Opacus DP-SGD",
                "poisson": "`Identity` + `Poisson`",
                "min-sep": "`BandMF(16)` + `MinSep(16)`",
            },
            ACCURACY,
        )
    },
    load=mnist,
    dataset_size=SIZE,
    network=network,
    methods=methods,
    epsilons=(1.0, 3.0, 8.0),
    rates=(0.06, 0.125, 0.25, 0.5, 1.0),
    tuning_seeds=(100,),
    seeds=(0, 1, 2, 3, 4),
    steps=STEPS,
    epoch_length=SIZE / BATCH,
    delta=1e-5,
    max_grad_norm=1.0,
    momentum=0.9,
)


if __name__ == "__main__":
    assert __doc__ is not None
    run_contest(CONTEST, __doc__.split("\n\n")[0], HERE / "results/utility_mnist")

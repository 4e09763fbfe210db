"""CIFAR-10 at equal privacy, after Dong & Ganesh 2026 (arXiv 2602.09338), section 7.2 and Figure 4.

A VGG without normalization, 1,500 steps with N / B = 300, δ = 1/(2N), SGD with momentum .95 whose
learning rate falls to a twentieth over the middle half of the run; R = 1, which the paper does not
state. The paper trains on CINIC-10 (images of CIFAR-10 and ImageNet), this script on CIFAR-10.

  dp-sgd         Identity + Poisson
  cyclic         BandMF + CyclicPoisson
  balls-in-bins  BandMF + BallsInBins
  min-sep        BandMF + MinSep

Bands and separations are those with the least predicted error of the averaged gradient, not chosen
by accuracy; cifar10_bands.py finds them, and which ε there are here. The learning rate of each
(ε, method) is chosen on a tenth of the training set that its runs do not train on, beside whichever
is the best so far until both its neighbors are worse; fresh seeds then train on all of it, and are
tested once. Every finished run is a line of the results, so an
interrupted contest goes on where it stopped.

    git clone https://github.com/cyizhuo/CIFAR-10-dataset
    PYTHONPATH=. python scripts/paper/cifar10_bands.py --epsilons 8
    PYTHONPATH=. python scripts/paper/cifar10_fig4.py --root CIFAR-10-dataset
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping

import torch
from torch import nn

from dptrain import BandMF, Identity, Poisson
from dptrain.sampling import Scheme
from recipes.data import cifar10
from recipes.models import vgg
from scripts.paper import cifar10_bands
from scripts.paper.cifar10_bands import DELTA, EPOCH_LENGTH, SIZE, STEPS
from scripts.utility.command import run_contest
from scripts.utility.contest import ACCURACY, NOT_RUN, SEEDS, Contest, Method, by_method

HERE = pathlib.Path(__file__).parent


def network(seed: int) -> nn.Module:
    """The VGG of configs/cifar10_*.yaml with the seed's weights."""
    torch.manual_seed(seed)
    return vgg(in_channels=3, classes=10, groups=0)


def _poisson(size: int) -> Scheme:
    return Poisson(probability=1 / EPOCH_LENGTH, dataset_size=size, steps=STEPS)


def _first_rate(epsilon: float) -> float:
    """Larger where there is less noise; the search goes on from it."""
    return 0.03 if epsilon < 2 else 0.05 if epsilon < 4 else 0.1


@functools.cache
def methods(epsilon: float) -> Mapping[str, Method]:
    """DP-SGD, and each scheme with the bands that are best for it at this ε."""
    found = {
        "dp-sgd": Method(
            title="DP-SGD",
            scheme=_poisson,
            strategy=Identity(),
            first_rate=_first_rate(epsilon),
        )
    }
    for name, row in cifar10_bands.best(epsilon).items():
        bands, separation = row["bands"], row["min_sep"]
        found[name] = Method(
            title=f"BandMF, {name}",
            scheme=functools.partial(cifar10_bands.scheme, name, bands, separation),
            strategy=BandMF(bands=bands),
            first_rate=_first_rate(epsilon),
        )
    return found


CONTEST = Contest(
    title="CIFAR-10, VGG, 1,500 steps",
    script=__file__,
    tables={
        "cifar10_fig4": by_method(
            {"dp-sgd": "DP-SGD", **cifar10_bands.TITLES},
            ACCURACY + SEEDS,
            "{@.mean:% .1f} (1)",
            NOT_RUN,
        )
    },
    load=cifar10,
    dataset_size=SIZE,
    network=network,
    methods=methods,
    epsilons=cifar10_bands.epsilons(),
    rates=(0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.6, 1.0),
    tuning_seeds=(100,),
    seeds=(0, 1, 2, 3, 4),
    steps=STEPS,
    epoch_length=EPOCH_LENGTH,
    delta=DELTA,
    max_grad_norm=1.0,
    momentum=0.95,
    schedule="late_linear",
    physical_batch_size=64,
)


if __name__ == "__main__":
    assert __doc__ is not None
    run_contest(CONTEST, __doc__.split("\n\n")[0], HERE / "results/cifar10_fig4")

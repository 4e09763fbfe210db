"""Accuracy by clipping norm R: MNIST, each R with its own best learning rate.

The network of Opacus's MNIST example, 2 epochs of expected batches of 512, Poisson batches and
independent noise, ε = 3, δ = 1e-5, SGD with momentum .9. Learning rates that are tried are the same
multiples of 1 / R each time: what is clipped has the length R, and noise grows with it, so that a
step has the same length. They are chosen on a tenth of the training set, as in utility_mnist.py;
finished runs are kept, and an interrupted contest goes on.

    git clone https://github.com/rasbt/mnist-pngs
    PYTHONPATH=. python scripts/bench/clipping_norm.py --root mnist-pngs
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

from dptrain import Identity, Poisson
from dptrain.sampling import Scheme
from scripts.bench.utility_mnist import BATCH, CONTEST, SIZE
from scripts.utility.command import run_contest
from scripts.utility.contest import ACCURACY, Method

HERE = pathlib.Path(__file__).parent
STEPS = round(2 * SIZE / BATCH)
NORMS = (0.1, 1.0, 10.0, 100.0)
LENGTHS = (0.06, 0.125, 0.25, 0.5, 1.0)


def _poisson(size: int) -> Scheme:
    return Poisson(probability=BATCH / SIZE, dataset_size=size, steps=STEPS)


@functools.cache
def methods(epsilon: float) -> Mapping[str, Method]:
    """A method for each R."""
    return {
        f"R={norm:g}": Method(
            title=f"R = {norm:g}",
            scheme=_poisson,
            strategy=Identity(),
            rates=tuple(length / norm for length in LENGTHS),
            max_grad_norm=norm,
        )
        for norm in NORMS
    }


CLIPPING = dataclasses.replace(
    CONTEST,
    title="MNIST, 2 epochs, by the clipping norm",
    script=__file__,
    tables={
        "clipping_norm": [
            ("R", "{norm:g}"),
            ("its best learning rate", "{lr:g}"),
            ("test accuracy, %", ACCURACY.replace("@.", "")),
        ]
    },
    row_a_method=True,
    methods=methods,
    epsilons=(3.0,),
    steps=STEPS,
)


if __name__ == "__main__":
    assert __doc__ is not None
    run_contest(CLIPPING, __doc__.split("\n\n")[0], HERE / "results/clipping_norm")

"""By how much the rounding of sums moves what one example changes, beyond R.

Two data sets that differ in one example are put through one private step without noise, as one
batch and in microbatches of 64, in float32. What their clipped sums differ by is compared with R,
which is what accountants take it for. The example is left out by a weight of 0 of its loss, as
zero-out has it. The other rows are nearly alike, so that all pull one way and partial sums are
large, and the example pulls against them.

    PYTHONPATH=. python scripts/bench/sum_rounding.py [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import pathlib
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Loading, Poisson, PrivacyEngine
from scripts import results

HERE = pathlib.Path(__file__).parent
R = 1.0
COLUMNS = (
    ("model", "{model}"),
    ("batch", "{batch}"),
    ("rows in a part", "{microbatch}"),
    ("beyond R (of R)", "{beyond R:.1e}"),
    ("at worst", "{worst case:.1e}"),
)


class Weighted(nn.Module):
    """A network and its loss a row, times the row's weight."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Of each row one number."""
        out = self.body(x)
        return weight * out.flatten(1).square().sum(1)


def perceptron() -> tuple[nn.Module, tuple[int, ...]]:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 10)), (200,)


def convolutional() -> tuple[nn.Module, tuple[int, ...]]:
    """Two convolutions; 256 positions are summed up for each image."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1), nn.Flatten()
    )
    return net, (3, 16, 16)


def attention() -> tuple[nn.Module, tuple[int, ...]]:
    """A layer of a transformer over 128 positions."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return layer, (128, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "MLP": perceptron,
    "convolutions": convolutional,
    "transformer layer": attention,
}


def clipped_sum(name: str, batch: int, micro: int | None, *, present: bool) -> torch.Tensor:
    """Σ_i clip(g_i, R) of the batch, flattened, in float64."""
    torch.manual_seed(1)
    body, shape = MODELS[name]()
    model = Weighted(body)
    x = torch.randn(1, *shape) + 1e-3 * torch.randn(batch, *shape)
    x[0] = -x[1]
    weight = torch.ones(batch)
    weight[0] = 1.0 if present else 0.0
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=TensorDataset(x, weight),
        scheme=Poisson(probability=1.0, dataset_size=batch, steps=1),
        noise_multiplier=0.0,
        max_grad_norm=R,
        gradients=Gradients(loss="sum"),
        loading=Loading(max_physical_batch_size=micro),
    )
    found: list[torch.Tensor] = []
    add = private.optimizer.add_noise

    def look() -> None:
        found.append(
            torch.cat([p.summed_grad.flatten().double() for p in private.optimizer.params])
        )
        add()

    private.optimizer.add_noise = look  # type: ignore[method-assign]
    for rows, weights in private.loader:
        private.optimizer.zero_grad()
        private.module(rows, weights).sum().backward()
        private.optimizer.step()
    return found[0]


def worst(rows: int) -> float:
    """2 γ_{m-1} m: what m rows of norm R may at worst add to R in a float32 sum."""
    unit = 2.0**-24
    return 2 * rows * (rows - 1) * unit / (1 - (rows - 1) * unit)


def main() -> None:
    """Print a line a case, and write all of them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, default=HERE / "results/sum_rounding.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in MODELS:
        for batch in (64, 512):
            for micro in (None, 64) if batch > 64 else (None,):
                with_it, without = (
                    clipped_sum(name, batch, micro, present=present) for present in (True, False)
                )
                moved = float((with_it - without).norm()) / R
                assert math.isfinite(moved)
                rows.append(
                    {
                        "model": name,
                        "batch": batch,
                        "microbatch": micro or batch,
                        "beyond R": moved - 1.0,
                        "worst case": worst(micro or batch),
                    }
                )
    table = results.Table(COLUMNS, rows)
    results.publish(options.json, {"sum_rounding": table}, script=__file__)


if __name__ == "__main__":
    main()

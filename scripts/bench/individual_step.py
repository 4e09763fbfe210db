"""Time of a training step with an individual filter against the same step without one.

Same model, same data, same batches (equal seeds); clipping, noise, update and the filter's
bookkeeping of all N examples included, data loading left out. The two sides take turns within one
process. A filter may do work at some steps only, so besides the median over rounds of the ratio
within a round the ratio of total times is printed. The noise is chosen so that full norms spend
their budget half-way: how budgets run out, which is when a filter has most to do, is part of it.
Mode bookkeeping, the fastest step there is here, shows a filter's share at its largest.

    PYTHONPATH=. python scripts/bench/individual_step.py [--device cpu] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Identity, Loading, MatrixMechanism, Poisson, PrivacyEngine
from dptrain.individual import GDPFilter, IndividualFilter, RenyiFilter
from recipes.models import vgg
from scripts import results

TARGET = {"target_epsilon": 8.0, "target_delta": 1e-5, "max_steps": 100_000}
FILTERS: dict[str, Callable[[], IndividualFilter]] = {
    "GDP": lambda: GDPFilter(**TARGET),
    "Rényi": lambda: RenyiFilter(**TARGET),
    "Rényi, personal clipping": lambda: RenyiFilter(**TARGET, personal_clipping=1.5),
}
COLUMNS = (
    ("model, N, batch", "{model}, {examples:,}, {batch:,}"),
    ("filter", "{filter}"),
    ("step without", "{seconds_without:time}"),
    ("median ratio", "{ratio:.3f}"),
    ("whole run", "{ratio_of_totals:.3f}"),
)
# Model, examples N, expected batch size, rounds and the filters that apply.
CASES: tuple[tuple[str, int, int, int, tuple[str, ...]], ...] = (
    ("mlp", 8192, 8192, 100, ("GDP",)),
    ("mlp", 60_000, 1024, 1000, tuple(FILTERS)[1:]),
    ("vgg", 60_000, 256, 60, tuple(FILTERS)[1:]),
)


def noise_for(scheme: Poisson) -> float:
    """The least σ, within 1 %, at which full norms last for half of the steps (GDP or Rényi)."""
    low, high = 0.2, 100.0
    individual = FILTERS["GDP" if scheme.rate == 1 else "Rényi"]()
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=middle)
        enough = individual.full_norm_steps(mechanism) >= scheme.steps / 2
        low, high = (low, middle) if enough else (middle, high)
    return high


def build(name: str, examples: int) -> tuple[nn.Module, TensorDataset]:
    """The model and random data for it."""
    torch.manual_seed(0)
    labels = torch.randint(0, 10, (examples,))
    if name == "vgg":
        images = torch.randn(512, 3, 32, 32).repeat(examples // 512 + 1, 1, 1, 1)[:examples]
        return vgg(in_channels=3, classes=10), TensorDataset(images, labels)
    mlp = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    return mlp, TensorDataset(torch.randn(examples, 784), labels)


class Side:
    """One run whose steps are timed one at a time."""

    def __init__(
        self, name: str, examples: int, batch: int, steps: int, device: str, which: str | None
    ) -> None:
        model, data = build(name, examples)
        model.to(device)
        scheme = Poisson.for_batch_size(batch_size=batch, dataset_size=examples, steps=steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private = PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
                data=data,
                scheme=scheme,
                noise_multiplier=noise_for(scheme),
                max_grad_norm=1.0,
                seed=0,
                individual=None if which is None else FILTERS[which](),
                gradients=Gradients(mode="bookkeeping"),
                loading=Loading(max_physical_batch_size=1024),
            )
        private.end_early()
        self.module, self.optimizer, loader = private
        self.loss = nn.CrossEntropyLoss()
        self.batches = iter(loader)
        self.device = device

    def step(self) -> float:
        """Seconds of the next logical step, all its microbatches."""
        total = 0.0
        while True:
            x, y = (t.to(self.device) for t in next(self.batches))
            self._wait()
            start = time.perf_counter()
            self.optimizer.zero_grad()
            self.loss(self.module(x), y).backward()
            self.optimizer.step()
            self._wait()
            total += time.perf_counter() - start
            if self.optimizer.at_step_boundary:
                return total

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(
    name: str, examples: int, batch: int, rounds: int, which: str, device: str
) -> dict[str, Any]:
    """One row: times in seconds, and ratios."""
    steps = rounds + 2
    sides = [Side(name, examples, batch, steps, device, each) for each in (None, which)]
    for side in sides:  # allocations of the first steps are not what is compared
        side.step()
        side.step()
    plain, filtered = [], []
    for turn in range(rounds):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        took = {each: sides[each].step() for each in order}
        plain.append(took[0])
        filtered.append(took[1])
    return {
        "model": name.upper(),
        "examples": examples,
        "batch": batch,
        "filter": which,
        "rounds": rounds,
        "seconds_without": statistics.median(plain),
        "seconds_with": statistics.median(filtered),
        "ratio": statistics.median(f / p for f, p in zip(filtered, plain, strict=True)),
        "ratio_of_totals": sum(filtered) / sum(plain),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, help="instead of those of the cases")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    rows = []
    for name, examples, batch, rounds, filters in CASES:
        for which in filters:
            row = measure(name, examples, batch, args.rounds or rounds, which, args.device)
            gc.collect()
            rows.append(row)
    results.publish(
        args.json,
        {"individual_step": results.Table(COLUMNS, rows)},
        script=__file__,
        machine=results.machine("torch", device=args.device),
    )


if __name__ == "__main__":
    main()

"""Test accuracy at equal privacy: stock Opacus, ours without and with correlated noise.

Three ways to train one small convolutional net on scikit-learn's digits (8×8 images, 1,437 for
training, 360 held out), with equal expected batch size, number of steps, clipping norm and δ:

  opacus    stock Opacus DP-SGD, Poisson batches, its PRV accountant
  identity  dptrain, Identity + Poisson
  bandmf    dptrain, BandMF + MinSep, noise certified by estimate-verify-release

The learning rate of each (ε, method) is the best of one grid on seeds that are not used again
(the tuning itself is not private, for none of the three); then five fresh seeds are run. Finished
runs are kept in the results file, so an interrupted benchmark goes on where it stopped.

    PYTHONPATH=. python scripts/bench/utility_digits.py [--processes 2] [--results FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import multiprocessing
import pathlib
import sys
import warnings
from typing import Any

import opacus
import torch
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from dptrain import BandMF, Identity, MatrixMechanism, MinSep, Poisson, PrivacyEngine, calibrate
from recipes.data import digits
from recipes.models import vgg
from scripts.utility.figure import draw
from scripts.utility.results import interval

HERE = pathlib.Path(__file__).parent
EPSILONS = (1.0, 2.0, 4.0, 8.0)
METHODS = ("opacus", "identity", "bandmf")
RATES = (0.0075, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5)
TUNING_SEEDS = (100, 101)
SEEDS = (0, 1, 2, 3, 4)
STEPS, BATCHES_PER_EPOCH, MIN_SEP, BANDS = 300, 15, 10, 10
MAX_GRAD_NORM, MOMENTUM = 1.0, 0.9


@functools.cache
def split() -> Any:
    """The data, once a process."""
    return digits(image_size=8)


def size() -> int:
    """N."""
    return len(split().train)


def delta() -> float:
    """1 / (2N)."""
    return 1 / (2 * size())


def network(seed: int) -> nn.Module:
    """The net with the seed's initial weights."""
    torch.manual_seed(seed)
    return vgg(in_channels=1, classes=10, image_size=8, channels=(16, 32), groups=4, hidden=32)


def accuracy(model: nn.Module) -> float:
    """On the held-out images."""
    model.eval()
    x, y = split().test.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def train_opacus(noise: float, rate: float, seed: int) -> float:
    """Stock DP-SGD for STEPS batches of Opacus's own Poisson loader."""
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    loader = DataLoader(split().train, batch_size=math.ceil(size() / BATCHES_PER_EPOCH))
    assert len(loader) == BATCHES_PER_EPOCH
    generator = torch.Generator().manual_seed(seed + 1)
    private, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=MAX_GRAD_NORM,
        noise_generator=generator,
    )
    loss, steps = nn.CrossEntropyLoss(), 0
    while steps < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            if len(x):
                loss(private(x), y).backward()
                optimizer.step()
            steps += 1
            if steps == STEPS:
                break
    return accuracy(model)


def train_ours(mechanism: MatrixMechanism, rate: float, seed: int) -> float:
    """The same with the engine."""
    model = network(seed)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM),
        data=split().train,
        mechanism=mechanism,
        max_grad_norm=MAX_GRAD_NORM,
        seed=seed,
    )
    loss = nn.CrossEntropyLoss()
    wrapped, optimizer, loader = private
    for x, y in loader:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()
    return accuracy(model)


def noises() -> dict[str, Any]:
    """What every (method, ε) adds: σ for Opacus, a mechanism for ours."""
    found: dict[str, Any] = {}
    rate = 1 / BATCHES_PER_EPOCH
    for epsilon in tqdm(EPSILONS, desc="calibrating", unit="ε"):
        found[f"opacus {epsilon:g}"] = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta(),
            sample_rate=rate,
            steps=STEPS,
            accountant="prv",
        )
        poisson = Poisson(probability=rate, dataset_size=size(), steps=STEPS)
        separated = MinSep.for_batch_size(
            batch_size=size() * rate, dataset_size=size(), min_sep=MIN_SEP, steps=STEPS
        )
        for name, scheme, strategy in (
            ("identity", poisson, Identity()),
            ("bandmf", separated, BandMF(bands=BANDS)),
        ):
            calibration = calibrate(
                scheme=scheme, strategy=strategy, epsilon=epsilon, delta=delta()
            )
            found[f"{name} {epsilon:g}"] = calibration.mechanism.to_dict()
    return found


def run(job: tuple[str, Any, float, int]) -> float:
    """One training run, in a worker process with one thread."""
    method, noise, rate, seed = job
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if method == "opacus":
        return train_opacus(noise, rate, seed)
    return train_ours(MatrixMechanism.from_dict(noise), rate, seed)


class Results:
    """Finished runs in a JSON file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.value: dict[str, Any] = {"runs": {}}
        if path.exists():
            self.value = json.loads(path.read_text())

    def save(self) -> None:
        """Write the file anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.value, indent=1, sort_keys=True) + "\n")

    def complete(self, jobs: list[tuple[str, float, float, int]], pool: Any) -> None:
        """Run the jobs (method, ε, learning rate, seed) that are not in the file."""
        keys = [f"{m} {e:g} lr={r:g} seed={s}" for m, e, r, s in jobs]
        missing = [(k, j) for k, j in zip(keys, jobs, strict=True) if k not in self.value["runs"]]
        noise = self.value["noise"]
        work = [(m, noise[f"{m} {e:g}"], r, s) for _, (m, e, r, s) in missing]
        done = tqdm(pool.imap(run, work), total=len(work), desc="training", unit="run")
        for (key, _), result in zip(missing, done, strict=True):
            self.value["runs"][key] = result
            self.save()

    def scores(self, method: str, epsilon: float, rate: float, seeds: tuple[int, ...]) -> list:
        """Accuracies of these runs."""
        return [self.value["runs"][f"{method} {epsilon:g} lr={rate:g} seed={s}"] for s in seeds]


def main() -> None:
    """Calibrate, tune, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--results", type=pathlib.Path, default=HERE / "results/utility_digits.json"
    )
    parser.add_argument("--plot", type=pathlib.Path, default=HERE / "results/utility_digits.png")
    options = parser.parse_args()
    results = Results(options.results)
    if "noise" not in results.value:
        results.value["noise"] = noises()
        results.save()
    pairs = [(m, e) for e in EPSILONS for m in METHODS]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results.complete(
            [(m, e, r, s) for m, e in pairs for r in RATES for s in TUNING_SEEDS], pool
        )
        best = {
            (m, e): max(RATES, key=lambda r: sum(results.scores(m, e, r, TUNING_SEEDS)))
            for m, e in pairs
        }
        results.complete([(m, e, best[m, e], s) for m, e in pairs for s in SEEDS], pool)
    table = {}
    for m, e in pairs:
        mean, half = interval(results.scores(m, e, best[m, e], SEEDS))
        noise = results.value["noise"][f"{m} {e:g}"]
        sigma = noise if m == "opacus" else noise["noise_multiplier"]
        table[f"{m} {e:g}"] = {"mean": mean, "half_width": half, "lr": best[m, e], "sigma": sigma}
    results.value["table"] = table
    results.value["versions"] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "opacus": opacus.__version__,
    }
    results.save()
    draw(
        table,
        {
            "opacus": "Opacus DP-SGD",
            "identity": "dptrain Identity + Poisson",
            "bandmf": f"dptrain BandMF({BANDS}) + MinSep({MIN_SEP})",
        },
        epsilons=EPSILONS,
        delta=delta(),
        title=f"Digits, {STEPS} steps, batch {size() / BATCHES_PER_EPOCH:.0f}, 5 seeds, 95 %",
        path=options.plot,
    )
    print("| ε | " + " | ".join(METHODS) + " |\n|---|" + "---|" * len(METHODS))
    for e in EPSILONS:
        cells = [table[f"{m} {e:g}"] for m in METHODS]
        text = [f"{100 * c['mean']:.1f} ± {100 * c['half_width']:.1f}" for c in cells]
        print(f"| {e:g} | " + " | ".join(text) + " |")


if __name__ == "__main__":
    main()

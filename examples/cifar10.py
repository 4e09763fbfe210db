"""CIFAR-10 with correlated noise: b-min-sep batches, BandMF, momentum, resumable.

    python -m examples.cifar10 CIFAR-10-dataset --epochs 10 --epsilon 8 --checkpoint run.pt

The folder is one that recipes.data.cifar10 reads: the original batches, the hub's files, or class
folders ``train/airplane/*.png`` ... Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader

import dptrain
from dptrain import BandMF, Identity, Loading, MinSep, Poisson, PrivacyEngine
from recipes.data import cifar10


def network(classes: int) -> nn.Module:
    """Four convolutions and their pooled mean, as in the tutorials of Opacus; no BatchNorm."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def accuracy(model: nn.Module, data: DataLoader) -> float:
    """The share of images that are named rightly."""
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).float() for x, y in data]
    model.train()
    return float(torch.cat(right).mean())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("data", type=pathlib.Path, help="folder of the data set")
    found.add_argument("--epochs", type=int, default=20)
    found.add_argument("-b", "--batch-size", type=int, default=1000, help="expected batch size")
    found.add_argument("--lr", type=float, default=0.3)
    found.add_argument("--momentum", type=float, default=0.9)
    found.add_argument("--bands", type=int, default=8, help="of the noise; 1 is plain DP-SGD")
    noise = found.add_mutually_exclusive_group()
    noise.add_argument("--epsilon", type=float, help="target, for which σ is found (8)")
    noise.add_argument("--sigma", type=float, help="noise multiplier, instead of a target")
    found.add_argument("--delta", type=float, default=1e-5, help="below 1/(training images)")
    found.add_argument("-c", "--max-per-sample-grad-norm", type=float, default=1.0)
    found.add_argument("--max-physical-batch-size", type=int, default=250)
    found.add_argument("--checkpoint", type=pathlib.Path, help="go on from here; private file")
    return found


def main(argv: Sequence[str] | None = None) -> float:
    """Train, report and return the test accuracy."""
    options = parser().parse_args(argv)
    split = cifar10(options.data)
    size = len(split.train)
    epoch = max(1, size // options.batch_size)
    sizes = {"batch_size": options.batch_size, "dataset_size": size}
    sizes["steps"] = options.epochs * epoch
    correlated = options.bands > 1
    model = dptrain.fix(network(split.classes))  # leaves it alone, unless you put a BatchNorm in
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum),
        data=DataLoader(split.train),
        scheme=(
            MinSep.for_batch_size(min_sep=options.bands, **sizes)
            if correlated
            else Poisson.for_batch_size(**sizes)
        ),
        strategy=BandMF(bands=options.bands) if correlated else Identity(),
        max_grad_norm=options.max_per_sample_grad_norm,
        noise_multiplier=options.sigma,
        target_epsilon=None if options.sigma is not None else options.epsilon or 8.0,
        target_delta=options.delta,
        loading=Loading(
            max_physical_batch_size=options.max_physical_batch_size, steps_per_epoch=epoch
        ),
    )
    if options.checkpoint is not None and options.checkpoint.exists():
        private.load_state_dict(torch.load(options.checkpoint, weights_only=True))
    model, optimizer, loader = private
    test = DataLoader(split.test, batch_size=1000)
    while private.steps_executed < loader.steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        print(f"step {private.steps_executed}: test accuracy {accuracy(model, test):.4f}")
        if options.checkpoint is not None:
            torch.save(private.state_dict(), options.checkpoint)
    print(private.guarantee())
    return accuracy(model, test)


if __name__ == "__main__":
    main()

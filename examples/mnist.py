"""MNIST by DP-SGD: the small convolutional network of many tutorials, on a folder of digits.

    python -m examples.mnist mnist-pngs --epochs 3 --epsilon 3

The folder is one that recipes.data.mnist reads: the original files, the hub's, or class folders
``train/0/*.png`` ... ``test/9/*.png``. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader

from dptrain import Loading, PrivacyEngine
from dptrain.reporting import privacy_report, save_released
from recipes.data import mnist


def network() -> nn.Module:
    """Two convolutions and two dense layers, 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


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
    found.add_argument("--epochs", type=int, default=8)
    found.add_argument("-b", "--batch-size", type=int, default=512, help="expected batch size")
    found.add_argument("--lr", type=float, default=0.5)
    noise = found.add_mutually_exclusive_group()
    noise.add_argument("--epsilon", type=float, help="target, for which σ is found (3)")
    noise.add_argument("--sigma", type=float, help="noise multiplier, instead of a target")
    found.add_argument("--delta", type=float, default=1e-5, help="below 1/(training images)")
    found.add_argument("-c", "--max-per-sample-grad-norm", type=float, default=1.0)
    found.add_argument("--microbatches", type=int, help="parts of a batch, to save memory")
    found.add_argument("--save", type=pathlib.Path, help="where to leave weights and guarantee")
    return found


def main(argv: Sequence[str] | None = None) -> float:
    """Train, report and return the test accuracy."""
    options = parser().parse_args(argv)
    split = mnist(options.data)
    model = network()
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=options.lr),
        data=DataLoader(split.train, batch_size=options.batch_size, shuffle=True),
        epochs=options.epochs,
        max_grad_norm=options.max_per_sample_grad_norm,
        noise_multiplier=options.sigma,
        target_epsilon=None if options.sigma is not None else options.epsilon or 3.0,
        target_delta=options.delta,
        loading=Loading(microbatches=options.microbatches),
    )
    model, optimizer, loader = private
    test = DataLoader(split.test, batch_size=1024)
    for epoch in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: test accuracy {accuracy(model, test):.4f}")
    guarantee = private.guarantee()
    print(guarantee)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        save_released(private, options.save / "model.safetensors")
        privacy_report(guarantee, options.save)
    return accuracy(model, test)


if __name__ == "__main__":
    main()

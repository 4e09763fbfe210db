"""MNIST in Lightning: an ordinary LightningModule, made private by one callback.

    python -m examples.lightning_mnist mnist-pngs --epochs 3 --epsilon 3

The folder is one that recipes.data.mnist reads. The checkpoint that is left has weights only, and
may be given away.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from dptrain import Loading
from dptrain.integrations.lightning import PrivateCallback
from recipes.data import mnist


class Digits(pl.LightningModule):
    """Knows nothing of privacy."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 1, 28, 28) to (rows, 10)."""
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean loss of a batch."""
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)  # self(x): what dptrain can look at

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Accuracy on the test images."""
        x, y = batch
        self.log("val_accuracy", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


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
    found.add_argument("--devices", type=int, default=1, help="processes (strategy ddp)")
    found.add_argument("--out", type=pathlib.Path, default=pathlib.Path("lightning_mnist"))
    return found


def main(argv: Sequence[str] | None = None) -> float:
    """Train, report and return the test accuracy."""
    options = parser().parse_args(argv)
    split = mnist(options.data)
    private = PrivateCallback(
        max_grad_norm=options.max_per_sample_grad_norm,
        noise_multiplier=options.sigma,
        target_epsilon=None if options.sigma is not None else options.epsilon or 3.0,
        target_delta=options.delta,
        loading=Loading(microbatches=options.microbatches),
    )
    weights = ModelCheckpoint(options.out, filename="weights", save_weights_only=True)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        callbacks=[private, weights],
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        logger=False,
    )
    module = Digits(options.lr)
    trainer.fit(
        module,
        DataLoader(split.train, batch_size=options.batch_size, shuffle=True),
        DataLoader(split.test, batch_size=1024),
    )
    if trainer.is_global_zero:
        print(private.guarantee())
    return float(trainer.callback_metrics["val_accuracy"])


if __name__ == "__main__":
    main()

"""A table of scikit-learn's, with choices made on a public part of it.

    python -m examples.tabular --epochs 20 --epsilon 2

The breast cancer data set (569 rows, 30 columns, with scikit-learn) is cut in three: a public
part, on which columns are scaled and learning rates are compared without any privacy; the private
part, which is trained on once; and a test part. Whatever is chosen on the private part itself, the
scaling of its columns included, would have to be paid for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dptrain import PrivacyEngine


def network(columns: int) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(columns, 16), nn.Tanh(), nn.Linear(16, 2))


def parts(seed: int) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Public, private and test rows; scaled by what the public ones are."""
    table = load_breast_cancer()
    x, y = table.data.astype(np.float32), table.target.astype(np.int64)
    public, rest = train_test_split(
        np.arange(len(y)), train_size=0.2, random_state=seed, stratify=y
    )
    private, test = train_test_split(rest, test_size=0.25, random_state=seed, stratify=y[rest])
    mean, spread = x[public].mean(0), x[public].std(0)
    scaled = ((x - mean) / spread).clip(-5, 5)
    public_part, private_part, test_part = (
        TensorDataset(torch.from_numpy(scaled[rows]), torch.from_numpy(y[rows]))
        for rows in (public, private, test)
    )
    return public_part, private_part, test_part


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of rows that are told rightly."""
    x, y = data.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def best_rate(public: TensorDataset, rates: Sequence[float], epochs: int) -> float:
    """The learning rate that is best on the second half of the public part, without noise."""
    half = len(public) // 2
    (x, y), found = public.tensors, {}
    for rate in rates:
        torch.manual_seed(0)
        model = network(x.shape[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(epochs):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:half]), y[:half]).backward()
            optimizer.step()
        found[rate] = accuracy(model, TensorDataset(x[half:], y[half:]))
        print(f"public part: lr {rate:g} has accuracy {found[rate]:.3f}")
    return max(found, key=lambda rate: found[rate])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--epochs", type=int, default=20)
    found.add_argument("-b", "--batch-size", type=int, default=64, help="expected batch size")
    found.add_argument("--lr", type=float, nargs="+", default=[0.1, 0.3, 1.0], help="to compare")
    noise = found.add_mutually_exclusive_group()
    noise.add_argument("--epsilon", type=float, help="target, for which σ is found (2)")
    noise.add_argument("--sigma", type=float, help="noise multiplier, instead of a target")
    found.add_argument("--delta", type=float, default=1e-3, help="below 1/(private rows)")
    found.add_argument("-c", "--max-per-sample-grad-norm", type=float, default=1.0)
    found.add_argument("--split", type=int, default=0, help="seed of the three parts; public")
    return found


def main(argv: Sequence[str] | None = None) -> float:
    """Train, report and return the test accuracy."""
    options = parser().parse_args(argv)
    public, train, test = parts(options.split)
    rate = best_rate(public, options.lr, options.epochs)
    model = network(train.tensors[0].shape[1])
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        data=DataLoader(train, batch_size=options.batch_size, shuffle=True),
        epochs=options.epochs,
        max_grad_norm=options.max_per_sample_grad_norm,
        noise_multiplier=options.sigma,
        target_epsilon=None if options.sigma is not None else options.epsilon or 2.0,
        target_delta=options.delta,
    )
    model, optimizer, loader = private
    for _ in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    print(private.guarantee())
    print(f"public part {accuracy(model, public):.3f}, test part {accuracy(model, test):.3f}")
    return accuracy(model, test)


if __name__ == "__main__":
    main()

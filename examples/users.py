"""Fine-tune a text classifier so that each user is protected, with all they wrote.

    python -m examples.users posts.csv --weights public.safetensors --steps 200 --epsilon 8

The table has the columns user, text and label (a whole number from 0). A text of several users
names them all, separated by a semicolon. Who wrote what is public in this model of privacy; what
the texts say is not. ``--weights`` are those of an earlier run on public data, or none.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import zlib
from collections.abc import Sequence

import torch
from safetensors.torch import load_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dptrain import AttributionGraph, BandMF, PrivacyEngine, UserMinSep
from dptrain.reporting import save_released

BUCKETS, LONGEST = 2048, 64


def read(table: pathlib.Path) -> tuple[TensorDataset, list[list[str]]]:
    """The rows as numbers of words, padded by 0, with labels; and the users of each."""
    words, labels, users = [], [], []
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            # A hash stands for a vocabulary, which would have to come from public text.
            found = [1 + zlib.crc32(word.encode()) % BUCKETS for word in row["text"].split()]
            words.append((found + [0] * LONGEST)[:LONGEST])
            labels.append(int(row["label"]))
            users.append(sorted({name.strip() for name in row["user"].split(";")}))
    return TensorDataset(torch.tensor(words), torch.tensor(labels)), users


class Classifier(nn.Module):
    """The mean of a text's word vectors, and two dense layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(BUCKETS + 1, 32, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, classes))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, words) to (rows, classes)."""
        there = (tokens != 0).sum(1, keepdim=True).clamp(min=1)
        return self.head(self.words(tokens).sum(1) / there)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("table", type=pathlib.Path, help="CSV file: user, text, label")
    found.add_argument("--classes", type=int, default=2)
    found.add_argument("--weights", type=pathlib.Path, help="of a model trained on public data")
    found.add_argument("--steps", type=int, default=200)
    found.add_argument("-b", "--batch-size", type=int, default=64, help="expected, in texts")
    found.add_argument("-k", "--texts-per-user", type=int, default=4, help="more are left out")
    found.add_argument("--min-sep", type=int, default=4, help="steps between two of a user's")
    found.add_argument("--lr", type=float, default=0.5)
    noise = found.add_mutually_exclusive_group()
    noise.add_argument("--epsilon", type=float, help="target, for which σ is found (8)")
    noise.add_argument("--sigma", type=float, help="noise multiplier, instead of a target")
    found.add_argument("--delta", type=float, default=1e-5, help="below 1/(users)")
    found.add_argument("-c", "--max-per-sample-grad-norm", type=float, default=1.0)
    found.add_argument("--save", type=pathlib.Path, help="where to leave the weights")
    return found


def main(argv: Sequence[str] | None = None) -> str:
    """Train, and return the guarantee in words."""
    options = parser().parse_args(argv)
    texts, users = read(options.table)
    bounded = AttributionGraph.from_lists(users).bound(options.texts_per_user, seed=0)
    print(bounded.statistics().table())
    model = Classifier(options.classes)
    if options.weights is not None:
        load_model(model, options.weights)
        model.words.weight.requires_grad_(False)  # fine-tuning: the head alone
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=options.lr
        ),
        data=DataLoader(bounded.subset(texts)),
        scheme=UserMinSep.for_batch_size(
            graph=bounded.graph,
            batch_size=options.batch_size,
            min_sep=options.min_sep,
            steps=options.steps,
        ),
        strategy=BandMF(bands=options.min_sep),
        max_grad_norm=options.max_per_sample_grad_norm,
        noise_multiplier=options.sigma,
        target_epsilon=None if options.sigma is not None else options.epsilon or 8.0,
        target_delta=options.delta,
    )
    model, optimizer, loader = private
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    said = str(private.guarantee())
    print(said)
    if options.save is not None:
        save_released(private, options.save)
    return said


if __name__ == "__main__":
    main()

"""A small dataset, two schemes, and loaders over them recorded batch by batch."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from dptrain.sampling import MinSep, Poisson, PrivateLoader

N = 60
SCHEME = MinSep.for_batch_size(batch_size=10, dataset_size=N, min_sep=3, steps=12)
RARE = Poisson(probability=0.01, dataset_size=N, steps=40)  # P(empty) = 0.55 a step


class Augmented(Dataset):
    """Row i: its index, and noise from every global generator that augmentations draw from."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002
        return index, torch.tensor(noise, dtype=torch.float64)


class Untouchable(Dataset):
    def __init__(self, length=N):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        raise AssertionError("data was touched")


def dataset():
    return TensorDataset(torch.arange(N), torch.arange(N, dtype=torch.float32)[:, None] + 1)


def make(data=None, scheme=SCHEME, seed=2**127 + 5, **options):
    return PrivateLoader(
        dataset=dataset() if data is None else data, scheme=scheme, seed=seed, **options
    )


def record(loader):
    """One iteration as (step, part, parts, rows); data and metadata are held against each other."""
    found = []
    for batch in loader:
        micro, rows = loader.current, batch[0].tolist()
        if len(micro.indices):
            assert rows == micro.indices.tolist()
        assert len(micro.weights) == micro.rows == len(rows)
        assert micro.weights.dtype == np.float32
        found.append((micro.step, micro.part, micro.parts, micro.indices.tolist()))
    return found


def logical(found):
    """Rows of every logical step in a record."""
    steps = {}
    for step, _, _, rows in found:
        steps.setdefault(step, []).extend(rows)
    return steps


def planned(scheme, seed=2**127 + 5):
    return {step: batch.tolist() for step, batch in enumerate(scheme.stream(seed))}

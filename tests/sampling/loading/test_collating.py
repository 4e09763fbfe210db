"""A collate function that mixes the rows of a batch is refused; one that does not is not."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dptrain import Gradients, Poisson, PrivacyEngine
from dptrain.sampling import PrivateLoader
from dptrain.sampling.loading.collating import CollateCheck

N = 24


class Sequences(Dataset):
    """Of lengths 3 to 5, several of each."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.ids = [torch.randint(1, 9, (3 + k % 3,), generator=generator) for k in range(N)]

    def __len__(self):
        return N

    def __getitem__(self, k):
        return self.ids[k], k % 2


def _points():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, 4, generator=generator), torch.arange(N) % 3)


def _mixup(samples):
    x, y = default_collate(samples)
    share = float(torch.rand(()))
    return share * x + (1 - share) * x.roll(1, 0), y


def _mixup_now_and_then(samples):
    return _mixup(samples) if torch.rand(()) < 0.5 else default_collate(samples)


def _labels_smoothed_over_the_batch(samples):
    x, y = default_collate(samples)
    y = nn.functional.one_hot(y, 3).double()
    return x, 0.9 * y + 0.1 * y.mean(0)


def _cutmix(samples):
    x, y = default_collate(samples)
    x = x.clone()
    order = torch.randperm(len(x))
    x[:, 2:] = x[order, 2:]
    return {"x": x, "y": y, "other": y[order]}


def _standardised(samples):
    x = np.stack([s[0].numpy() for s in samples])
    return (x - x.mean(0)) / x.std(0), default_collate([s[1] for s in samples])


def _weights_by_counts(samples):
    x, y = default_collate(samples)
    return x, y, 1 / torch.bincount(y, minlength=3)[y]


MIXERS = [
    _mixup,
    _mixup_now_and_then,
    _labels_smoothed_over_the_batch,
    _cutmix,
    _standardised,
    _weights_by_counts,
]


def _padded(samples):
    return pad_sequence([s[0] for s in samples], batch_first=True), default_collate(
        [s[1] for s in samples]
    )


def _positions_first(samples):
    return pad_sequence([s[0] for s in samples]), [s[1] for s in samples]


def _longest_first(samples):
    return _padded(sorted(samples, key=lambda s: -len(s[0])))


def _packed(samples):
    ids = sorted((s[0] for s in samples), key=len, reverse=True)
    return pack_sequence(ids), default_collate([s[1] for s in samples])


def _masked(samples):
    ids, y = _padded(samples)
    hidden = torch.rand(ids.shape) < 0.3
    return {"ids": torch.where(hidden, 0, ids), "labels": torch.where(hidden, ids, -100), "y": y}


def _masked_by_words(samples):
    """Draws as many numbers as there are large ids: what the next row hides follows from them."""
    ids, y = _padded(samples)
    for row in ids:
        for k in (row > 4).nonzero():
            row[k] = 0 if random.random() < 0.5 else row[k]
    return ids, y


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    tokens: int


def _counted(samples):
    ids, _ = _padded(samples)
    return Batch(ids, int((ids > 0).sum()))  # no row


def _two_views(samples):
    ids, y = _padded(samples)
    return torch.stack([ids, ids.flip(1)], 1).flatten(0, 1), y


def _popping(samples):
    for k, s in enumerate(samples):
        samples[k] = s[:1]
    return _padded([(s[0], 0) for s in samples])


APART = [
    default_collate,
    _padded,
    _positions_first,
    _longest_first,
    _packed,
    _masked,
    _masked_by_words,
    _counted,
    _two_views,
    _popping,
]


@pytest.mark.parametrize("collate", MIXERS)
def test_what_mixes_rows_is_refused(collate):
    check, data = CollateCheck(collate), _points()

    def first_batches():
        for start in range(4):
            check.look_at([data[k] for k in range(start, start + 5)])

    with pytest.raises(RuntimeError, match=r"mixes the examples.*probe='off'"):
        first_batches()


@pytest.mark.parametrize("collate", APART)
def test_what_keeps_rows_apart_is_not(collate):
    check, data = CollateCheck(collate), Sequences()
    for start in range(12):
        check.look_at([data[k] for k in range(start, start + 2 + start % 5)])
    if collate in (_padded, _longest_first, _masked, _counted, _two_views, _popping):
        assert check._apart == 2  # it could tell


@pytest.mark.parametrize("probe", ["shapes", "first", "off"])
def test_a_run_refuses_before_anything_is_released(probe):
    """One example in a mixed row moved two others' gradients, so that a release moved past 2R."""
    model = nn.Linear(4, 3)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=DataLoader(_points(), collate_fn=_mixup),
        scheme=Poisson(probability=0.5, dataset_size=N, steps=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        gradients=Gradients(probe=probe),
    )

    def run():
        module, optimizer, loader = private
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

    if probe == "off":
        run()
        assert "(probe='off')" in " ".join(private.guarantee(1e-3).notes)
        return
    with pytest.raises(RuntimeError, match="mixes the examples"):
        run()
    assert private.steps_executed == 0


class Counting:
    """Has a state of its own, which shows in the batches."""

    def __init__(self):
        self.calls, self.generator = 0, np.random.default_rng(0)

    def __call__(self, samples):
        self.calls += 1
        ids, y = _padded(samples)
        return ids + self.calls, y + self.generator.random() + torch.rand(len(y))


def test_batches_are_the_same_with_and_without_the_check():
    scheme = Poisson(probability=0.3, dataset_size=N, steps=6)

    def batches(check):
        loader = PrivateLoader(
            dataset=Sequences(),
            scheme=scheme,
            seed=3,
            collate_fn=Counting(),
            check_collate=check,
        )
        return list(loader)

    for ours, theirs in zip(batches(True), batches(False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

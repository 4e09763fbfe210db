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
            check.look_at([data[k] for k in range(start, start + 5)], seed=start)

    with pytest.raises(RuntimeError, match=r"mixes the examples.*mix only views of one example$"):
        first_batches()


@pytest.mark.parametrize("collate", APART)
def test_what_keeps_rows_apart_is_not(collate):
    check, data = CollateCheck(collate), Sequences()
    for start in range(12):
        check.look_at([data[k] for k in range(start, start + 2 + start % 5)], seed=start)
    if collate in (_padded, _longest_first, _masked, _counted, _two_views, _popping):
        assert check._apart >= 8  # it could tell


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


def _mixup_of(probability):
    def collate(samples):
        return _mixup(samples) if random.random() < probability else default_collate(samples)

    return collate


def test_what_mixes_now_and_then_is_found_by_seeds_of_the_run():
    """One batch in five: 24 coins in the first eight batches miss it with .8^24 = .5 %."""
    data, found = _points(), 0
    for run in range(40):
        check = CollateCheck(_mixup_of(0.2))
        try:
            for step in range(8):
                check.look_at([data[k] for k in range(5)], seed=1000 * run + step)
        except RuntimeError:
            found += 1
    assert found >= 37


def test_what_does_not_mix_under_known_seeds_is_found():
    """Seeds of the check must not be told apart from those of the run."""
    known = set()
    for seed in range(3):
        random.seed(seed)
        known.add(random.random())

    def collate(samples):
        return default_collate(samples) if random.random() in known else _mixup(samples)

    with pytest.raises(RuntimeError, match="mixes the examples"):
        CollateCheck(collate).look_at([_points()[k] for k in range(5)], seed=7)


def test_what_mixes_later_is_found_at_random_steps():
    """After a thousand batches: of later ones every twentieth is looked at."""
    late = [False]
    check = CollateCheck(lambda samples: (_mixup if late[0] else default_collate)(samples))
    data = _points()
    for step in range(30):
        check.look_at([data[k] for k in range(5)], seed=step)
    late[0] = True

    def later():
        for seed in np.random.SeedSequence(5).generate_state(500, np.uint64).tolist():
            check.look_at([data[k] for k in range(5)], seed=seed)

    with pytest.raises(RuntimeError, match="mixes the examples"):
        later()


class Together(Dataset):
    """Makes the rows of a batch at once, by ``make`` of their tensor."""

    def __init__(self, make):
        self.x, self.make = _points().tensors[0], make

    def __len__(self):
        return N

    def __getitem__(self, k):
        return self.__getitems__([k])[0]

    def __getitems__(self, indices):
        return list(self.make(self.x[indices]))


def _row_of_the_batch(x):
    return x / (1 + x.norm(dim=1, keepdim=True))


def _augmented(x):
    return x + torch.randn(len(x), 1) * 0.1


def _standard(x):
    return x - x.mean(0)


def _mixed(x):
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def _mixed_seldom(x):
    return _mixed(x) if torch.rand(()) < 0.3 else x


def _run_on(dataset, probe="shapes", collate=None, steps=12):
    model = nn.Linear(4, 3)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=DataLoader(dataset, collate_fn=collate),
        scheme=Poisson(probability=0.5, dataset_size=N, steps=steps),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        gradients=Gradients(probe=probe),
    )
    for x in private.loader:
        private.module(x[0] if isinstance(x, list) else x).sum().backward()
        private.optimizer.step()
    return private


@pytest.mark.parametrize("make", [_standard, _mixed, _mixed_seldom])
def test_a_data_set_that_mixes_the_rows_that_it_makes_at_once_is_refused(make):
    with pytest.raises(RuntimeError, match=r"__getitems__ of the data set, a Together, mixes"):
        _run_on(Together(make))
    _run_on(Together(make), probe="off")


@pytest.mark.parametrize("make", [_row_of_the_batch, _augmented])
def test_a_data_set_that_makes_rows_apart_is_not(make):
    _run_on(Together(make))


@pytest.mark.parametrize("probe", ["shapes", "off"])
def test_the_guarantee_says_what_of_the_batches_was_tested_and_what_is_assumed(probe):
    told = "was not tested" if probe == "off" else "was tested on a few examples"
    private = _run_on(Together(_augmented), probe, lambda samples: torch.stack(samples), steps=1)
    notes = private.guarantee(1e-3).notes
    assert any("collate_fn=" in note and told in note for note in notes)
    assert any("__getitems__" in note and told in note for note in notes)
    assert any("row i of the data set, a Together, is made of record i alone" in n for n in notes)
    plain = _run_on(TensorDataset(_points().tensors[0]), steps=1).guarantee(1e-3).notes
    assert not any("collate" in note or "data set" in note for note in plain)


def test_transforms_of_hugging_face_get_a_batch_of_rows():
    datasets = pytest.importorskip("datasets")
    rows = {"x": _points().tensors[0].tolist()}

    def standard(batch):
        x = torch.tensor(batch["x"])
        return {"x": list(x - x.mean(0))}

    def alone(batch):
        return {"x": [torch.tensor(x) for x in batch["x"]]}

    def collate(samples):
        return torch.stack([sample["x"] for sample in samples])

    found = datasets.Dataset.from_dict(rows)
    with pytest.raises(RuntimeError, match=r"__getitems__ of the data set, a Dataset, mixes"):
        _run_on(found.with_transform(standard), collate=collate)
    notes = _run_on(found.with_transform(alone), collate=collate, steps=1).guarantee(1e-3).notes
    assert any("row i of the data set, a Dataset" in note for note in notes)
    notes = _run_on(found.with_format("torch"), collate=collate, steps=1).guarantee(1e-3).notes
    assert not any("row i of the data set" in note for note in notes)


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

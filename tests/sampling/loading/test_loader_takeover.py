"""What is taken over from datasets and data loaders, and what is refused before any row is read."""

from __future__ import annotations

import logging

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dptrain.sampling import PrivateLoader
from dptrain.sampling.loading.loader import _NOT_OF_THE_LOADER
from tests.helpers.loaders import SCHEME, N, Untouchable, dataset, make, planned


class Endless(IterableDataset):
    def __iter__(self):
        raise AssertionError("data was touched")


class NoLength(Dataset):
    def __getitem__(self, index):
        raise AssertionError("data was touched")


@pytest.mark.parametrize("data", [Endless(), NoLength(), iter([1])])
def test_dataset_without_length(data):
    kind = type(data).__name__
    with pytest.raises(ValueError, match=f"^dataset is of type {kind}, a dataset without length"):
        make(data=data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": Untouchable(N - 1)}, "has 59 examples .* dataset_size=60"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size=0"),
        ({"max_physical_batch_size": 2.0}, "max_physical_batch_size=2.0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"steps_per_epoch": True}, "steps_per_epoch=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": None}, "seed=None"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**{"data": Untouchable(), **options})


def triple(items):
    return [torch.stack([item[0] for item in items]), "collated by the user"]


def note_worker(worker_id):
    torch.set_num_threads(1)


def test_takes_over_a_data_loader(caplog):
    given = DataLoader(
        dataset(),
        batch_size=10,
        shuffle=True,
        drop_last=True,
        collate_fn=triple,
        num_workers=1,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=60,
        worker_init_fn=note_worker,
    )
    with caplog.at_level(logging.WARNING):
        loader = PrivateLoader.from_data_loader(given, scheme=SCHEME, seed=0, steps_per_epoch=4)
    assert "RandomSampler" in caplog.text
    assert "replaced by MinSep" in caplog.text
    inner = loader._loader
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout"):
        assert getattr(inner, name) == getattr(given, name) is not None
    assert inner.worker_init_fn is note_worker
    assert loader.dataset is given.dataset
    expected = planned(SCHEME, 0)
    for rows, remark in loader:
        assert remark == "collated by the user"
        assert rows.tolist() == expected[loader.current.step]
    assert loader.position == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": None}, "batch_size=None"),
        ({"batch_sampler": [[0, 1], [2]]}, "batch sampler .list. .* no accountant"),
        ({"batch_size": 4, "sampler": SubsetRandomSampler([1, 2])}, "SubsetRandomSampler"),
        ({"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * N, N)}, "Weighted"),
    ],
)
def test_data_loaders_that_choose_for_themselves(options, message):
    with pytest.raises(ValueError, match=message):
        PrivateLoader.from_data_loader(DataLoader(Untouchable(), **options), scheme=SCHEME, seed=0)


def test_data_loader_over_a_stream():
    with pytest.raises(ValueError, match="dataset without length"):
        PrivateLoader.from_data_loader(DataLoader(Endless(), batch_size=4), scheme=SCHEME, seed=0)


@pytest.mark.parametrize("name", _NOT_OF_THE_LOADER)
def test_attributes_of_other_loaders_say_what_there_is(name):
    """And trainers that look whether they are there find that they are not."""
    loader = make()
    with pytest.raises(AttributeError, match=f"PrivateLoader has no {name}: "):
        getattr(loader, name)
    assert not hasattr(loader, name)
    assert not hasattr(loader, "banana")


def test_opacus_memory_manager_is_answered():
    manager = BatchMemoryManager(data_loader=make(), max_physical_batch_size=2, optimizer=None)
    with pytest.raises(AttributeError, match=r"loading=Loading\(max_physical_batch_size="):
        manager.__enter__()

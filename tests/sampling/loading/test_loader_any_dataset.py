"""The loader takes whatever a torch DataLoader takes, with and without workers."""

from __future__ import annotations

import collections
import warnings

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from dptrain.sampling import PrivateLoader
from tests.helpers.loaders import RARE, SCHEME, N, make, planned

Pair = collections.namedtuple("Pair", ["row", "value"])


def _values():
    return torch.arange(N, dtype=torch.float32)[:, None] + 1


class Samples(Dataset):
    """Row i as whatever ``shape`` makes of (i, i + 1)."""

    def __init__(self, shape):
        self.shape = shape

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.shape(index, float(index + 1))


# Top-level functions, which spawned workers can import.
def as_tuple(row, value):
    return row, torch.tensor([value])


def as_dictionary(row, value):
    return {"row": row, "value": value, "text": str(row)}


def as_named_tuple(row, value):
    return Pair(row, value)


def as_tensor(row, value):
    return torch.tensor([float(row), value])


def as_number(row, value):
    return row


def as_numpy(row, value):
    return np.array([row, value])


def first_column(batch):
    """The rows of a collated batch of any of the shapes above."""
    if isinstance(batch, dict):
        return batch["row"]
    if isinstance(batch, torch.Tensor):
        return batch if batch.ndim == 1 else batch[:, 0]
    return batch[0]


SHAPES = [as_tuple, as_dictionary, as_named_tuple, as_tensor, as_number, as_numpy]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_samples_of_any_shape(shape, workers):
    loader = make(Samples(shape), num_workers=workers)
    seen = {}
    for batch in loader:
        rows = [int(row) for row in first_column(batch)]
        seen[loader.current.step] = rows if len(loader.current.indices) else []
        if shape is as_dictionary and seen[loader.current.step]:
            assert batch["text"] == [str(row) for row in rows]
        if shape is as_named_tuple:
            assert type(batch) is Pair
    assert seen == planned(SCHEME)


def arrow(tmp_path=None):
    table = datasets.Dataset.from_dict(
        {"row": list(range(N)), "text": [f"row {i}" for i in range(N)]}
    )
    if tmp_path is None:
        return table
    table.save_to_disk(str(tmp_path / "arrow"))
    return datasets.load_from_disk(str(tmp_path / "arrow"))


@pytest.mark.parametrize("workers", [0, 2])
def test_arrow_in_memory_and_mapped(tmp_path, workers):
    mapped = arrow(tmp_path)
    assert mapped.cache_files  # it does lie on disk
    for data in (arrow(), mapped, mapped.with_format("torch"), mapped.with_format("numpy")):
        loader = make(data, num_workers=workers)
        for batch in loader:
            rows = loader.current.indices.tolist()
            assert batch["row"].tolist() == (rows or [0])
            if rows:
                assert batch["text"] == [f"row {i}" for i in rows]


def test_arrow_after_select_and_shuffle():
    """Rows are those of the data set that is handed over, not of the table beneath it."""
    data = datasets.Dataset.from_dict({"row": list(range(3 * N))}).shuffle(seed=1)
    data = data.select(range(N))
    order = data["row"]
    loader = make(data)
    for batch in loader:
        if len(loader.current.indices):
            assert batch["row"].tolist() == [order[i] for i in loader.current.indices]


def test_changed_arrow_is_refused_on_resume(tmp_path):
    loader = make(arrow(tmp_path))
    next(iter(loader))
    state = loader.state_dict()
    make(arrow()).load_state_dict(state)  # the same rows, from memory
    other = arrow().map(lambda row: {"text": row["text"].upper()})
    with pytest.raises(ValueError, match="dataset has changed"):
        make(other).load_state_dict(state)


def pad_texts(samples):
    """A user's collate function: as wide as the longest text of the batch."""
    width = max(len(sample["text"]) for sample in samples)
    codes = [[ord(c) for c in s["text"].ljust(width)] for s in samples]
    return {"codes": torch.tensor(codes), "row": torch.tensor([s["row"] for s in samples])}


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_function_of_the_user(workers):
    loader = make(arrow(), collate_fn=pad_texts, num_workers=workers)
    for batch in loader:
        if len(loader.current.indices):
            assert batch["row"].tolist() == loader.current.indices.tolist()
            texts = ["".join(map(chr, codes)).strip() for codes in batch["codes"].tolist()]
            assert texts == [f"row {i}" for i in loader.current.indices]


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(torch.arange(N), _values()),
        Subset(TensorDataset(torch.arange(-5, N), torch.zeros(N + 5)), range(5, N + 5)),
        ConcatDataset(
            [TensorDataset(torch.arange(20)), TensorDataset(torch.arange(20, N))],
        ),
    ],
    ids=lambda data: type(data).__name__,
)
def test_torch_data_sets(data):
    loader = make(data)
    for batch in loader:
        rows = loader.current.indices.tolist()
        assert batch[0].tolist() == (rows or [0])


def test_pinned_memory():
    """Pinning needs an accelerator; without one torch warns and hands over plain tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loader = make(pin_memory=True)
        for rows, values in loader:
            assert rows.tolist() == (loader.current.indices.tolist() or [0])
            assert values.is_pinned() == torch.cuda.is_available()


@pytest.mark.parametrize("shape", SHAPES)
def test_empty_batches_have_the_same_types(shape):
    loader = make(Samples(shape), RARE)
    kinds = {type(batch) for batch in loader}
    assert len(kinds) == 1
    assert loader.position == RARE.steps


def test_taking_over_a_data_loader_of_an_arrow_data_set():
    theirs = DataLoader(arrow(), batch_size=8, collate_fn=pad_texts, shuffle=True, num_workers=2)
    loader = PrivateLoader.from_data_loader(theirs, scheme=SCHEME, seed=1)
    batch = next(iter(loader))
    assert batch["codes"].shape[0] == loader.current.rows

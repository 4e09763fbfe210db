"""A data set is recognized when a run goes on, and another one is refused."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from dptrain.sampling.loading.dataset import ROWS, fingerprint
from tests.helpers.loaders import Augmented, N, dataset, make


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@dataclasses.dataclass
class Sample:
    text: str
    pixels: torch.Tensor


ROWS_OF_ONE = [
    torch.tensor([1.0, 2.0]),
    torch.tensor([1.0, 2.0], dtype=torch.float64),
    torch.tensor([1.0, 2.0]).bfloat16(),
    torch.tensor([[1.0, 2.0]]),
    torch.tensor([1.0, -2.0]),
    np.array([1.0, 2.0]),
    np.array(["a", "b"]),
    np.array(["a", None], dtype=object),
    np.float32(1.0),
    (torch.tensor(1.0), 2),
    (torch.tensor(1.0), 3),
    [1, 2],
    [[1], 2],
    [1, [2]],
    {"text": "a", "label": 1},
    {"text": "a", "label": 2},
    {"text": "ab", "label": 1},
    Sample("a", torch.zeros(2)),
    Sample("a", torch.ones(2)),
    "a",
    b"a",
    1,
    1.0,
    True,
    None,
]


def test_different_rows_differ():
    found = [fingerprint(Rows([row])) for row in ROWS_OF_ONE]
    assert len(set(found)) == len(found)
    assert found == [fingerprint(Rows([row])) for row in ROWS_OF_ONE]


def test_length_and_order_count():
    rows = [torch.tensor(float(i)) for i in range(5)]
    found = {fingerprint(Rows(r)) for r in (rows, rows[:4], rows[::-1])}
    assert len(found) == 3


def test_every_row_of_a_small_set_is_looked_at():
    whole = fingerprint(dataset())
    for row in range(N):
        assert N <= ROWS
        numbers, values = (t.clone() for t in dataset().tensors)
        values[row] += 1
        assert fingerprint(TensorDataset(numbers, values)) != whole


def test_wrappers_and_pictures():
    image = pytest.importorskip("PIL.Image")
    white, grey = (image.new("L", (2, 2), color) for color in (255, 128))
    assert fingerprint(Rows([white])) != fingerprint(Rows([grey]))
    assert fingerprint(Subset(dataset(), range(3))) != fingerprint(Subset(dataset(), range(1, 4)))


def test_a_data_set_may_say_it_itself():
    first, second = Rows([1]), Rows([2])
    first.fingerprint = second.fingerprint = "the same"
    assert fingerprint(first) == fingerprint(second)
    second.fingerprint = "another"
    assert fingerprint(first) != fingerprint(second)


def test_augmentations_do_not_count():
    """Whatever the global generators are, and where a generator of its own makes rows differ."""
    found = {fingerprint(Augmented())}
    random.seed(1), torch.manual_seed(1), np.random.seed(1)  # noqa: NPY002
    found.add(fingerprint(Augmented()))
    assert len(found) == 1

    class Own(Rows):
        generator = np.random.default_rng()

        def __getitem__(self, index):
            return self.rows[index] + self.generator.random()

    assert fingerprint(Own([1, 2])) == fingerprint(Own([3, 4])) != fingerprint(Own([3, 4, 5]))


def test_rows_that_only_workers_can_read():
    """As where ``worker_init_fn`` opens the file: a checkpoint needs the rows in this process."""

    class InWorkers(Rows):
        def __getitem__(self, index):
            raise TypeError(f"no file is open for row {index}")

    rows = InWorkers([1, 2])
    with pytest.raises(ValueError, match=r"row 0 of InWorkers.*TypeError.*attribute fingerprint"):
        fingerprint(rows)
    rows.fingerprint = "version 3"
    assert fingerprint(rows)


def test_changed_data_is_refused_on_resume():
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    make().load_state_dict(state)
    numbers, values = dataset().tensors
    with pytest.raises(ValueError, match="dataset has changed"):
        make(TensorDataset(numbers, values + 1)).load_state_dict(state)

"""The private loader: what it yields, and its position in the plan."""

from __future__ import annotations

import io

import pytest
import torch
from torch.utils.data import Subset
from tqdm import tqdm

from dptrain.sampling import Poisson
from tests.helpers.loaders import (
    RARE,
    SCHEME,
    N,
    Untouchable,
    dataset,
    logical,
    make,
    planned,
    record,
)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cap", [None, 1, 4])
def test_yields_the_plan(workers, cap):
    loader = make(num_workers=workers, max_physical_batch_size=cap)
    found = record(loader)
    assert logical(found) == planned(SCHEME)
    assert loader.position == SCHEME.steps
    for step, rows in planned(SCHEME).items():
        pieces = [entry for entry in found if entry[0] == step]
        parts = max(1, -(-len(rows) // (cap or N)))
        assert [entry[1:3] for entry in pieces] == [(part, parts) for part in range(parts)]
        assert all(len(entry[3]) <= (cap or N) for entry in pieces)


def test_current_belongs_to_the_batch_at_hand():
    loader = make(num_workers=2, max_physical_batch_size=3)
    assert loader.current is None
    lasts = [loader.current.last for _ in loader]
    assert sum(lasts) == SCHEME.steps
    assert lasts[-1]
    assert loader.current is None


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_break_starts_again_at_the_uncompleted_step(workers, persistent):
    persistent = persistent and workers > 0
    loader = make(
        num_workers=workers,
        persistent_workers=persistent,
        prefetch_factor=4 if workers else None,
        max_physical_batch_size=2,
    )
    for _ in loader:  # breaks within step 3: steps 0, 1 and 2 are completed
        if loader.current.step == 3 and loader.current.part == 1:
            break
    assert loader.position == 3
    for _ in loader:  # breaks at once
        assert (loader.current.step, loader.current.part) == (3, 0)
        break
    assert loader.position == 3
    for _ in loader:  # holds the last part of step 3, which is completed by the next request
        if loader.current.step == 3 and loader.current.last:
            break
    assert loader.position == 3
    rest = logical(record(loader))
    assert rest == {step: rows for step, rows in planned(SCHEME).items() if step >= 3}


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs(workers):
    loader = make(num_workers=workers, persistent_workers=workers > 0, steps_per_epoch=5)
    steps, lengths = [], []
    for _ in range(3):
        lengths.append(len(loader))
        steps.append(list(logical(record(loader))))
    assert steps == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert lengths == [5, 5, 2]


def test_epoch_after_a_break_ends_where_it_would_have():
    loader = make(steps_per_epoch=5)
    for _ in loader:
        if loader.current.step == 2:
            break
    assert [entry[0] for entry in record(loader)] == [2, 3, 4]
    assert len(loader) == 5


def test_more_than_the_plan_is_refused():
    loader = make()
    record(loader)
    with pytest.raises(RuntimeError, match="all 12 planned steps have run"):
        iter(loader)


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("parts", [1, 2, 7, 40])
@pytest.mark.parametrize("scheme", [SCHEME, RARE])
def test_a_fixed_number_of_microbatches(scheme, parts, workers):
    loader = make(scheme=scheme, microbatches=parts, num_workers=workers, steps_per_epoch=5)
    rows, lengths = {}, []
    while loader.position < scheme.steps:
        start, length = loader.position, len(loader)
        found, bar = [], tqdm(loader, file=io.StringIO())
        for _ in bar:
            found.append(loader.current)
            lengths.append(len(loader))
        assert set(lengths[-len(found) :]) == {length} == {bar.total}  # no shrinking under way
        assert length == len(found) == parts * (loader.position - start)
        assert [(m.step, m.part, m.parts) for m in found] == [
            (step, part, parts) for step in range(start, loader.position) for part in range(parts)
        ]
        for micro in found:
            rows.setdefault(micro.step, []).extend(micro.indices.tolist())
    assert rows == planned(scheme)
    assert len(loader) == 0


def test_the_length_is_that_of_the_iteration_or_not_known():
    """What a trainer counts before must be what it gets."""
    bounded = Poisson(probability=0.1, dataset_size=N, steps=30, max_batch_size=24)
    for options, length in (
        ({}, 12),
        ({"max_physical_batch_size": N}, 12),
        ({"scheme": bounded}, 30),
        ({"scheme": bounded, "max_physical_batch_size": 10}, 90),
        ({"scheme": bounded, "max_physical_batch_size": 10, "world_size": 3}, 30),
        ({"scheme": bounded, "microbatches": 4}, 120),
        ({"microbatches": 3, "world_size": 2, "rank": 1}, 36),
    ):
        loader = make(**options)
        assert len(loader) == length == len(list(loader))
    loader = make(max_physical_batch_size=N - 1)
    with pytest.raises(TypeError, match=r"random and private.*set microbatches=.*loader.steps"):
        len(loader)
    assert tqdm(loader, file=io.StringIO()).total is None
    assert len(list(loader)) >= loader.steps


@pytest.mark.parametrize("options", [{"microbatches": 0}, {"microbatches": 2.0}])
def test_bad_microbatches(options):
    with pytest.raises((TypeError, ValueError), match=r"PrivateLoader: microbatches="):
        make(**options)
    with pytest.raises(ValueError, match=r"max_physical_batch_size=3 and microbatches=2"):
        make(microbatches=2, max_physical_batch_size=3)


def test_only_one_iteration_at_a_time():
    loader = make()
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second)[0].tolist() == planned(SCHEME)[0]
    with pytest.raises(RuntimeError, match="newer iteration"):
        next(first)
    next(second)
    assert loader.position == 1
    assert len(loader) == SCHEME.steps  # the end of the first is not that of the second


def test_empty_batch_is_one_zero_row_of_weight_zero():
    loader = make(scheme=RARE, num_workers=0, max_physical_batch_size=2)
    empty = 0
    for index, value in loader:
        micro = loader.current
        if len(micro.indices) == 0:
            empty += 1
            assert (micro.part, micro.parts, micro.last, micro.rows) == (0, 1, True, 1)
            assert micro.weights.tolist() == [0.0]
            assert index.tolist() == [0]
            assert value.tolist() == [[0.0]]  # example 0 has 1.0 here
        else:
            assert (value > 0).all()
            assert micro.weights.tolist() == [1.0] * len(index)
    rows = planned(RARE).values()
    assert empty == sum(not batch for batch in rows) > 5
    assert loader.position == RARE.steps


def test_dictionary_samples_and_own_collate():
    samples = [{"text": f"word {i}", "label": i} for i in range(N)]

    def collate(items):
        texts = [item["text"] for item in items]
        return {"text": texts, "labels": torch.tensor([item["label"] for item in items]) + 7}

    loader = make(data=samples, scheme=RARE, collate_fn=collate)
    for batch in loader:
        rows = loader.current.indices.tolist()
        assert batch["text"] == [f"word {i}" for i in (rows or [0])]
        assert batch["labels"].tolist() == ([i + 7 for i in rows] or [0])


def test_many_rows_are_fetched_at_once_where_the_dataset_can():
    class Table(Untouchable):
        def __getitems__(self, indices):
            assert all(type(index) is int for index in indices)
            return [{"row": index} for index in indices]

    found = [batch["row"].tolist() for batch in make(data=Table())]
    assert found == [rows or [0] for rows in planned(SCHEME).values()]
    assert record(make(data=Subset(dataset(), range(N)))) == record(make())

"""The private loader: what it yields, its position, its determinism and its refusals."""

from __future__ import annotations

import io
import logging
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from tqdm import tqdm

from dptrain.sampling import BallsInBins, MinSep, Poisson, PrivateLoader

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


def test_length_and_progress_bar_with_microbatches():
    loader = make(max_physical_batch_size=1)
    assert len(loader) == SCHEME.steps
    sink = io.StringIO()
    lengths = {len(loader) for _ in tqdm(loader, file=sink)}
    assert lengths == {SCHEME.steps}  # does not shrink under the loop's feet
    assert len(loader) == 0


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


def augmentations(loader):
    return [batch[1].clone() for batch in loader]


@pytest.mark.parametrize("cap", [None, 3])
def test_augmentations_do_not_depend_on_workers(cap):
    alone = augmentations(make(data=Augmented(), max_physical_batch_size=cap))
    pair = augmentations(make(data=Augmented(), max_physical_batch_size=cap, num_workers=2))
    other = augmentations(make(data=Augmented(), max_physical_batch_size=cap, seed=1))
    assert len(alone) == len(pair)
    assert all(torch.equal(a, b) for a, b in zip(alone, pair, strict=True))
    assert len(torch.cat(alone).unique()) == torch.cat(alone).numel()  # no step repeats another
    assert not np.isin(torch.cat(alone), torch.cat(other)).any()


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_bit_identical(workers):
    whole = augmentations(make(data=Augmented()))
    loader = make(data=Augmented(), num_workers=workers, persistent_workers=workers > 0)
    for _ in loader:
        if loader.current.step == 7:
            break
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    resumed = make(data=Augmented(), seed=3, num_workers=workers, persistent_workers=workers > 0)
    next(iter(resumed))  # workers that persist have seen the other seed
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.position == 7
    rest = augmentations(resumed)
    assert len(rest) == SCHEME.steps - 7
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[7:], strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_are_left_alone(workers):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    loader = make(data=Augmented(), num_workers=workers)
    for _ in loader:
        assert states() == before
    assert states() == before


def test_generators_are_put_back_when_an_example_fails():
    before = torch.get_rng_state()
    with pytest.raises(AssertionError, match="touched"):
        next(iter(make(data=Untouchable())))
    assert torch.equal(torch.get_rng_state(), before)


def test_driven_protocol():
    loader = make(max_physical_batch_size=4)
    with pytest.raises(RuntimeError, match="driven"):
        loader.complete_step()
    loader.driven = True
    with pytest.raises(RuntimeError, match="before a batch"):
        loader.report_microbatch()
    batches = 0
    for _ in loader:
        batches += 1
        position = loader.position
        assert position == loader.current.step
        with pytest.raises(RuntimeError, match="follows report_microbatch"):
            loader.complete_step()
        loader.report_microbatch()
        with pytest.raises(RuntimeError, match="twice"):
            loader.report_microbatch()
        if loader.current.last:
            loader.complete_step()
            assert loader.position == position + 1
            with pytest.raises(RuntimeError, match="completed already"):
                loader.complete_step()
        else:
            with pytest.raises(RuntimeError, match="follows report_microbatch"):
                loader.complete_step()
    assert batches > SCHEME.steps
    assert loader.position == SCHEME.steps


@pytest.mark.parametrize("workers", [0, 2])
def test_driven_refuses_a_batch_without_optimizer_step(workers):
    loader = make(num_workers=workers)
    loader.driven = True
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) has to be called once for every"):
        for _ in loader:
            pass
    assert loader.position == 0
    batches = iter(loader)
    next(batches)
    loader.report_microbatch()
    with pytest.raises(RuntimeError, match="complete_step"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_driven_break_repeats_only_what_was_not_completed(workers):
    loader = make(num_workers=workers, max_physical_batch_size=3)
    loader.driven = True
    done = []
    for _ in range(3):
        for _ in loader:
            micro = loader.current
            loader.report_microbatch()
            if micro.last:
                loader.complete_step()
                done.append(micro.step)
                if len(done) % 4 == 0:
                    break
    assert done == list(range(SCHEME.steps))
    with pytest.raises(RuntimeError, match="all 12 planned"):
        iter(loader)


def test_state_of_something_else_is_refused():
    state = make().state_dict()
    other = BallsInBins(bins=6, epochs=2, dataset_size=N)
    with pytest.raises(ValueError, match="another scheme"):
        make(scheme=other).load_state_dict(state)
    with pytest.raises(ValueError, match="dataset of 59 examples"):
        make().load_state_dict({**state, "dataset_size": 59})
    with pytest.raises(ValueError, match="no state"):
        make().load_state_dict({})


def test_loading_ends_a_running_iteration():
    loader = make()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    assert loader.current is None
    with pytest.raises(RuntimeError, match="state was loaded"):
        next(batches)
    assert loader.position == 0


class Endless(IterableDataset):
    def __iter__(self):
        raise AssertionError("data was touched")


class NoLength(Dataset):
    def __getitem__(self, index):
        raise AssertionError("data was touched")


@pytest.mark.parametrize("data", [Endless(), NoLength(), iter([1])])
def test_dataset_without_length(data):
    with pytest.raises(ValueError, match="dataset without length"):
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
    with pytest.raises(ValueError, match=message):
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


def test_spawned_workers():
    """Nothing in the loader depends on workers inheriting the memory of their parent."""
    loader = make(num_workers=1, multiprocessing_context="spawn", max_physical_batch_size=4)
    assert logical(record(loader)) == planned(SCHEME)

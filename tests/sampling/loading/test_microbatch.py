"""Constant physical sizes, shares of ranks, and how both are padded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from dptrain.sampling import Poisson
from dptrain.sampling.loading.microbatch import split
from dptrain.sampling.loading.padding import blank_rows
from tests.helpers.loaders import N, logical, make, planned, record

SCHEME = Poisson(probability=0.1, dataset_size=N, steps=30, max_batch_size=24)


@pytest.mark.parametrize("cap", [None, 24, 10, 7, 1])
@pytest.mark.parametrize("size", [0, 1, 6, 23, 24])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_split_is_a_partition_in_step(cap, size, world):
    indices = np.arange(100, 100 + size)
    for physical in (None, 24):
        shares = [
            split(3, indices, cap, physical_units=physical, rank=rank, world_size=world)
            for rank in range(world)
        ]
        assert len({len(share) for share in shares}) == 1  # ranks stay in step
        rows = [micro for share in shares for micro in share]
        np.testing.assert_array_equal(np.concatenate([m.indices for m in rows]), indices)
        for micro in rows:
            used = len(micro.indices)
            assert micro.weights.tolist() == [1.0] * used + [0.0] * (micro.rows - used)
            assert micro.rows >= 1
            if cap is not None:
                assert micro.rows <= cap
        assert [m.last for m in shares[0]] == [False] * (len(shares[0]) - 1) + [True]
        if physical is not None:
            assert len({m.rows for m in rows}) == 1
            assert physical <= sum(m.rows for m in rows)
        elif cap is None and world == 1:
            assert rows[0].rows == max(1, size)


@pytest.mark.parametrize("cap", [None, 10])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_batch_has_the_physical_size(workers, cap):
    data = TensorDataset(torch.arange(N), torch.arange(N, dtype=torch.float32)[:, None] + 1)
    loader = make(data, SCHEME, num_workers=workers, max_physical_batch_size=cap)
    seen = {}
    for numbers, values in loader:
        micro = loader.current
        assert len(numbers) == len(values) == micro.rows == (24 if cap is None else 8)
        used = len(micro.indices)
        assert numbers[:used].tolist() == micro.indices.tolist()
        assert values[:used, 0].tolist() == [i + 1 for i in micro.indices]
        assert not values[used:].any()  # nothing of an example is in the padding
        seen.setdefault(micro.step, []).extend(micro.indices.tolist())
    assert seen == planned(SCHEME)


def test_blank_rows_keeps_what_has_no_rows():
    batch = {
        "x": torch.ones(3, 2),
        "mask": np.ones((3, 2), dtype=bool),
        "names": ["a", "b", "c"],
        "table": torch.ones(5),
        "scalar": torch.tensor(3.0),
        "pair": (torch.ones(3, dtype=torch.int64), torch.ones(3, 1)),
    }
    result = blank_rows(batch, start=1, rows=3)
    assert result["x"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert result["mask"].tolist() == [[True, True], [False, False], [False, False]]
    assert result["names"] == ["a", "b", "c"]
    assert result["table"].tolist() == [1] * 5
    assert result["scalar"] == 3
    assert result["pair"][0].tolist() == [1, 0, 0]
    assert batch["x"].all()  # the argument is untouched
    assert batch["mask"].all()


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_draw_the_same_logical_batch(workers):
    ranks = [
        record(make(rank=r, world_size=2, num_workers=workers, max_physical_batch_size=3))
        for r in range(2)
    ]
    whole = logical(record(make()))
    assert [(s, p, n) for s, p, n, _ in ranks[0]] == [(s, p, n) for s, p, n, _ in ranks[1]]
    for step, rows in whole.items():
        first, second = (logical(r)[step] for r in ranks)
        assert first + second == rows
        assert abs(len(first) - len(second)) <= 1


def test_ranks_augment_differently():
    from tests.helpers.loaders import Augmented

    draws = [
        torch.cat([noise for _, noise in make(Augmented(), rank=rank, world_size=2)])
        for rank in range(2)
    ]
    assert not set(draws[0].flatten().tolist()) & set(draws[1].flatten().tolist())


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), (True, 2), (0.0, 1)])
def test_bad_ranks_are_refused(rank, world):
    with pytest.raises((TypeError, ValueError), match=r"rank|world_size"):
        make(rank=rank, world_size=world)

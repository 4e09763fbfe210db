"""Microbatches of units with several rows: none is cut, and ranks stay in step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from dptrain.sampling import PrivateLoader
from dptrain.sampling.loading.microbatch import split
from tests.sampling.users.test_per_user import SMALL, per_user

GROUP = 5


def records(share):
    """(rows, weight) of every record of some microbatches."""
    found = []
    for micro in share:
        rows = [*micro.indices.tolist(), *[None] * (micro.rows - len(micro.indices))]
        ends = np.cumsum(micro.sizes)
        assert ends[-1] == micro.rows == len(rows)
        for size, end, weight in zip(micro.sizes, ends, micro.weights, strict=True):
            found.append((rows[end - size : end], float(weight)))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("cap", [None, 5, 7, 12, 100])
@pytest.mark.parametrize("count", [0, 1, 2, 9, 14])
@pytest.mark.parametrize("physical", [None, 14])
@pytest.mark.parametrize("microbatches", [None, 1, 4])
def test_units_are_a_partition_and_whole(world, cap, count, physical, microbatches):
    if cap is not None and microbatches is not None:
        return
    rng = np.random.default_rng(count)
    sizes = rng.integers(1, GROUP + 1, size=count)
    rows = rng.permutation(1000)[: sizes.sum()]
    shares = [
        split(
            3,
            rows,
            cap,
            sizes=sizes,
            group_size=GROUP,
            microbatches=microbatches,
            physical_units=physical,
            rank=rank,
            world_size=world,
        )
        for rank in range(world)
    ]
    assert len({len(share) for share in shares}) == 1
    found = [each for share in shares for each in records(share)]
    units = np.split(rows, np.cumsum(sizes)[:-1]) if count else []
    assert [r for r, weight in found if weight == 1.0] == [unit.tolist() for unit in units]
    assert all(r == [None] for r, weight in found if weight != 1.0)
    assert {weight for _, weight in found} <= {0.0, 1.0}
    for share in shares:
        assert [m.last for m in share] == [False] * (len(share) - 1) + [True]
        assert [m.part for m in share] == list(range(len(share)))
        for micro in share:
            assert micro.step == 3
            assert micro.rows >= 1
            assert cap is None or micro.rows <= cap
        if microbatches is not None:
            assert len(share) == microbatches
        elif cap is None:
            assert len(share) == 1
    if physical is not None:
        assert len({m.rows for share in shares for m in share}) == 1


@pytest.mark.parametrize("name", ["Poisson", "Poisson, cut"])
@pytest.mark.parametrize("cap", [None, 8])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_yields_users_one_after_the_other(name, cap, workers):
    scheme = per_user(SMALL, name, 4)
    data = TensorDataset(torch.arange(SMALL.examples) + 1)
    loader = PrivateLoader(
        dataset=data, scheme=scheme, seed=2, max_physical_batch_size=cap, num_workers=workers
    )
    if name == "Poisson, cut":
        assert len(loader) == 20 * (1 if cap is None else 4)
    elif cap is not None:
        with pytest.raises(TypeError, match="max_physical_batch_size"):
            len(loader)
    seen, sizes = {}, set()
    for (numbers,) in loader:
        micro = loader.current
        assert len(numbers) == micro.rows
        sizes.add((micro.rows, micro.parts))
        used = len(micro.indices)
        assert (numbers[:used] - 1).tolist() == micro.indices.tolist()
        assert not numbers[used:].any()
        owners, start = SMALL.members[micro.indices], 0
        for size in micro.sizes[micro.weights > 0]:
            assert len(set(owners[start : start + size])) == 1
            start += size
        assert len(set(owners)) == (micro.weights > 0).sum()  # nobody is in two records
        seen.setdefault(micro.step, []).extend(micro.indices.tolist())
    planned = {t: batch.tolist() for t, batch in enumerate(scheme.stream(2))}
    assert {t: sorted(rows) for t, rows in seen.items()} == planned
    if name == "Poisson, cut":  # room for 7 users of 4 examples; cut into 8 rows, 2 users each
        assert sizes == {(28, 1) if cap is None else (8, 4)}


def test_parts_that_no_user_fits_into_are_refused():
    data = TensorDataset(torch.arange(SMALL.examples))
    with pytest.raises(ValueError, match=r"max_physical_batch_size=3 is below group_size=4"):
        PrivateLoader(
            dataset=data, scheme=per_user(SMALL, group_size=4), seed=0, max_physical_batch_size=3
        )

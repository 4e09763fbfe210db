"""The pool against a plain set, for every size and every choice of positions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dptrain.sampling.schemes.drawing import Pool, move_last


def subsets(size: int) -> list[np.ndarray]:
    """Every ascending choice among ``size`` positions."""
    return [
        np.array(chosen, dtype=np.int64)
        for count in range(size + 1)
        for chosen in itertools.combinations(range(size), count)
    ]


@pytest.mark.parametrize("size", range(9))
def test_the_moved_come_last_in_order_and_the_others_stay(size):
    for positions in subsets(size):
        entries = np.arange(100, 100 + size, dtype=np.int32)
        expected = entries[positions]
        taken = move_last(entries, positions)
        assert taken.tolist() == expected.tolist()
        assert entries[size - len(positions) :].tolist() == expected.tolist()
        rest = set(range(100, 100 + size)) - set(expected.tolist())
        assert set(entries[: size - len(positions)].tolist()) == rest
        assert taken.dtype == np.int32
        assert taken.base is None  # a copy: what is written later does not change it


def test_a_part_of_a_row_is_reordered_within_itself():
    row = np.arange(20)
    move_last(row[5:15], np.array([0, 3, 9]))
    np.testing.assert_array_equal(row[:5], np.arange(5))
    np.testing.assert_array_equal(row[15:], np.arange(15, 20))
    assert sorted(row[5:12].tolist()) == [6, 7, 9, 10, 11, 12, 13]
    assert row[12:15].tolist() == [5, 8, 14]


@pytest.mark.parametrize("size", range(7))
def test_taking_and_returning_is_that_of_a_set(size):
    """Every choice, then every choice of the rest, then all come back in another order."""
    for first in subsets(size):
        for second in subsets(size - len(first)):
            pool = Pool(np.arange(size, dtype=np.int64))
            members = set(range(size))
            groups = []
            for positions in (first, second):
                expected = pool.members[positions].tolist()
                groups.append(pool.take(positions))
                assert groups[-1].tolist() == expected
                members -= set(expected)
                assert len(pool) == len(members)
                assert set(pool.members.tolist()) == members
            for group in groups:
                pool.put(group)
                members |= set(group.tolist())
                assert sorted(pool.members.tolist()) == sorted(members)
            assert len(pool) == size


def test_a_long_random_walk_is_that_of_a_set():
    rng = np.random.default_rng(20_261_120)
    pool = Pool(np.arange(50, dtype=np.int32))
    members, out = set(range(50)), []
    for _ in range(2_000):
        positions = np.flatnonzero(rng.random(len(pool)) < rng.random())
        out.append(pool.take(positions))
        members -= set(out[-1].tolist())
        while out and rng.random() < 0.6:
            group = out.pop(int(rng.integers(len(out))))
            pool.put(group)
            members |= set(group.tolist())
        assert len(pool) == len(members)
        assert set(pool.members.tolist()) == members


def test_capacity_beyond_the_first_members():
    first = np.array([4, 2], dtype=np.int32)
    pool = Pool(first, capacity=4)
    pool.put(np.array([7, 1], dtype=np.int32))
    assert sorted(pool.members.tolist()) == [1, 2, 4, 7]
    assert first.tolist() == [4, 2]  # copied
    with pytest.raises(ValueError, match="at most 4"):
        pool.put(np.array([9], dtype=np.int32))
    assert sorted(pool.members.tolist()) == [1, 2, 4, 7]

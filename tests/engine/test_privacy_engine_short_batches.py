"""Batches that cannot be filled are told before training, as they then come."""

import re
import warnings

import pytest

from dptrain import AttributionGraph, UserFixed
from tests.helpers.engine import images, make, small_net

N = 24
GRAPH = AttributionGraph.from_lists([[e % 9, 9 + e % 7] for e in range(N)])


def run(**fields):
    scheme = UserFixed.for_batch_size(graph=GRAPH, steps=10, **fields)
    return make(small_net(), images(N), scheme=scheme, accountant="gaussian")


def test_short_batches_are_told():
    with pytest.warns(UserWarning, match=r"UserFixed: \d+ of 10 batches") as told:
        private = run(batch_size=5, min_sep=3)
    numbers = re.search(
        r"(\d+) of 10 .*of step (\d+), the smallest has (\d+), and (\d+) are missing",
        str(told[0].message),
    )
    assert told[0].filename == make.__code__.co_filename  # the call of make_private
    stream = private.mechanism.scheme.stream(private.loader._plan.seed)
    sizes = [len(batch) for batch in stream]
    short = [t for t, size in enumerate(sizes) if size < 5]
    assert 0 < len(short) < 10
    expected = (len(short), short[0], min(sizes), sum(5 - size for size in sizes))
    assert tuple(map(int, numbers.groups())) == expected


def test_full_batches_are_not_worth_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(batch_size=2, min_sep=1)

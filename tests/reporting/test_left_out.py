"""The sentence about what contribution bounding left out."""

from __future__ import annotations

import pytest

from dptrain import AttributionGraph
from dptrain.reporting import bounding_note


@pytest.mark.parametrize(
    ("lists", "k", "duplicates", "expected"),
    [
        # User 0 has three examples of its own.
        (
            [[0], [0], [0], [1]],
            2,
            False,
            "3 of 4 examples were kept so that no user has more than 2; the other 1 was not "
            "trained on",
        ),
        # One of two examples stays, and who had the other one only is gone.
        (
            [[0, 1], [0, 2]],
            1,
            False,
            "1 of 2 examples were kept so that no user has more than 1; the other 1 was not "
            "trained on, and with them all that 1 of 3 users had",
        ),
        # Everybody has room for a copy.
        (
            [[0], [1]],
            2,
            True,
            "2 of 2 examples were kept so that no user has more than 2, and 2 copies of them added",
        ),
    ],
)
def test_counts(lists, k, duplicates, expected):
    bounded = AttributionGraph.from_lists(lists).bound(k, duplicates=duplicates, seed=0)
    assert bounding_note(bounded) == expected

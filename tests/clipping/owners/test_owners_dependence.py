"""The oracle finds what is known by hand, and a map that lies is found by it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.clipping.owners.claims import Claim, wrong
from tests.helpers.dependence import SHARED, Owned, Unsteady, dependence, differs, with_gradients

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ROWS = Owned.rows(X)


def movers(program, *arguments: Owned) -> list[list[set[int]]]:
    """Of every result, who moves the first element of each of its rows."""
    truth = dependence(program, arguments)
    return [
        [truth.movers(k, (row, *[0] * (result.dim() - 1))) for row in range(len(result))]
        for k, result in enumerate(truth.results)
    ]


def test_rows_alone() -> None:
    assert movers(torch.tanh, ROWS) == [[{0}, {1}, {2}, {3}]]


def test_sums_over_the_batch() -> None:
    everyone = {0, 1, 2, 3}
    assert movers(lambda x: x - x.mean(0), ROWS) == [[everyone] * 4]
    assert movers(lambda x: x.cumsum(0), ROWS) == [[{0}, {0, 1}, {0, 1, 2}, everyone]]


def test_companions() -> None:
    order = torch.tensor([1, 0, 2, 3])
    assert movers(lambda x: x + x[order], ROWS) == [[{0, 1}, {0, 1}, {2}, {3}]]


def test_nothing_times_a_number_is_moved_by_nan() -> None:
    assert movers(lambda x: x[:2] + 0 * x[2:], ROWS) == [[{0, 2}, {1, 3}]]


def test_an_escaped_largest_number() -> None:
    assert movers(lambda x: x * x.max().item(), ROWS) == [[{0, 1, 2, 3}] * 4]


def test_what_nobody_owns_moves_nothing() -> None:
    assert movers(lambda x, w: w * 2, ROWS, Owned.shared(torch.ones(2))) == [[set(), set()]]


def test_ids_and_truth_values() -> None:
    ids = Owned.rows(torch.tensor([0, 2, 1, 2]))
    mask = Owned.rows(torch.tensor([True, False, True, False]))
    table = torch.arange(3.0)
    assert movers(lambda i: table[i], ids) == [[{0}, {1}, {2}, {3}]]
    assert movers(lambda m: m.cumsum(0), mask) == [[{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]]


def test_where_an_element_is_not_always_there() -> None:
    """Whether the third row is the second that is found hangs on the first three alone."""
    mask = Owned.rows(torch.tensor([True, False, True, False]))
    assert movers(lambda m: m.nonzero(), mask)[0][1] == {0, 1, 2}


def test_generators_start_alike() -> None:
    assert movers(lambda x: F.dropout(x + torch.rand(4, 3)), ROWS)[0][0] <= {0}


def test_gradients() -> None:
    """By rows, of each alone; by what all share, of all."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).square()

    result, by_x, by_w = movers(with_gradients(program), ROWS, Owned.shared(X[0] + 1))
    assert result == by_x == [{0}, {1}, {2}, {3}]
    assert by_w == [{0, 1, 2, 3}] * 3


def test_unsteady_programs_are_named() -> None:
    numbers = iter(range(100))
    with pytest.raises(Unsteady):
        dependence(lambda x: x + next(numbers), [ROWS])


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([1.0, float("nan"), 0.0], [1.0 + 1e-14, float("nan"), 0.0], [False] * 3),
        ([1.0, float("nan"), 0.0], [1.0 + 1e-6, 1.0, -0.0], [True] * 3),
        ([1.0, 2.0], [1.0], [False, True]),
    ],
)
def test_what_differs(before: list[float], after: list[float], found: list[bool]) -> None:
    numbers = (torch.tensor(each, dtype=torch.float64) for each in (before, after))
    assert differs(*numbers).tolist() == found


@pytest.mark.parametrize(
    ("owners", "lies"),
    [([0, 1, 2, 3], True), ([-2, -2, 2, 3], False), ([SHARED] * 4, True), ([1, -2, 2, 3], True)],
)
def test_a_map_that_lies_is_found(owners: list[int], lies: bool) -> None:
    order = torch.tensor([1, 0, 2, 3])
    truth = dependence(lambda x: x + x[order], [ROWS])
    own = torch.tensor(owners)[:, None].expand(4, 3)
    assert bool(wrong(Claim(truth.results, [own], {}, []), truth)) == lies

"""A table that is looked up and multiplied with: both uses in one gradient."""

from __future__ import annotations

import pytest
import torch

from dptrain.clipping.bookkeeping.combine import merge, norms_of_sum
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.use import Materialized

ROWS, LENGTH, WIDTH = 3, 11, 4


@pytest.mark.parametrize("table_first", [True, False])
def test_rows_of_a_table_are_added_to_gradients_that_are_there(table_first):
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    before = gradients.clone()
    ids = torch.tensor([[0, 3, 3, 10, 0], [5, 5, 5, 5, 5], [1, 2, 3, 4, 5]])
    looked_up = torch.randn(ROWS, 5, WIDTH, generator=generator, dtype=torch.float64)
    expected = gradients.clone()
    for row in range(ROWS):
        for k, b in zip(ids[row], looked_up[row], strict=True):
            expected[row, k] += b
    uses = [Gathered(ids, looked_up, LENGTH), Materialized(gradients)]
    (found,) = merge(uses if table_first else uses[::-1])
    torch.testing.assert_close(found.per_example(0, ROWS), expected)
    torch.testing.assert_close(norms_of_sum(uses), expected.flatten(1).norm(dim=1))
    assert torch.equal(gradients, before), "what a use holds may be somebody else's"

"""Layers that take part in some batches only: each is probed when it first does."""

import pytest
import torch
from torch import nn

from tests.helpers.bookkeeping_runs import ROWS, case, run_of, take
from tests.helpers.clipping_oracle import reduced


class Mixing(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Dropping(nn.Module):
    """The second layer is skipped at random."""

    def __init__(self, second):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), second, nn.Linear(4, 3)
        self.calls = []

    def forward(self, x):
        h = self.first(x)
        if float(torch.rand(())) < 0.5:
            h = h + self.second(h)
        return self.last(h)


def passes(second):
    """First without the second layer, then with it."""
    private = run_of(case(Dropping(second), torch.randn(ROWS, 4)))
    (x,), y = take(private)
    for seed in (1, 3):
        torch.manual_seed(seed)
        called = float(torch.rand(())) < 0.5
        assert called == (seed == 3)
        torch.manual_seed(seed)
        loss = reduced(private.module(x), y, "mean")
        after = torch.rand(())
        torch.manual_seed(seed)
        torch.rand(())
        assert torch.equal(after, torch.rand(()))  # as if there had been no further probe
        private.optimizer.zero_grad()
        loss.backward()


def test_a_layer_that_comes_later_is_probed_then():
    passes(nn.Linear(4, 4))


def test_a_layer_that_comes_later_and_mixes_is_refused():
    with pytest.raises(RuntimeError, match=r"layer '(first|second)'"):
        passes(Mixing(4, 4))

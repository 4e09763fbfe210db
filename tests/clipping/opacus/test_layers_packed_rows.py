"""Packed sequences: rows in one order for all layers, or refused."""

import copy

import pytest
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

from tests.helpers.engine import MODES, everything_every_step, flat, make

WITH_RECURRENT = [mode for mode in MODES if mode != "bookkeeping"]
SIZE, BOUND = 6, 0.05
SORTED = [7, 5, 4, 3, 2, 1]
MIXED = [2, 7, 3, 5, 1, 4]


class Sequences(nn.Module):
    """Embedding, LSTM over packed rows, and a linear layer, which sees the rows as they come."""

    def __init__(self, enforce_sorted, named=False):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(9, 5)
        self.recurrent = DPLSTM(5, 6, batch_first=True)
        self.out = nn.Linear(6, 3)
        self.enforce_sorted, self.named = enforce_sorted, named

    def forward(self, x, lengths):
        packed = pack_padded_sequence(
            self.embed(x), lengths, batch_first=True, enforce_sorted=self.enforce_sorted
        )
        found = self.recurrent(input=packed) if self.named else self.recurrent(packed)
        return self.out(found[1][0][-1])


def rows(lengths):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 9, (SIZE, 7), generator=generator)
    y = torch.randint(0, 3, (SIZE,), generator=generator)
    return TensorDataset(x, torch.tensor(lengths), y)


def private_run(module, lengths, mode):
    return make(
        module,
        rows(lengths),
        mode,
        scheme=everything_every_step(SIZE, 2),
        max_grad_norm=BOUND,
        loss_reduction="sum",
    )


def one_pass(private, lengths):
    """A backward pass by hand; the clipped sum of step 0."""
    model, optimizer, loader = private
    criterion = nn.CrossEntropyLoss(reduction="sum")
    x, n, y = next(iter(loader))
    criterion(model(x, n), y).backward()
    bound, weights = optimizer.bounds()
    sums = optimizer.clipper.clipped_sum(max_grad_norm=bound, weights=weights, scales=None)
    return torch.cat([s.flatten() for s in sums])


@pytest.mark.parametrize("mode", WITH_RECURRENT)
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_rows_in_the_order_of_their_lengths_are_clipped_one_by_one(mode, enforce_sorted):
    module = Sequences(enforce_sorted)
    plain = Sequences(enforce_sorted)
    wanted = torch.zeros_like(flat(plain))
    for x, n, y in rows(SORTED):
        loss = nn.functional.cross_entropy(plain(x[None], n[None]), y[None])
        g = torch.cat([p.flatten() for p in torch.autograd.grad(loss, list(plain.parameters()))])
        wanted += g * min(1.0, BOUND / float(g.norm()))
    found = one_pass(private_run(module, SORTED, mode), SORTED)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * BOUND)


@pytest.mark.parametrize("mode", WITH_RECURRENT)
@pytest.mark.parametrize("named", [False, True])
def test_rows_that_the_recurrent_layer_would_reorder_are_refused(mode, named):
    """Removing one of these rows would move the sum by up to 1.39 R."""
    private = private_run(Sequences(False, named), MIXED, mode)
    with pytest.raises(RuntimeError, match=r"'recurrent'.*enforce_sorted=False.*padded tensors"):
        one_pass(private, MIXED)


def test_other_calls_are_left_alone():
    """Evaluation, and the user's own copy of the module."""
    module = Sequences(False)
    own = copy.deepcopy(module)
    private = private_run(module, MIXED, "hooks")
    x, n, _ = rows(MIXED).tensors
    expected = own(x, n)
    with torch.no_grad():
        torch.testing.assert_close(private.module(x, n), expected)
    torch.testing.assert_close(private.module.eval()(x, n), expected)
    private.module.train()
    assert private.detach() is module
    torch.testing.assert_close(module(x, n), expected)

"""Data whose gradients depend on what was released: budgets hold for what is really contributed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain.individual import GDPFilter
from tests.helpers.individual_runs import make_with

SIZE, STEPS, SIGMA, BOUND = 8, 40, 2.0, 0.7


class Reacting(nn.Module):
    """⟨w, x_i⟩ times a factor from 1e-2 to 1e2 that is read off the released parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        angle = 40.0 * (self.layer.weight.detach() @ x.T).flatten()
        return self.layer(x).flatten() * torch.pow(10.0, 2.0 * torch.sin(angle))


class Output:
    reduction = "sum"

    def __call__(self, out):
        return out if self.reduction == "none" else out.sum()


def contributions(mode, individual, dtype):
    """Per step, the part of the release that each example made up, shape (steps, N); and the run.

    Microbatches of one example: what the running sum grows by is this example's doing.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SIZE, 5, generator=generator).to(dtype)
    model = Reacting().to(dtype)
    private = make_with(
        torch.optim.SGD(model.parameters(), lr=0.3),
        model,
        TensorDataset(x),
        individual,
        mode,
        steps=STEPS,
        sigma=SIGMA,
        max_grad_norm=BOUND,
        max_physical_batch_size=1,
        loss_reduction="sum",
        criterion=Output(),
    )
    wrapped, optimizer, loader = private
    criterion = Output()
    clipped_sum, norms, spendings = optimizer.clipper.clipped_sum, np.zeros((STEPS, SIZE)), []

    def noting(**options):
        sums = clipped_sum(**options)
        batch = loader.current
        (index,) = batch.indices
        norms[batch.step, index] = torch.cat([s.flatten() for s in sums]).double().norm()
        return sums

    optimizer.clipper.clipped_sum = noting
    for (rows,) in loader:
        optimizer.zero_grad()
        criterion(wrapped(rows)).backward()
        optimizer.step()
        if optimizer.at_step_boundary:
            spendings.append(private.individual.spent**2)
    return norms, np.array(spendings), private


# Every pair of two settings.
@pytest.mark.sample(every=5)
@pytest.mark.parametrize(
    ("mode", "full_consumption", "dtype"),
    [
        (mode, full_consumption, (torch.float32, torch.float64)[(number + full_consumption) % 2])
        for number, mode in enumerate(["bookkeeping", "hooks", "functorch"])
        for full_consumption in (False, True)
    ],
)
def test_no_example_ever_contributes_more_than_its_budget(mode, full_consumption, dtype):
    individual = GDPFilter(
        target_epsilon=4.0, target_delta=1e-3, max_steps=50, full_consumption=full_consumption
    )
    norms, spendings, private = contributions(mode, individual, dtype)
    real = (norms / (SIGMA * BOUND)) ** 2  # μ² of what was released
    booked = np.diff(spendings, axis=0, prepend=0)
    budget = private.individual.budget
    assert (spendings <= budget**2).all()
    assert (booked >= 0).all()
    slack = 1e-6 if dtype == torch.float32 else 1e-14
    assert (real <= booked * (1 + slack) + 1e-16).all()
    assert (real.cumsum(0) <= budget**2 * (1 + slack)).all()
    # The test sees all there is: small and clipped gradients, some left out, some that return.
    took_part = norms > 0
    assert (norms > 0.999 * BOUND).any()
    assert (took_part & (norms < 0.05 * BOUND)).any()
    if full_consumption:
        assert private.individual.active.sum() < SIZE
        spent_up = spendings[-1] == budget**2
        np.testing.assert_allclose(real.sum(0)[spent_up], budget**2, rtol=1e-5)
    else:
        returns = np.diff(took_part.astype(int), axis=0) == 1
        assert returns.any()
        assert spendings[-1].max() > 0.9 * budget**2

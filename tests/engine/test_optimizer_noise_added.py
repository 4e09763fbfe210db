"""C · (noise added over all steps) = Z, and it is the Z of the run's seed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import BandMF, MinSep
from tests.helpers.engine import make, train

STEPS, SIZE, SIGMA, R = 12, 30, 1.5, 0.3


def quiet_run(mode, micro, interrupted=False):
    """A run whose gradients are all zero, so that what is released is noise alone."""

    class Quiet(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 5, bias=False)
            self.head = nn.Linear(5, 3, bias=False)

        def forward(self, x):
            return self.head(self.layer(x))

    def fresh():
        torch.manual_seed(0)
        return make(
            Quiet(),
            TensorDataset(torch.zeros(SIZE, 6), torch.zeros(SIZE, dtype=torch.long)),
            mode,
            scheme=MinSep.for_batch_size(batch_size=6, dataset_size=SIZE, min_sep=4, steps=STEPS),
            strategy=BandMF(bands=4),
            noise_multiplier=SIGMA,
            max_grad_norm=R,
            max_physical_batch_size=micro,
        )

    rows = []

    def record():
        if private.optimizer.at_step_boundary:
            rows.append(torch.cat([p.grad.flatten() for p in private.optimizer.params]))

    private = fresh()
    if interrupted:
        train(private, steps=5, after_step=record)
        state = private.state_dict()
        private = fresh()
        private.load_state_dict(state)
    train(private, after_step=record)
    assert len(rows) == STEPS
    noise = torch.stack(rows).double().numpy() * 6 / (SIGMA * R)  # B̄ = 6
    dense = private.mechanism.strategy.columns(STEPS, np.arange(STEPS))
    return dense @ noise


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("interrupted", [False, True])
def test_c_times_noise_is_white(mode, micro, interrupted):
    z = quiet_run(mode, micro, interrupted)
    # The same seed has to give the same Z in every mode, microbatching and after a resume …
    np.testing.assert_allclose(z, quiet_run("hooks", None), rtol=0, atol=2e-5)
    # … and Z has to be standard normal: 12·45 draws, mean and variance at 6 sigma.
    count = z.size
    assert abs(z.mean()) < 6 / np.sqrt(count)
    assert abs(z.var() - 1) < 6 * np.sqrt(2 / count)
    lagged = (z[1:] * z[:-1]).sum() / np.sqrt(z[1:].size)
    assert abs(lagged) < 6  # rows of Z are uncorrelated, rows of C^-1 Z are not

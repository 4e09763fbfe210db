"""A step that is taken within ``torch.autocast`` adds up float32 numbers all the same."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers.engine import everything_every_step, images, make, released


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_within_autocast_releases_what_one_outside_does(mode, autocast):
    """Rounded products would take the sum past R, and past what its norms are of."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 64), nn.Linear(64, 3)
    )
    found = []
    for within in (False, True):
        private = make(
            copy.deepcopy(net),
            images(),
            mode,
            scheme=everything_every_step(24, 1),
            noise_multiplier=0.0,
            max_grad_norm=0.5,
        )
        x, y = next(iter(private.loader))
        nn.functional.cross_entropy(private.module(x), y).backward()
        with torch.autocast("cpu", autocast, enabled=within):
            private.optimizer.step()
        found.append(released(private, 24))
    assert torch.equal(*found)

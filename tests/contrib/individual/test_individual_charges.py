"""What an example is charged is never below what it adds to the released sum."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain.individual import GDPFilter, RenyiFilter
from tests.helpers.engine import MODES, everything_every_step, images, make, small_net
from tests.helpers.individual_runs import watch

BOUND = 100.0
GENEROUS = GDPFilter(target_epsilon=1e7, target_delta=1e-3, max_steps=50)


def charged_and_released(mode, seed, dtype, scale=None):
    """Of the one example there is, at three steps; of a loss that is scaled, if it is."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    data = TensorDataset(torch.randn(1, 6), torch.tensor([1]))
    private = make(
        module,
        data,
        mode,
        scheme=everything_every_step(1, 3),
        max_grad_norm=BOUND,
        noise_multiplier=1e-3,
        individual=GENEROUS,
    )
    ratios, admit = [], private.individual.admit

    def admitting(**options):
        ratios.append(float(options["ratios"][0]))
        return admit(**options)

    private.individual.admit = admitting
    sums = watch(private)
    model, optimizer, loader = private
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [(r * BOUND, float(s.double().norm())) for r, s in zip(ratios, sums, strict=True)]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_half_precision_inside_the_model_is_charged(mode, dtype):
    for seed in range(4):
        for charged, released in charged_and_released(mode, seed, dtype):
            assert released <= charged <= released * (1 + 3e-6)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
@pytest.mark.parametrize("mode", MODES)
def test_a_scaled_loss_is_charged_in_true_units(mode, scale):
    for charged, released in charged_and_released(mode, 0, torch.float16, scale):
        assert released <= charged <= released * (1 + 3e-6)
    plain = charged_and_released(mode, 0, None)
    scaled = charged_and_released(mode, 0, None, scale)
    assert scaled[0] == pytest.approx(plain[0], rel=1e-6)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("kind", [GDPFilter, RenyiFilter])
def test_a_bound_that_is_none_is_refused_before_anything_is_charged(mode, bound, kind):
    """R = -1 would release g/‖g‖ and charge ‖g‖."""
    individual = kind(target_epsilon=6.0, target_delta=1e-3, max_steps=50)
    private = make(
        small_net(), images(6), mode, scheme=everything_every_step(6, 3), individual=individual
    )
    model, optimizer, loader = private
    criterion = nn.CrossEntropyLoss()
    x, y = next(iter(loader))
    optimizer.max_grad_norm = bound

    def step():
        criterion(model(x), y).backward()
        optimizer.step()

    with pytest.raises(ValueError, match=f"max_grad_norm={bound}.*positive and finite"):
        step()
    assert private.individual.steps == private.steps_executed == 0

"""Runs on a GPU: resumed bit for bit, in parts, in other precisions, and equal to the CPU's."""

import functools

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dptrain import (
    BLT,
    BandInvMF,
    BandMF,
    Identity,
    JoinedOptimizer,
    Loading,
    NoiseOptions,
    Poisson,
    PrivacyEngine,
    ScaledAdam,
    Tree,
)
from dptrain.individual import GDPFilter
from tests.cuda.devices import needs_gpu
from tests.cuda.runs import SIZE, STEPS, Run
from tests.helpers.engine import flat, images

MODES = ["bookkeeping", "hooks", "functorch"]
everything = Poisson(probability=1.0, dataset_size=SIZE, steps=STEPS)


def resumes(make, batches):
    """A run that is stopped after so many batches ends as the whole one."""
    whole = make().train()
    assert whole.private.steps_executed == STEPS
    assert torch.isfinite(whole.end()).all()
    first = make().train(batches=batches)
    state = first.state()
    second = make()
    torch.manual_seed(4711)
    second.private.load_state_dict(state)
    second.train()
    assert torch.equal(second.end(), whole.end())
    for one, other in zip(
        second.private.optimizer.params, whole.private.optimizer.params, strict=True
    ):
        assert torch.equal(one.grad, other.grad)
    return whole


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro", [None, 3])
def test_a_resumed_run_is_bit_identical(mode, micro, device):
    """With dropout, whose masks come from the device's generator, and within a step."""
    make = functools.partial(
        Run, device, mode=mode, micro=micro, dropout=0.3, strategy=BandMF(bands=3)
    )
    resumes(make, batches=5)


NOISES = {
    "independent": {"strategy": Identity()},
    "buffers": {"strategy": BLT(buffers=2), "scheme": everything},
    "banded inverse": {"strategy": BandInvMF(inverse_bands=3), "scheme": everything},
    "tree": {"strategy": Tree(), "scheme": everything},
    "bfloat16 buffers": {
        "strategy": BandMF(bands=3),
        "noise": NoiseOptions(dtype=torch.bfloat16),
    },
    "regenerated": {"strategy": BandMF(bands=3), "noise": NoiseOptions(regenerate=True)},
    "a filter": {
        "scheme": everything,
        "individual": GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=50),
        "noise_multiplier": 1.2,
    },
}


@pytest.mark.parametrize("name", NOISES)
def test_every_kind_of_noise_resumes(name, device):
    resumes(functools.partial(Run, device, **NOISES[name]), batches=4)


def test_secure_noise_resumes(device):
    """Its seed is fresh entropy, which only the checkpoint knows."""
    options = {"strategy": BandMF(bands=3), "noise": NoiseOptions(secure=True), "seed": None}
    first = Run(device, **options).train(batches=4)
    state = first.state()
    first.train()
    second = Run(device, **options)
    second.private.load_state_dict(state)
    assert torch.equal(second.train().end(), first.end())


def by_dimension(kind, parameters):
    parameters = list(parameters)
    return JoinedOptimizer(
        kind([p for p in parameters if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=0.01),
    )


optim = torch.optim
OPTIMIZERS = {
    "SGD fused": functools.partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": functools.partial(optim.Adam, lr=0.05),
    "AdamW foreach": functools.partial(optim.AdamW, lr=0.05, foreach=True),
    "AdamW fused": functools.partial(optim.AdamW, lr=0.05, fused=True),
    "Adafactor": functools.partial(optim.Adafactor, lr=0.05),
    "joined": functools.partial(by_dimension, getattr(optim, "Muon", optim.SGD)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes(name, device):
    resumes(functools.partial(Run, device, OPTIMIZERS[name]), batches=4)


def test_scaled_gradients_resume(device):
    adam = functools.partial(ScaledAdam, lr=0.05, eps_scale=0.1)
    resumes(functools.partial(Run, device, adam, mode="hooks"), batches=4)


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_a_batch_add_up(mode, device):
    """Three rows at a time, seven, or all: the same up to the rounding of sums, in float64."""
    options = {"mode": mode, "dtype": torch.float64, "strategy": BandMF(bands=3)}
    ends = [Run(device, micro=micro, **options).train().end() for micro in (None, 3, 7)]
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], rtol=1e-9, atol=1e-9)


def test_a_fixed_number_of_parts(device):
    options = {"dtype": torch.float64, "strategy": BandMF(bands=3)}
    whole = Run(device, **options).train()
    parts = Run(device, loading=Loading(microbatches=4), **options).train()
    torch.testing.assert_close(parts.end(), whole.end(), rtol=1e-9, atol=1e-9)


PRECISIONS = {
    "autocast to bfloat16": {"autocast": torch.bfloat16},
    "autocast to float16": {"autocast": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_trains_and_resumes(name, mode, device):
    make = functools.partial(Run, device, mode=mode, strategy=BandMF(bands=3), **PRECISIONS[name])
    whole = resumes(make, batches=4)
    wanted = PRECISIONS[name].get("dtype", torch.float32)
    assert {p.grad.dtype for p in whole.private.optimizer.params} == {wanted}


@pytest.mark.parametrize("mode", MODES)
def test_the_noise_has_the_standard_deviation_that_is_accounted_for(mode, device):
    """Of the released sum, σ R an entry, whatever the gradient: all weights are on no example."""
    sigma, bound = 3.0, 0.5
    run = Run(
        device,
        mode=mode,
        scheme=Poisson(probability=1e-9, dataset_size=SIZE, steps=40),
        noise_multiplier=sigma,
        max_grad_norm=bound,
        dtype=torch.float32,
    )
    found = []
    run.private.optimizer.register_step_pre_hook(
        lambda *_: found.append(torch.cat([p.grad.flatten() for p in run.private.optimizer.params]))
    )
    run.train()
    size = run.private.mechanism.scheme.expected_batch_size
    z = torch.stack(found).double().flatten() * size / (sigma * bound)
    assert abs(float(z.mean())) * len(z) ** 0.5 < 6
    assert abs(float(z.square().mean()) - 1) * (len(z) / 2) ** 0.5 < 6


@pytest.mark.parametrize("mode", MODES)
def test_a_broken_example_is_left_out_and_counted(mode, device):
    run = Run(device, mode=mode, scheme=everything, noise_multiplier=0.0)
    model, optimizer, loader = run.private
    x, y = next(iter(loader))
    x[3] = float("nan")
    nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
    assert run.private.nonfinite_examples == 1
    assert all(torch.isfinite(p.grad).all() for p in optimizer.params)


def test_what_a_forward_pass_leaves_in_the_module_is_refused(device):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(16, 3)
            self.register_buffer("seen", torch.zeros(16))

        def forward(self, x):
            self.seen += x.detach().flatten(1).mean(0)
            return self.body(x.flatten(1))

    module = Counts().to(device)
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data=images(SIZE),
        scheme=everything,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    x, y = next(iter(private.loader))
    out = private.module(x.to(device))
    nn.functional.cross_entropy(out, y.to(device)).backward()
    with pytest.raises(RuntimeError, match="seen"):
        private.optimizer.step()


def test_an_average_of_weights_leaves_the_run_alone_and_resumes(device):
    plain = Run(device).train()
    run = Run(device)
    average = AveragedModel(run.private.module, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    total = torch.zeros_like(run.end())
    for step in range(1, STEPS + 1):
        run.train(step=step)
        average.update_parameters(run.private.module)
        total = run.end() if step == 1 else 0.7 * total + 0.3 * run.end()
    assert torch.equal(run.end(), plain.end())
    torch.testing.assert_close(flat(average), total, rtol=0, atol=STEPS * 2.0**-23)


@needs_gpu
def test_a_run_without_noise_is_that_of_the_cpu():
    """In float64 and without dropout nothing but the order of sums differs."""
    options = {"dtype": torch.float64, "noise_multiplier": 0.0, "strategy": BandMF(bands=3)}
    here, there = (Run(device, **options).train().end().cpu() for device in ("cpu", "cuda"))
    torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-8)


@needs_gpu
def test_a_checkpoint_of_the_other_device_is_refused():
    """Its noise would go on as another."""
    state = Run("cuda", strategy=BandMF(bands=3)).train(batches=2).state()
    other = Run("cpu", strategy=BandMF(bands=3))
    before = other.end()
    with pytest.raises(ValueError, match="devices"):
        other.private.load_state_dict(state)
    assert torch.equal(other.end(), before)

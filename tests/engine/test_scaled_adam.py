"""Adam that scales before it clips, against its equations in numpy; and scales in general."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import BandMF, Gradients, MinSep
from dptrain.core.randomness import split_seed
from dptrain.engine.scaled_adam import ScaledAdam
from dptrain.noise import noise_stream
from tests.engine.test_private_training_resume import through_disk
from tests.helpers.engine import everything_every_step, flat, wire

WITH_GRADIENTS = ["bookkeeping", "hooks", "functorch"]
STABILITY = 1e-6  # what Opacus, and dptrain with it, adds to a norm that it divides by
SIZE, INPUTS, OUTPUTS = 18, 3, 2


def regression(size=SIZE, scale=1.0, seed=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, INPUTS, generator=generator, dtype=torch.float64)
    x *= scale * torch.tensor([1.0, 0.1, 4.0], dtype=torch.float64)  # a geometry to be learnt
    return TensorDataset(x, torch.randn(size, OUTPUTS, generator=generator, dtype=torch.float64))


def linear():
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS).double()


def make(model, data, *, optimizer=None, mode="hooks", **options):
    options.setdefault("scheme", everything_every_step(len(data), 6))
    options.setdefault("noise_multiplier", 0.7)
    options.setdefault("max_grad_norm", 0.9)
    options.setdefault("seed", 5)
    return wire(
        module=model,
        optimizer=optimizer or ScaledAdam(model.parameters(), lr=0.05, eps_scale=0.2),
        data=data,
        gradients=Gradients(
            loss=nn.MSELoss(reduction=options.get("loss_reduction", "mean")), mode=mode
        ),
        **options,
    )


def train(private, batches=None, after=lambda: None):
    model, optimizer, loader = private
    for count, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        losses = (model(x) - y).square().sum(1)
        (losses.mean() if optimizer.loss_reduction == "mean" else losses.sum()).backward()
        optimizer.step()
        after()
        if count == batches:
            break


def gradients(theta, x, y):
    """Per-example gradients of |W x + b - y|², shape (rows, outputs · inputs + outputs)."""
    weight, bias = theta[: OUTPUTS * INPUTS].reshape(OUTPUTS, INPUTS), theta[OUTPUTS * INPUTS :]
    error = 2 * (x @ weight.T + bias - y)
    return np.concatenate([(error[:, :, None] * x[:, None]).reshape(len(x), -1), error], axis=1)


def algorithm(
    theta, batches, noise, data, *, lr, betas, eps, eps_scale, bound, pad, grid, mean_size
):
    """The equations in the class's docstring, one line each; yields θ and ĝ after every step.

    The sum is rounded to the grid, of which the noise are whole numbers, and R is less by the pad.
    """
    x, y = (t.numpy() for t in data.tensors)
    m = v = np.zeros_like(theta)
    for t, (rows, n) in enumerate(zip(batches, noise, strict=True), start=1):
        s = 1 / (np.sqrt(v) + eps_scale)
        total = np.zeros_like(theta)
        for g in gradients(theta, x[rows], y[rows]):
            total += s * g * min(1, bound * (1 - pad) / (np.linalg.norm(s * g) + STABILITY))
        g_hat = grid * (np.rint(total / grid) + n) / mean_size / s
        m = betas[0] * m + (1 - betas[0]) * g_hat
        v = betas[1] * v + (1 - betas[1]) * g_hat**2
        corrected = np.sqrt(v / (1 - betas[1] ** t)) + eps
        theta = theta - lr * m / (1 - betas[0] ** t) / corrected
        yield theta, g_hat


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("mode", WITH_GRADIENTS)
@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_run_is_the_algorithm(mode, micro, reduction):
    """Correlated noise, random batches, clipping that bites for some examples and not for all."""
    data, model, steps = regression(), linear(), 12
    settings = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "eps_scale": 0.2}
    bound, sigma = 40.0, 0.3
    scheme = MinSep.for_batch_size(batch_size=4, dataset_size=SIZE, min_sep=3, steps=steps)
    start = flat(model).numpy()
    private = make(
        model,
        data,
        mode=mode,
        optimizer=ScaledAdam(model.parameters(), **settings),
        scheme=scheme,
        strategy=BandMF(bands=3),
        noise_multiplier=sigma,
        max_grad_norm=bound,
        max_physical_batch_size=micro,
        loss_reduction=reduction,
    )
    batches, thetas, releases = [[] for _ in range(steps)], [], []

    def note():
        batch = private.loader.current
        batches[batch.step].extend(batch.indices)
        if private.optimizer.at_step_boundary:
            thetas.append(flat(model).numpy())
            releases.append(torch.cat([p.grad.flatten() for p in private.optimizer.params]))

    train(private, after=note)
    like = [torch.empty_like(p) for p in private.optimizer.params]
    stream = noise_stream(private.mechanism.strategy, steps=steps, like=like, seed=split_seed(5)[1])
    noise = [np.concatenate([r.numpy().ravel() for r in next(stream)]) for _ in range(steps)]
    expected = algorithm(
        start,
        batches,
        noise,
        data,
        bound=bound,
        pad=np.sqrt(len(start)) * sigma * 2.0**-stream.grid_bits,
        grid=bound * sigma * 2.0**-stream.grid_bits,
        mean_size=4 if reduction == "mean" else 1,
        **settings,
    )
    for theta, found, (right, g_hat) in zip(thetas, releases, expected, strict=True):
        np.testing.assert_allclose(found.numpy(), g_hat, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(theta, right, rtol=1e-10, atol=1e-10)
    norms = np.linalg.norm(gradients(start, *(t.numpy() for t in data.tensors)), axis=1)
    assert (norms / 0.2 > bound).any()
    assert (norms / 0.2 < bound).any()


@pytest.mark.parametrize("mode", WITH_GRADIENTS)
def test_without_noise_and_clipping_it_is_adam(mode):
    data, model, plain = regression(), linear(), linear()
    options = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-4}
    private = make(
        model,
        data,
        mode=mode,
        optimizer=ScaledAdam(model.parameters(), eps_scale=0.01, **options),
        noise_multiplier=0.0,
        max_grad_norm=1e9,
    )
    train(private)
    adam = torch.optim.Adam(plain.parameters(), **options)
    for _ in range(6):
        adam.zero_grad()
        x, y = data.tensors
        (plain(x) - y).square().sum(1).mean().backward()
        adam.step()
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-10, atol=1e-10)


def test_a_large_eps_scale_is_private_adam():
    """s is 1/ε_s everywhere then: clipping norm R·ε_s and noise to match."""
    data, ends = regression(scale=1e-3), []
    for scaled in (True, False):
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        if scaled:
            optimizer = ScaledAdam(model.parameters(), lr=1e-3, eps_scale=1e4)
        bound = 0.5 / 1e4 if scaled else 0.5
        private = make(model, data, optimizer=optimizer, max_grad_norm=bound)
        train(private)
        ends.append(flat(model))
    # R/(‖g‖ + 1e-6) has a larger share of 1e-6 where all is scaled down: 2 % of R.
    moved = flat(linear()) - ends[1]
    assert float((ends[0] - ends[1]).norm() / moved.norm()) < 0.03


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("stop_after", [1, 2, 5, 10])
def test_resumed_run_is_bit_identical(stop_after):
    """Also from within a logical step; the scales come from the second moments that are saved."""

    def start():
        model = linear()
        private = make(model, regression(), max_physical_batch_size=7)
        scheduler = torch.optim.lr_scheduler.StepLR(private.optimizer, 2, 0.5)
        return private, private.register_scheduler(scheduler), model

    whole, scheduler, expected = start()
    train(whole, after=scheduler.step)
    assert whole.optimizer.param_groups[0]["lr"] == 0.05 * 0.5**3
    first, scheduler, _ = start()
    train(first, batches=stop_after, after=scheduler.step)
    second, scheduler, model = start()
    second.load_state_dict(through_disk(first.state_dict()))
    train(second, after=scheduler.step)
    assert second.steps_executed == whole.steps_executed == 6
    assert torch.equal(flat(model), flat(expected))
    pairs = zip(
        second.optimizer.original_optimizer.scales().values(),
        whole.optimizer.original_optimizer.scales().values(),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("sigma", [0.0, 0.7])
def test_parameters_without_a_gradient(sigma):
    """They are released as noise, divided by their scale like all else."""
    torch.manual_seed(0)
    model, alone = WithUnused(), linear()
    before = flat(model.unused)
    private = make(model, regression(), noise_multiplier=sigma)
    train(private)
    if sigma:
        assert not (flat(model.unused) == before).any()
        assert bool(torch.isfinite(flat(model)).all())
        return
    assert torch.equal(flat(model.unused), before)
    train(make(alone, regression(), noise_multiplier=sigma))
    torch.testing.assert_close(flat(model.used), flat(alone), rtol=1e-12, atol=0)


def test_bad_eps_scale():
    params = list(linear().parameters())
    for value in (0.0, -1.0, math.inf, math.nan, 1e-320):
        with pytest.raises(ValueError, match="eps_scale"):
            ScaledAdam(params, eps_scale=value)
    for value in (True, "1e-3", None):
        with pytest.raises(TypeError, match="eps_scale"):
            ScaledAdam(params, eps_scale=value)
    with pytest.raises(ValueError, match="eps_scale=-2"):
        ScaledAdam([{"params": params, "eps_scale": -2.0}], eps_scale=1.0)
    own = ScaledAdam(
        [{"params": params[:1], "eps_scale": 4.0}, {"params": params[1:]}], eps_scale=0.5
    )
    first, second = own.scales().values()
    assert bool((first == 0.25).all())
    assert bool((second == 2.0).all())


def test_a_checkpoint_knows_whether_gradients_were_scaled():
    model = linear()
    plain = make(model, regression(), optimizer=torch.optim.Adam(model.parameters()))
    scaled = make(linear(), regression())
    for one, other in ((plain, scaled), (scaled, plain)):
        with pytest.raises(ValueError, match="scaled="):
            other.load_state_dict(one.state_dict())

"""Private runs on a device: the loop of a user who moves the module and every batch there."""

from __future__ import annotations

import io

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Loading, MinSep, Poisson, PrivacyEngine
from tests.helpers.engine import flat, images


def module_on(build, device):
    torch.manual_seed(0)  # on the CPU, so that it is the same module everywhere
    return build().to(device)


def loop(module, x):
    """Gradients of the sum of squared outputs, row by row: shape (rows, numbers)."""
    rows = []
    for i in range(len(x)):
        grads = torch.autograd.grad(module(x[i : i + 1]).square().sum(), list(module.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).detach()


def started(module, x, *, mode, max_grad_norm):
    """A run of one step over all rows of ``x``, its batch taken; nothing is noised."""
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data=TensorDataset(x.cpu()),
        scheme=Poisson(probability=1.0, dataset_size=len(x), steps=1),
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        gradients=Gradients(loss="sum", mode=mode),
    )
    next(iter(private.loader))
    return private


def clipped(private, x):
    """The clipped sum over the rows, as the run releases it, in one vector."""
    private.module(x).square().sum().backward()
    private.optimizer.step()
    return torch.cat([p.grad.flatten() for p in private.optimizer.params])


def net(dropout=0.0):
    """An embedding of pixels' signs, a convolution, norms and a head."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(64, 8),
        nn.LayerNorm(8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


STEPS, SIZE = 8, 24
SCHEME = MinSep.for_batch_size(batch_size=SIZE / 4, dataset_size=SIZE, min_sep=3, steps=STEPS)


class Run:
    """A run over small images.

    Args:
        device: of the module and its batches.
        optimizer: makes one of parameters.
        dropout: drawn on the device, from torch's own generator.
        micro: most rows of a part of a batch.
        autocast: dtype of the forward pass, or none.
        dtype: of the parameters and inputs.
        options: of ``make_private``.
    """

    def __init__(
        self,
        device,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        *,
        dropout=0.0,
        micro=None,
        mode="bookkeeping",
        autocast=None,
        dtype=torch.float32,
        **options,
    ):
        self.device, self.autocast, self.dtype = device, autocast, dtype
        self.module = module_on(lambda: net(dropout), device).to(dtype)
        self.private = PrivacyEngine().make_private(
            module=self.module,
            optimizer=optimizer(self.module.parameters()),
            data=images(SIZE),
            **{
                "scheme": SCHEME,
                "noise_multiplier": 1.0,
                "max_grad_norm": 1.0,
                "seed": 5,
                "gradients": Gradients(mode=mode),
                "loading": Loading(max_physical_batch_size=micro),
                **options,
            },
        )
        torch.manual_seed(99)

    def train(self, batches=None, step=None):
        """So many batches of the loader, or up to a step, or to the end."""
        model, optimizer, loader = self.private
        for count, (x, y) in enumerate(loader, start=1):
            optimizer.zero_grad()
            with torch.autocast(
                self.device, self.autocast or torch.bfloat16, enabled=self.autocast is not None
            ):
                out = model(x.to(self.device, self.dtype))
                whole = out if self.dtype is torch.float64 else out.float()
                loss = nn.functional.cross_entropy(whole, y.to(self.device))
            loss.backward()
            optimizer.step()
            if count == batches or self.private.steps_executed == step:
                break
        return self

    def end(self):
        return flat(self.module)

    def state(self):
        """The checkpoint, written and read."""
        file = io.BytesIO()
        torch.save(self.private.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

"""Architectures through the public engine, fed as a user does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dptrain import Gradients, Loading, Poisson
from dptrain.engine.private_training import PrivateTraining
from tests.helpers.architectures import Architecture
from tests.helpers.clipping_oracle import reduced
from tests.helpers.engine import wire

# What a mode refuses; tests/clipping/opacus/test_layers_refused.py holds that it does.
UNKNOWN = {
    "hooks": frozenset(
        {
            "torch attention",
            "torch recurrent",
            "shared row of positions",
            "flat positions",
            "inplace",
            "padding_mode",
            "output size",
            "bag",
            "bilinear",
            "bilinear over positions",
            "prelu",
            "prelu over positions",
            "prelu over pixels",
        }
    ),
    "bookkeeping": frozenset(),
}
MODES = list(UNKNOWN)


def one_batch(
    a: Architecture,
    mode: str,
    *,
    reduction: str,
    bound: float = 1.0,
    most: int | None = None,
    noise_multiplier: float = 0.0,
    scheme: Any = None,
    lr: float = 0.0,
    probe: str = "shapes",
    **options: Any,
) -> PrivateTraining:
    """A run over the architecture's batch, whole in the one step that there is by default."""
    rows = [x.unflatten(0, (a.examples, a.views)) for x in (*a.inputs, a.targets)]
    return wire(
        module=a.module,
        optimizer=torch.optim.SGD([p for p in a.module.parameters() if p.requires_grad], lr=lr),
        data=TensorDataset(*rows),
        scheme=scheme or Poisson(probability=1.0, dataset_size=a.examples, steps=1),
        noise_multiplier=noise_multiplier,
        max_grad_norm=bound,
        seed=1,
        gradients=Gradients(mode=mode, loss=reduction, views=a.views, probe=probe),
        loading=Loading(max_physical_batch_size=most),
        **options,
    )


def loss_of(private: PrivateTraining, batch: list[Tensor]) -> Tensor:
    """The user's loss of a batch as the loader yields it."""
    *inputs, targets = (x.flatten(0, 1) for x in batch)
    return reduced(private.module(*inputs), targets, private.optimizer.loss_reduction)


def backward(private: PrivateTraining, a: Architecture) -> None:
    """Forward and backward of the first batch, without a step; that batch is the architecture's."""
    batch = next(iter(private.loader))
    assert torch.equal(batch[-1].flatten(), a.targets) or not torch.isfinite(a.targets).all()
    loss_of(private, batch).backward()


def releases(
    a: Architecture, mode: str, *, reduction: str, bound: float, most: int
) -> tuple[list[Tensor], Tensor]:
    """What one step over microbatches of ``most`` examples releases, undone of the division by the
    expected batch size; and the norms of the examples, shape (examples,)."""
    private = one_batch(a, mode, reduction=reduction, bound=bound, most=most)
    norms = []
    for batch in private.loader:
        private.optimizer.zero_grad()
        loss_of(private, batch).backward()
        private.optimizer.step()
        norms.append(private.optimizer.clipper.norms)
    assert len(norms) == -(-a.examples // most)
    scale = a.examples if reduction == "mean" else 1
    return [p.grad * scale for p in private.optimizer.params], torch.cat(norms)

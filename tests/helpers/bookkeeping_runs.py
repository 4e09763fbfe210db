"""Modules written out by hand, their one batch, and what a run makes of it against the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dptrain.engine.private_training import PrivateTraining
from tests.helpers.architectures import Architecture
from tests.helpers.architectures_runs import one_batch
from tests.helpers.clipping_oracle import (
    TOLERANCE,
    Reference,
    assert_norms,
    assert_sums,
    flat_factors,
    reduced,
    reference,
)

ROWS = 5


def case(module: nn.Module, *inputs: Tensor, dtype: torch.dtype = torch.float64) -> Architecture:
    """The module with these inputs; some of its gradients are clipped by the median norm."""
    sizes = torch.logspace(-1, 1, len(inputs[0]))
    return Architecture(
        module=module.to(dtype),
        inputs=tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs),
        targets=(torch.randn(len(sizes)) * sizes).to(dtype),
        views=1,
    )


def dense(width: int = 4, rows: int = ROWS) -> Architecture:
    """A few linear layers and a norm."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(width, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid(),
        nn.Linear(5, 2),
    )  # fmt: skip
    return case(module, torch.randn(rows, width))


def run_of(a: Architecture, **options: Any) -> PrivateTraining:
    """A run in bookkeeping mode over the whole batch, one step."""
    options.setdefault("reduction", "mean")
    return one_batch(a, options.pop("mode", "bookkeeping"), **options)


def take(private: PrivateTraining) -> tuple[tuple[Tensor, ...], Tensor]:
    """The first batch as the loader gives it: inputs and targets."""
    *inputs, targets = (x.flatten(0, 1) for x in next(iter(private.loader)))
    return tuple(inputs), targets


def backward(private: PrivateTraining, forward: Callable[..., Tensor] | None = None) -> None:
    """Forward and backward pass of the first batch, by the run's module or in another way."""
    inputs, targets = take(private)
    output = (private.module if forward is None else forward)(*inputs)
    reduced(output, targets, private.optimizer.loss_reduction).backward()


def check(
    private: PrivateTraining,
    wanted: Reference,
    weights: Tensor | None = None,
    tolerance: float | None = None,
) -> None:
    """That norms and clipped sums of what was reported are the loop's; consumes it."""
    finite = wanted.norms[torch.isfinite(wanted.norms)]
    bound = float(finite.median())
    weights = torch.ones(len(wanted.norms)) if weights is None else weights
    clipper = private.optimizer.clipper
    sums = clipper.clipped_sum(max_grad_norm=bound, weights=weights, scales=None)
    tolerance = tolerance or TOLERANCE[wanted.norms.dtype]
    assert_norms(clipper.norms, wanted, tolerance)
    assert_sums(sums, wanted, flat_factors(wanted.norms, bound, weights), tolerance)


def check_like_loop(
    a: Architecture, forward: Callable[..., Tensor] | None = None, **options: Any
) -> PrivateTraining:
    """One batch through a run, against the loop over the module as it was given."""
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a, **options)
    backward(private, forward)
    check(private, wanted)
    return private

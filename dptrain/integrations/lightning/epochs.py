"""The number of steps that a fit makes, held against the number that the scheme plans."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch.utils.data import DataLoader

from dptrain.engine import Loading
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson, Scheme


@dataclasses.dataclass(frozen=True)
class FitPlan:
    """The plan of a fit.

    Attributes:
        scheme: how batches are drawn, ``None`` where a mechanism says so.
        loading: with the logical steps of an epoch.
    """

    scheme: Scheme | None
    loading: Loading

    @property
    def parts(self) -> int:
        """Number of Lightning's batches that make one logical batch."""
        return self.loading.microbatches or 1

    @property
    def epoch(self) -> int:
        """Number of logical steps of an epoch."""
        assert self.loading.steps_per_epoch is not None
        return self.loading.steps_per_epoch


def fit_plan(
    *,
    data: Any,
    max_epochs: int,
    max_steps: int,
    scheme: Scheme | None,
    mechanism: MatrixMechanism | None,
    loading: Loading,
) -> FitPlan:
    """The plan of a fit whose end the trainer and the scheme agree on.

    Args:
        max_epochs, max_steps: of the trainer; -1 is no limit.
        scheme: as given to the callback. Without one, and without a mechanism, it is Poisson
            sampling with the loader's batch size, for what the trainer runs.
    """
    known = scheme if mechanism is None else mechanism.scheme
    if known is None:
        known = scheme = _poisson(data, max_epochs, max_steps)
        loading = dataclasses.replace(loading, steps_per_epoch=loading.steps_per_epoch or len(data))
    if loading.max_physical_batch_size is not None:
        raise ValueError(
            f"Loading(max_physical_batch_size={loading.max_physical_batch_size}): the number of "
            "parts of a batch may then be random, and Lightning counts the parts as batches. Set "
            "Loading(microbatches=...), a fixed number of parts of every batch"
        )
    steps = known.steps
    plan = f"{type(known).__name__} plans {steps} steps"
    epoch = loading.steps_per_epoch
    if epoch is None:
        if max_epochs != -1 and steps % max_epochs:
            raise ValueError(
                f"Trainer(max_epochs={max_epochs}): {plan}, which {max_epochs} epochs do not "
                f"divide evenly. Plan {steps - steps % max_epochs + max_epochs} steps, or set "
                f"Trainer(max_epochs=1), one epoch of {steps} steps"
            )
        epoch = steps if max_epochs == -1 else steps // max_epochs
    by_epochs = math.inf if max_epochs == -1 else epoch * max_epochs
    by_steps = math.inf if max_steps == -1 else max_steps
    if min(by_epochs, by_steps) != steps:
        _refuse(steps, plan, epoch, max_epochs, max_steps)
    return FitPlan(scheme, dataclasses.replace(loading, steps_per_epoch=epoch))


def _refuse(steps: int, plan: str, epoch: int, max_epochs: int, max_steps: int) -> None:
    """Say which limit of the trainer's disagrees with the plan."""
    by_epochs = math.inf if max_epochs == -1 else epoch * max_epochs
    if max_steps != -1 and max_steps <= by_epochs:
        name, runs = f"Trainer(max_steps={max_steps})", float(max_steps)
        remedy = f"set max_steps={steps}, or leave it out"
    elif by_epochs == math.inf:
        name, runs = "Trainer(max_epochs=-1)", math.inf
        remedy = f"set max_epochs={math.ceil(steps / epoch)}, or max_steps={steps}"
    else:
        name, runs = f"Trainer(max_epochs={max_epochs})", by_epochs
        remedy = (
            f"set max_epochs={steps // epoch}"
            if steps % epoch == 0
            else f"set max_epochs={math.ceil(steps / epoch)} and max_steps={steps}"
        )
    where = "before" if runs < steps else "after"
    count = "without end" if runs == math.inf else f"after {runs:.0f} steps, {epoch} per epoch"
    raise ValueError(
        f"{name} would run {count}, and {plan}: the fit would end {where} its plan, for which the "
        f"noise is chosen. Either {remedy}, or plan another number of steps in the scheme"
    )


def _poisson(data: Any, max_epochs: int, max_steps: int) -> Scheme:
    """Poisson batches of the loader's size, for what the trainer runs."""
    if not isinstance(data, DataLoader) or data.batch_size is None:
        raise ValueError(
            "scheme=None needs a DataLoader with a batch_size, from which Poisson sampling "
            f"follows, and the training data is a {type(data).__name__}: pass such a loader, or "
            "set scheme=, for instance dptrain.Poisson.for_batch_size(...)"
        )
    if max_epochs == -1 and max_steps == -1:
        raise ValueError(
            "Trainer(max_epochs=-1) runs without end, and scheme=None takes the number of steps "
            "from the trainer: set max_epochs or max_steps"
        )
    steps = math.inf if max_epochs == -1 else max_epochs * len(data)
    steps = min(steps, math.inf if max_steps == -1 else max_steps)
    return Poisson.for_batch_size(
        batch_size=data.batch_size,
        dataset_size=len(data.dataset),  # type: ignore[arg-type]
        steps=int(steps),
    )

"""The work of ``accelerator.prepare`` in ordinary training, done as a private run needs it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch

from dptrain.core import checks
from dptrain.engine import PrivateTraining
from dptrain.reporting import OWNER_ONLY, owner_only
from dptrain.sampling import PrivateLoader

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def prepare(
    accelerator: Any, private: PrivateTraining, *schedulers: Any
) -> tuple[Any, torch.optim.Optimizer, PrivateLoader]:
    """Module, optimizer and loader of a private run, for a loop with ``accelerator.backward``.

    In place of ``accelerator.prepare(*private, *schedulers)``. The optimizer is accelerate's around
    the run's. Neither is the loader replaced, which would draw batches of its own, nor is the
    module wrapped for several processes, whose gradients the run adds up itself, and schedulers
    tick once a logical step, whatever the number of processes. ``accelerator.save_state`` saves the
    private run too, as a custom object, and ``load_state`` goes on with it bit for bit; whoever has
    that folder can subtract the noise.

    Args:
        accelerator: of the loop.
        private: what ``make_private`` returned, on the accelerator's device.
        schedulers: of the learning rate, of the run's optimizer; kept with the run's state.

    Returns:
        Module, optimizer and loader.

    Raises:
        TypeError: if ``private`` is no run.
        ValueError: for settings of the accelerator that a private run cannot have, by their names.
    """
    checks.instance("private", private, PrivateTraining, example="make_private(...)")
    _check(accelerator, private)
    for scheduler in schedulers:
        private.register_scheduler(scheduler)
    optimizer = accelerator.prepare_optimizer(private.optimizer)
    accelerator.register_for_checkpointing(private)
    accelerator.save_state = _for_the_owner(accelerator.save_state)
    for name in _CLIPS:
        setattr(accelerator, name, _refusing(getattr(accelerator, name), name, private))
    return private.module, optimizer, private.loader


def _for_the_owner(save_state: Callable[..., Any]) -> Callable[..., Any]:
    """``save_state``, with files that nobody else can read: they hold seeds and random states."""

    def save(*args: Any, **more: Any) -> Any:
        with owner_only():
            folder = save_state(*args, **more)
        for path in pathlib.Path(folder).rglob("*") if folder else ():  # also of an earlier run
            if path.is_file():
                path.chmod(OWNER_ONLY)
        return folder

    return save


def _check(accelerator: Any, private: PrivateTraining) -> None:
    """Refuse settings that would change the steps."""
    parts = accelerator.gradient_accumulation_steps
    if parts != 1:
        raise ValueError(
            f"Accelerator(gradient_accumulation_steps={parts}): it skips calls of "
            "optimizer.step(), but every batch of a private run needs one. Leave it out, and give "
            f"make_private loading=Loading(microbatches={parts}), which takes one step in {parts} "
            "calls"
        )
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}): it replaces the "
            "module's forward. Leave it out, and run the forward pass under torch.autocast in the "
            "loop"
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ValueError(
            f"the accelerator's distributed_type is {kind}, but each process of a private run "
            "holds the whole model and its optimizer: use plain processes on CPUs or GPUs"
        )
    if accelerator.num_processes != (world := private.optimizer.shared.ranks.world_size):
        raise ValueError(
            f"the accelerator has {accelerator.num_processes} process(es) and the private run "
            f"{world}: create the Accelerator first and the run afterwards, without "
            "PrivacyEngine(distributed=False)"
        )
    found = {p.device.type for p in private.optimizer.params}
    if found != {accelerator.device.type}:
        raise ValueError(
            f"the module is on {sorted(found)} and the accelerator's device is "
            f"{accelerator.device}: call module.to(accelerator.device) before make_private"
        )


def _refusing(clip: Callable[..., Any], name: str, private: PrivateTraining) -> Callable[..., Any]:
    """``clip`` that refuses the run's parameters, on which it would have no effect."""
    own = {id(p) for p in private.optimizer.params}

    def clips(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not private.optimizer.detached and any(id(p) in own for p in given):
            raise RuntimeError(
                f"accelerator.{name} would clip a gradient that the private step replaces: leave "
                "it out, since make_private(max_grad_norm=...) clips every example's gradient"
            )
        return clip(given, *args, **kwargs)

    return clips

"""Settings of Lightning's that a private fit cannot have, each by its name with the remedy."""

from __future__ import annotations

import inspect
import re
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves

from dptrain.integrations.evaluation import TrainingRows, is_same

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_SAY_SO = "say so by PrivateCallback(public_evaluation=True)"
_PRECISIONS = ("32-true", "bf16-mixed")

# Callbacks that change how often or with what the fit steps, or look at the training data besides.
_CALLBACKS: dict[str, str] = {
    "BatchSizeFinder": (
        "it trains on the data to find a batch size, which no guarantee covers; the scheme fixes "
        "the batch size, and Loading(microbatches=...) fits it into memory"
    ),
    "LearningRateFinder": (
        "it trains on the data to find a learning rate, which no guarantee covers; find it on "
        "public data, in a fit without PrivateCallback"
    ),
    "GradientAccumulationScheduler": (
        "the scheme fixes the batch size; use Loading(microbatches=...) to compute a batch in parts"
    ),
    "SpikeDetection": (
        "it skips batches by their training loss, which is private, and the plan of a private run "
        "does not allow skipping; max_grad_norm bounds the influence of each example"
    ),
    "StochasticWeightAveraging": (
        "it changes the number of epochs and the learning rate schedule during the fit; average "
        "the weights of checkpoints after training, which costs no privacy"
    ),
    "Timer": (
        "it ends the fit after a wall-clock time, so the planned number of steps is unknown "
        "(Trainer(max_time=...) adds it too); set max_epochs= or max_steps=, and leave max_time out"
    ),
}


# Arguments of the trainer, the values that a fit may have, and why it may not have others.
_NOT = (None, False, 0, 0.0)
_ARGUMENTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("fast_dev_run", _NOT, "it ends the fit before the plan; try the loop without PrivateCallback"),
    ("accumulate_grad_batches", (1,),
     ("the scheme fixes the batch size; leave it out, give the scheme the whole batch size, and "
     "set loading=Loading(microbatches={}) to compute every batch in parts")),
    ("gradient_clip_val", _NOT,
     ("it would clip the batch's gradient, which the private step replaces; leave it out, since "
     "PrivateCallback(max_grad_norm=...) clips every example's gradient")),
    ("overfit_batches", _NOT, "it trains on the same batches again; leave it out"),
    ("limit_train_batches", (1.0,),
     "an epoch would end before its planned steps; leave it out, and set "
     "loading=Loading(steps_per_epoch=...) for shorter epochs"),
    ("reload_dataloaders_every_n_epochs", _NOT,
     "a private fit uses one data set from beginning to end; leave it out"),
    ("precision", _PRECISIONS,
     f"a private fit is tested with {' and '.join(map(repr, _PRECISIONS))} only; use one of these"),
)  # fmt: skip


def check_trainer(trainer: Any) -> None:
    """Refuse arguments of the trainer that would make another fit than the planned one."""
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(
            f"the trainer is a {type(trainer).__module__}.{type(trainer).__name__}, and "
            "PrivateCallback supports lightning.pytorch.Trainer only: use import lightning.pytorch "
            "as pl instead of pytorch_lightning, also for the LightningModule and its data"
        )
    for name, fine, why in _ARGUMENTS:
        value = getattr(trainer, name)
        if value not in fine:
            _refuse(name, value, why.format(value))
    _check_strategy(trainer.strategy)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS and kind.__module__.startswith("lightning."):
                name = type(callback).__name__
                raise ValueError(
                    f"Trainer(callbacks=[{name}(...)]) with PrivateCallback: "
                    f"{_CALLBACKS[kind.__name__]}"
                )


def _check_strategy(strategy: Any) -> None:
    name = type(strategy).__name__
    if name not in _STRATEGIES:
        _refuse(
            "strategy",
            name,
            "each process of a private fit holds the whole model and its optimizer; use "
            "strategy='auto' on one device or strategy='ddp' on several",
        )
    if name == "DDPStrategy" and getattr(strategy, "_start_method", "popen") != "popen":
        _refuse(
            "strategy",
            f"{name}(start_method={strategy._start_method!r})",
            "the run and its guarantee would end with the processes that it starts; use "
            "strategy='ddp'",
        )
    if getattr(strategy, "_ddp_comm_state", None) or getattr(strategy, "_ddp_comm_hook", None):
        _refuse(
            "strategy",
            f"{name} with a communication hook",
            "make_private already adds up the processes' gradients; use strategy='ddp'",
        )


def _refuse(argument: str, value: object, why: str) -> None:
    raise ValueError(f"Trainer({argument}={value!r}) with PrivateCallback: {why}")


def check_lightning_module(module: pl.LightningModule) -> None:
    """Refuse hooks of the module's that would do nothing, or take the loop's place."""
    name = type(module).__name__
    if is_overridden("configure_gradient_clipping", module):
        raise ValueError(
            f"{name}.configure_gradient_clipping would clip a gradient that the private step "
            "replaces, so it would have no effect: leave it out, since "
            "PrivateCallback(max_grad_norm=...) clips every example's gradient"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            f"{name}.training_step(dataloader_iter) takes batches itself, but a private step has "
            "exactly one: write training_step(self, batch, batch_idx)"
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ValueError(
            f"{name} is compiled as a whole, together with its training_step: pass the module "
            "itself to trainer.fit, and compile the network within it (self.net = "
            "torch.compile(net))"
        )


def only_optimizer(optimizers: list[Any]) -> Any:
    """The one optimizer of the module."""
    if len(optimizers) > 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"configure_optimizers returned {len(optimizers)} optimizers ({kinds}), but a private "
            "step releases the gradients of all parameters at once: return "
            "dptrain.JoinedOptimizer(...) of them, and call step() once per batch"
        )
    if not optimizers or type(optimizers[0]).__name__ == "_MockOptimizer":
        raise ValueError("configure_optimizers returned no optimizer: return one over the module")
    optimizer = optimizers[0]
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"configure_optimizers returned a {type(optimizer).__name__}: return a torch optimizer"
        )
    return optimizer


def check_whole_steps(trainer: pl.Trainer, parts: int) -> None:
    """Refuse checkpoints that would be taken between the ``parts`` of a step."""
    saving = [c for c in trainer.checkpoint_callbacks if isinstance(c, callbacks.ModelCheckpoint)]
    for callback in saving:
        if parts > 1 and callback._train_time_interval is not None:
            raise ValueError(
                f"ModelCheckpoint(train_time_interval={callback._train_time_interval}) with "
                f"Loading(microbatches={parts}): it may save in the middle of a step, where no fit "
                "can resume; set every_n_train_steps= or every_n_epochs= instead"
            )
        # It saves again at the step that a fit goes on from, once its first part is done.
        callback._last_global_step_saved = trainer.global_step
    every = trainer.val_check_batch
    if saving and every is not None and every != float("inf") and every % parts:
        raise ValueError(
            f"Trainer(val_check_interval={trainer.val_check_interval}) validates after every "
            f"{every} batches, which can be in the middle of a step, and ModelCheckpoint saves "
            f"then: make it a multiple of microbatches={parts}"
        )


def check_monitors(trainer: pl.Trainer) -> None:
    """Refuse what is decided by a metric of the training data.

    Which metrics these are is known when they have been logged: in ``training_step``, or in another
    hook of the training loop.
    """
    metrics = [entry.meta for entry in trainer.fit_loop.epoch_loop._results.values()]
    logged = {
        name for m in metrics for name in (m.name, f"{m.name}_step", f"{m.name}_epoch") if name
    }
    for callback in trainer.checkpoint_callbacks:
        for name in _in_file_names(callback):
            if name in logged:
                raise ValueError(
                    f"{type(callback).__name__} puts {name!r}, which is logged in the training "
                    "loop, into the names of its files. It is computed from the private data "
                    "without noise, and a file name is published with the file. Name files by "
                    f"{{epoch}} and {{step}}, or by a metric of public validation data"
                )
    for who, monitor in _monitors(trainer):
        if monitor in logged:
            raise ValueError(
                f"{who} follows {monitor!r}, which is logged in the training loop. It is computed "
                "from the private data without noise, so no guarantee covers decisions based on "
                "it. Monitor a metric of public validation data, or set monitor=None"
            )


def _in_file_names(callback: Any) -> list[str]:
    """The metrics that a checkpoint callback's templates of file names have."""
    templates = (getattr(callback, "filename", None), getattr(callback, "CHECKPOINT_NAME_LAST", ""))
    return [name for each in templates for name in re.findall(r"\{([^:}]*)", each or "")]


def check_evaluation(loaders: Any, training: TrainingRows, *, public: bool) -> None:
    """Refuse to validate on the examples that are trained on.

    Args:
        loaders: the trainer's, one or several in lists or by name; ``None`` without validation.
        public: True if the user says that the data are other people's.
    """
    for loader in tree_leaves(loaders):
        data = getattr(loader, "dataset", loader)
        own = is_same(data, training.dataset)
        found = own or (False if public else training.hold(data))
        if found:
            raise ValueError(
                "the validation data contain rows of the training data. Their metrics are computed "
                "without noise, so the guarantee does not cover what follows from them (logs, file "
                "names, the best model, early stopping). Validate on data of other people"
                + ("" if own else f", or, if these happen to have the same rows, {_SAY_SO}")
            )
        if found is None:
            raise ValueError(
                "the validation data have no length or no rows by index, so dptrain cannot check "
                "whether they contain rows of the training data. Pass a map-style data set, or, "
                f"if the data come from other people, {_SAY_SO}"
            )


def _monitors(trainer: pl.Trainer) -> list[tuple[str, str]]:
    found = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.EarlyStopping | callbacks.ModelCheckpoint):
            found.append((f"{type(callback).__name__}(monitor=...)", callback.monitor))
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            found.append((f"{type(config.scheduler).__name__}", config.monitor))
    return [(who, monitor) for who, monitor in found if monitor is not None]

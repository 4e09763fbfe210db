"""The callback: a fit of Lightning's becomes a private run, and is one in every step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from dptrain.core import Guarantee, checks
from dptrain.engine import CommonArguments, Loading, PrivacyEngine, PrivateTraining, takes
from dptrain.integrations.evaluation import TrainingRows
from dptrain.integrations.lightning.batches import BatchSource, CountedBatches
from dptrain.integrations.lightning.epochs import FitPlan, fit_plan
from dptrain.integrations.lightning.refusals import (
    check_evaluation,
    check_lightning_module,
    check_monitors,
    check_trainer,
    check_whole_steps,
    only_optimizer,
)
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import OWNER_ONLY, owner_only
from dptrain.sampling import Scheme

logger = logging.getLogger(__name__)

CHECKPOINT_KEY = "dptrain_private_run"
"""Where a checkpoint of Lightning's has the private run: whoever has it can subtract the noise."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FitArguments(CommonArguments):
    """The arguments of a ``PrivateCallback``: those of ``make_private`` that Lightning lacks.

    Args:
        engine: accountant and ledger.
        public_evaluation: says that the validation data, which no noise protects, hold nothing of
            the people who are protected. Without it, validation on rows of the training data is
            refused, and so are data that cannot be compared with them.
    """

    engine: PrivacyEngine | None = None
    public_evaluation: bool = False


class PrivateCallback(Callback):
    """Makes ``trainer.fit`` a private run, of a ``LightningModule`` that is left as it is.

    Before the first batch the module, the optimizer that ``configure_optimizers`` returned and the
    training loader go through ``PrivacyEngine.make_private``; Lightning is given the optimizer and
    the loader that it returns. ``trainer.global_step`` counts logical steps. With
    ``Loading(microbatches=k)`` every logical batch comes as k batches of Lightning's, as with its
    own ``accumulate_grad_batches=k``: progress bars and ``batch_idx`` count these, while schedulers
    and loggers go by logical steps. The module is the user's own again when the fit is over.

    The trainer has to run exactly the steps that are planned; whatever would make another fit of it
    is refused before the first step. A checkpoint holds the private run under ``CHECKPOINT_KEY``,
    and a fit goes on from it bit for bit. It must not be given away;
    ``ModelCheckpoint(save_weights_only=True)`` writes files without it.

    With several processes (``strategy="ddp"``) they make one run of one logical batch; their
    gradients are added up by dptrain, so that torch's DistributedDataParallel is taken off.

    Progress bar and loggers of the trainer are told ``epsilon_so_far`` and ``epsilon_planned``, at
    the first step, at the last and every ``log_every_n_steps``. What ``training_step`` logs goes
    there too, and is not for release: with ``logger=False`` it is seen on the bar alone.

    One callback has one run; another fit is another run, and their guarantees add up.

    Without a scheme and a mechanism, batches are Poisson ones, with the training loader's batch
    size as the expected one, for as many steps as the trainer would have run.
    ``Loading.steps_per_epoch`` is by default that of the loader then, and otherwise the plan
    divided by ``max_epochs``. The loss of ``training_step`` is a mean over the batch unless
    ``Gradients(loss="sum")`` says otherwise. Lightning's ``seed_everything`` has no part in what is
    drawn.

    Raises:
        TypeError: if ``engine`` is no engine. What else is wrong is said by ``trainer.fit``.

    Example:
        >>> private = PrivateCallback(max_grad_norm=1.0, target_epsilon=8.0, target_delta=1e-5)
        >>> trainer = pl.Trainer(max_epochs=3, callbacks=[private])
        >>> trainer.fit(module, train_loader)
        >>> print(private.guarantee())
    """

    @takes(FitArguments)
    def __init__(self, asked: FitArguments) -> None:
        """Ask for a run; ``trainer.fit`` makes it."""
        owner = type(self).__name__
        for name, kind in (
            ("scheme", Scheme),
            ("mechanism", MatrixMechanism),
            ("engine", PrivacyEngine),
        ):
            if (value := getattr(asked, name)) is not None:
                checks.instance(name, value, kind, owner=owner)
        example = "Loading(microbatches=4)"
        checks.instance("loading", asked.loading, Loading, example=example, owner=owner)
        checks.flag("public_evaluation", asked.public_evaluation, owner=owner)
        self._asked = asked
        self._engine = asked.engine or PrivacyEngine()
        self._training: TrainingRows | None = None
        self._begun = False  # whether a fit has been set up with this callback
        self._fitting = False
        self._private: PrivateTraining | None = None
        self._source: BatchSource | None = None
        self._data: Any = None
        self._plan: FitPlan | None = None
        self._saved: dict[str, Any] | None = None  # the private run of a checkpoint
        self._after = contextlib.ExitStack()  # what gives Lightning its own back

    @property
    def private(self) -> PrivateTraining:
        """The run, from ``on_fit_start`` of callbacks that come after this one; kept afterwards.

        Raises:
            RuntimeError: before.
        """
        if self._private is None:
            raise RuntimeError("there is no private run yet: trainer.fit(...) creates it")
        return self._private

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """The guarantee of the planned run; see ``PrivateTraining.guarantee``."""
        return self.private.guarantee(delta)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse unusable settings, and stand between the fit loop and the training data."""
        if stage != TrainerFn.FITTING:
            return
        if self._begun:
            raise RuntimeError(
                "this PrivateCallback was used in a fit already, and a second fit would be "
                "another private run: create a new callback and a new Trainer, with ckpt_path= to "
                "resume the first run. The guarantees of runs on the same data add up"
            )
        check_trainer(trainer)
        others = [c for c in trainer.callbacks if isinstance(c, PrivateCallback)]  # type: ignore[attr-defined]
        if len(others) != 1:
            raise ValueError(
                f"the trainer has {len(others)} PrivateCallbacks: use one per fit, and individual= "
                "for separate budgets of groups of examples"
            )
        check_lightning_module(pl_module)
        if trainer.world_size > 1 and self._engine.distributed is False:
            raise ValueError(
                f"PrivacyEngine(distributed=False) with {trainer.world_size} processes, which "
                "would train as many different models: leave distributed out"
            )
        self._begun = self._fitting = True
        loop = trainer.fit_loop
        self._source = BatchSource(loop._data_source, lambda: self._batches(trainer))
        self._after.callback(setattr, loop, "_data_source", loop._data_source)
        loop._data_source = self._source  # type: ignore[assignment]

    def _batches(self, trainer: pl.Trainer) -> CountedBatches:
        """The batches of the fit loop, which may ask for them while optimizers are configured."""
        plan = self._planned(trainer)
        return CountedBatches(plan.epoch * plan.parts, lambda: self.private.loader)

    def _planned(self, trainer: pl.Trainer) -> FitPlan:
        """The plan, made when the training data is first there: after ``setup`` of the module."""
        if self._plan is not None:
            return self._plan
        assert self._source is not None
        if not self._source.is_defined():
            raise ValueError(
                "there is no training data: pass trainer.fit(module, train_dataloaders=...), or "
                "return it from train_dataloader() of the module or of a datamodule"
            )
        self._data = self._source.own.dataloader()
        if not isinstance(self._data, torch.utils.data.DataLoader):
            raise TypeError(
                f"the training data is a {type(self._data).__name__}: a private fit needs one "
                "torch.utils.data.DataLoader over a map-style data set"
            )
        assert trainer.max_epochs is not None
        self._plan = fit_plan(
            data=self._data,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            scheme=self._asked.scheme,
            mechanism=self._asked.mechanism,
            loading=self._asked.loading,
        )
        self._accumulate(trainer, self._plan.parts)
        return self._plan

    def _accumulate(self, trainer: pl.Trainer, parts: int) -> None:
        """Make Lightning take the parts of a logical batch for one step."""
        if parts == 1:
            return
        loop = trainer.fit_loop.epoch_loop
        if trainer.lightning_module.automatic_optimization:
            trainer.accumulate_grad_batches = parts
            self._after.callback(setattr, trainer, "accumulate_grad_batches", 1)
            # It would divide the loss by the number of parts, before examples are clipped.
            loop.automatic_optimization.output_result_cls = _WholeLoss
            self._after.callback(vars(loop.automatic_optimization).pop, "output_result_cls", None)
            return
        manual = loop.manual_optimization
        for name in ("_on_before_step", "_on_after_step"):
            counted = getattr(manual, name)
            setattr(manual, name, lambda counted=counted: counted() if self._at_last else None)
            self._after.callback(vars(manual).pop, name, None)

    @property
    def _at_last(self) -> bool:
        """True if a logical step ends with the batch at hand."""
        batch = self.private.loader.current
        return batch is None or batch.last

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the private run of a checkpoint that the fit is to go on from."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._saved = checkpoint.get(CHECKPOINT_KEY)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the run, and give Lightning its optimizer."""
        if trainer.ckpt_path is not None and self._saved is None:
            raise ValueError(
                f"ckpt_path={str(trainer.ckpt_path)!r} is a checkpoint without {CHECKPOINT_KEY!r}: "
                "it holds weights only, or comes from a fit that was not private, and a private "
                "fit can resume only from a private one. To start from its weights, load them "
                "into the module (module.load_state_dict(torch.load(path)['state_dict'])), and "
                "leave ckpt_path out"
            )
        plan = self._planned(trainer)
        strategy = trainer.strategy
        optimizer = only_optimizer(strategy.optimizers)
        if strategy.model is not pl_module:  # within DistributedDataParallel
            strategy.model = pl_module
        common = CommonArguments.__dataclass_fields__
        asked: dict[str, Any] = {name: getattr(self._asked, name) for name in common}
        asked |= {"scheme": plan.scheme, "loading": plan.loading}
        private = self._engine.make_private(
            module=pl_module, optimizer=optimizer, data=self._data, **asked
        )
        self._private = private
        self._after.callback(setattr, strategy, "optimizers", [optimizer])
        self._after.callback(private.detach)
        for config in trainer.lr_scheduler_configs:
            private.register_scheduler(config.scheduler)
        strategy.optimizers = [private.optimizer]
        if any(isinstance(c, EarlyStopping) for c in trainer.callbacks):  # type: ignore[attr-defined]
            private.end_early()
        if self._saved is not None:
            private.load_state_dict(self._saved)
            self._saved = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse checkpoints between the parts of a step, before the first one."""
        assert self._plan is not None
        check_whole_steps(trainer, self._plan.parts)
        self._check_evaluation(trainer)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                # A metric may be logged at the end of an epoch, just before the file is written.
                self._before(callback, "_save_checkpoint", lambda: check_monitors(trainer))

    def _before(self, owner: Any, name: str, first: Callable[[], object]) -> None:
        """Make a method of Lightning's do something first, until the fit is over."""
        method = getattr(owner, name)

        def both(*args: Any, **more: Any) -> Any:
            first()
            return method(*args, **more)

        setattr(owner, name, both)
        self._after.callback(vars(owner).pop, name, None)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse to validate on the examples that are trained on."""
        if self._fitting:
            self._check_evaluation(trainer)

    def _check_evaluation(self, trainer: pl.Trainer) -> None:
        if self._training is None:
            self._training = TrainingRows(self._data.dataset)
        check_evaluation(
            trainer.val_dataloaders, self._training, public=self._asked.public_evaluation
        )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Compare the place in Lightning's loop with the place in the plan."""
        assert self._plan is not None
        at_hand = self.private.loader.current
        assert at_hand is not None
        due = self._plan.parts * (at_hand.step % self._plan.epoch) + at_hand.part
        if (trainer.global_step, batch_idx) != (at_hand.step, due):
            raise RuntimeError(
                f"Lightning is at step {trainer.global_step}, batch {batch_idx} of its epoch, and "
                f"the private run at step {at_hand.step}, batch {due}: the checkpoint was saved in "
                "the middle of a step (for instance of a failed one), or the loop's counters were "
                "changed. Resume from another checkpoint"
            )

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add up a part of a logical batch, where Lightning made no step of it."""
        if pl_module.automatic_optimization and not self._at_last:
            self.private.optimizer.step()
            self.private.optimizer.zero_grad()
        check_monitors(trainer)
        if self._at_last:
            self._tell(trainer, pl_module)

    def _tell(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report ε so far and as planned to the progress bar and the trainer's loggers."""
        done = self.private.steps_executed
        often = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if done in (1, self.private.mechanism.steps) or (often and done % often == 0):
            for name, value in self.private.so_far().figures.items():
                pl_module.log(name, value, on_step=True, on_epoch=False, prog_bar=True)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the metrics that the last epoch's hooks logged."""
        check_monitors(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if the fit ended before its plan."""
        check_monitors(trainer)
        done, planned = self.private.steps_executed, self.private.mechanism.steps
        if done < planned:
            logger.warning(
                "the fit ended after %d of %d planned steps; the guarantee still describes the "
                "whole plan, for which the noise was chosen",
                done,
                planned,
            )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the private run into the checkpoint."""
        if self._private is None:
            return
        if self._fitting and not trainer.interrupted and not self._at_last:
            raise RuntimeError(
                "a checkpoint between two microbatches of a step cannot be resumed: save by steps "
                "(ModelCheckpoint(every_n_train_steps=...)) or by epochs, or check "
                "callback.private.optimizer.at_step_boundary before saving"
            )
        state = checkpoint[CHECKPOINT_KEY] = self._private.state_dict()
        _keep_from_others(trainer.strategy.checkpoint_io)
        if self._fitting and checkpoint.get("optimizer_states"):
            # Lightning took this process's, which may be of a slice, and loads it in all of them.
            checkpoint["optimizer_states"] = [state["optimizer"]]
        for saved in checkpoint.get("lr_schedulers", []):
            saved.pop("step", None)  # the gate that register_scheduler put there

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """End the run; the module is the user's."""
        self._end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the run; the module is the user's."""
        if stage == TrainerFn.FITTING:
            self._end()

    def _end(self) -> None:
        if self._fitting:
            self._fitting = False
            self._after.close()


def _keep_from_others(plugin: Any) -> None:
    """Make files with a private run readable by their owner only, whatever writes them."""
    while isinstance(inner := getattr(plugin, "checkpoint_io", None), CheckpointIO):
        plugin = inner
    if "save_checkpoint" in vars(plugin):
        return
    save = plugin.save_checkpoint

    def for_the_owner(checkpoint: dict[str, Any], path: Any, *args: Any, **more: Any) -> None:
        if CHECKPOINT_KEY not in checkpoint:
            save(checkpoint, path, *args, **more)
            return
        with owner_only():
            save(checkpoint, path, *args, **more)
        if os.path.isfile(path):
            pathlib.Path(path).chmod(OWNER_ONLY)

    plugin.save_checkpoint = for_the_owner


class _WholeLoss(ClosureResult):
    """The result of ``training_step``, with the loss as it is."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> Any:
        """The result as Lightning's, without dividing the loss."""
        return super().from_training_step_output(training_step_output, 1)

"""The trainer of ``transformers`` that releases nothing but what its guarantee covers."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
)

from dptrain.core import Guarantee, checks
from dptrain.distributed import FullySharded
from dptrain.engine import Gradients, Loading, NoiseOptions, PrivacyEngine, PrivateTraining
from dptrain.integrations.evaluation import TrainingRows, is_same
from dptrain.integrations.transformers import checkpoints
from dptrain.integrations.transformers.arguments import PrivacyArguments
from dptrain.integrations.transformers.head_loss import LossCheck, example_loss, head_of
from dptrain.integrations.transformers.own_losses import OwnLossCheck
from dptrain.integrations.transformers.plan import (
    LogicalStep,
    RowByRow,
    TrainerPlan,
    graph_of,
    plan_of,
    steps_loader,
)
from dptrain.integrations.transformers.publishing import publish, retract
from dptrain.integrations.transformers.refusals import (
    check_arguments,
    check_class,
    check_dataset,
    check_evaluation,
    check_padding,
    check_same_rows,
    check_trainer,
)
from dptrain.integrations.transformers.services import (
    check_service,
    guard,
    records_console,
    reports,
)
from dptrain.integrations.transformers.sharding import Sharding, whole_weights
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import MARK, OWNER_ONLY, owner_only

logger = logging.getLogger(__name__)

_Base: Any = object  # whatever class it is put before

# Of what a trainer logs while it trains, what follows from the plan alone. How long steps take
# follows from how many examples they drew, so that times are not released.
_RELEASED = frozenset(("learning_rate", "epoch", "step", "epsilon_so_far", "epsilon_planned"))
_ARGUMENTS_FILE = "training_args.bin"


class PrivateTrainerMixin(_Base):
    """Makes a trainer of ``transformers`` private: put it before that class in the bases.

    ``class PrivateSFTTrainer(PrivateTrainerMixin, trl.SFTTrainer): pass`` is a private trainer of
    TRL. What training arguments mean stays: ``per_device_train_batch_size`` is the most examples
    that are in memory at once, and times ``gradient_accumulation_steps`` and the number of
    processes it is the *expected* batch of a step; epochs become the steps of the scheme; all of
    the trainer's steps (logging, saving, evaluating, the learning rate) are steps of the scheme.
    The loss is reduced example by example. Arguments that would break the guarantee are refused by
    name.

    Checkpoints in ``output_dir`` are private: whoever has one can subtract the noise.
    ``save_model`` writes what may be published.

    Args:
        model, args, data_collator, train_dataset, rest, more: as of the trainer.
        privacy: the guarantee that is wanted.
        gradients: how per-example gradients are formed and clipped.

    Attributes:
        privacy: the guarantee that is wanted.
        private: the private run; ``None`` before ``train``.
        plan: the steps and batches that run.
        training_log: figures of the training batches, by step; not for release.

    Raises:
        TypeError, ValueError: naming the argument, the value and the remedy.
    """

    optimizer: Any
    lr_scheduler: Any
    model_wrapped: Any
    _created_lr_scheduler: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *rest: Any,
        privacy: PrivacyArguments,
        gradients: Gradients = Gradients(),
        **more: Any,
    ) -> None:
        checks.instance(
            "privacy", privacy, PrivacyArguments, example="PrivacyArguments(epsilon=8, delta=1e-5)"
        )
        checks.instance("gradients", gradients, Gradients, example="Gradients()")
        if gradients.mode not in (None, "bookkeeping"):
            raise ValueError(
                f"Gradients(mode={gradients.mode!r}): the trainer saves and evaluates the model "
                "itself, which only mode 'bookkeeping' leaves in place: leave mode out"
            )
        if gradients.views != 1:
            raise ValueError(
                f"Gradients(views={gradients.views}): a trainer's batches have one row per "
                "example: leave views out"
            )
        check_class(type(self), PrivateTrainerMixin)
        check_dataset(train_dataset)
        accumulation = 1
        self._sharding: Sharding | None = None
        if args is not None:
            check_arguments(args)
            self._sharding = Sharding.asked_by(args)
            accumulation = args.gradient_accumulation_steps
            # A step of the trainer is one of the scheme, in whatever parts it comes.
            args = copy.copy(args)
            args.gradient_accumulation_steps = 1
            if self._sharding is not None:  # which is done here, and not by accelerate
                args.fsdp, args.fsdp_config, args.fsdp_plugin_args = None, {}, None
            if args.max_grad_norm is None:
                args.max_grad_norm = 1.0  # as not used; the trainer compares it with 0
        self.privacy, self.gradients = privacy, gradients
        self.private: PrivateTraining | None = None
        self.training_log: list[dict[str, float]] = []
        self._accumulation = accumulation
        self._parts: Iterator[Any] | None = None
        self._public_figures = False
        self._kept: dict[str, float] = {}
        super().__init__(model, args, data_collator, train_dataset, *rest, **more)
        check_arguments(self.args)
        check_dataset(self.train_dataset)
        check_trainer(self)
        self._training = TrainingRows(self.train_dataset)
        self._check_evaluation()
        if self._sharding is not None:
            self._check_divisible()
        check_padding(self)
        self._graph = None
        if privacy.user_column is not None:
            check_same_rows(self.train_dataset, train_dataset, privacy.user_column)
            self._graph = graph_of(self.train_dataset, privacy.user_column)
        self._own_loss = self._loss_of_a_user()
        self._check: LossCheck | None = None
        if self.compute_loss_func is not None:
            self._check = LossCheck(self.compute_loss_func, gradients.reduction)
        elif not self._own_loss:
            head_of(self.model)
        self._own_check: OwnLossCheck | None = None
        if self._own_loss or type(self).compute_loss is not PrivateTrainerMixin.compute_loss:
            reduction, owner = gradients.reduction, type(self).__name__
            self._own_check = OwnLossCheck(self.compute_loss, reduction, owner)
            self.compute_loss = self._looked_at  # type: ignore[method-assign]
        for callback in self.callback_handler.callbacks:
            self._guard(callback)
        self._planned_from = self._sizes()
        self.plan: TrainerPlan = plan_of(
            privacy,
            dataset_size=len(self.train_dataset),
            graph=self._graph,
            part=self.args.per_device_train_batch_size,
            batch_size=self.args.per_device_train_batch_size
            * accumulation
            * max(1, self.args.world_size),
            epochs=self.args.num_train_epochs,
            max_steps=self.args.max_steps,
        )

    def _check_divisible(self) -> None:
        """Refuse what was made of whole weights, or is saved as a part of them."""
        if self.optimizer is not None:
            raise ValueError(
                "optimizers= with fsdp=True holds the parameters of the whole model, which "
                "train() divides: leave it out and set TrainingArguments(optim=...)"
            )
        if hasattr(self.model, "get_base_model"):
            raise ValueError(
                f"model is a {type(self.model).__name__} with fsdp=True, which is untested with "
                "peft adapters: leave fsdp out, since an adapter trains few weights"
            )

    def _check_evaluation(self) -> None:
        check_evaluation(self.eval_dataset, self._training, public=self.privacy.public_evaluation)

    def add_callback(self, callback: Any) -> None:
        """As of the trainer.

        Raises:
            ValueError: for a service that is told to upload what is private.
        """
        super().add_callback(callback)
        self._guard(self.callback_handler.callbacks[-1])

    def _guard(self, callback: Any) -> None:
        check_service(callback)
        guard(callback, console=self.privacy.log_training_loss)

    def _sizes(self) -> dict[str, float]:
        names = ("num_train_epochs", "max_steps", "per_device_train_batch_size")
        return {name: getattr(self.args, name) for name in names}

    def _loss_of_a_user(self) -> bool:
        """True if the trainer that this one is put before has a ``compute_loss`` of a user's."""
        order = type(self).__mro__
        after = order[order.index(PrivateTrainerMixin) + 1 :]
        owner = next(base for base in after if "compute_loss" in vars(base))
        return not owner.__module__.startswith(("transformers.", "trl."))

    # The run

    def train(self, resume_from_checkpoint: Any = None, *rest: Any, **more: Any) -> Any:
        """As of the trainer; a run ends with its plan, and one that goes on ends bit for bit alike.

        Raises:
            ValueError: if this trainer has trained already, or the checkpoint is another run's.
        """
        if more.get("trial") is not None or (rest and rest[0] is not None):
            raise ValueError(_SEARCH)
        for callback in self.callback_handler.callbacks:
            check_service(callback)
        self._check_evaluation()
        for name, value in self._sizes().items():
            if value != self._planned_from[name]:
                raise ValueError(
                    f"{name} was {self._planned_from[name]} when the trainer was created, and its "
                    f"plan and noise depend on it, but now it is {value}: create a new trainer "
                    "with it"
                )
        if self.private is not None:
            if self.private.steps_executed and not resume_from_checkpoint:
                raise ValueError(
                    f"this trainer has run {self.private.steps_executed} private steps, so "
                    "training again would be another run on the same data, whose guarantee adds "
                    "to the first. Resume with train(resume_from_checkpoint=True), or create a "
                    "new trainer"
                )
            self.private.detach()
            self.optimizer = self.private.optimizer.original_optimizer
            self.lr_scheduler = None
        result = super().train(resume_from_checkpoint, *rest, **more)
        assert self.private is not None
        executed = self.private.steps_executed
        if executed < self.plan.steps:
            self.private.end_early()
            logger.warning(
                "training was stopped after %d of %d planned steps; the guarantee describes the "
                "whole plan. train(resume_from_checkpoint=True) resumes it",
                executed,
                self.plan.steps,
            )
        self.private.detach()
        return result

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refused: every trial is a run on the same data."""
        raise ValueError(_SEARCH)

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """The guarantee of the run; see ``PrivateTraining.guarantee``.

        Raises:
            ValueError: before ``train``.
        """
        if self.private is None:
            raise ValueError("nothing has been trained yet: call train() first")
        found = self.private.guarantee(delta)
        return found.with_notes(_CHOSEN) if self._chooses else found

    @property
    def _chooses(self) -> bool:
        """True if the weights, or the end of training, are chosen by the evaluation data."""
        stops = any(isinstance(c, EarlyStoppingCallback) for c in self.callback_handler.callbacks)
        return bool(self.args.load_best_model_at_end) or stops

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        if self._sharding is not None and not FullySharded.there(self.model):
            self._sharding.divide(self.model, self.args.device)
        self.create_optimizer()
        # Only the precision of its forward pass: ranks are added up by the run.
        if not hasattr(self.model, "_original_forward"):
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        elif self.model not in self.accelerator._models:
            self.accelerator._models.append(self.model)
        self.model_wrapped = self.model
        saved = None if resume_from_checkpoint is None else checkpoints.read(resume_from_checkpoint)
        private = self.private = self._begin(resume_from_checkpoint, saved)
        self.optimizer = self.accelerator.prepare(private.optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        private.register_scheduler(self.lr_scheduler)
        if saved is not None:
            assert resume_from_checkpoint is not None
            checkpoints.load(resume_from_checkpoint, saved, private)
            if private.steps_executed != self.state.global_step:
                raise ValueError(
                    f"resume_from_checkpoint={resume_from_checkpoint!r}: its trainer_state.json is "
                    f"at step {self.state.global_step} and its {checkpoints.PRIVATE_FILE} at "
                    f"{private.steps_executed}, so the files belong to two checkpoints: use a "
                    "complete one"
                )
            self._load_scaler(resume_from_checkpoint)
        self._parts = None
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._say(private)
        return self.model, train_dataloader

    def _begin(self, folder: str | None, saved: dict[str, Any] | None) -> PrivateTraining:
        privacy, plan = self.privacy, self.plan
        if saved is None:
            asked: dict[str, Any] = {
                "scheme": plan.scheme,
                "strategy": plan.strategy,
                "noise_multiplier": privacy.noise_multiplier,
                "target_epsilon": privacy.epsilon,
            }
        else:
            assert folder is not None
            planned = MatrixMechanism(
                scheme=plan.scheme,
                strategy=plan.strategy,
                noise_multiplier=saved["run"]["mechanism"]["noise_multiplier"],
            )
            asked = {"mechanism": checkpoints.mechanism_of(folder, saved, privacy, planned)}
        engine = PrivacyEngine(accountant=privacy.accountant, ledger=privacy.ledger)
        return engine.make_private(
            module=self.model,
            optimizer=self.optimizer,
            data=self._data(),
            max_grad_norm=privacy.per_example_max_grad_norm,
            target_delta=privacy.delta,
            seed=privacy.noise_seed,
            gradients=self.gradients,
            noise=NoiseOptions(secure=privacy.secure_noise),
            loading=Loading(max_physical_batch_size=plan.parts),
            **asked,
        )

    def _data(self) -> DataLoader[Any]:
        """The training data as the trainer would fetch them, for the run to draw from."""
        data, collate = self.train_dataset, self.data_collator
        column = self.privacy.user_column
        names = getattr(data, "column_names", None)
        if isinstance(names, list):  # datasets.Dataset
            if column in names:
                data = data.remove_columns(column)
            data = self._remove_unused_columns(data, description="training")
            if data.format["type"] == "custom":
                data = RowByRow(data)
        else:
            if column is not None:
                collate = _Without(column, collate)
            collate = self._get_collator_with_removed_columns(collate, description="training")
        workers = self.args.dataloader_num_workers
        return DataLoader(
            data,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=self.args.dataloader_multiprocessing_context
            if workers
            else None,
        )

    def _say(self, private: PrivateTraining) -> None:
        """Log in one line the private run that the arguments lead to."""
        if not self.is_world_process_zero():
            return
        plan, privacy = self.plan, self.privacy
        target = (
            f"σ = {privacy.noise_multiplier:g}"
            if privacy.epsilon is None
            else f"(ε, δ) = ({privacy.epsilon:g}, {privacy.delta:g}), "
            f"σ = {private.mechanism.noise_multiplier:.4g}"
        )
        logger.warning(
            "private training: %g epochs of %d rows become %d steps of %s with %g %s expected in a "
            "batch, at most %d in memory at once; each example's gradient is clipped to %g "
            "(max_grad_norm of TrainingArguments is not used); %s. Losses of training batches are "
            "computed without noise and are %s%s",
            plan.steps / plan.whole_epoch,
            len(self.train_dataset),
            plan.steps,
            type(plan.scheme).__name__,
            plan.scheme.expected_batch_size,
            "examples" if plan.scheme.group_size is None else "users",
            plan.parts,
            privacy.per_example_max_grad_norm,
            target,
            MARK,
            "; log_training_loss=True sends them to report_to anyway"
            if privacy.log_training_loss
            else "",
        )

    # What the trainer counts

    def get_train_dataloader(self) -> Any:
        """One mark for each step of an epoch; the examples come from the private loader."""
        return steps_loader(self.plan.steps_per_epoch)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Steps and epochs of the plan, as the trainer counts them."""
        plan = self.plan
        size = plan.scheme.expected_batch_size
        return (
            plan.epochs,
            plan.steps_per_epoch,
            round(size * plan.steps_per_epoch),
            round(size * plan.steps),
            round(size),
            plan.steps_per_epoch,
            plan.steps,
        )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The mark of the next step; how much its batch holds is private and not counted."""
        step = next(epoch_iterator, None)
        return ([] if step is None else [step]), None

    def floating_point_ops(self, inputs: Any) -> int:
        """0: the true number follows from the sizes of the batches, which are private."""
        return 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count nothing: how many tokens were drawn is private."""

    def _clip_grad_norm(self, model: Any) -> None:
        """Do nothing: every example's gradient was clipped, and the release stays as it is."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Return nothing: before the step there is no gradient that may be shown."""

    # A step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """All parts of a logical step; the trainer's own call of ``optimizer.step()`` ends it.

        Raises:
            RuntimeError: if the trainer and the run disagree on the step.
        """
        private = self.private
        if private is None or not isinstance(inputs, LogicalStep):
            raise RuntimeError(
                "training_step() of a private trainer may only be called by train(): any other "
                "batch was not drawn by the scheme"
            )
        if self._parts is None:
            self._parts = iter(private.loader)
        if self.state.global_step != private.steps_executed:
            raise RuntimeError(
                f"the trainer is at step {self.state.global_step} and the private run at "
                f"{private.steps_executed}: something else made a step or changed the trainer's "
                "state"
            )
        total, rows = torch.zeros((), device=self.args.device), 0
        while True:
            part = next(self._parts)
            micro = private.loader.current
            assert micro is not None
            private.optimizer.zero_grad()
            loss = super().training_step(model, part, None)
            used = len(micro.indices)
            if used:
                total, rows = total + loss.to(total) * used, rows + used
            if micro.last:
                return total / max(1, rows)
            self.optimizer.step()

    def _looked_at(self, model: nn.Module, inputs: Any, *args: Any, **more: Any) -> Any:
        """A user's ``compute_loss``, which in training is checked to keep the examples apart."""
        check = self._own_check
        assert check is not None
        if not model.training or check.busy:
            return check.compute(model, inputs, *args, **more)
        return check(self._examples_at_hand, model, inputs, *args, **more)

    @property
    def _examples_at_hand(self) -> int:
        """The number of rows of the batch at hand that are examples."""
        assert self.private is not None
        assert self.private.loader.current is not None
        return len(self.private.loader.current.indices)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The trainer's own loss in evaluation; in training the mean of one loss an example.

        Raises:
            ValueError: for a model whose loss is not known example by example.
            RuntimeError: for a ``compute_loss_func`` that ties the examples together.
        """
        if not model.training or self._own_loss:
            return super().compute_loss(model, inputs, return_outputs, None)
        names = set(self.label_names)
        labels: Any = {name: inputs[name] for name in inputs if name in names}
        given = {name: value for name, value in inputs.items() if name not in names}
        if not labels:
            raise ValueError(
                f"the batch has none of the labels {sorted(names)}, only {sorted(given)}: name "
                "them in TrainingArguments(label_names=[...]), or override compute_loss"
            )
        outputs = model(**given)
        if self.compute_loss_func is not None:
            labels = labels.get("labels", labels)
            assert self._check is not None
            if self._own_check is None:  # which looks at the whole of it
                self._check.look_at(outputs, labels, self._examples_at_hand)
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        else:
            if set(labels) != {"labels"}:
                raise ValueError(
                    f"the batch has the labels {sorted(labels)}, but the loss of "
                    f"{type(model).__name__} uses only 'labels': override compute_loss to use "
                    "others"
                )
            logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
            smoothing = self.args.label_smoothing_factor
            loss = example_loss(
                head_of(model), model, logits, labels["labels"], smoothing=smoothing
            )
            if self.gradients.reduction == "sum":
                loss = loss * len(logits)
        return (loss, outputs) if return_outputs else loss

    # What is told of it

    def evaluate(self, eval_dataset: Any = None, *rest: Any, **more: Any) -> Any:
        """As of the trainer, of the model as it is."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str) and isinstance(self.eval_dataset, dict):
            data = self.eval_dataset.get(data, data)
        with self._figures_of(data):
            found = super().evaluate(eval_dataset, *rest, **more)
            return found if self._public_figures else {**self._kept, **found}

    def predict(self, test_dataset: Any, *rest: Any, **more: Any) -> Any:
        """As of the trainer, of the model as it is."""
        with self._figures_of(test_dataset):
            if self._public_figures:
                return super().predict(test_dataset, *rest, **more)
            # Figures of the trained examples: returned, and told to no callback.
            handler = self.callback_handler
            tell = handler.on_predict
            handler.on_predict = lambda args, state, control, _: tell(args, state, control, {})
            try:
                return super().predict(test_dataset, *rest, **more)
            finally:
                del handler.on_predict

    @contextlib.contextmanager
    def _figures_of(self, data: Any) -> Iterator[None]:
        """Mark what is logged meanwhile as public if ``data`` are other than the trained ones."""
        before = self._public_figures
        self._public_figures = not is_same(data, self.train_dataset) and (
            self.privacy.public_evaluation or self._training.hold(data) is False
        )
        try:
            yield
        finally:
            self._public_figures = before

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Figures of training batches go to the console and ``training_log``, and no further.

        ``trainer_state.json``, callbacks and the services of ``report_to`` get what may be
        released, ε so far and as planned among it; the latter get all with
        ``log_training_loss=True``. Where one of them records the console, that is told what may be
        released only.
        """
        if self._own_check is not None and self._own_check.busy:
            return
        if self._public_figures:
            super().log(logs, start_time)
            return
        # Out of the very dictionary, which the trainer hands on to its callbacks.
        kept = {name: logs.pop(name) for name in list(logs) if name not in _RELEASED}
        self._kept = kept
        if self.private is not None and "learning_rate" in logs:
            standing = self.private.so_far()
            logs.update(standing.figures)
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                    callback.training_bar.set_postfix_str(str(standing), refresh=False)
        super().log(logs, start_time)
        if not kept:
            return
        self.training_log.append({**kept, "step": self.state.global_step})
        marked = {f"{name} ({MARK})": value for name, value in kept.items()}
        asked = self.privacy.log_training_loss
        shown = asked or not any(records_console(c) for c in self.callback_handler.callbacks)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback | PrinterCallback):
                if shown:
                    callback.on_log(self.args, self.state, self.control, logs=dict(marked))
            elif asked and reports(callback):
                callback.on_log(
                    self.args, self.state, self.control, logs=dict(kept), model=self.model
                )

    # What is written of it

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not FullySharded.there(self.model):  # the run's own checkpoint has the weights as well
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_checkpoint(self, *args: Any, **more: Any) -> Any:
        """As of the trainer; its files are the owner's alone, as some hold seeds and states."""
        with owner_only():
            return super()._save_checkpoint(*args, **more)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        for path in pathlib.Path(output_dir).glob("rng_state*.pth"):  # also of an earlier run
            path.chmod(OWNER_ONLY)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.private is not None
        checkpoints.write(output_dir, self.private, self.privacy, here=self.args.should_save)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, the tokenizer, the privacy statement and a model card; all are public.

        A folder that also holds checkpoints is told of: those are private. Of a model that ``fsdp``
        has divided the first process writes all; every process has to call this.
        """
        if FullySharded.there(self.model):
            self._save(output_dir, state_dict=whole_weights(self.model))
        else:
            super().save_model(output_dir, _internal_call=_internal_call)
        if _internal_call or not self.args.should_save:
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        assert folder is not None
        pathlib.Path(folder, _ARGUMENTS_FILE).unlink(
            missing_ok=True
        )  # paths and tokens of the host
        self._publish(folder)
        beside = sorted(
            name
            for name in os.listdir(folder)
            if name.startswith("checkpoint-")
            or name in (checkpoints.PRIVATE_FILE, checkpoints.PRIVATE_FOLDER)
        )
        if beside:
            logger.warning(
                "%s also holds %s, which is private: publish only the files of the model, or call "
                "save_model() with a separate folder",
                folder,
                ", ".join(beside[:3]),
            )

    def _publish(self, folder: str) -> None:
        if self.private is None or not self.private.steps_executed:
            retract(folder)  # of weights that lay there before
            return
        if self.private.changed_since_detach:
            retract(folder)
            raise RuntimeError(
                "the model was changed after train() ended, so the guarantee does not describe "
                f"what save_model() wrote to {folder}, and no statement was written there. Call "
                "save_model() before the model is trained further or merged. If the change "
                "follows from public data alone, save the model separately and write "
                "privacy_report(trainer.guarantee(), folder) beside it"
            )
        about: dict[str, Any] = {"library_name": "transformers"}
        config = getattr(self.model, "config", None)
        if source := getattr(config, "_name_or_path", None):
            about["base_model"] = source
        publish(folder, self.guarantee(), about=about, hub_model_id=self.args.hub_model_id)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """The card that states the guarantee; the trainer's own lists training losses."""
        if self.is_world_process_zero() and self.args.output_dir is not None:
            os.makedirs(self.args.output_dir, exist_ok=True)
            self._publish(self.args.output_dir)

    def push_to_hub(self, *_: Any, **__: Any) -> Any:
        """Refused: it uploads the folder of the checkpoints."""
        raise ValueError(
            "push_to_hub() uploads output_dir, which holds logs and checkpoints: call "
            "save_model(folder) with a separate folder and upload that one, for instance with "
            "huggingface_hub.upload_folder"
        )


class PrivateTrainer(PrivateTrainerMixin, transformers.Trainer):
    """``transformers.Trainer``, private: see ``PrivateTrainerMixin``.

    Example:
        >>> trainer = PrivateTrainer(
        ...     model=model, args=TrainingArguments("out", num_train_epochs=3),
        ...     train_dataset=train_set, processing_class=tokenizer,
        ...     privacy=PrivacyArguments(epsilon=8, delta=1e-5))
        >>> trainer.train()
        >>> trainer.save_model("published")
        >>> print(trainer.guarantee())
    """


_CHOSEN = (
    "The weights, or the end of training, were chosen by the evaluation data, which is taken to "
    "hold nothing of the people whom this guarantee protects: no noise protects it"
)
_SEARCH = (
    "a hyperparameter search trains once per trial, and the choice depends on all trials, so "
    "their guarantees add up. Create a trainer for each trial and add their guarantees, or tune "
    "on public data"
)


class _Without:
    """A collate function that does not see a field."""

    def __init__(self, name: str, collate: Any) -> None:
        self._name, self._collate = name, collate

    def __call__(self, rows: list[Any]) -> Any:
        return self._collate([{k: v for k, v in row.items() if k != self._name} for row in rows])

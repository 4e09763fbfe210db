"""Refusals, by name, of ``TrainingArguments`` and trainers of which no private run can be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from dptrain.distributed import FullySharded
from dptrain.integrations.evaluation import TrainingRows, is_same

_SPREAD = (
    "each process of a private run holds the whole model, and the run itself adds up gradients "
    "over processes"
)


_STEPS_OTHERWISE = ("lomo", "layerwise", "schedule_free")


def _named(value: Any) -> str:
    return str(getattr(value, "value", value))


# What is refused: an argument, which values of it, what would happen, and what to set instead.
_ARGUMENTS: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("deepspeed", bool, f"it has its own optimizer and gradients, but {_SPREAD}",
             "leave deepspeed out and start the script with torchrun"),
    ("parallelism_config", bool, f"it spreads an example over processes, but {_SPREAD}",
             "leave parallelism_config out"),
    ("train_sampling_strategy", lambda value: value != "random",
             "the accountant covers only batches that the scheme draws",
             ("leave train_sampling_strategy out, and choose the sampling by "
             "PrivacyArguments(scheme=...)")),
    ("auto_find_batch_size", bool,
             ("after running out of memory it starts the run again, so steps would be released "
             "twice"),
             ("set per_device_train_batch_size to what fits: it is the largest number of examples "
             "in memory at once, and gradient_accumulation_steps makes up the batch size")),
    ("ignore_data_skip", bool,
             "a resumed run continues at its place in the plan, not at the start of an epoch",
             "leave ignore_data_skip out: resuming reads no data"),
    ("dataloader_drop_last", bool, "batches are sampled, so there is no last batch to drop",
             "leave dataloader_drop_last out"),
    ("neftune_noise_alpha", lambda value: value is not None,
             ("its noise is scaled by the longest example of the batch, so each example's gradient "
             "depends on the others"), "leave neftune_noise_alpha out"),
    ("torch_compile", bool,
             "the run would clip the gradients of the original module instead of the compiled one",
             "leave torch_compile out"),
    ("use_liger_kernel", bool, "it replaces layers by others without per-example gradients",
             "leave use_liger_kernel out"),
    ("include_num_input_tokens_seen", lambda value: value not in ("no", False),
             "the number of sampled tokens is private, and would be logged",
             "set include_num_input_tokens_seen='no'"),
    ("push_to_hub", bool,
             "it uploads output_dir, including logs and checkpoints, which are private",
             ("call trainer.save_model(folder) with a separate folder and upload that one, for "
             "instance with huggingface_hub.upload_folder")),
    ("enable_jit_checkpoint", bool, "it saves in the middle of a step",
             "set save_strategy='steps' and save_steps"),
    ("optim", lambda value: any(part in _named(value) for part in _STEPS_OTHERWISE),
             ("it updates parameters during the backward pass, with gradients that are neither "
             "clipped nor noised, or keeps other weights than the model shows"),
             "use optim='adamw_torch'"),
    ("lr_scheduler_type", lambda value: _named(value) == "greedy",
             "it follows metrics measured in the training loop, which are private",
             "use lr_scheduler_type='linear', for instance"),
    ("max_grad_norm", lambda value: value not in (None, 0, 1),
             "it clips the mean gradient of a batch, here after the noise",
             ("bound each example's gradient by PrivacyArguments(per_example_max_grad_norm=...), "
             "and leave max_grad_norm of TrainingArguments at its default, which is not used")),
    ("packing", bool, ("it packs several examples into one row, and a row of several people's "
             "texts is clipped as one example"),
             "set packing=False; completion_only_loss works as it is"),
    ("padding_free", bool, "it joins the examples of a batch into one row",
             "set padding_free=False"),
    ("loss_type", lambda value: value not in (None, "nll"), "it is not known here",
             "set loss_type='nll', which is computed example by example"),
    ("activation_offloading", bool, "per-example gradients were not checked with it",
             "set activation_offloading=False; gradient_checkpointing=True works"),
)  # fmt: skip


def check_arguments(args: Any) -> None:
    """Refuse training arguments that would break the guarantee, or mean nothing here."""
    for name, wrong, why, remedy in _ARGUMENTS:
        value = getattr(args, name, None)
        if name == "loss_type" and not hasattr(args, "packing"):
            continue  # of TRL's SFTConfig only
        if hasattr(args, name) and wrong(value):
            shown = repr(getattr(value, "value", value))
            raise ValueError(f"TrainingArguments: {name}={shown:.80}: {why}; {remedy}")
    own = getattr(args, "accelerator_config", None)
    if getattr(own, "gradient_accumulation_kwargs", None):
        raise ValueError(
            "TrainingArguments: accelerator_config with gradient_accumulation_kwargs: the scheme "
            "determines each step, so set gradient_accumulation_steps alone"
        )


def check_dataset(dataset: Any) -> None:
    """Refuse training data that no scheme can draw from."""
    if dataset is None:
        raise ValueError("train_dataset= is missing: a private run needs its training examples")
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__}, which yields examples in its own order "
            "and has no length, but a scheme draws examples by index and the guarantee depends on "
            "how they are drawn. Use a data set with rows (datasets.Dataset, without "
            "streaming=True, or a torch Dataset with __len__ and __getitem__)"
        )
    if len(dataset) == 0:
        raise ValueError("train_dataset is empty: there is nothing to train on")


def check_padding(trainer: Any) -> None:
    """Refuse padding on the left to the longest row, which moves the positions of all others."""
    collator = trainer.data_collator
    for name in ("tokenizer", "processing_class"):
        side = getattr(getattr(collator, name, None), "padding_side", "right")
        if side == "left" and getattr(collator, "padding", True) != "max_length":
            raise ValueError(
                f"data_collator={type(collator).__name__} pads on the left (padding_side='left') "
                "to the longest row of the batch, so one example's length moves the tokens of all "
                "others. Set tokenizer.padding_side = 'right' for training, or pad every row to "
                "one length (padding='max_length', max_length=...)"
            )


def check_same_rows(prepared: Any, given: Any, column: str) -> None:
    """Refuse data whose users can no longer be told, as the trainer made other rows of them."""
    names = getattr(prepared, "column_names", None)
    if prepared is not given and not (isinstance(names, list) and column in names):
        raise ValueError(
            f"user_column={column!r}: the trainer created new rows from the data without this "
            "column, so their users are unknown. Prepare the data before, and keep the column"
        )


def check_class(kind: type, mixin: type) -> None:
    """Refuse classes of trainers by which the private run of ``mixin`` would be passed by."""
    order = kind.__mro__
    for name in ("get_train_dataloader", "training_step", "_prepare_for_training"):
        owner = next(base for base in order if name in vars(base))
        if not issubclass(mixin, owner) and order.index(owner) < order.index(mixin):
            raise TypeError(
                f"{kind.__name__} overrides {name}(), which would bypass the private run: override "
                f"compute_loss instead, or put {mixin.__name__} before that class in the bases"
            )
    sampler = next(base for base in order if "_get_train_sampler" in vars(base))
    if sampler is not transformers.Trainer:
        raise TypeError(
            f"{sampler.__name__}._get_train_sampler() draws batches in its own way, which no "
            "accountant covers: leave it out, and choose the sampling by "
            "PrivacyArguments(scheme=...)"
        )
    known_trl = ("_BaseTrainer", "SFTTrainer")
    others = [
        base.__name__
        for base in order
        if base.__module__.startswith("trl.")
        and base.__name__.endswith("Trainer")
        and base.__name__ not in known_trl
    ]
    if others:
        raise TypeError(
            f"{others[0]} of TRL makes batches with several rows per example or with generated "
            "rows, for which dptrain has no per-example gradients; SFTTrainer is supported"
        )


def check_trainer(trainer: Any) -> None:
    """Refuse devices and models by which the private run would be passed by."""
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"the trainer sees {trainer.args.n_gpu} GPUs in one process and would use "
            f"DataParallel, but {_SPREAD}: start the script with torchrun, or set "
            "CUDA_VISIBLE_DEVICES=0"
        )
    kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(
            f"the accelerator's distributed_type is {kind}, set by accelerate launch or the "
            f"environment variable ACCELERATE_USE_{kind}, but {_SPREAD}: start the script with "
            "torchrun, or set the variable to false"
        )
    if FullySharded.there(trainer.model):
        raise ValueError(
            "model was already divided by fully_shard: pass the whole model and "
            "TrainingArguments(fsdp=True), so that the trainer divides it, or call make_private "
            "in a loop of your own"
        )


def check_evaluation(data: Any, training: TrainingRows, *, public: bool) -> None:
    """Refuse to evaluate on the examples that are trained on.

    Args:
        data: ``eval_dataset``.
        public: True if the user says that the data are other people's.
    """
    if is_same(data, training.dataset):
        raise ValueError(
            "eval_dataset is train_dataset, or contains it. Its metrics are computed without "
            "noise, so the guarantee does not cover what follows from them (logs, the best model, "
            "early stopping). Evaluate on data of other people"
        )
    found = False if public else training.hold(data)
    if found:
        raise ValueError(
            "eval_dataset has rows of train_dataset. Their metrics are computed without noise, so "
            "the guarantee does not cover what follows from them (logs, the best model, early "
            "stopping). Remove these rows from one of the two, or, if other people happen to have "
            "the same rows, set PrivacyArguments(public_evaluation=True)"
        )
    if found is None:
        raise ValueError(
            "eval_dataset has no length or no rows by index, so dptrain cannot check whether it "
            "contains rows of train_dataset. Pass a map-style data set, or, if the data come from "
            "other people, set PrivacyArguments(public_evaluation=True)"
        )

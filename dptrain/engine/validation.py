"""What has to hold before any data is touched."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from dptrain.clipping import why_not
from dptrain.clipping.bookkeeping import tapped_layer
from dptrain.clipping.bookkeeping.rules import RULES
from dptrain.clipping.probe import PROBES
from dptrain.core import checks
from dptrain.sampling import PrivateLoader

NOISE_DTYPES = (torch.float32, torch.bfloat16)

# What Opacus 1.6 lets through and gets wrong.
NOT_BY_OPACUS: dict[type[nn.Module], str] = {
    nn.RNN: "nn.RNN fails in the backward pass; use opacus.layers.DPRNN",
    nn.EmbeddingBag: (
        "nn.EmbeddingBag's gradients come out too short, since an id that a bag has twice counts "
        "once; use nn.Embedding and a sum or mean over the positions"
    ),
}


def check_module(module: nn.Module) -> None:
    """Refuse modules whose per-example gradients do not exist.

    Raises:
        TypeError: if it is not a module.
        ValueError: with the layer's name and the remedy.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{checks.named('module', module)} must be a torch.nn.Module")
    if isinstance(module, AbstractGradSampleModule):
        raise ValueError(
            "module is already wrapped for per-example gradients, by another run for instance: "
            "pass the bare one, which its to_standard_module() returns, ending that run; the "
            "guarantees of runs on the same data add up"
        )
    if tapped_layer(module) is not None or hasattr(module, "autograd_grad_sample_hooks"):
        raise ValueError(
            "module is trained by another private run, and would report to both: call "
            "to_standard_module() on the module of that run first, or build a new one"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.DataParallel):
            raise ValueError(
                f"layer {name!r} is a DataParallel: its replicas see parts of a batch, so rows are "
                "not the examples any more; pass the module that it wraps (its .module), and use "
                "torch.distributed for several devices"
            )
        if getattr(layer, "max_norm", None) is not None:
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__} with max_norm={layer.max_norm}: it "
                "rescales the rows that a batch looks up, without noise, which tells who was in "
                "it; use max_norm=None"
            )
        trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        if getattr(layer, "scale_grad_by_freq", False) and trained:
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__} with scale_grad_by_freq=True: it "
                "divides an example's gradients by counts over the whole batch, so that clipping "
                "it does not bound what it does to the others'; use scale_grad_by_freq=False"
            )
        if (why := why_not(name, layer)) is not None:
            raise ValueError(why)
        if any(is_lazy(p) for p in layer.parameters(recurse=False)):
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__} whose parameters are made by its "
                "first forward pass: run one, on made-up data, before building the optimizer"
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            "module has no trainable parameter: set requires_grad=True on the layers to train"
        )


def check_mode(module: nn.Module, mode: str) -> None:
    """Refuse modules whose per-example gradients the mode cannot compute.

    Raises:
        ValueError: naming the remedy.
    """
    if hasattr(module, "_orig_mod") and mode != "bookkeeping":
        raise ValueError(
            f"module is compiled, and grad_sample_mode={mode!r} needs eager mode: pass the module "
            "itself, or use grad_sample_mode='bookkeeping'"
        )
    errors = [
        f"layer {name!r}: {error}"
        for name, layer in module.named_modules()
        if type(layer) in ModuleValidator.VALIDATORS
        and not (mode == "bookkeeping" and type(layer) in RULES)
        and any(p.requires_grad for p in layer.parameters())
        for error in ModuleValidator.VALIDATORS[type(layer)](layer)
    ]
    errors += [
        f"layer {name!r}: {NOT_BY_OPACUS[type(layer)]}"
        for name, layer in module.named_modules()
        if type(layer) in NOT_BY_OPACUS
        and mode != "bookkeeping"
        and any(p.requires_grad for p in layer.parameters())
    ]
    errors += [
        f"layer {name!r}: {type(layer).__name__} with padding_mode={layer.padding_mode!r}, which "
        f"grad_sample_mode={mode!r} takes for zeros: norms are not those of the gradients, and "
        "nothing bounds them; use padding_mode='zeros', or grad_sample_mode='bookkeeping' or "
        "'functorch'"
        for name, layer in module.named_modules()
        if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        and mode == "hooks"
        and layer.padding_mode != "zeros"
        and layer.weight.requires_grad
    ]
    errors += [
        f"layer {name!r}: {type(layer).__name__} with sparse=True, whose gradients functorch "
        "cannot form; use sparse=False, or grad_sample_mode='bookkeeping' or 'hooks'"
        for name, layer in module.named_modules()
        if mode == "functorch"
        and isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        and layer.sparse
        and layer.weight.requires_grad
    ]
    errors += [
        f"layer {name!r}: {type(layer).__name__}, which returns a tuple; use "
        f"opacus.layers.dp_rnn.DP{type(layer).__name__} with grad_sample_mode='hooks'"
        for name, layer in module.named_modules()
        if mode != "bookkeeping"
        and type(layer) is nn.LSTMCell
        and any(p.requires_grad for p in layer.parameters())
    ]
    errors += [
        f"layer {name!r}: {type(layer).__name__} has trained parameters and the buffer(s) "
        f"{[n for n, _ in layer.named_buffers()]}, which grad_sample_mode={mode!r} cannot form "
        "gradients with; freeze its parameters with requires_grad_(False), or use "
        "grad_sample_mode='bookkeeping', with a rule for it by dptrain.register_layer()"
        for name, layer in module.named_modules()
        if mode != "bookkeeping"
        and any(p.requires_grad for p in layer.parameters(recurse=False))
        and next(layer.buffers(), None) is not None
    ]
    if errors:
        raise ValueError(
            "module cannot be trained privately: "
            + "; ".join(errors)
            + " (opacus.validators.ModuleValidator.fix(model) replaces the layers it knows)"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse an optimiser that does not train exactly the module's trainable parameters.

    Raises:
        TypeError: if it is not a torch optimiser.
        ValueError: naming the parameters that are on one side only.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{checks.named('optimizer', optimizer)} must be a torch.optim.Optimizer")
    if isinstance(optimizer, DPOptimizer):
        raise ValueError(
            "optimizer is already private, that of another run: build a new one for the module, or "
            "pass the one that it wraps, its original_optimizer"
        )
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer is a {name}, whose step() evaluates the loss several times: a step has one "
            "release, with its noise; use an optimizer that steps by p.grad alone, SGD or Adam for "
            "instance"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"optimizer is a {name}, which takes sparse gradients only, and noise is dense; use "
            "torch.optim.Adam"
        )
    held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    trainable = {p: name for name, p in module.named_parameters() if p.requires_grad}
    if missing := [name for p, name in trainable.items() if p not in held]:
        raise ValueError(
            f"trainable parameter(s) {missing} of the module are not in the optimizer: add them, "
            "or freeze them with requires_grad_(False)"
        )
    if extra := [tuple(p.shape) for p in held if p not in trainable]:
        raise ValueError(
            f"the optimizer holds parameter(s) of shape {extra} that the module does not have; "
            "build it from module.parameters() of this very module"
        )


def check_scheduled(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a scheduler that sets the learning rate of something else.

    Args:
        scheduler: a learning-rate scheduler.
        optimizer: that of the run, as it is or wrapped.

    Raises:
        ValueError: if it belongs to another optimizer.
    """
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if groups is not None and groups is not optimizer.param_groups:
        raise ValueError(
            f"lr_scheduler is a {type(scheduler).__name__} of another optimizer: it would leave "
            "the run's learning rate alone; build it on the optimizer of the run, the one given to "
            "make_private or the one it returns"
        )


def check_criterion(criterion: Any, loss_reduction: str) -> None:
    """Refuse a criterion that does not split into per-example losses as the engine needs it.

    Raises:
        ValueError: naming what to change.
    """
    if criterion is None:
        return
    reduction = getattr(criterion, "reduction", None)
    if reduction is not None and reduction != loss_reduction:
        raise ValueError(
            f"criterion.reduction={reduction!r} but loss_reduction={loss_reduction!r}: make them "
            "equal"
        )
    ignored = getattr(criterion, "ignore_index", -100)
    if ignored != -100 and reduction == "mean":  # -100 is torch's "not set"
        raise ValueError(
            f"the criterion has ignore_index={ignored} and reduction='mean': it divides by the "
            "number of targets of the whole batch that count, which ties the examples together; "
            "use dptrain.losses.TokenCrossEntropy, or reduction='sum' and loss_reduction='sum'"
        )
    if getattr(criterion, "weight", None) is not None and reduction == "mean":
        raise ValueError(
            "the criterion has class weights and reduction='mean': it divides by the weights of "
            "the whole batch, which ties the examples together; use "
            "dptrain.losses.TokenCrossEntropy, or reduction='sum' and loss_reduction='sum'"
        )


class Numbers(NamedTuple):
    """The numbers among the arguments, as floats."""

    max_grad_norm: float
    noise_multiplier: float | None
    target_epsilon: float | None
    target_delta: float | None


def check_choices(
    *,
    loss_reduction: str,
    probe: Any,
    max_grad_norm: float,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
    mechanism: object | None,
) -> Numbers:
    """The numbers as floats; settings that contradict each other are refused.

    Raises:
        TypeError, ValueError: naming the argument, the value and the remedy.
    """
    checks.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    checks.choice("probe", probe, PROBES)
    remedy = "below 1/N, often 1/(2N) for N examples"
    numbers = Numbers(
        checks.number("max_grad_norm", max_grad_norm, above=0),
        _optional("noise_multiplier", noise_multiplier, minimum=0),
        _optional("target_epsilon", target_epsilon, above=0, remedy="e.g. 8"),
        _optional("target_delta", target_delta, above=0, below=1, remedy=remedy),
    )
    if mechanism is not None:
        return numbers
    if noise_multiplier is not None and target_epsilon is not None:
        raise ValueError(
            f"noise_multiplier={noise_multiplier} and target_epsilon={target_epsilon} are both "
            "given: state the noise or the target, not both"
        )
    if noise_multiplier is None and target_epsilon is None:
        raise ValueError("state noise_multiplier=, or target_epsilon= and target_delta=")
    if target_epsilon is not None and target_delta is None:
        raise ValueError(f"target_epsilon= needs target_delta=: {remedy}")
    return numbers


def _optional(name: str, value: Any, **limits: Any) -> float | None:
    return None if value is None else checks.number(name, value, **limits)


def check_noise_options(
    *, secure: bool, noise_dtype: Any, regenerate_noise: bool, seed: Any
) -> None:
    """Refuse ways of drawing the noise that do not exist or contradict each other.

    Raises:
        TypeError: if a switch is neither True nor False.
        ValueError: naming the argument, the value and the remedy.
    """
    checks.flag("secure", secure)
    checks.flag("regenerate_noise", regenerate_noise)
    checks.instance("noise_dtype", noise_dtype, torch.dtype)
    if noise_dtype not in NOISE_DTYPES:
        raise ValueError(
            f"noise_dtype={noise_dtype!r}: torch.float32, or torch.bfloat16 for buffers of half "
            "the size and a guarantee that is only an estimate"
        )
    if regenerate_noise and noise_dtype != torch.float32:
        raise ValueError(
            f"noise_dtype={noise_dtype} with regenerate_noise=True: noise that is drawn again has "
            "no buffers; leave one of the two out"
        )
    if secure and seed is not None:
        raise ValueError(
            f"secure=True with seed={seed}: the seed is the key of the noise, and one that can be "
            "written down can be guessed or found; leave seed out, which draws 128 bits from the "
            "operating system (a checkpoint keeps them), or use secure=False"
        )


def check_types(**expected: tuple[Any, type | tuple[type, ...]]) -> None:
    """Refuse arguments of another type; ``None`` passes.

    Args:
        expected: by the argument's name, its value and its type.

    Raises:
        TypeError: naming the argument and the value.
    """
    for name, (value, kind) in expected.items():
        if value is not None:
            checks.instance(name, value, kind)


def check_not_private(**given: object) -> None:
    """Refuse the loader of a private run as the data of another, by the name of the argument.

    Raises:
        TypeError: naming the remedy.
    """
    for name, value in given.items():
        if isinstance(value, PrivateLoader):
            raise TypeError(
                f"{name}= is the private loader of another run, whose batches it draws: keep the "
                "data loader that run was made from under a name of its own and pass that (or "
                "dataset=loader.dataset); the guarantees of runs on the same data add up"
            )


def check_only_mechanism(**others: object) -> None:
    """Refuse arguments beside ``mechanism=`` that it already fixes.

    Raises:
        ValueError: naming them.
    """
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(f"mechanism= already fixes {given}: leave them out")


def dataset_of(data_loader: Any, dataset: Any, collate_fn: Any, num_workers: Any) -> Any:
    """The data set of the one source that is given.

    Raises:
        ValueError: if both or none are given, or a data loader's settings are given again.
    """
    if (data_loader is None) == (dataset is None):
        raise ValueError("give either data_loader= or dataset=, one of them")
    if isinstance(dataset, DataLoader):
        raise ValueError("dataset= is a DataLoader: pass it as data_loader=")
    if data_loader is None:
        return dataset
    if collate_fn is not None or num_workers is not None:
        raise ValueError(
            "collate_fn and num_workers are taken over from data_loader=: set them there, or pass "
            "dataset= instead"
        )
    return data_loader.dataset

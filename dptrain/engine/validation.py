"""Modules, optimizers and schedules that a private run can be made of."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn

from dptrain.clipping import keeps_statistics, why_not
from dptrain.clipping.bookkeeping import part_of_a_run, uncompiled
from dptrain.clipping.bookkeeping.rules import rule_of
from dptrain.core import checks
from dptrain.engine.joined import single_optimizers

# What Opacus 1.6 lets through and gets wrong.
NOT_BY_OPACUS: dict[type[nn.Module], str] = {
    nn.RNN: (
        "nn.RNN fails in the backward pass of Opacus: use Gradients(mode='bookkeeping') or "
        "opacus.layers.DPRNN"
    ),
    nn.EmbeddingBag: (
        "Opacus computes too short gradients for nn.EmbeddingBag when a bag contains an id twice: "
        "use Gradients(mode='bookkeeping'), or nn.Embedding and a sum or mean over the positions"
    ),
}


def check_module(module: nn.Module) -> None:
    """Refuse modules whose per-example gradients do not exist."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{checks.named('module', module)} must be a torch.nn.Module")
    if isinstance(module, AbstractGradSampleModule):
        raise ValueError(
            "module is already wrapped for per-example gradients, for instance by another run: end "
            "that run with private.detach() and pass the module that it returns (or, for Opacus's "
            "own wrapper, to_standard_module()). The guarantees of runs on the same data add up"
        )
    if part_of_a_run(module) is not None or hasattr(module, "autograd_grad_sample_hooks"):
        raise ValueError(
            "module is trained by another private run: call private.detach() on that run first, "
            "or pass copy.deepcopy(module) and an optimizer of the copy's parameters. The "
            "guarantees of runs on the same data add up"
        )
    _check_scripted(module)
    for name, layer in module.named_modules():
        if (why := why_not(name, layer)) is not None:
            raise ValueError(why)
    for name, p in module.named_parameters():
        if p.requires_grad and p.is_complex():
            raise ValueError(
                f"parameter {name!r} is complex ({p.dtype}), and noise is added to real numbers "
                "only: train its real and imaginary parts as two real parameters, which forward() "
                "combines with torch.complex(real, imaginary), or freeze it with "
                "requires_grad_(False)"
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            "module has no trainable parameter: set requires_grad=True on the layers to train"
        )


def _check_scripted(module: nn.Module) -> None:
    """Refuse to train what runs apart from Python."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule) and any(
            p.requires_grad for p in layer.parameters()
        ):
            raise ValueError(
                f"layer {name or '(the module itself)'!r} is a TorchScript module (of "
                f"{layer.original_name}), whose per-example gradients cannot be computed: train "
                "the module that it was scripted or traced from, and script copy.deepcopy(model) "
                "after training; or freeze it with requires_grad_(False)"
            )


def check_mode(module: nn.Module, mode: str) -> None:
    """Refuse modules whose per-example gradients the mode cannot compute."""
    if uncompiled(module) is not module and mode != "bookkeeping":
        raise ValueError(
            f"module is compiled, and Gradients(mode={mode!r}) needs eager mode: pass the module "
            "itself, or use Gradients(mode='bookkeeping')"
        )
    if mode != "bookkeeping":
        for name, layer in module.named_modules():
            own = [n for n, p in layer.named_parameters(recurse=False) if p.requires_grad]
            if own and keeps_statistics(layer):
                raise ValueError(
                    f"layer {name!r} is a {type(layer).__name__} in eval mode with trainable "
                    f"{' and '.join(own)}, which Gradients(mode={mode!r}) does not support: use "
                    "Gradients(mode='bookkeeping'), or freeze them with "
                    "dptrain.freeze_batchnorm(model, affine=True)"
                )
    errors = [
        f"layer {name!r}: {error}"
        for name, layer in module.named_modules()
        if type(layer) in ModuleValidator.VALIDATORS
        and not (mode == "bookkeeping" and rule_of(layer) is not None)
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
        (
            f"layer {name!r}: {type(layer).__name__} with padding_mode={layer.padding_mode!r}, "
            f"which Gradients(mode={mode!r}) treats as zero padding, so its norms are wrong and "
            "clipping bounds nothing: use padding_mode='zeros', or "
            "Gradients(mode='bookkeeping') or 'functorch'"
        )
        for name, layer in module.named_modules()
        if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        and mode == "hooks"
        and layer.padding_mode != "zeros"
        and layer.weight.requires_grad
    ]
    errors += [
        (
            f"layer {name!r}: {type(layer).__name__} with sparse=True, whose per-example "
            "gradients functorch cannot compute: use sparse=False, or "
            "Gradients(mode='bookkeeping') or 'hooks'"
        )
        for name, layer in module.named_modules()
        if mode == "functorch"
        and isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        and layer.sparse
        and layer.weight.requires_grad
    ]
    errors += [
        (
            f"layer {name!r}: {type(layer).__name__} returns a tuple: use "
            f"Gradients(mode='bookkeeping'), or opacus.layers.dp_rnn.DP{type(layer).__name__} with "
            "Gradients(mode='hooks')"
        )
        for name, layer in module.named_modules()
        if mode != "bookkeeping"
        and type(layer) is nn.LSTMCell
        and any(p.requires_grad for p in layer.parameters())
    ]
    errors += [
        (
            f"layer {name!r}: {type(layer).__name__} has trainable parameters and the buffer(s) "
            f"{[n for n, _ in layer.named_buffers()]}, which Gradients(mode={mode!r}) does not "
            "support: freeze its parameters with requires_grad_(False), or use "
            "Gradients(mode='bookkeeping'), with a rule registered by dptrain.register_layer()"
        )
        for name, layer in module.named_modules()
        if mode != "bookkeeping"
        and any(p.requires_grad for p in layer.parameters(recurse=False))
        and next(layer.buffers(), None) is not None
    ]
    if errors:
        raise ValueError(
            "module cannot be trained privately: "
            + "; ".join(errors)
            + " (Gradients(mode='bookkeeping') trains most of these as they are; for this mode, "
            "opacus.validators.ModuleValidator.fix(model) puts in those of Opacus)"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer that does not train exactly the module's trainable parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{checks.named('optimizer', optimizer)} must be a torch.optim.Optimizer")
    if isinstance(optimizer, DPOptimizer):
        raise ValueError(
            "optimizer is already the private optimizer of another run: build a new one for the "
            "module, or pass the one that it wraps, its original_optimizer"
        )
    for single in single_optimizers(optimizer):
        name = type(single).__name__
        closure = inspect.signature(single.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"optimizer is a {name}, whose step() evaluates the loss several times, but a "
                "private step releases one noisy gradient: use an optimizer that needs only "
                "p.grad, such as SGD or Adam"
            )
        if isinstance(single, torch.optim.SparseAdam):
            raise ValueError(
                f"optimizer is a {name}, which accepts only sparse gradients, and the noise is "
                "dense: use torch.optim.Adam"
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
            f"the optimizer holds parameter(s) of shape {extra} that the module does not have: "
            "build it from module.parameters() of this very module"
        )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what does not tick, cannot be kept in a checkpoint, or sets another learning rate."""
    if not all(hasattr(scheduler, n) for n in ("step", "state_dict", "load_state_dict")):
        start = checks.named("scheduler", scheduler)
        raise TypeError(f"{start} must be a torch learning-rate scheduler")
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    own = {id(group) for group in optimizer.param_groups}  # which joined optimizers share
    if any(id(group) not in own for group in groups):
        raise ValueError(
            f"scheduler is a {type(scheduler).__name__} of another optimizer, so it would not "
            "change this run's learning rate: build it on the optimizer given to make_private or "
            "on the one that it returns"
        )


def check_public(module: nn.Module, public: Sequence[str]) -> None:
    """Refuse parameters among what is declared public.

    A name that nothing has yet is taken: caches may come with the first forward pass.
    """
    parameters = {name for name, _ in uncompiled(module).named_parameters()}
    if wrong := sorted(parameters & set(public)):
        raise ValueError(
            f"Gradients: buffers={list(public)}: {wrong} are parameters, which only the private "
            "optimizer may change: name only buffers and other attributes"
        )

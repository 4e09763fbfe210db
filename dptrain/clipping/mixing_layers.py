"""Layers that keep statistics of the batches they see, and mix their rows by them."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle


def why_not(name: str, layer: nn.Module) -> str | None:
    """Why a layer cannot be a part of a private run, with the remedy; ``None`` for any other.

    A batch norm, or an instance norm that tracks statistics, is an affine map of each row by itself
    while it is in eval mode with statistics to go by; in training mode it writes the batch's into
    its buffers, without noise, and a batch norm makes every row's output depend on all rows.

    Args:
        name: of the layer.
        layer: any.
    """
    if not _keeps_statistics(layer):
        return None
    kind = f"layer {name!r} is a {type(layer).__name__}"
    trained = [n for n, p in layer.named_parameters(recurse=False) if p.requires_grad]
    frozen = f"freeze it (eval() and requires_grad_(False) on {name!r})"
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        return (
            f"{kind}: it mixes the examples of a batch, so no example's contribution can be "
            f"bounded; replace it by nn.GroupNorm({_groups(layer.num_features)}, "
            f"{layer.num_features}) or run opacus.validators.ModuleValidator.fix(model) before "
            f"building the optimizer, or, with statistics of public data, {frozen}"
        )
    if isinstance(layer, _InstanceNorm) and layer.training:
        return (
            f"{kind} with track_running_stats=True: it keeps statistics of the batches without "
            f"noise; use track_running_stats=False, or, with statistics of public data, {frozen}"
        )
    if trained:
        return (
            f"{kind} in eval mode whose {' and '.join(trained)} would be trained, for which there "
            f"is no rule: {frozen}, or replace it by nn.GroupNorm"
        )
    return None


def refuse_training_mode(module: nn.Module) -> list[RemovableHandle]:
    """Make layers that keep statistics refuse to run in training mode, as after ``model.train()``.

    Returns:
        The hooks, one for every such layer.
    """
    return [
        layer.register_forward_pre_hook(functools.partial(_refuse, name))
        for name, layer in module.named_modules()
        if _keeps_statistics(layer)
    ]


def _keeps_statistics(layer: nn.Module) -> bool:
    if isinstance(layer, _InstanceNorm):
        return bool(layer.track_running_stats)
    return isinstance(layer, _BatchNorm)


def _refuse(name: str, layer: nn.Module, _: Any) -> None:
    # Without gradients as well: reentrant checkpointing runs the layer so first.
    if layer.training:
        raise RuntimeError(
            f"layer {name!r}, a {type(layer).__name__}, is in training mode, where it keeps "
            "statistics of the batch without noise and rows may depend on each other; after "
            f"model.train(), call eval() on {name!r}"
        )


def _groups(channels: int) -> int:
    return next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0)

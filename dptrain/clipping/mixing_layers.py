"""Layers that cannot be a part of a private run, since they mix the examples or keep statistics."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from typing_extensions import override

from dptrain.clipping.base.stand_in import StandIn


def why_not(name: str, layer: nn.Module) -> str | None:
    """The reason why a layer cannot be part of a private run, with the remedy, or ``None``.

    A batch norm, or an instance norm that tracks statistics, is an affine map of each row by itself
    while it is in eval mode with statistics to go by; in training mode it writes the batch's into
    its buffers, without noise, and a batch norm makes every row's output depend on all rows.

    Args:
        name: of the layer.
        layer: any.
    """
    kind = f"layer {name!r} is a {type(layer).__name__}"
    if any(is_lazy(p) for p in layer.parameters(recurse=False)):
        return (
            f"{kind} whose parameters are created by its first forward pass: run one on made-up "
            "data before building the optimizer"
        )
    if isinstance(layer, nn.DataParallel):
        return (
            f"{kind}: each replica sees only a part of the batch, so its rows are no longer the "
            "examples of the batch. Pass the module that it wraps (its .module; "
            "dptrain.fix(model) unwraps it), and use torch.distributed for several devices"
        )
    if getattr(layer, "max_norm", None) is not None:
        return (
            f"{kind} with max_norm={layer.max_norm}: it rescales the rows that a batch looks up "
            "without adding noise, which reveals which ids were in the batch. Use "
            "max_norm=None, as dptrain.fix(model) sets it"
        )
    trained = [n for n, p in layer.named_parameters(recurse=False) if p.requires_grad]
    if getattr(layer, "scale_grad_by_freq", False) and trained:
        return (
            f"{kind} with scale_grad_by_freq=True: it divides an example's gradients by counts "
            "over the whole batch, so one example changes the gradients of others and clipping "
            "does not bound this. Use scale_grad_by_freq=False, as dptrain.fix(model) sets it"
        )
    return _why_not_norm(kind, layer) if keeps_statistics(layer) else None


def _why_not_norm(kind: str, layer: Any) -> str | None:
    """``why_not`` for what keeps statistics."""
    frozen = ". If its statistics come from public data, dptrain.freeze_batchnorm(model) keeps them"
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        frozen = "" if layer.running_mean is None else frozen
        return (
            f"{kind}: it mixes the examples of a batch, so no example's contribution can be "
            f"bounded. dptrain.fix(model) replaces it by nn.GroupNorm({groups_for(layer)}, "
            f"{layer.num_features}) and keeps its weights{frozen}"
        )
    if isinstance(layer, _InstanceNorm) and layer.training:
        return (
            f"{kind} with track_running_stats=True: it keeps statistics of the batches without "
            f"noise. Use track_running_stats=False, as dptrain.fix(model) sets it{frozen}"
        )
    return None


def groups_for(layer: _BatchNorm) -> int:
    """Groups of channels of the group norm that stands in for a batch norm.

    The largest of 32, 16, 8, 4, 2 and 1 that divides the channels and leaves 4 of them to a group.
    Groups of one channel, which are instance norms, trained far worse than any others in Wu & He
    2018 (arXiv 1803.08494, Table 3), and a mean over positions behind them is the same for all
    rows. A ``BatchNorm1d`` may be called without positions, where a group of few channels would
    normalize away what it is given: its groups have 16 channels at least.
    """
    channels = layer.num_features
    least = 16 if isinstance(layer, nn.BatchNorm1d) else 4
    fitting = (g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels // g >= least)
    return next(fitting, 1)


def refuse_training_mode(module: nn.Module) -> list[StandIn]:
    """Make layers that keep statistics refuse to run in training mode, as after ``model.train()``.

    Returns:
        What does, one for every such layer, to be removed when the run ends.
    """
    return [
        _InEvalMode(name, layer)
        for name, layer in module.named_modules()
        if keeps_statistics(layer)
    ]


def keeps_statistics(layer: nn.Module) -> bool:
    """True if a layer is a batch norm, or an instance norm that tracks statistics."""
    if isinstance(layer, _InstanceNorm):
        return bool(layer.track_running_stats)
    return isinstance(layer, _BatchNorm)


class _InEvalMode(StandIn):
    """The forward of a layer that keeps statistics."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__(layer, "forward")
        self._layer, self._called = layer, name

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        # Without gradients as well: reentrant checkpointing runs the layer so first.
        if self._layer.training:
            raise RuntimeError(
                f"layer {self._called!r}, a {type(self._layer).__name__}, is in training mode, "
                "where it updates its statistics from the batch without noise and mixes the "
                "examples. Call dptrain.freeze_batchnorm(model) before make_private to keep it "
                f"in eval mode, or call eval() on {self._called!r} after every model.train()"
            )
        return self.own(*args, **kwargs)

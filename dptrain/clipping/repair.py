"""Changes a model into one that a private run takes, where a change can do that."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from dptrain.clipping.bookkeeping import part_of_a_run
from dptrain.clipping.mixing_layers import groups_for, keeps_statistics, why_not
from dptrain.core import checks

_OF_BATCH_NORM = frozenset(vars(nn.SyncBatchNorm(1))) - frozenset(vars(nn.Module()))
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def fix(module: nn.Module, *, report: Callable[[str], object] = print) -> nn.Module:
    """Replace in a model what no private run takes, and say what was replaced.

    The model itself is changed, and returned; only a model that is itself such a layer, or is
    wrapped in ``DataParallel``, comes back as another object. Take ``copy.deepcopy(model)`` first
    to keep the old one. What is changed, where a private run would refuse it:

    - batch norms (``BatchNorm1d`` to ``3d``, ``SyncBatchNorm``, their subclasses that compute the
      same, and timm's with an activation) become group norms with the same weight and bias, under
      the same name. Their running statistics are dropped, so a trained model computes something
      else and has to be trained on; a batch norm that is frozen (``freeze_batchnorm``, or
      ``eval()`` and ``requires_grad_(False)``) stays;
    - instance norms stop to track statistics;
    - embeddings lose ``max_norm`` and ``scale_grad_by_freq``;
    - weight norm and spectral norm of ``torch.nn.utils``, whose hooks compute weights before every
      call, become those of ``torch.nn.utils.parametrizations``, with the same parameters. The
      vectors of a spectral norm follow from the weights alone, and may be declared public:
      ``Gradients(buffers=["*._u", "*._v"])``;
    - ``DataParallel`` and ``DistributedDataParallel`` are taken off, of names ``.module`` with it;
    - Hugging Face's mixtures of experts stop to compute a balancing loss over the whole batch
      (``config.output_router_logits``).

    Weights stay the same ``Parameter`` objects, in their place, dtype and ``requires_grad``, so
    that an optimizer that was built before holds the model's.

    Example:
        >>> model = dptrain.fix(torchvision.models.resnet18())
        dptrain.fix: 'bn1': BatchNorm2d(64) became GroupNorm(32, 64), with its weight and bias
        ...

    Args:
        module: the user's, before ``make_private``.
        report: is called with one line for each change, and for each layer that a private run
            refuses and this function cannot mend; ``logger.info``, for instance, in place of
            ``print``.

    Returns:
        The model.

    Raises:
        TypeError: if it is no module.
        ValueError: if it is trained by a private run.
    """
    _check_free(module, "fix")
    if not callable(report):
        raise TypeError(f"report={report!r}: must be a function of one line of text, such as print")
    lines: list[str] = []
    statistics = any(n.endswith(_STATISTICS) for n, _ in module.named_buffers())
    module = _fixed("", module, {}, lines)
    if statistics and not any(n.endswith(_STATISTICS) for n, _ in module.named_buffers()):
        lines.append(
            "running statistics are gone: a model that was trained with them needs further training"
        )
    for name, layer in module.named_modules():
        lines += [f"{why} (left as it is)" for why in _left(_shown(name), layer)]
    for line in lines or ["nothing to change"]:
        report(f"dptrain.fix: {line}")
    return module


def freeze_batchnorm(module: nn.Module, *, affine: bool = False) -> nn.Module:
    """Fix the statistics of a model's batch norms, so that a private run takes them as they are.

    Each batch norm, and each instance norm that tracks statistics, is put into eval mode and stays
    there when ``model.train()`` is called: it maps every row by itself, by the mean and variance
    that it has, and writes nothing. Weight and bias are trained on, like those of any layer (mode
    bookkeeping; in the other modes they have to be frozen too). ``state_dict``, ``copy.deepcopy``
    and pickling keep working, and a copy stays in eval mode as well.

    The statistics are no part of what the run proves: let them be those of public data, as those of
    a pretrained model are. A model that never saw any has means of 0 and variances of 1.

    Example:
        >>> model = dptrain.freeze_batchnorm(torchvision.models.resnet18(weights="DEFAULT"))

    Args:
        module: the user's, before ``make_private``; changed in place.
        affine: whether to freeze weight and bias as well (``requires_grad_(False)``).

    Returns:
        The model.

    Raises:
        TypeError: if it is no module, or ``affine`` no bool.
        ValueError: if it has no such layer, one that has no statistics, or is trained by a private
            run.
    """
    _check_free(module, "freeze_batchnorm")
    checks.flag("affine", affine)
    found = {name: layer for name, layer in module.named_modules() if keeps_statistics(layer)}
    if not found:
        raise ValueError("module has no batch norm, and no instance norm that tracks statistics")
    for name, layer in found.items():
        if layer.running_mean is None:
            raise ValueError(
                f"layer {_shown(name)!r} is a {type(layer).__name__} without statistics "
                "(track_running_stats=False), which mixes the examples of a batch in eval mode "
                "too: dptrain.fix(model) replaces it by nn.GroupNorm"
            )
    for layer in found.values():
        layer.eval()
        vars(layer)["train"] = functools.partial(_train_within, layer)
        for p in layer.parameters(recurse=False) if affine else ():
            p.requires_grad_(False)
    return module


def _train_within(layer: nn.Module, mode: bool = True) -> nn.Module:
    """``train`` of a layer that stays in eval mode: of what is within it."""
    layer.training = False
    for child in layer.children():
        child.train(mode)
    return layer


def _stays(layer: nn.Module) -> bool:
    """True if a layer was frozen by ``freeze_batchnorm``, or has nothing to train."""
    kept = getattr(vars(layer).get("train"), "func", None) is _train_within
    return kept or not any(p.requires_grad for p in layer.parameters(recurse=False))


def _check_free(module: nn.Module, name: str) -> None:
    """Refuse what is no module, or one that a run holds, as an argument of one of ours."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{checks.named('module', module)} must be a torch.nn.Module")
    if part_of_a_run(module) is not None or hasattr(module, "autograd_grad_sample_hooks"):
        raise ValueError(
            "module is trained by a private run, which must not lose its layers: call "
            f"dptrain.{name}(model) before make_private, or private.detach() first"
        )


def _fixed(
    name: str, layer: nn.Module, done: dict[nn.Module, nn.Module], lines: list[str]
) -> nn.Module:
    """The layer that replaces a layer; each layer is looked at once, wherever it is registered."""
    if layer in done:
        return done[layer]
    found = layer
    for mend in _MENDS:
        found, said = mend(found)
        lines += [f"{_shown(name)!r}: {text}" for text in said]
    done[layer] = done[found] = found
    if not isinstance(found, torch.jit.ScriptModule):  # whose layers cannot be exchanged
        for key, child in found._modules.items():
            if child is not None:
                inner = _fixed(f"{name}.{key}" if name else key, child, done, lines)
                found._modules[key] = inner
    return found


def _shown(name: str) -> str:
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod") or "(the module itself)"


Mended = tuple[nn.Module, list[str]]
"""The layer that replaces a layer, and the lines to say of it."""


def _unwrapped(layer: nn.Module) -> Mended:
    said = []
    while isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
        said.append(f"{type(layer).__name__} was taken off")
        layer = layer.module
    return layer, said


def _group_norm(layer: nn.Module) -> Mended:
    """A group norm with everything of the batch norm's but what is a batch norm's alone."""
    if not isinstance(layer, _BatchNorm) or (why_not("", layer) is None and _stays(layer)):
        return layer, []
    kind = _kind_for(layer)
    if kind is None:
        return layer, []
    new: Any = kind.__new__(kind)
    # Parameters, hooks, training mode, children and what the user has put there.
    vars(new).update({k: v for k, v in vars(layer).items() if k not in _OF_BATCH_NORM})
    new.num_groups, new.num_channels = groups_for(layer), layer.num_features
    new.eps, new.affine = layer.eps, layer.weight is not None
    _drop_statistics(new)
    if kind is not nn.GroupNorm:  # timm's
        new._fast_norm = False
        for part in ("drop", "act"):
            new._modules.setdefault(part, nn.Identity())
    own = [n for n, p in new._parameters.items() if p is not None]
    kept = f", with its {' and '.join(own)}" if own else ""
    return new, [
        f"{type(layer).__name__}({layer.num_features}) became {kind.__name__}({new.num_groups}, "
        f"{new.num_channels}){kept}"
    ]


def _kind_for(layer: _BatchNorm) -> type[nn.GroupNorm] | None:
    """The kind of group norm that does what this batch norm does besides; ``None``: not known."""
    if "forward" in vars(layer) or isinstance(layer, LazyModuleMixin):
        return None
    if type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return nn.GroupNorm
    timm: Any = sys.modules.get("timm.layers.norm_act")
    if timm is not None and type(layer) in (timm.BatchNormAct2d, timm.SyncBatchNormAct):
        kind: type[nn.GroupNorm] = timm.GroupNormAct
        return kind
    return None


def _untracked(layer: nn.Module) -> Mended:
    if not isinstance(layer, _InstanceNorm) or not layer.track_running_stats:
        return layer, []
    if why_not("", layer) is None and _stays(layer):
        return layer, []
    layer.track_running_stats = False
    _drop_statistics(layer)
    return layer, [f"{type(layer).__name__} has track_running_stats=False now"]


def _drop_statistics(layer: nn.Module) -> None:
    for name in _STATISTICS:
        layer._buffers.pop(name, None)
        layer._non_persistent_buffers_set.discard(name)
    if isinstance(layer, _InstanceNorm):
        for name in _STATISTICS:
            layer.register_buffer(name, None)


def _lookup(layer: Any) -> Mended:
    said = []
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if layer.max_norm is not None:
            said.append(f"{type(layer).__name__} now has max_norm=None; it was {layer.max_norm}")
            layer.max_norm = None
        if layer.scale_grad_by_freq and why_not("", layer) is not None:
            said.append(f"{type(layer).__name__} has scale_grad_by_freq=False now")
            layer.scale_grad_by_freq = False
    return layer, said


def _parametrized(layer: nn.Module) -> Mended:
    """Parametrizations, with the same parameters, of what hooks compute weights from."""
    said = []
    for hook in list(layer._forward_pre_hooks.values()):
        if isinstance(hook, WeightNorm) and _trained(layer, f"{hook.name}_g", f"{hook.name}_v"):
            _weight_norm_anew(layer, hook)
        elif isinstance(hook, SpectralNorm) and _trained(layer, f"{hook.name}_orig"):
            _spectral_norm_anew(layer, hook)
        else:
            continue
        kind = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
        said.append(
            f"{kind} of {hook.name!r} is now the one of torch.nn.utils.parametrizations, with "
            f"the same parameters: layer.parametrizations.{hook.name}"
        )
    return layer, said


def _trained(layer: nn.Module, *names: str) -> bool:
    return any(layer.get_parameter(name).requires_grad for name in names)


def _weight_norm_anew(layer: nn.Module, hook: WeightNorm) -> None:
    parts = [layer.get_parameter(f"{hook.name}_{part}") for part in "gv"]
    remove_weight_norm(layer, hook.name)
    parametrizations.weight_norm(layer, hook.name, hook.dim)
    steps: Any = layer.parametrizations
    steps[hook.name].original0, steps[hook.name].original1 = parts


def _spectral_norm_anew(layer: nn.Module, hook: SpectralNorm) -> None:
    original = layer.get_parameter(f"{hook.name}_orig")
    vectors = [layer.get_buffer(f"{hook.name}_{part}") for part in "uv"]
    remove_spectral_norm(layer, hook.name)
    with torch.random.fork_rng(devices=[]):  # the vectors are drawn, and then replaced
        parametrizations.spectral_norm(
            layer, hook.name, hook.n_power_iterations, hook.eps, hook.dim
        )
    steps: Any = layer.parametrizations
    steps[hook.name].original = original
    for name, vector in zip(("_u", "_v"), vectors, strict=True):
        setattr(steps[hook.name][0], name, vector)


def _no_balancing_loss(layer: nn.Module) -> Mended:
    config: Any = getattr(layer, "config", None)
    if getattr(config, "output_router_logits", None) is not True:
        return layer, []
    config.output_router_logits = False
    return layer, [
        (
            "config.output_router_logits is now False: a balancing loss over the tokens of a batch "
            "mixes its examples"
        )
    ]


_MENDS: tuple[Callable[[Any], Mended], ...] = (
    _unwrapped,
    _group_norm,
    _untracked,
    _lookup,
    _parametrized,
    _no_balancing_loss,
)


def _left(name: str, layer: nn.Module) -> Iterator[str]:
    """Messages on what a private run refuses of a layer and no change here mends."""
    why = why_not(name, layer)
    if why is not None and isinstance(layer, _BatchNorm) and not isinstance(layer, LazyModuleMixin):
        file = inspect.getmodule(type(layer))
        where = "" if file is None else f" ({file.__name__})"
        yield (
            f"layer {name!r} is a {type(layer).__name__}{where} with a forward of its own, which "
            "a group norm would not have: replace it yourself by a layer that does not mix the "
            "examples"
        )
    elif why is not None:
        yield why
    if isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in layer.original_name:
        yield (
            f"layer {name!r} is a scripted {layer.original_name}, which cannot be replaced: call "
            "dptrain.fix before torch.jit.script"
        )
    if isinstance(layer, _SpectralNorm) and layer.training:
        yield (
            f"layer {name!r} keeps vectors of a spectral norm, which depend on the weights "
            "alone: allow them to change, with Gradients(buffers=['*._u', '*._v'])"
        )
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            yield (
                f"layer {name!r} is pruned, and computes {hook._tensor_name!r} before every "
                "call: torch.nn.utils.prune.remove makes the pruning permanent, and the pruned "
                "weights are trained again"
            )

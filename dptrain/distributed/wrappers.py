"""Wrappers of libraries for parallel training, which a private run cannot use as they are."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dptrain.distributed.fully_sharded import FullySharded, is_divided

_log = logging.getLogger(__name__)

_SHARDED = ("FullyShardedDataParallel",)  # by name: the import takes a second
_PREPARED = ("AcceleratedOptimizer", "DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader")
_REMEDY = (
    "each rank of a private run holds the whole model and its optimizer, and make_private itself "
    "adds up the ranks' gradients"
)
_FSDP2 = (
    "or divide it with torch.distributed.fsdp.fully_shard (FSDP2), in Gradients(mode='bookkeeping')"
)


def bare_module(module: Any, mode: str | None) -> Any:
    """The module within torch's DistributedDataParallel, where the mode allows for one.

    Raises:
        ValueError: for modules that are spread over devices or processes, with the remedy.
    """
    if isinstance(module, nn.Module):
        for name, layer in module.named_modules():
            kind = _first_of(layer, _SHARDED)
            if kind is None and isinstance(layer, DataParallel):
                kind = "DataParallel"
            if kind is None and name and isinstance(layer, DistributedDataParallel):
                kind = "DistributedDataParallel"
            if kind is not None:
                where = f"its layer {name!r}" if name else "module"
                fixed = f", {_FSDP2}" if kind in _SHARDED else ", as dptrain.fix(model) returns it"
                raise ValueError(f"{where} is a {kind}: {_REMEDY}; pass the bare module{fixed}")
    if FullySharded.there(module) and mode not in (None, "bookkeeping"):
        raise ValueError(
            f"module was divided by fully_shard, but Gradients(mode={mode!r}) needs the whole "
            "module: use Gradients(mode='bookkeeping')"
        )
    if not isinstance(module, DistributedDataParallel):
        return module
    if mode not in (None, "bookkeeping"):
        raise ValueError(
            f"module is wrapped in DistributedDataParallel, but Gradients(mode={mode!r}) needs the "
            f"bare module: pass module=model.module; {_REMEDY}"
        )
    _log.warning(
        "DistributedDataParallel was removed from the module: %s. Train the module that "
        "make_private returns, not the wrapped one",
        _REMEDY,
    )
    return module.module


def check_whole_optimizer(optimizer: Any, module: Any) -> None:
    """Refuse an optimizer or parameters that are divided among processes.

    Those of a module that ``fully_shard`` was called on may be: see ``FullySharded``.

    Raises:
        ValueError: with the remedy.
    """
    if kind := _first_of(optimizer, ("ZeroRedundancyOptimizer", "DistributedOptimizer")):
        raise ValueError(
            f"optimizer is a {kind}, which holds only a part on each rank, but {_REMEDY}: pass a "
            "plain torch optimizer over all parameters"
        )
    if FullySharded.there(module):
        return
    for group in getattr(optimizer, "param_groups", ()):
        if any(is_divided(p) for p in group["params"]):
            raise ValueError(
                "the optimizer holds DTensor parameters, of which each rank has only a part, but "
                f"{_REMEDY}: pass a module that was not sharded, {_FSDP2}"
            )


def check_not_prepared(**given: Any) -> None:
    """Refuse what Hugging Face's accelerate has wrapped, by the name of the argument.

    Its optimizer leaves out updates while gradients are accumulated, which would be released all
    the same, and its loader draws batches of its own.

    Raises:
        ValueError: saying what to call in which order.
    """
    for name, value in given.items():
        if kind := _first_of(value, _PREPARED):
            raise ValueError(
                f"{name}= is an {kind} that accelerator.prepare() returned: call make_private "
                f"first, with the {name} that you gave to prepare(), and then "
                "dptrain.integrations.accelerate.prepare(accelerator, private); use "
                "private.loader directly"
            )


def _first_of(value: Any, names: tuple[str, ...]) -> str | None:
    """The name among these that one of the value's classes has."""
    return next((base.__name__ for base in type(value).__mro__ if base.__name__ in names), None)

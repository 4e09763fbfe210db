"""How the ranks of a run begin: with the same arguments, data, parameters and ledger."""

from __future__ import annotations

import functools
import inspect
import os
import pathlib
from collections.abc import Callable, Sized
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from dptrain.core import JsonValue, digest
from dptrain.distributed import Ranks
from dptrain.engine.private_training import PrivateTraining
from dptrain.engine.release_ledger import StepLedger
from dptrain.engine.shared_step import settings_of
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import PrivateLoader

T = TypeVar("T")
P = ParamSpec("P")

_LOCAL = {"self", "num_workers", "pin_memory"}  # may differ between machines


def one_run(make: Callable[P, T]) -> Callable[P, T]:
    """Decorates what makes a run: the arguments have to be those of all ranks.

    An error of one rank becomes an error of all instead of a hang.
    """

    @functools.wraps(make)
    def together(*args: P.args, **kwargs: P.kwargs) -> T:
        wanted: Any = kwargs.get("distributed")
        ranks = Ranks.of(wanted)

        def facts() -> dict[str, Any]:
            given = inspect.signature(make).bind(*args, **kwargs)
            given.apply_defaults()
            return {k: comparable(v) for k, v in given.arguments.items() if k not in _LOCAL}

        with ranks.together():
            ranks.agree("make_private", facts, secret=("seed",), error=ValueError)
            return make(*args, **kwargs)

    return together


def comparable(value: Any) -> Any:
    """What two ranks' arguments are compared by; of unknown objects only their type."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    name = type(value).__name__
    if isinstance(value, JsonValue | MatrixMechanism):
        return f"{name} {digest(value.to_dict())[:12]}"
    if isinstance(value, nn.Module):
        state = [*value.named_parameters(), *value.named_buffers()]
        shapes = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in state]
        return f"{name} with tensors {digest(shapes)[:12]}"
    if isinstance(value, torch.optim.Optimizer):
        return f"{name} {settings_of(value)}"
    if isinstance(value, DataLoader):
        size = f", {len(value.dataset)} examples" if isinstance(value.dataset, Sized) else ""
        return f"{name} with batch_size={value.batch_size}{size}"
    if isinstance(value, Sized) and not isinstance(value, PrivateLoader):
        return f"{name} of {len(value)}"
    return name


def shared_ledger(
    ranks: Ranks, mechanism: MatrixMechanism, path: str | pathlib.Path | None
) -> StepLedger:
    """The record of released steps, whose file is rank 0's; all know what is in it."""
    ledger = StepLedger(mechanism.hash, path, keeper=ranks.rank == 0)
    run, digests = ranks.from_first(lambda: (ledger.run, ledger.digests))
    ledger.run, ledger.digests = run, list(digests)
    return ledger


def begin_together(ranks: Ranks, private: PrivateTraining, module: nn.Module) -> None:
    """Refuse ranks with another mechanism or other data, then give all rank 0's parameters.

    Raises:
        ValueError: on every rank, naming what differs.
    """
    ranks.agree(
        "make_private",
        lambda: {
            "mechanism": private.mechanism.hash[:12],
            "the data set's contents": private.loader.data_fingerprint,
        },
        secret=("the data set's contents",),
        error=ValueError,
    )
    ranks.copy_from_first([*module.parameters(), *module.buffers()])

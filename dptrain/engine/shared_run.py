"""The start of a run on several ranks: same arguments, data, parameters and ledger on all."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from dptrain.core import JsonValue, digest
from dptrain.distributed import Ranks, is_divided
from dptrain.engine.arguments import RunArguments
from dptrain.engine.optimizer import settings_of
from dptrain.engine.options import GROUPS, MOVED
from dptrain.engine.private_training import PrivateTraining
from dptrain.engine.release_ledger import StepLedger
from dptrain.engine.shards import DividedModule
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import PrivateLoader

E = TypeVar("E")


def one_run(
    make: Callable[[E, RunArguments], PrivateTraining],
) -> Callable[[E, RunArguments], PrivateTraining]:
    """Decorate the method of an engine that makes a run: all ranks have to make the same one.

    An error of one rank becomes an error of all instead of a hang.
    """

    @functools.wraps(make)
    def together(engine: E, asked: RunArguments) -> PrivateTraining:
        ranks = Ranks.of(getattr(engine, "distributed", None))

        def facts() -> dict[str, Any]:
            named = {f: getattr(engine, f) for f in ("accountant", "ledger", "distributed")}
            return {
                name: comparable(value)
                for argument, whole in {**named, **vars(asked)}.items()
                for name, value in _fields(argument, whole)
            }

        made: PrivateTraining | None = None
        try:
            with ranks.together():
                ranks.agree("make_private", facts, secret=("seed",), error=ValueError)
                made = make(engine, asked)
        except BaseException:
            if made is not None:  # and another rank has no run
                made.detach()
            raise
        return made

    return together


def refuse_unknown(args: tuple[Any, ...], given: Iterable[str]) -> None:
    """Refuse arguments by position, and a keyword that make_private does not have."""
    if args:
        raise TypeError(
            "make_private takes keywords only: make_private(module=..., optimizer=..., "
            "data=..., ...)"
        )
    known = RunArguments.__dataclass_fields__
    for name in given:
        if name in known:
            continue
        if name in MOVED:
            raise TypeError(f"make_private has no {name}=: it is {MOVED[name]}")
        near = difflib.get_close_matches(name, [*known, *MOVED], n=1)
        hint = f"did you mean {near[0]}=?" if near else f"it has {', '.join(sorted(known))}"
        raise TypeError(f"make_private has no {name}=: {hint}")


def _fields(argument: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The argument, or, of a group of options, each of them."""
    if argument in GROUPS and isinstance(value, JsonValue):
        yield from ((f"{argument}.{name}", option) for name, option in vars(value).items())
    else:
        yield argument, value


def comparable(value: Any) -> Any:
    """A stand-in by which ranks compare an argument; of unknown objects only their type."""
    if value is None or isinstance(value, bool | int | float | str | tuple | torch.dtype):
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
    ranks: Ranks, mechanism: MatrixMechanism, path: str | os.PathLike[str] | None
) -> StepLedger:
    """The record of released steps, whose file is rank 0's; all know what is in it."""
    kept = StepLedger(mechanism.hash, path) if ranks.rank == 0 else None
    told = ranks.from_first(lambda: None if kept is None else (kept.run, kept.digests))
    return StepLedger(mechanism.hash, path, told=told) if kept is None else kept


def begin_together(ranks: Ranks, private: PrivateTraining, module: nn.Module) -> None:
    """Refuse ranks with another mechanism or other data, then give all rank 0's parameters."""
    ranks.agree(
        "make_private",
        lambda: {
            "mechanism": private.mechanism.hash[:12],
            "the data set's contents": private.loader.data_fingerprint,
        },
        secret=("the data set's contents",),
        error=ValueError,
    )
    state = [*module.parameters(), *module.buffers()]
    ranks.copy_from_first([tensor for tensor in state if not is_divided(tensor)])
    if isinstance(private.optimizer.shards, DividedModule):
        private.optimizer.shards.begin_alike(module)

"""Modules that use a layer's parameters without calling the layer."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn


class Readers:
    """Notes in whose forward parameters are read past the forward of the layer that owns them.

    What stands in for a layer's forward exchanges the parameters for others while it runs: whoever
    finds those of the layer itself has gone past it.

    Args:
        module: the user's, bare.

    Attributes:
        again: modules whose parameters were read so in a backward pass, as a checkpoint within
            their own forward does it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: dict[nn.Module, list[nn.Module]] = {}
        self.again: set[nn.Module] = set()  # whose parameters were read in a backward pass

    def of(self, owner: nn.Module) -> list[nn.Module]:
        """Modules whose forward uses parameters of this one; none before it was noted."""
        return self._found.get(owner, [])

    def known(self, owner: nn.Module) -> bool:
        """True if the module was looked at."""
        return owner in self._found

    @contextlib.contextmanager
    def noting(self, owners: Collection[nn.Module]) -> Iterator[None]:
        """Note, within the context, whose forward reads the parameters of these."""
        parts = set(self._module.modules())
        kept = [(vars(owner), vars(owner)["_parameters"]) for owner in owners]

        def read(owner: nn.Module) -> None:
            if torch._C._current_graph_task_id() != -1:
                self.again.add(owner)
            reader = _innermost(sys._getframe(2), parts)
            found = self._found.setdefault(owner, [])
            if reader is not None and reader is not owner and reader not in found:
                found.append(reader)

        try:
            for owner, (attributes, before) in zip(owners, kept, strict=True):
                self._found.setdefault(owner, [])
                attributes["_parameters"] = _Noted(before, functools.partial(read, owner))
            yield
        finally:
            for attributes, before in kept:
                attributes["_parameters"] = before


class _Noted(dict[str, Any]):
    """Parameters that tell when one of them is asked for by its name."""

    def __init__(self, parameters: dict[str, Any], read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read()
        return super().__getitem__(name)


def _innermost(frame: FrameType | None, parts: Collection[nn.Module]) -> nn.Module | None:
    """The module whose forward is being run, of these."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module) and first in parts:
                return first
        frame = frame.f_back
    return None
